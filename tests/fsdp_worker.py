"""One process of the tests of sharded training: `python fsdp_worker.py FOLDER`, with the rank in the environment.

Writes what the process ends up with to FOLDER/rank<n>.pt: {case: {name: tensor}}.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ddp_worker
import pytest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fastlm
from fastlm import adapters
from fastlm.forwards.causal_lm import DeferredLogits
from fastlm.patching import patch_of

HALVES = ("self_attn", "mlp")
# settings: of fully_shard for every layer; parts: modules of a layer that are sharded by themselves; reason: why such a layer is stock
CASES: dict[str, dict] = {
    "layers": {},
    "layers-recomputed": dict(recompute=True),
    "layers-top-only": dict(layers_to_transform=[1], recompute=True),
    "layers-kept-whole": dict(settings=dict(reshard_after_forward=False)),
    "layers-and-root-resharded": dict(root=dict(reshard_after_forward=True)),
    "layers-outputs-cast": dict(root=dict(mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))),
    "patched-afterwards": dict(is_late=True),
    "root-alone": dict(shards_layers=False),
    "full": dict(lora=False, path="parts"),
    "halves": dict(parts=HALVES, path="parts", reason="its halves are a FSDPLlamaAttention and a FSDPLlamaMLP"),
    "projections": dict(parts=("mlp.up_proj",), path="parts", reason="a projection has hooks"),
    "norms": dict(parts=("input_layernorm",), path="parts", reason="a norm is a FSDPLlamaRMSNorm"),
}


def make(layers_to_transform=None, lora: bool = True, is_late: bool = False):
    made = tiny.model("llama", attention="sdpa")
    made = tiny.with_lora(made, layers_to_transform=layers_to_transform) if lora else made
    return made if is_late else fastlm.patch_model(made)


def layers(model):
    return adapters.base_model(model).model.layers


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def two_steps(model, batch: dict[str, torch.Tensor], n_items: torch.Tensor, world: int) -> dict[str, torch.Tensor]:
    """Losses of two steps of gradient descent, and the gradients of the second."""
    found = {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        loss = model.train()(**batch, num_items_in_batch=n_items).loss
        # gradients are averaged over the processes, where one process has their sum
        (loss * world).backward()
        found[f"loss {i}"] = loss.detach().float()
        optimizer.step()
    return found | {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.requires_grad}


def evaluation(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def one_process(layers_to_transform=None, lora: bool = True, **_) -> dict[str, torch.Tensor]:
    """What a case computes without being sharded."""
    model = make(layers_to_transform, lora)
    batch, n_items = ddp_worker.four_rows()
    found = two_steps(model, batch, n_items, 1)
    return {**found, "logits": evaluation(model, batch)}


def sharded(
    settings=None, root=None, parts=(), recompute=False, layers_to_transform=None, lora=True, shards_layers=True,
    is_late=False, path="block", reason="",
) -> dict[str, torch.Tensor]:  # fmt: skip
    model, settings = make(layers_to_transform, lora, is_late), settings or {}
    if recompute:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers(model) if shards_layers else ():
        for name in parts:
            fully_shard(layer.get_submodule(name), mesh=mesh, **settings)
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **(settings if root is None else root))
    if is_late:
        fastlm.patch_model(model, strict=True)
    batch, n_items = ddp_worker.four_rows()
    half = {name: value[2 * dist.get_rank() :][:2] for name, value in batch.items()}
    found = two_steps(model, half, n_items, dist.get_world_size())
    for i in range(2):
        dist.all_reduce(found[f"loss {i}"])
    for layer, row in zip(layers(model), fastlm.report(model), strict=False):
        assert row.path == path and reason in row.reason and row.calls, row
        assert bool(reason) == bool(row.fallback_calls), row
        assert path != "block" or patch_of(layer).calls == 2, row
    # every rank computes the whole batch
    return {**found, "logits": evaluation(model, batch).float()}


def assert_mixed_precision_is_no_worse() -> None:
    """Weights, inputs and outputs cast by FSDP, as accelerate has it: at most 1.1 times the error of a stock model sharded alike."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    exact, errors = tiny.with_lora(tiny.model("llama")), []
    for made in (tiny.with_lora(tiny.model("llama")), make()):
        for layer in layers(made):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(made, mesh=mesh, mp_policy=policy)
        total = 0.0
        for seed in range(4):
            batch = dict(input_ids=tiny.ids(2, 24, seed), labels=tiny.ids(2, 24, seed))
            made.zero_grad()
            made.train()(**batch).loss.backward()
            got = torch.cat([whole(p.grad).flatten() for p in made.parameters() if p.requires_grad])
            tiny.loss_and_gradients(exact, batch)
            total += tiny.relative(got, torch.cat([p.grad.flatten() for p in exact.parameters() if p.requires_grad]))
        errors.append(total)
    assert errors[1] <= 1.1 * errors[0] > 0, errors
    assert all(row.path == "block" and not row.fallback_calls for row in fastlm.report(made) if ".layers." in row.layer)


def assert_late_logits_are_refused() -> None:
    """Logits that are read when the head's weight is no longer whole."""
    model, batch = make(), ddp_worker.four_rows()[0]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
    output = model.train()(**batch)
    with pytest.raises(RuntimeError, match="FSDP has sharded the head's weight again: read them before"):
        _ = output.logits


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert_late_logits_are_refused()
    DeferredLogits.__call__ = ddp_worker.refuse
    assert_mixed_precision_is_no_worse()
    torch.save({name: sharded(**case) for name, case in CASES.items()}, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
