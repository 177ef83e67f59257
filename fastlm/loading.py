"""The door to transformers: models and tokenizers from a hub id or a directory, checked before they are read."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from fastlm import files, quant, template_check
from fastlm.config import LoadConfig
from fastlm.families import FAMILIES, stock_attention_reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        model: hub id or directory of the base model.
        adapter: hub id or directory of the adapter to put on it, or None.
        is_local: the base model is a directory: nothing is looked up.
    """

    model: str
    adapter: str | None
    is_local: bool


def _directory(name: str) -> str | None:
    """The directory that a name stands for, without a trailing slash; None if it is no directory here."""
    expanded = os.path.expanduser(name)
    return os.path.abspath(expanded) if os.path.isdir(expanded) else None


def resolve(config: LoadConfig) -> Source:
    """Find the base model and the adapter behind a name. An existing directory always wins over a hub id.

    Raises:
        FileNotFoundError: for a path that does not exist or a directory without a model.
        ValueError: if a config file in it is damaged.
    """
    name = config.model_name
    directory = _directory(name)
    if directory is None:
        _check_hub_id(name)
    else:
        if "adapter_config.json" not in os.listdir(directory):
            _check_model_directory(directory)
            return Source(directory, None, True)
        found = os.path.join(directory, "adapter_config.json")
        settings = files.read_json(found)
    if directory is None:
        found = find_adapter_config_file(
            name, cache_dir=config.cache_dir, token=config.token, revision=config.revision,
            local_files_only=config.local_files_only,
        )  # fmt: skip
        if found is None:
            return Source(name, None, False)
        settings = files.read_json(found)
    files.check_adapter(found, settings)
    base = settings.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ValueError(
            f"adapter_config.json of {name!r} does not name its base model: base_model_name_or_path is {base!r}"
        )
    base_directory = _directory(base)
    if base_directory is None:
        try:
            _check_hub_id(base)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the adapter {name!r} was trained on {base!r}, which does not exist here: put the model there, or write where "
                "it lies into base_model_name_or_path of adapter_config.json"
            ) from error
    else:
        _check_model_directory(base_directory)
    return Source(base_directory or base, directory or name, base_directory is not None)


def _check_model_directory(directory: str) -> None:
    if "config.json" not in os.listdir(directory):
        raise FileNotFoundError(f"{directory} holds no config.json: it is not the directory of a model")
    files.read_json(os.path.join(directory, "config.json"))


# What the hub takes as a name: github.com/huggingface/huggingface_hub, validate_repo_id
_HUB_ID = re.compile(r"(?![-.])[\w.-]+(/(?![-.])[\w.-]+)?", re.ASCII)


def _check_hub_id(name: str) -> None:
    """Raises FileNotFoundError for a name that can only be a path, and that is no directory."""
    if os.path.isfile(os.path.expanduser(name)):
        raise FileNotFoundError(
            f"{name!r} is a file: give the directory that holds it, with its config.json and tokenizer"
        )
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"there is no directory {name!r}: give an existing directory or a hub id like 'org/model'"
        )


def choose_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype asked for, or bfloat16 where the device computes in it, else float16.

    Raises:
        ValueError: if bfloat16 is asked for on a GPU that lacks it.
    """
    if not torch.cuda.is_available():
        return dtype or torch.bfloat16
    major, minor = torch.cuda.get_device_capability()
    if dtype is torch.bfloat16 and major < 8:
        raise ValueError(
            f"dtype=bfloat16 needs compute capability 8.0, this GPU ({torch.cuda.get_device_name()}) has {major}.{minor}: "
            "use dtype=torch.float16 and fp16=True in the trainer's arguments"
        )
    return dtype or (torch.bfloat16 if major >= 8 else torch.float16)


# Types that know the length they were made for; "dynamic" takes it from the config's window, which must therefore stay.
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")


def _scaled_rope(text_config: Any, rope_scaling: dict[str, Any], window: int, max_seq_length: int | None) -> int:
    """Put the user's RoPE parameters into the config. Returns the window that they allow.

    Raises:
        ValueError: if `max_seq_length` is beyond it, or the model's layers rotate in different ways.
    """
    before = text_config.rope_parameters
    if "rope_theta" not in before:
        raise ValueError(
            f"rope_scaling cannot be set for {text_config.model_type!r}: its layers rotate in ways of their own"
        )
    kept = {name: before[name] for name in ("rope_theta", "partial_rotary_factor") if name in before}
    parameters = kept | rope_scaling
    reach, kind = window, parameters["rope_type"]
    if kind in _WITH_ORIGINAL:
        reach = parameters.setdefault(
            "original_max_position_embeddings", before.get("original_max_position_embeddings", window)
        )
    factor = parameters.get("factor", 1.0)
    widened = max(window, int(reach * factor))
    if max_seq_length is not None and max_seq_length > widened:
        raise ValueError(
            f"max_seq_length={max_seq_length} is more than the {widened} tokens that rope_scaling allows: factor={factor:g} "
            f"times {reach}. Pass a larger factor"
        )
    text_config.rope_parameters = parameters
    if kind != "dynamic":
        text_config.max_position_embeddings = widened
    return widened


@contextlib.contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Says which name could not be had from the hub, and whose base model it is: the hub's own errors may not."""
    try:
        yield
    except OSError as error:
        if source.is_local:
            raise
        whose = f", the base model of the adapter {source.adapter!r}," if source.adapter is not None else ""
        raise OSError(
            f"{source.model!r}{whose} is no directory here and cannot be had from the hub: {error}"
        ) from error


# what transformers and the code it stands on raise over values that no config should have
_OF_CONFIGS = (
    StrictDataclassError,
    AssertionError,
    AttributeError,
    KeyError,
    TypeError,
    IndexError,
    ZeroDivisionError,
    OverflowError,
    RecursionError,
)


@contextlib.contextmanager
def _blaming(directory: str, name: str) -> Iterator[None]:
    """Says in which file of a local directory a value lies that the libraries stumble over."""
    try:
        yield
    except _OF_CONFIGS as error:
        if not os.path.isdir(directory):
            raise
        raise ValueError(
            f"{os.path.join(directory, name)} cannot be used: {type(error).__name__}: {error}. Save or download it again"
        ) from error


def _config(config: LoadConfig, source: Source, common: dict[str, Any]) -> tuple[Any, int | None]:
    """The model's config with the requested window, and the longest row to expect; None if the model has no window."""
    with _naming(source), _blaming(source.model, "config.json"):
        model_config = AutoConfig.from_pretrained(source.model, **common)
        text_config = model_config.get_text_config()
        if source.is_local:
            files.check_sizes(source.model, text_config.to_dict())
    # a config has the settings of its own kind of model only: some take rows of any length, some have no RoPE
    window = getattr(text_config, "max_position_embeddings", None)
    length = config.max_seq_length
    if config.rope_scaling is not None:
        if window is None or not getattr(text_config, "rope_parameters", None):
            raise ValueError(
                f"rope_scaling cannot be set for {source.model}: a {text_config.model_type!r} model has no RoPE"
            )
        window = _scaled_rope(text_config, config.rope_scaling, window, length)
    elif length is not None and window is not None and length > window:
        raise ValueError(
            f"max_seq_length={length} is more than the {window} tokens that {source.model} was trained for. "
            f"Pass at most {window}, or say how to stretch its positions, as in rope_scaling={{'rope_type': 'linear', "
            f"'factor': {-(-length // window)}.0}}"
        )
    return model_config, length or window


def _quantization(
    config: LoadConfig, model_config: Any, dtype: torch.dtype, source: Source
) -> BitsAndBytesConfig | None:
    """What to quantize with while loading; None for 16-bit loads and for checkpoints that are quantized already."""
    stored = getattr(model_config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        is_bnb = str(method).lower().endswith("bitsandbytes")
        if is_bnb:
            quant.bitsandbytes()
            four = stored.get("load_in_4bit") if isinstance(stored, dict) else stored.load_in_4bit
            bits = "4bit" if four else "8bit"
            if config.has_mode and config.mode != bits:
                asked = {"16bit": "16 bit", "full": "16 bit to train all of it", "4bit": "4 bit", "8bit": "8 bit"}[
                    config.mode
                ]
                raise ValueError(
                    f"{source.model} is stored in {bits.replace('bit', ' bit')} and cannot be loaded in {asked}: "
                    "leave the load_in_… flags out, or load a 16-bit checkpoint"
                )
        return None
    if config.mode not in ("4bit", "8bit"):
        return None
    quant.bitsandbytes()
    if config.mode == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def load_model(config: LoadConfig, source: Source) -> tuple[PreTrainedModel, int | None]:
    """Load the base model as transformers does.

    Returns:
        The model, in evaluation mode, and the longest row to expect; None if rows may have any length.

    Raises:
        ValueError, FileNotFoundError, ImportError: before any weight is read.
        ValueError: if the weights are not those of the model that the config describes.
    """
    common: dict[str, Any] = dict(
        trust_remote_code=config.trust_remote_code,
        local_files_only=source.is_local or config.local_files_only,
    )
    if not source.is_local:
        # a revision belongs to the name that was asked for, not to the base model that an adapter names
        common |= dict(token=config.token, cache_dir=config.cache_dir)
        if source.adapter is None:
            common["revision"] = config.revision
    dtype = choose_dtype(config.dtype)
    if source.is_local:
        files.check_weights(source.model, "model", allow_pickle=not config.use_safetensors)
    model_config, length = _config(config, source, common)
    with _blaming(source.model, "config.json"):
        quantization = _quantization(config, model_config, dtype, source)
        attention = config.attn_implementation
        if attention is None and _needs_eager(model_config):
            attention = "eager"
        model, info = AutoModelForCausalLM.from_pretrained(
            source.model,
            config=model_config,
            dtype=dtype,
            device_map=_device_map(config.device_map),
            quantization_config=quantization,
            attn_implementation=attention,
            use_safetensors=True if config.use_safetensors else None,
            # not to go on with them, but to say which they are
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **common,
        )
    _check_fit(source.model, model, info)
    quant.keep_cpu_layout(model)
    return model, length


def read_config(directory: str) -> Any:
    """The config in a local directory.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = _directory(directory)
    if found is None:
        raise FileNotFoundError(f"there is no directory {directory!r} with a config.json")
    _check_model_directory(found)
    with _blaming(found, "config.json"):
        return AutoConfig.from_pretrained(found, local_files_only=True)


def empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config without memory for its weights.

    Raises:
        ValueError: if the config is none of a causal language model.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)


def _needs_eager(model_config: Any) -> bool:
    """Whether attention scores are capped by a model whose attention stays stock: transformers' SDPA drops the cap."""
    settings = model_config.get_text_config().to_dict()
    family = FAMILIES.get(settings["model_type"])
    is_ours = family is not None and family.softcap is not None and stock_attention_reason(settings) is None
    return settings.get("attn_logit_softcapping") is not None and not is_ours


def _device_map(device_map: Any) -> Any:
    """Where the model goes: as asked for, or to the current GPU where there is one.

    Raises:
        ValueError: if it is to go to a GPU and PyTorch sees none.
    """
    if torch.cuda.is_available():
        return {"": torch.cuda.current_device()} if device_map is None else device_map
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    if any(isinstance(place, int) or str(place).startswith("cuda") for place in places):
        raise ValueError(
            f"device_map={device_map!r} asks for a GPU, and PyTorch sees none here: leave device_map out to load on the CPU"
        )
    return device_map


def _check_fit(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises ValueError where the checkpoint does not fill the model: transformers would go on with random values."""
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{key} is {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in sorted(info["mismatched_keys"])]
    # layers whose weights are missing have no shape that says anything
    wrong = wrong or [f"{key}.weight is {found}, not {wanted}" for key, found, wanted in quant.misshapen(model)]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"the weights in {name} are not those of the model that its config.json describes: {wrong[0]}{more}"
        )


def load_tokenizer(config: LoadConfig, source: Source) -> Any:
    """The tokenizer of the adapter's directory if it has one, else the base model's, just as its files say."""
    where, is_local = source.model, source.is_local
    if source.adapter is not None:
        directory = _directory(source.adapter)
        if directory is not None and "tokenizer_config.json" in os.listdir(directory):
            where, is_local = directory, True
    if is_local and not _tokenizer_files(where):
        # transformers would make one without a vocabulary up
        raise FileNotFoundError(f"{where} holds no tokenizer: save it there with tokenizer.save_pretrained")
    try:
        with (
            _naming(Source(where, None if is_local else source.adapter, is_local)),
            _blaming(where, "tokenizer_config.json (or config.json)"),
        ):
            tokenizer = AutoTokenizer.from_pretrained(
                where,
                trust_remote_code=config.trust_remote_code,
                local_files_only=is_local or config.local_files_only,
                token=None if is_local else config.token,
                cache_dir=config.cache_dir,
                revision=config.revision if where == config.model_name else None,
            )
    except Exception:
        # what the tokenizers library raises has no type of its own and names no file
        if is_local:
            _explain_tokenizer(where)
        raise
    template_check.check_templates(tokenizer, where)
    return tokenizer


def _tokenizer_files(directory: str) -> list[str]:
    starts = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
    return [name for name in sorted(os.listdir(directory)) if name.startswith(starts)]


def _explain_tokenizer(directory: str) -> None:
    """Raises ValueError naming the file, where one of the tokenizer's is damaged: transformers' own error names none."""
    for name in _tokenizer_files(directory):
        if name.endswith(".json"):
            files.read_json(os.path.join(directory, name))


def is_transformers_model(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel)


def is_causal_lm(model: nn.Module) -> bool:
    """Whether this is a model of transformers that predicts the next token of the row that it reads."""
    return (
        isinstance(model, PreTrainedModel)
        and model.can_generate()
        and not model.config.is_encoder_decoder
        and model.get_output_embeddings() is not None
    )


def own_config(root: nn.Module, model: PreTrainedModel) -> Any:
    """Give the model a config object of its own: others may have been built from the same one, and it says how attention runs.

    Returns:
        The config that was there before.
    """
    before = model.config
    replace_config(root, before, copy.deepcopy(before))
    return before


def replace_config(root: nn.Module, old: Any, new: Any) -> None:
    """Exchange one config object for another in every module that holds it."""
    for module in root.modules():
        if module.__dict__.get("config") is old:
            module.config = new
