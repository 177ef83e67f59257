"""Writing trained models to disk: merged 16-bit checkpoints and adapters."""

from fastlm.export.merge import save_pretrained_merged

__all__ = ["save_pretrained_merged"]
