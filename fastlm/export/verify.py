"""Whether a saved model answers like the live one: the last-token logits of a short probe.

The saved files are loaded by transformers, as a user will load them, but one module at a time from the disk: memory does not grow with
the number of layers. Two loads tell how far apart answers may be: in float32 they are the saved weights' own, and what 16-bit arithmetic
makes of the same weights shows the error that any 16-bit run of them has.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from fastlm import quant
from fastlm.export.checkpoint import common_dtype, places
from fastlm.export.weights import Source

logger = logging.getLogger(__name__)

_ROWS, _LENGTH = 4, 16
_HEAD_ROWS = 8192
# how many times the error of 16-bit arithmetic the live model may be away from the saved weights
_ALLOWED = 2.0


def has_probe(base: PreTrainedModel) -> str | None:
    """Why the logits of this model cannot be compared; None if they can."""
    if base.get_output_embeddings() is None or base.config.is_encoder_decoder:
        return f"a {type(base).__name__} gives no logits of a next token"
    if "input_ids" not in inspect.signature(type(base).forward).parameters:
        return f"a {type(base).__name__} takes no input_ids"
    if any(quant.is_8bit(module) for module in base.modules()):
        return "LLM.int8() rounds its inputs to 8 bits, which no 16-bit model does"
    return None


def check_logits(base: PreTrainedModel, weights: Mapping[str, Source], folder: Path, dtype: torch.dtype) -> None:
    """Compare a saved model with the live one.

    Args:
        base: the live transformers model, with its adapters.
        weights: its tensors, by the names of the model.
        folder: where it was saved, in 16 or 32 bits.
        dtype: of the saved weights.

    Raises:
        RuntimeError: with the numbers, if the live model's logits are further from the saved weights' than twice the error of
            16-bit arithmetic, or are not finite.
    """
    reason = has_probe(base)
    if reason is not None:
        logger.info("logits are not compared: %s", reason)
        return
    n_tokens = min(base.config.get_text_config().vocab_size, base.get_input_embeddings().weight.shape[0])
    ids = torch.randint(n_tokens, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(0))
    live = live_logits(base, weights, ids)
    exact, rounded = saved_logits(base, weights, folder, dtype, ids)
    for what, values in (("the live model", live), ("the saved model in float32", exact), ("the saved model", rounded)):
        if not values.isfinite().all():
            raise RuntimeError(
                f"the logits of {what} are not finite ({dtype}); nothing was saved. dtype=torch.bfloat16 holds larger "
                "values than float16"
            )
    difference, error = _rms(live - exact), _rms(rounded - exact)
    text = (
        f"the last-token logits of a probe differ by {difference:.3g} from the live model's (root mean square; they are "
        f"{_rms(exact):.3g}), where 16-bit arithmetic makes an error of {error:.3g}"
    )
    if not difference <= _ALLOWED * error:
        raise RuntimeError(
            f"{text}, of which {_ALLOWED:g} times are allowed: nothing was saved. Compare what the live model computes with what it "
            "was loaded from, or pass verify=False to save it all the same"
        )
    logger.info("verified: %s", text)


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


@torch.no_grad()
def live_logits(base: PreTrainedModel, weights: Mapping[str, Source], ids: Tensor) -> Tensor:
    """Logits [rows, V] float32 behind the last token, in evaluation mode; the model is left as it was."""
    device = base.get_input_embeddings().weight.device
    dense = {source.dtype for source in weights.values() if source.packed is None and source.dtype.is_floating_point}
    # a model with some weights in float32 runs in training under autocast, and need not run without
    half = common_dtype(weights.values(), base.config.dtype)
    mixed = torch.autocast(device.type, dtype=half, enabled=len(dense) > 1)
    with _evaluating(base), quant.kept_cpu_layout(base), mixed:
        logits: Tensor = base(input_ids=ids.to(device), use_cache=False).logits[:, -1]
        return logits.float().cpu()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@torch.no_grad()
def saved_logits(
    base: PreTrainedModel, weights: Mapping[str, Source], folder: Path, dtype: torch.dtype, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """What the model in `folder` answers in float32, and in 16 bits. Eager attention: it leaves no part of a model out.

    It is loaded in its own dtype, which reads nothing yet; weights become those of the other run when they are read for it.

    Raises:
        RuntimeError: if transformers finds tensors missing, superfluous or of another shape.
    """
    device = base.get_input_embeddings().weight.device
    with tempfile.TemporaryDirectory(dir=folder, prefix=".offload-") as scratch:
        loaded, info = type(base).from_pretrained(
            folder, dtype=dtype, device_map=_from_disk(base, weights, device), offload_folder=scratch,
            output_loading_info=True, attn_implementation="eager", local_files_only=True,
        )  # fmt: skip
        wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
        if wrong:
            raise RuntimeError(f"transformers cannot load what was written to {folder}: {wrong}; nothing was saved")
        _read_head_in_blocks(base, loaded, folder)
        answers = {}
        for run in (dtype, torch.bfloat16 if dtype == torch.float32 else torch.float32):
            if run != dtype:
                _convert(loaded, dtype, run)
            logits = loaded.eval()(input_ids=ids.to(device), use_cache=False).logits[:, -1]
            answers[run] = logits.float().cpu()
    exact = answers.pop(torch.float32)
    return exact, answers.popitem()[1]


def _convert(loaded: PreTrainedModel, before: torch.dtype, after: torch.dtype) -> None:
    """Have the next run read its weights in another dtype. Buffers, as RoPE's frequencies, keep theirs."""
    embedding: Any = loaded.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding
    for parameter in loaded.parameters():
        # a large table, of which a few rows are read
        if parameter.dtype == before and not (is_plain and parameter is embedding.weight):
            parameter.data = parameter.data.to(after)
    if is_plain:
        embedding.register_forward_hook(lambda module, args, output: output.to(after))


class _HeadOnDisk(nn.Module):
    """A linear layer that reads its weight [V, D] from a safetensors file, some rows at a time, in the dtype of its input."""

    def __init__(self, path: Path, name: str):
        super().__init__()
        self._path, self._name = path, name

    def forward(self, x: Tensor) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            rows = file.get_slice(self._name)
            starts = range(0, rows.get_shape()[0], _HEAD_ROWS)
            return torch.cat([functional.linear(x, rows[at : at + _HEAD_ROWS].to(x)) for at in starts], dim=-1)


def _read_head_in_blocks(base: PreTrainedModel, loaded: PreTrainedModel, folder: Path) -> None:
    """A vocabulary's matrix is larger than all others, and would be read whole, and once more in float32."""
    head: Any = loaded.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return
    name = next(path for path, module in loaded.named_modules() if module is head) + ".weight"
    where = places(folder)
    stored = name if name in where else base.all_tied_weights_keys.get(name)
    if stored in where:
        loaded.set_output_embeddings(_HeadOnDisk(where[stored][0], stored))


def _from_disk(base: PreTrainedModel, weights: Mapping[str, Source], device: torch.device) -> dict[str, Any]:
    """Each smallest module with weights stays on the disk until it is called; the smallest of all, and mere buffers, lie on `device`."""
    sizes: dict[str, int] = {}
    for name, source in weights.items():
        module = name.rpartition(".")[0]
        sizes[module] = sizes.get(module, 0) + math.prod(source.shape)
    found: dict[str, Any] = dict.fromkeys(sizes, "disk")
    # transformers refuses a model that is on the disk as a whole
    found[min(sizes, key=sizes.__getitem__)] = str(device)
    for name, module in base.named_modules():
        if name not in found and any(True for _ in module.buffers(recurse=False)) and "base_layer" not in name:
            found[name] = str(device)
    return found
