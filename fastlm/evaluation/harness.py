"""The door to lm-eval: a model in memory, with its fast paths and adapters, as its tasks run it."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn


def harness_model(model: nn.Module, tokenizer: Any, **settings: Any) -> Any:
    """A model in memory as an `lm_eval` model, without saving and loading it again.

        results = lm_eval.simple_evaluate(model=harness_model(model, tokenizer, batch_size=8), tasks=["gsm8k"])

    A merged model in a folder needs no adapter: `lm_eval --model hf --model_args pretrained=FOLDER`. Inside a training run, call it
    within `undisturbed(model)`.

    Args:
        model: any causal language model of transformers, or a PEFT model. It is put in evaluation mode.
        tokenizer: the model's.
        **settings: of `lm_eval.models.huggingface.HFLM` (batch_size, max_length, …).

    Raises:
        ImportError: if lm-eval is not installed.
    """
    try:
        harness = importlib.import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise ImportError("harness_model needs lm-eval: pip install 'fastlm[eval]'") from error
    return harness.HFLM(pretrained=model.eval(), tokenizer=tokenizer, backend="causal", **settings)
