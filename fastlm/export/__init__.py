"""Writing trained models to disk and to a hub: merged checkpoints, GGUF files and adapters."""

from fastlm.export.gguf import push_to_hub_gguf, save_pretrained_gguf
from fastlm.export.hub import push_to_hub, push_to_hub_merged
from fastlm.export.lora import load_lora, save_lora
from fastlm.export.merge import save_pretrained_merged

__all__ = [
    "load_lora",
    "push_to_hub",
    "push_to_hub_gguf",
    "push_to_hub_merged",
    "save_lora",
    "save_pretrained_gguf",
    "save_pretrained_merged",
]
