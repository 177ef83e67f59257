"""The door to peft: adapters made by its own LoraConfig, and read as plain tensors when a forward needs them."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlm import files, quant
from fastlm.patching import patch_of
from fastlm_kernels.lora import Projection

logger = logging.getLogger(__name__)


def peft() -> Any:
    """peft, imported after bitsandbytes: importing peft imports it, and that import must not look things up on the hub."""
    if quant.is_installed():
        quant.bitsandbytes()
    return importlib.import_module("peft")


def is_peft_model(model: nn.Module) -> bool:
    module = sys.modules.get("peft")
    return module is not None and isinstance(model, module.PeftModel)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model; any other model itself.

    Raises:
        TypeError: if it is no module at all.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a model is needed, got {type(model).__name__}. from_pretrained returns two things: model, tokenizer"
        )
    return model.get_base_model() if is_peft_model(model) else model


def _lora() -> Any:
    """peft.tuners.lora if it is loaded: without it, no module can be an adapter's."""
    return sys.modules.get("peft.tuners.lora")


def is_lora_layer(module: nn.Module) -> bool:
    lora = _lora()
    return lora is not None and isinstance(module, lora.LoraLayer)


# The reason of `view_linear` that is no fallback: a layer whose weight is trained is a plain GEMM in both directions.
TRAINED_WEIGHT = "its weight is trained"


def is_plain_lora_layer(module: nn.Module) -> bool:
    """Whether this is exactly peft's LoRA layer around a dense or 4-bit linear layer."""
    return type(module) in _linear_kinds(_lora())


@functools.cache
def _linear_kinds(lora: Any) -> tuple[type, ...]:
    if lora is None:
        return ()
    # peft defines the 4-bit class only where bitsandbytes is installed
    return (lora.Linear, lora.Linear4bit) if quant.is_installed() else (lora.Linear,)


class LinearView(NamedTuple):
    """One linear layer, with the adapter that is active on it, as a fused function needs it.

    Attributes:
        projection: plain tensors.
        dtype: in which the base GEMM runs.
        out_dtype: of the stock layer's result.
        lora_dtype: of the adapter's GEMMs; None means the adapter's own.
    """

    projection: Projection
    dtype: torch.dtype
    out_dtype: torch.dtype
    lora_dtype: torch.dtype | None


# transformers leaves this hook on a module once outputs were captured; it does nothing until they are asked for again
_IDLE_HOOK = "install_output_capuring_hook.<locals>.output_capturing_hook"


def _is_idle(hook: Any) -> bool:
    # other hooks may be any callable
    return isinstance(hook, types.FunctionType) and hook.__qualname__ == _IDLE_HOOK


def has_hooks(module: nn.Module) -> bool:
    """Whether calling this module does more than its class's forward: such a module must be called, not read."""
    return _has_own_hooks(module) or bool(torch.nn.modules.module._has_any_global_hook())


def _has_own_hooks(module: nn.Module) -> bool:
    """`has_hooks` without the hooks for all modules of the process. Asked of some 40 modules in each layer and call."""
    own = module.__dict__
    if "forward" in own:
        patch, forward = patch_of(module), own["forward"]
        if patch is None or not isinstance(forward, types.MethodType) or forward.__func__ is not patch.bound:
            # somebody replaced it
            return True
    if own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"] or "_hf_hook" in own:
        return True
    hooks = own["_forward_hooks"]
    return bool(hooks) and not all(_is_idle(hook) for hook in hooks.values())


def tensor_of(module: nn.Module, name: str) -> Any:
    """module.name for what is a parameter as a rule, without the time that a module takes to look for it."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _supports_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def view_linear(module: nn.Module, x: Tensor) -> LinearView | str:
    """A linear layer as plain tensors for input x, or why it must be called as a module.

    Read at call time, so adapters may be added, switched, disabled or merged after the model was patched.
    """
    found = views((module,), x)
    return found if isinstance(found, str) else found[0]


class _Adapter(NamedTuple):
    """What `Projection` says of an adapter."""

    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 1.0
    dropout: float = 0.0


_NO_ADAPTER = _Adapter()
_NOT_PLAIN_LORA = "{0.__module__}.{0.__name__} is not a plain LoRA linear"
_NOT_PLAIN = "{0.__module__}.{0.__name__} is not a plain or 4-bit linear layer"


def _adapter(module: Any, asks_of_hooks: bool = True) -> _Adapter | str:
    """The adapter that is active on one of peft's plain LoRA layers, or why the layer must be called as a module."""
    if module.disable_adapters:
        return "a disabled adapter is still merged" if module.merged else _NO_ADAPTER
    if module.merged:
        return _NO_ADAPTER
    modules = module._modules
    lora_a = modules["lora_A"]._modules
    active = [name for name in module.active_adapters if name in lora_a]
    if len(active) != 1:
        return f"{len(active)} adapters are active at once" if active else _NO_ADAPTER
    name = active[0]
    if name in module.lora_variant:
        return f"adapter {name!r} is a LoRA variant ({type(module.lora_variant[name]).__name__})"
    a, b = lora_a[name], modules["lora_B"]._modules[name]
    is_plain = type(a) is nn.Linear and type(b) is nn.Linear and tensor_of(b, "bias") is None
    if not is_plain or (asks_of_hooks and (_has_own_hooks(a) or _has_own_hooks(b))):
        return f"adapter {name!r} is more than two plain matrices"
    if not module.cast_input_dtype_enabled:
        return "its input cast is switched off"
    drop, dropout = modules["lora_dropout"]._modules[name], 0.0
    if isinstance(drop, nn.Dropout):
        dropout = float(drop.p) if drop.training else 0.0
    elif not isinstance(drop, nn.Identity):
        return f"adapter {name!r} has a dropout of its own kind"
    if asks_of_hooks and _has_own_hooks(drop):
        return f"adapter {name!r} has a dropout of its own kind"
    if dropout == 1.0:
        return "its dropout is 1"
    return _Adapter(tensor_of(a, "weight"), tensor_of(b, "weight"), float(module.scaling[name]), dropout)


def unfit_adapter(module: nn.Module) -> str | None:
    """Why a projection can run in no fused function as it is now, whatever its input: an adapter of another kind. None otherwise.

    Hooks come and go: a call that meets them says so.
    """
    if is_plain_lora_layer(module):
        found = _adapter(module, asks_of_hooks=False)
        return found if isinstance(found, str) else None
    if is_lora_layer(module):
        return _NOT_PLAIN_LORA.format(type(module))
    return None if quant.is_4bit(module) or type(module) is nn.Linear else _NOT_PLAIN.format(type(module))


class Input(NamedTuple):
    """What of an input decides how linear layers can run; `has_global_hooks`: torch has hooks for all modules of the process."""

    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    has_global_hooks: bool

    @classmethod
    def of(cls, x: Tensor) -> Input:
        device = x.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(x.dtype, device, autocast, bool(torch.nn.modules.module._has_any_global_hook()))


def _view(module: nn.Module, x: Input) -> LinearView | str:
    """`view_linear` for such an input, where no hooks for all modules are."""
    x_dtype, device, autocast, _ = x
    base, adapter = module, _NO_ADAPTER
    if _has_own_hooks(module):
        return "a projection has hooks"
    if is_plain_lora_layer(module):
        base = module._modules["base_layer"]
        if _has_own_hooks(base):
            return "a projection has hooks"
        found = _adapter(module)
        if isinstance(found, str):
            return found
        adapter = found
    elif is_lora_layer(module):
        return _NOT_PLAIN_LORA.format(type(module))
    weight: Any
    if quant.is_4bit(base):
        weight = quant.nf4_weight(base)
        if isinstance(weight, str):
            return weight
        dtype, out_dtype = autocast or quant.compute_dtype(base, x_dtype), x_dtype
    elif type(base) is nn.Linear:
        weight = tensor_of(base, "weight")
        if weight.requires_grad:
            return TRAINED_WEIGHT
        if autocast is None and weight.dtype != x_dtype:
            return f"its weight is {weight.dtype} and its input {x_dtype}"
        dtype = out_dtype = autocast or x_dtype
    else:
        return _NOT_PLAIN.format(type(base))
    if weight.device != device:
        return "its weight lies on another device"
    lora_dtype, bfloat16 = autocast, torch.bfloat16
    if (
        adapter.a is not None
        and adapter.a.dtype is bfloat16
        and dtype is not bfloat16
        and not _supports_bfloat16(device)
    ):
        # TRL casts the adapters of a quantized model to bfloat16 whatever the card; no such pointer may reach a kernel here
        lora_dtype = dtype
    projection = Projection(weight, tensor_of(base, "bias"), *adapter)
    return LinearView(projection, dtype, out_dtype, lora_dtype)


def views(modules: Sequence[nn.Module], x: Tensor | Input) -> list[LinearView] | str:
    """All modules as views that can run as one function, or the first reason why not."""
    given = x if isinstance(x, Input) else Input.of(x)
    if given.has_global_hooks:
        return "a projection has hooks"
    found = []
    for module in modules:
        view = _view(module, given)
        if isinstance(view, str):
            return view
        found.append(view)
    first = found[0]
    lora_dtypes = {v.lora_dtype or v.projection.lora_a.dtype for v in found if v.projection.lora_a is not None}
    if len(lora_dtypes) > 1 or any(v.dtype != first.dtype or v.out_dtype != first.out_dtype for v in found):
        return "the projections compute in different dtypes"
    return found


def head_parts(module: nn.Module) -> tuple[nn.Module, Tensor, Tensor | None] | str:
    """The linear layer that a call of a head reaches, with the weight [V, D] and bias [V] of its GEMM; or why it must be called.

    Through peft's wrappers: the active one of fully trained copies, or the layer with the rows that are trained alone in their places,
    in a copy of its weight whose gradient reaches those rows.
    """
    loaded = sys.modules.get("peft.utils.other")
    if loaded is None or not isinstance(module, loaded.AuxiliaryTrainingWrapper):
        return _linear_parts(module)
    if has_hooks(module):
        return "it has hooks"
    is_off = module.disable_adapters or not module.active_adapters
    if len(module.active_adapters) > 1 and not is_off:
        return f"{len(module.active_adapters)} adapters are active at once"
    if isinstance(module, loaded.ModulesToSaveWrapper):
        return _linear_parts(module.original_module if is_off else module.modules_to_save[module.active_adapters[0]])
    if type(module) is not loaded.TrainableTokensWrapper:
        return f"it is a {type(module).__name__}"
    rows = module.token_adapter
    if has_hooks(rows):
        return "it has hooks"
    parts = _linear_parts(rows.get_base_layer())
    if isinstance(parts, str) or (rows.merged and not is_off):
        return parts
    if rows.merged:
        return "rows of a disabled adapter are still merged"
    if parts[2] is not None:
        return "peft leaves the bias of a head out whose rows it trains"
    return parts if is_off else (parts[0], rows.get_merged_weights(module.active_adapters), None)


def _linear_parts(module: nn.Module) -> tuple[nn.Module, Tensor, Tensor | None] | str:
    return (module, module.weight, module.bias) if type(module) is nn.Linear else f"it is a {type(module).__name__}"


def has_adapter(model: nn.Module) -> bool:
    return is_peft_model(model) or any(is_lora_layer(module) for module in model.modules())


def _linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of the model's linear layers, without the head's."""
    head = model.get_output_embeddings()
    return sorted(
        {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    )


def lora_config(model: nn.Module, settings: dict[str, Any], others: dict[str, Any]) -> Any:
    """PEFT's own LoraConfig for this model.

    Raises:
        ValueError: if a target or a module to save does not exist in the model, or PEFT refuses a value.
        TypeError: for an argument that LoraConfig does not have.
    """
    targets = settings["target_modules"]
    if not targets:
        raise ValueError(f"target_modules is empty: name some of {_linear_names(model)}, or 'all-linear'")
    unknown = _unknown_targets(model, targets)
    if unknown:
        raise ValueError(
            f"target_modules {unknown} are no layers of this model that an adapter can sit on: its linear layers are "
            f"{_linear_names(model)}. 'all-linear' takes all of them; another string is a regular expression over whole names"
        )
    if settings["layers_to_transform"]:
        n_layers = model.config.get_text_config().num_hidden_layers
        outside = [i for i in settings["layers_to_transform"] if not 0 <= i < n_layers]
        if outside:
            raise ValueError(f"layers_to_transform {outside} are not in this model: its layers are 0..{n_layers - 1}")
    if settings["layers_pattern"] and settings["layers_to_transform"] is None:
        raise ValueError(
            f"layers_pattern={settings['layers_pattern']!r} needs layers_to_transform, the numbers of the layers"
        )
    names = [name for name, _ in model.named_modules()]
    for name in settings["modules_to_save"] or ():
        if not any(_is_named(n, name) for n in names):
            owners = sorted({n.split(".")[-2] for n, _ in model.named_parameters(remove_duplicate=False)})
            raise ValueError(f"modules_to_save {name!r} is not in this model: its modules with weights are {owners}")
    config_class = peft().LoraConfig
    foreign = sorted(set(others) - set(config_class.__dataclass_fields__))
    if foreign:
        raise TypeError(f"get_peft_model() got an unexpected keyword argument {foreign[0]!r}")
    task = others.get("task_type", "CAUSAL_LM")
    if task not in ("CAUSAL_LM", None):
        raise ValueError(f"task_type must be 'CAUSAL_LM' for a causal language model, got {task!r}")
    return config_class(**{"task_type": "CAUSAL_LM", **settings, **others})


def _is_named(full: str, name: str) -> bool:
    """peft's rule: a name stands for every module whose dotted name is it or ends with it."""
    return full == name or full.endswith(f".{name}")


def _unknown_targets(model: nn.Module, targets: str | list[str]) -> list[str]:
    """Those targets that stand for no layer with a matrix: nothing that peft could adapt."""
    weights = model.named_parameters(remove_duplicate=False)
    layers = [name.removesuffix(".weight") for name, p in weights if name.endswith(".weight") and p.ndim > 1]
    if not isinstance(targets, str):
        return [target for target in targets if not any(_is_named(name, target) for name in layers)]
    if targets == "all-linear":
        return []
    try:
        is_found = any(re.fullmatch(targets, name) for name in layers)
    except re.error as error:
        raise ValueError(f"target_modules {targets!r} is no regular expression: {error}") from error
    return [] if is_found else [targets]


def add_adapter(model: nn.Module, config: Any) -> nn.Module:
    """The model wrapped in PEFT with a new adapter, as PEFT itself does it."""
    return peft().get_peft_model(model, config)


def load_adapter(model: nn.Module, name: str, config: Any) -> nn.Module:
    """The model wrapped in PEFT with a saved adapter, trainable.

    Args:
        model: the base model.
        name: directory or hub id of the adapter.
        config: the `LoadConfig` of the request.

    Raises:
        ValueError: if the adapter's file is damaged or pickled, or does not fit this model, naming the first tensor that does not.
    """
    package = peft()
    hub: dict[str, Any] = {}
    saved: dict[str, Any] | None = None
    if os.path.isdir(name):
        files.check_weights(name, "adapter_model", allow_pickle=not config.use_safetensors)
        file = os.path.join(name, "adapter_model.safetensors")
        saved = files.safetensors_header(file) if os.path.exists(file) else None
    else:
        hub = dict(token=config.token, revision=config.revision, cache_dir=config.cache_dir)
    try:
        settings = package.PeftConfig.from_pretrained(name, **hub)
        if settings.task_type not in ("CAUSAL_LM", None):
            raise ValueError(f"it was made for the task {settings.task_type}, not CAUSAL_LM")
        _grow_embeddings(model, saved or {}, settings)
        if settings.is_prompt_learning:
            logger.warning("%s is a prompt, which peft loads for inference only: it cannot be trained on", name)
        if config.use_safetensors and hub:
            hub["use_safetensors"] = True
        wrapped = package.PeftModel.from_pretrained(
            model, name, is_trainable=not settings.is_prompt_learning, config=settings, **hub
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the adapter_config.json of {name!r} cannot be read: {type(error).__name__}: {error}"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter {name!r} does not fit this base model: {_first_lines(error)}") from error
    if saved is not None:
        expected = package.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        missing, foreign = sorted(set(expected) - set(saved)), sorted(set(saved) - set(expected))
        foreign = [key for key in foreign if "lora_" in key]
        if missing or foreign:
            what = f"it lacks {missing[0]}" if missing else f"{foreign[0]} has no place in it"
            raise ValueError(f"the adapter {name!r} does not fit this base model ({type(model).__name__}): {what}")
    return wrapped


def _first_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:3])


def grow_embeddings(model: nn.Module, n_rows: int, multiple: int | None = 64) -> None:
    """Give the embedding and the head of a transformers model at least n_rows rows, if they have fewer.

    What the further rows hold is not said. Rows that are there, and whether they are trained, stay as they are.
    """
    tables = [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]
    if n_rows <= tables[0].weight.shape[0]:
        return
    trained = [table.weight.requires_grad for table in tables]
    model.resize_token_embeddings(n_rows, pad_to_multiple_of=multiple, mean_resizing=False)
    for table, is_trained in zip((model.get_input_embeddings(), model.get_output_embeddings()), trained, strict=False):
        for parameter in table.parameters():
            parameter.requires_grad_(is_trained)


# a bound for what an adapter's configuration can ask for
_MAX_NEW_ROWS = 2**16


def _grow_embeddings(model: nn.Module, saved: dict[str, Any], settings: Any) -> None:
    """Give the model the embedding rows that the adapter was trained with: new tokens came with it."""
    rows = {
        t["shape"][0]
        for key, t in saved.items()
        if key.endswith(("embed_tokens.weight", "lm_head.weight", "base_layer.weight")) and "lora_" not in key
    }
    if rows:
        grow_embeddings(model, max(rows), multiple=None)
    trained = vars(settings).get("trainable_token_indices") or ()
    lists = trained.values() if isinstance(trained, dict) else [trained]
    last, n_rows = (
        max((index for each in lists for index in each), default=-1),
        model.get_input_embeddings().weight.shape[0],
    )
    if last >= n_rows + _MAX_NEW_ROWS:
        raise ValueError(f"it trains row {last} of an embedding of {n_rows}")
    grow_embeddings(model, last + 1)
