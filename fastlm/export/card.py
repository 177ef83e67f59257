"""Model cards, as huggingface_hub writes them."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from fastlm import adapters


def merged_card(model: Any, base: PreTrainedModel, what: str) -> ModelCard:
    """The card of a merged model.

    Args:
        model: as it was saved, under PEFT or not.
        base: the transformers model in it.
        what: in which form the weights are.
    """
    name = base.config.name_or_path
    # a folder of this machine is no model that others could look up
    is_hub = bool(name) and not os.path.exists(name)
    data = ModelCardData(
        base_model=name if is_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation" if base.can_generate() else None,
        tags=["fastlm"],
    )
    lines = [f"A {type(base).__name__}{f' made from `{name}`' if is_hub else ''}, {what}."]
    if adapters.is_peft_model(model):
        for one in model.active_adapters:
            config = model.peft_config[one].to_dict()
            shape = ", ".join(
                f"{key}={config[key]}" for key in ("r", "lora_alpha", "use_rslora", "use_dora") if key in config
            )
            lines.append(f"The adapter `{one}` ({config['peft_type'].value}; {shape}) is part of the weights.")
    lines.append("Load it with transformers:")
    lines.append(
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto", device_map="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```'
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# Model\n\n" + "\n\n".join(lines) + "\n")
