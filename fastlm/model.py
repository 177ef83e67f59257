"""The facade: load, adapt, train, save."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from fastlm import adapters, binding, loading, tokenization, tokens, trainers
from fastlm.config import (
    NOT_SUPPORTED,
    NOT_SUPPORTED_PEFT,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_PEFT,
    LoadConfig,
    check_flags,
    check_lora,
    check_seed,
    lora_settings,
    parse_checkpointing,
    parse_dtype,
    parse_lora_rounding,
    parse_mode,
    parse_rope,
    reject_unknown,
)
from fastlm.export import (
    load_lora,
    push_to_hub,
    push_to_hub_gguf,
    push_to_hub_merged,
    save_lora,
    save_pretrained_gguf,
    save_pretrained_merged,
)
from fastlm.memory.manager import parse_host, parse_strategy

logger = logging.getLogger(__name__)

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def patch_model(
    model: nn.Module,
    strict: bool = False,
    deterministic: bool = False,
    lora_rounding: str = "stock",
    cuda_graphs: bool = True,
    memory: str | float | None = None,
    host_memory: float | None = None,
) -> nn.Module:
    """Put the fast paths on a loaded model. Only this instance changes; `revert` takes them off again.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        strict: raise instead of leaving any layer stock, now or at call time.
        deterministic: gradients are equal to the bit between runs, and between what is kept and what is made again. The
            attention takes a library and an order of sums that are; the other kernels always do.
        lora_rounding: "stock" adds an adapter's product to the rounded base product, as PEFT does; "once" adds it before the
            rounding, in the same GEMM, over decoded 4-bit weights: faster and closer to float32, where 16-bit stock loses what an
            adapter adds below half a unit, so that losses differ from stock's.
        cuda_graphs: on a CUDA GPU, a layer that trains on batches of one shape is captured as CUDA graphs and replayed. Values do not
            change; the host has less to do.
        memory: what layers keep for their backward, as `fastlm.set_memory_strategy`; no plan changes a value. None: its default, or
            "balanced" where the trainer asks for gradient checkpointing.
        host_memory: GiB of host memory that activations may take; None is a share of what is free.

    Returns:
        The same model.

    Raises:
        TypeError: if it is not a causal language model of transformers.
        RuntimeError: with `strict`, naming what would stay stock.
    """
    check_flags(strict=strict, deterministic=deterministic, cuda_graphs=cuda_graphs)
    rounds_once = parse_lora_rounding(lora_rounding)
    binding.patch(
        model, strict=strict, deterministic=deterministic, rounds_once=rounds_once, cuda_graphs=cuda_graphs,
        memory=parse_strategy(memory), host_memory=parse_host(host_memory),
    )  # fmt: skip
    trainers.serve_head(model)
    _bind_methods(model)
    return model


def revert(model: nn.Module) -> nn.Module:
    """Take the fast paths off a model: it computes bit for bit what the stock one does, with its present weights.

    Returns:
        The same model. One that was never patched stays as it is.
    """
    binding.revert(model)
    for holder in {id(m): m for m in (model, adapters.base_model(model))}.values():
        for name in _METHODS:
            holder.__dict__.pop(name, None)
    return model


_METHODS: Mapping[str, Callable[..., Any]] = {
    "save_pretrained_merged": save_pretrained_merged,
    "push_to_hub_merged": push_to_hub_merged,
    "push_to_hub": push_to_hub,
    "save_lora": save_lora,
    "load_lora": load_lora,
    "save_pretrained_gguf": save_pretrained_gguf,
    "push_to_hub_gguf": push_to_hub_gguf,
}


def _bind_methods(model: nn.Module) -> None:
    for holder in (model, adapters.base_model(model)):
        for name, function in _METHODS.items():
            # a pickle finds the function by its own name: a bound method's would be looked up in the holder's class
            method: Any = functools.partial(function, holder)
            method.__doc__ = function.__doc__
            holder.__dict__[name] = method


def _seed(random_state: int) -> None:
    random.seed(random_state)
    torch.manual_seed(random_state)


class FastLanguageModel:
    """Load a causal language model and fine-tune it faster, in less memory, with the same numbers."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int | None = None,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool | None = None,
        load_in_8bit: bool | None = None,
        load_in_16bit: bool | None = None,
        full_finetuning: bool | None = None,
        token: str | bool | None = None,
        device_map: Any = None,
        rope_scaling: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        attn_implementation: str | None = None,
        random_state: int = 3407,
        use_gradient_checkpointing: bool | str = "auto",
        strict: bool = False,
        deterministic: bool = False,
        lora_rounding: str = "stock",
        cuda_graphs: bool = True,
        memory: str | float | None = None,
        host_memory: float | None = None,
        lora_r: int | None = None,
        lora_alpha: int | float | None = None,
        use_safetensors: bool = True,
        local_files_only: bool = False,
        cache_dir: str | None = None,
        **others: Any,
    ) -> tuple[nn.Module, Any]:
        """Load a model and its tokenizer, and put the fast paths on the model.

        Args:
            model_name: a hub id, or the directory of a model or of an adapter. A directory is read without any look-up.
            max_seq_length: longest row that will be trained, in tokens; None is the model's own window.
            dtype: of everything that is not quantized; None is bfloat16, or float16 on a GPU without it.
            load_in_4bit, load_in_8bit, load_in_16bit, full_finetuning: the mode. None given is 4-bit (NF4 with nested
                quantization); one alone selects its mode. 8-bit models run on stock layers.
            token, revision, cache_dir, local_files_only, trust_remote_code: as in transformers.
            device_map: as in transformers; None puts the model on the current GPU, or on the CPU without one.
            rope_scaling: transformers' RoPE parameters, to go beyond the model's window. Never applied unasked.
            attn_implementation: None lets fastlm choose the fastest library that is right; a name keeps that one.
            random_state: seed for what is drawn after this call.
            use_gradient_checkpointing: "auto" lets `memory` decide where the trainer allows it; True recomputes layers in the backward;
                False never does.
            strict: raise instead of leaving any layer stock, now or at call time.
            deterministic, lora_rounding, cuda_graphs, memory, host_memory: as `patch_model`.
            lora_r, lora_alpha: shorthand for a `get_peft_model` call with the defaults and this rank and alpha.
            use_safetensors: False allows pickled weights, which can run code when they are loaded.

        Returns:
            model, tokenizer.

        Raises:
            ValueError, TypeError, NotImplementedError, FileNotFoundError, ImportError: before anything is loaded, saying what
                was received and what to do.
        """
        reject_unknown("from_pretrained", others, NOT_SUPPORTED, WITHOUT_EFFECT)
        if not isinstance(model_name, (str, os.PathLike)):
            raise TypeError(f"model_name must be a hub id or a path, got {type(model_name).__name__}")
        modes = (load_in_4bit, load_in_8bit, load_in_16bit, full_finetuning)
        config = LoadConfig(
            model_name=os.fspath(model_name),
            mode=parse_mode(*modes),
            has_mode=any(flag is not None for flag in modes),
            dtype=parse_dtype(dtype),
            max_seq_length=max_seq_length,
            rope_scaling=parse_rope(rope_scaling),
            token=token,
            device_map=None if device_map == "sequential" else device_map,
            trust_remote_code=trust_remote_code,
            revision=revision,
            # the name of what fastlm chooses anyway
            attn_implementation=None if attn_implementation == "fastlm" else attn_implementation,
            use_safetensors=use_safetensors,
            local_files_only=local_files_only,
            cache_dir=cache_dir,
        )
        checkpointing = parse_checkpointing(use_gradient_checkpointing)
        check_flags(strict=strict, deterministic=deterministic, cuda_graphs=cuda_graphs)
        rounds_once = parse_lora_rounding(lora_rounding)
        strategy, host_gib = parse_strategy(memory), parse_host(host_memory)
        check_seed(random_state)
        if lora_alpha is not None and lora_r is None:
            raise ValueError(f"lora_alpha={lora_alpha} was given without lora_r: give both, or call get_peft_model")
        if lora_r is not None:
            check_lora(lora_r, lora_alpha if lora_alpha is not None else lora_r, 0.0)
            if config.mode == "full":
                raise ValueError("lora_r and full_finetuning=True exclude each other: choose one")
        source = loading.resolve(config)
        if source.adapter is not None and lora_r is not None:
            raise ValueError(f"{config.model_name} is an adapter already: leave lora_r out to go on training it")
        if source.adapter is not None and config.mode == "full":
            raise ValueError(
                f"{config.model_name} is an adapter: full_finetuning=True needs the directory of a whole model"
            )
        # before the weights: what is wrong with a tokenizer shows at once
        tokenizer = loading.load_tokenizer(config, source)
        model, length = loading.load_model(config, source)
        tokenization.choose_padding(tokenizer, model.get_input_embeddings().weight.shape[0])
        tokenization.one_begin_token(tokenizer)
        if source.adapter is not None:
            model = adapters.load_adapter(model, source.adapter, config)
        elif config.mode == "full":
            model.requires_grad_(True)
        else:
            model.requires_grad_(False)
        binding.patch(
            model, strict=strict, keep_attention=config.attn_implementation is not None, deterministic=deterministic,
            rounds_once=rounds_once, cuda_graphs=cuda_graphs, memory=strategy, host_memory=host_gib,
        )  # fmt: skip
        trainers.serve_head(model)
        _bind_methods(model)
        state = binding.state_of(model)
        state.max_seq_length, state.is_full = length, config.mode == "full"
        adapters.base_model(model).max_seq_length = length
        binding.set_checkpointing(adapters.base_model(model), checkpointing)
        _seed(random_state)
        if lora_r is not None:
            model = FastLanguageModel.get_peft_model(
                model, r=lora_r, lora_alpha=lora_alpha if lora_alpha is not None else lora_r,
                use_gradient_checkpointing=use_gradient_checkpointing, random_state=random_state,
            )  # fmt: skip
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: nn.Module,
        r: int = 16,
        target_modules: Sequence[str] | str = ALL_LINEAR,
        lora_alpha: int | float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        layers_to_transform: Sequence[int] | int | None = None,
        layers_pattern: Sequence[str] | str | None = None,
        use_gradient_checkpointing: bool | str = "auto",
        random_state: int = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True,
        loftq_config: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> nn.Module:
        """Put a LoRA adapter on the model: PEFT's own, made by its `LoraConfig`.

        Args:
            model: from `from_pretrained`, or any patched model.
            r: rank, 1 or more.
            target_modules: names of the linear layers to adapt, or "all-linear". Names that the model does not have are an error.
            lora_alpha: the adapter is scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with `use_rslora`.
            lora_dropout: of the adapter's input, in training.
            bias, layers_to_transform, layers_pattern, use_rslora, use_dora, modules_to_save, init_lora_weights,
                loftq_config: as in `LoraConfig`.
            use_gradient_checkpointing: as in `from_pretrained`.
            random_state: seed of the adapter's initial weights: the same seed gives the same weights.
            **others: further arguments of `LoraConfig` (rank_pattern, alpha_pattern, exclude_modules, …).

        Tokens that `fastlm.add_new_tokens` added are trained with it.

        Returns:
            The PEFT model, in training mode.

        Raises:
            ValueError, TypeError: for bad values, unknown targets, a second adapter, or a model loaded for full fine-tuning.
        """
        if not loading.is_causal_lm(adapters.base_model(model)):
            raise TypeError(f"a causal language model of transformers is needed, got {type(model).__name__}")
        checkpointing = parse_checkpointing(use_gradient_checkpointing)
        check_seed(random_state)
        of_peft = {k: v for k, v in others.items() if k not in NOT_SUPPORTED_PEFT and k not in WITHOUT_EFFECT_PEFT}
        not_of_peft = {k: v for k, v in others.items() if k not in of_peft}
        reject_unknown("get_peft_model", not_of_peft, NOT_SUPPORTED_PEFT, WITHOUT_EFFECT_PEFT)
        settings = lora_settings(
            r, target_modules, lora_alpha, lora_dropout, bias, layers_to_transform, use_rslora, use_dora, modules_to_save,
            init_lora_weights, loftq_config,
        )  # fmt: skip
        if adapters.has_adapter(model):
            raise ValueError("the model has an adapter already: train it, or load the base model again for another one")
        state = binding.state_of(model)
        if state is not None and state.is_full:
            raise ValueError("the model was loaded with full_finetuning=True: train it without an adapter")
        rows = tokens.trained_rows(model, settings["modules_to_save"])
        if rows:
            of_peft = {"trainable_token_indices": rows, **of_peft}
        config = adapters.lora_config(model, settings | dict(layers_pattern=layers_pattern), of_peft)
        _seed(random_state)
        wrapped = adapters.add_adapter(model, config)
        binding.patch(wrapped)
        trainers.serve_head(wrapped)
        _bind_methods(wrapped)
        base = adapters.base_model(wrapped)
        if checkpointing is not None or (state is not None and state.checkpointing is not None):
            binding.set_checkpointing(base, checkpointing if checkpointing is not None else state.checkpointing)
        return wrapped.train()

    @staticmethod
    def for_training(model: nn.Module, use_gradient_checkpointing: bool | str | None = None) -> nn.Module:
        """Put the model in training mode. `use_gradient_checkpointing`: as in `from_pretrained`; None leaves it as it is."""
        base = adapters.base_model(model)
        if use_gradient_checkpointing is not None:
            binding.set_checkpointing(base, parse_checkpointing(use_gradient_checkpointing))
        return model.train()

    @staticmethod
    def for_inference(model: nn.Module) -> nn.Module:
        """Put the model in evaluation mode with its key/value cache on, as generation wants it."""
        adapters.base_model(model).config.use_cache = True
        binding.release_graphs(model)
        return model.eval()

    @staticmethod
    def get_trainer(model: nn.Module, train_dataset: Any = None, args: Any = None, **kwargs: Any) -> Any:
        """A TRL `SFTTrainer` for this model: see `fastlm.trainers.get_trainer`.

        Conversations are tokenized many at a time, into the rows that TRL makes one by one. Evaluations leave no trace in the training.
        """
        # what else is wrong with args, the trainer says
        settings = vars(args) if is_dataclass(args) else args or {}
        if isinstance(settings, dict) and "formatting_func" not in kwargs and "data_collator" not in kwargs:
            with_tokens = importlib.import_module("fastlm.data.prepared").with_tokens
            prepared = functools.partial(with_tokens, tokenizer=kwargs.get("processing_class"), settings=settings)
            train_dataset = prepared(train_dataset)
            if "eval_dataset" in kwargs:
                kwargs["eval_dataset"] = prepared(kwargs["eval_dataset"])
        trainer = trainers.get_trainer(model, train_dataset, args, **kwargs)
        trainer.add_callback(importlib.import_module("fastlm.evaluation.state").LeaveNoTrace())
        return trainer


# the name that scripts for models of any kind use
FastModel = FastLanguageModel
