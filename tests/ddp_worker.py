"""One process of the tests of data-parallel training: `python ddp_worker.py FOLDER`, with the rank in the environment.

Writes what the process ends up with to FOLDER/rank<n>.pt: {case: {name: tensor}}.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
import training
from torch.nn.parallel import DistributedDataParallel

from fastlm.forwards.causal_lm import DeferredLogits

GRADIENTS = {
    "gradients": dict(checkpointing=False, find_unused=False),
    "gradients-recomputed": dict(checkpointing=True, find_unused=False),
    "gradients-find-unused": dict(checkpointing=False, find_unused=True),
}
TRAINERS = {
    "sft": dict(make=training.sft),
    "sft-packed": dict(make=training.sft, packing=True, max_length=32),
    "sft-accumulated": dict(make=training.sft, gradient_accumulation_steps=2),
    "plain": dict(make=training.plain),
    "plain-full": dict(make=training.plain, lora=False),
}


def gradients(checkpointing: bool, find_unused: bool) -> dict[str, torch.Tensor]:
    """The gradient of a batch of four rows from this process' half of it, averaged by DDP."""
    model = training.ours()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    batch, n_items = four_rows()
    half = {name: value[2 * dist.get_rank() :][:2] for name, value in batch.items()}
    wrapped = DistributedDataParallel(model.train(), find_unused_parameters=find_unused)
    # DDP averages over the processes what is to be their sum
    loss = wrapped(**half, num_items_in_batch=n_items).loss * dist.get_world_size()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def four_rows() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A padded batch whose halves hold different numbers of labelled tokens, and that of all."""
    batch = {name: torch.cat([value, value[:1]]) for name, value in tiny.padded_batch().items()}
    return batch, (batch["labels"][:, 1:] != -100).sum()


def weights(folder: Path, batch_size: int, make, lora: bool = True, **args) -> dict[str, torch.Tensor]:
    """Trained parameters, and losses, after two steps of a trainer that takes `batch_size` rows in each process.

    SGD, whose weights can be compared: Adam makes a full step of a gradient that is nothing but rounding.
    """
    model = training.ours(lora)
    args = dict(args, max_steps=2, per_device_train_batch_size=batch_size, optim="sgd", learning_rate=0.1)
    trainer = make(model, folder, training.rows(training.LENGTHS * 2), train_sampling_strategy="sequential", **args)
    trainer.train()
    training.assert_ran_fast(model, "block" if lora else "parts")
    return {**training.trained(model), "losses": torch.tensor([entry["loss"] for entry in training.logged(trainer)])}


def refuse(self):
    raise AssertionError("a training step made its logits")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    DeferredLogits.__call__ = refuse
    dist.init_process_group("gloo")
    found = {name: gradients(**case) for name, case in GRADIENTS.items()}
    found |= {name: weights(folder, 2, **case) for name, case in TRAINERS.items()}
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
