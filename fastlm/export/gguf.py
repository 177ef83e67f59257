"""`save_pretrained_gguf`: a trained model, or its adapter, as files that llama.cpp and Ollama run.

Weights are merged as in `save_pretrained_merged`, one tensor at a time, and written in every wanted format before the next one is
looked at. Files are written into a hidden folder, read back, and moved into place when all are complete.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor

from fastlm import adapters
from fastlm.export import gguf_arch, gguf_types, gguf_vocab, hub, merge
from fastlm.export.checkpoint import tied_names
from fastlm.export.folders import staging
from fastlm.export.gguf_arch import Arch
from fastlm.export.gguf_lora import adapter_tensors
from fastlm.export.gguf_modelfile import modelfile
from fastlm.export.gguf_types import METHODS
from fastlm.export.weights import Source, effective_weights

logger = logging.getLogger(__name__)

SAVE_METHODS = ("merged_16bit", "lora")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_QUANTIZATION_VERSION = 2


def save_pretrained_gguf(
    model: Any,
    save_directory: str | os.PathLike[str],
    tokenizer: Any = None,
    quantization_method: str | list[str] = "q8_0",
    save_method: str = "merged_16bit",
    model_name: str | None = None,
) -> list[Path]:
    """Save a model with its adapters merged as GGUF files, or the adapter alone as one.

    W + s B A is computed in float32 from the weights that the model trained on (4-bit and 8-bit weights decoded) and
    rounded or quantized once. The live model is not touched. A Modelfile for Ollama lies beside the files.

    Args:
        model: a transformers model, or one that PEFT wrapped, of a family that `gguf_arch.ARCHS` lists.
        save_directory: target folder; made if missing. Files of the same names are replaced, others stay.
        tokenizer: the model's fast tokenizer, or a processor that holds it. "lora" needs none.
        quantization_method: one or several of "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s",
            "q3_k_l", "q3_k_m", "q3_k_s", "q2_k", "q5_1", "q5_0", "q4_1", "q4_0"; one file each. "lora" ignores it.
        save_method: "merged_16bit", or "lora" for the adapter alone, in float32.
        model_name: first part of the files' names; the folder's own by default.

    Returns:
        The GGUF files, in the order of the methods.

    Raises:
        TypeError: if the model is not a transformers or PEFT model, or the tokenizer not a fast one.
        ValueError: for an unknown method or a name that is no plain one; for a model, tokenizer or adapter that has no form in GGUF;
            for weights that are not finite or an adapter that changes no weight.
        ImportError: without the package gguf.
    """
    gguf_types.library()
    methods = gguf_types.parse_methods(quantization_method)
    if save_method not in SAVE_METHODS:
        raise ValueError(f"save_method must be one of {', '.join(map(repr, SAVE_METHODS))}, got {save_method!r}")
    base = merge._base_model(model)
    target = Path(save_directory).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"save_directory must be a folder, got the file {target}")
    stem = _stem(model_name, target)
    config = base.config.get_text_config()
    arch = gguf_arch.find_arch(config)
    merge._check_mergeable(model)
    weights = effective_weights(base)
    merge._check_quantizer(base, weights)
    if save_method == "lora":
        files = [f"{stem}.LORA.gguf"]
        with staging(target) as folder:
            _write_adapter(model, weights, config, arch, folder / files[0])
        return [target / file for file in files]
    plan = _Plan(base, config, arch, weights, tokenizer)
    files = [f"{stem}.{method.upper()}.gguf" for method in methods]
    with staging(target) as folder:
        title = gguf_vocab.safe_title(stem, tokenizer)
        plan.write({method: folder / file for method, file in zip(methods, files, strict=True)}, title)
        text = modelfile(files[0], tokenizer, plan.vocabulary.adds["bos"], plan.end_ids)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
    return [target / file for file in files]


def _stem(model_name: str | None, target: Path) -> str:
    if model_name is None:
        # a folder may be called anything
        return re.sub(r"[^A-Za-z0-9._-]+", "-", target.name).strip(".-_")[:96] or "model"
    if not isinstance(model_name, str) or not _PLAIN_NAME.fullmatch(model_name):
        raise ValueError(
            f"model_name becomes a part of file names: letters, digits, dots, dashes and underscores, got {model_name!r}"
        )
    return model_name


class _Plan:
    """What is known of a merged model's files before the first tensor is computed."""

    def __init__(self, base: Any, config: Any, arch: Arch, weights: Mapping[str, Source], tokenizer: Any):
        self.config, self.arch = config, arch
        tied = tied_names(base, weights, torch.float32)
        left_out = tied | set(base._keys_to_ignore_on_save or ())
        self.weights = {name: source for name, source in weights.items() if name not in left_out}
        has_head = _HEAD in self.weights
        if has_head and not arch.has_head:
            raise ValueError(
                f"llama.cpp reads one matrix for the embedding and the head of {arch.name} models, and those of this one differ: "
                f"it has no GGUF form"
            )
        self.names = gguf_arch.tensor_names(list(self.weights), arch, config.num_hidden_layers)
        self.shape = gguf_arch.mix_shape(config, has_head)
        self.n_rows = weights[_EMBEDDING].shape[0]
        self.end_ids = _end_ids(base)
        self.vocabulary = gguf_vocab.read_vocabulary(tokenizer, self.n_rows, self.end_ids)
        self.rope = gguf_arch.rope_tensors(config)

    def _formats(self, method: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name in the file -> shape and format, in the order of the file."""
        found: dict[str, tuple[tuple[int, ...], str]] = {name: (tuple(t.shape), "F32") for name, t in self.rope.items()}
        for name, made in self.names.items():
            shape = self.weights[name].shape
            found[made] = (shape, gguf_types.choose_format(method, made, len(shape), shape[-1], self.shape))
        return found

    def write(self, paths: Mapping[str, Path], title: str) -> None:
        """Write one file for each method.

        Raises:
            ValueError: naming the tensor, if one cannot be computed or does not fit the format.
        """
        formats = {method: self._formats(method) for method in paths}
        with ExitStack() as stack:
            writers = {}
            for method, path in paths.items():
                writers[method] = _open(path, self.arch, formats[method], title, METHODS[method][0], stack, self.fill)
            is_changed = False
            for name, tensor, device, changed in self._values():
                is_changed = is_changed or changed
                for method, writer in writers.items():
                    try:
                        writer.write_tensor_data(gguf_types.encode(tensor, formats[method][name][1], device))
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}") from error
            merge._check_changed(dict(self.weights), is_changed, "float32")
        for method, path in paths.items():
            _check_file(path, formats[method])
            logger.info("%s: %.2f GiB, %s", path.name, path.stat().st_size / 2**30, method)

    def fill(self, writer: Any) -> None:
        gguf_arch.write_fields(writer, self.config, self.arch, self.n_rows)
        gguf_vocab.write_vocabulary(writer, self.vocabulary)

    def _values(self) -> Iterator[tuple[str, Tensor, torch.device, bool]]:
        """Name in the file, value on the CPU, device of the live tensor, and whether an adapter changed it."""
        for name, tensor in self.rope.items():
            yield name, tensor, tensor.device, False
        for name, source in self.weights.items():
            is_exact = source.packed is None and not source.is_adapted and source.dtype != torch.float64
            try:
                # what needs no arithmetic keeps its dtype, at half the memory
                tensor, changed = source.compute(source.dtype if is_exact else torch.float32)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            value = gguf_arch.convert(name, tensor, self.config, self.arch).contiguous()
            yield self.names[name], value, source.tensor.device, changed


def _end_ids(base: Any) -> list[int]:
    """Tokens that end an answer by the model's generation settings."""
    if not base.can_generate():
        return []
    ids = base.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else [int(index) for index in ids]


def _open(
    path: Path,
    arch: Arch,
    formats: Mapping[str, tuple[tuple[int, ...], str]],
    title: str,
    file_type: str,
    stack: ExitStack,
    fill: Any,
) -> Any:
    """A gguf.GGUFWriter that has written all but the tensors' values."""
    gguf = gguf_types.library()
    writer = gguf.GGUFWriter(path, arch.name)
    stack.callback(writer.close)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(title)
    writer.add_file_type(int(gguf.LlamaFileType[file_type]))
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    fill(writer)
    _announce(writer, formats)
    return writer


def _announce(writer: Any, formats: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Write the header, the fields and the table of tensors."""
    for name, (shape, kind) in formats.items():
        gguf_types.announce(writer, name, shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _check_file(path: Path, formats: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Read a file's tables again.

    Raises:
        RuntimeError: if they do not name what was meant to be written, or the file is short.
    """
    reader = gguf_types.library().GGUFReader(path)
    found = {t.name: (tuple(int(size) for size in reversed(t.shape)), t.tensor_type.name) for t in reader.tensors}
    if found != dict(formats):
        raise RuntimeError(f"{path.name} does not hold the tensors that were written to it")


def _write_adapter(model: Any, weights: Mapping[str, Source], config: Any, arch: Arch, path: Path) -> None:
    gguf = gguf_types.library()
    if not adapters.is_peft_model(model) and not merge._base_model(model)._hf_peft_config_loaded:
        raise ValueError(f"save_method='lora' needs the PEFT model with its adapter, got a {type(model).__name__}")
    holder: Any = model
    settings = list(holder.peft_config.values())
    for setting in settings:
        if setting.modules_to_save or setting.bias != "none":
            raise ValueError(
                f"the adapter trained whole modules or biases (modules_to_save={setting.modules_to_save}, bias={setting.bias!r}), "
                f"which a GGUF adapter cannot hold: save a merged model instead"
            )
    alpha = float(settings[0].lora_alpha)
    tensors = dict(adapter_tensors(weights, config, arch, alpha))
    writer = gguf.GGUFWriter(path, arch.name)
    with ExitStack() as stack:
        stack.callback(writer.close)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        formats = {name: (tuple(tensor.shape), "F32") for name, tensor in tensors.items()}
        _announce(writer, formats)
        for tensor in tensors.values():
            writer.write_tensor_data(tensor.numpy())
    _check_file(path, formats)


def push_to_hub_gguf(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    quantization_method: str | list[str] = "q8_0",
    save_method: str = "merged_16bit",
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> str:
    """Save as `save_pretrained_gguf` does, into a temporary folder, and upload that with a model card.

    Args:
        model, tokenizer, quantization_method, save_method: as in `save_pretrained_gguf`.
        repo_id: "name/repository", or the repository's name alone, which names the files too; made if it is not there.
        token: of the hub; None is the one that was logged in with. It gets into no file and no log.
        private, revision, commit_message, create_pr: as in huggingface_hub.

    Returns:
        The address of the commit.

    Raises:
        ValueError, TypeError, ImportError: as `save_pretrained_gguf`; a bad `repo_id`.
        HfHubHTTPError, or an error of its HTTP client: if the hub refuses, or cannot be reached five times.
    """
    name = repo_id.rpartition("/")[2]

    def save(folder: Path) -> None:
        save_pretrained_gguf(model, folder, tokenizer, quantization_method, save_method, model_name=name)
        data = ModelCardData(library_name="gguf", tags=["gguf", "fastlm"])
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {name}\n\nGGUF files for llama.cpp and Ollama.\n")
        card.save(folder / "README.md")

    return hub.upload(save, repo_id, token, private, revision, commit_message or "GGUF by fastlm", create_pr)
