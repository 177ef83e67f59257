"""One process of a data-parallel run with FusedAdamW, then of the same with torch's: `python adamw_worker.py FOLDER`.

Writes the trained weights, norms and losses of both to FOLDER/rank<n>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import training
import trl

from fastlm import optimizers, steps, trainers


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # get_trainer leaves a CPU torch's own
    steps._DEVICES = ("cpu",)
    dist.init_process_group("gloo")
    found = {}
    for name in ("ours", "stock"):
        model = training.ours()
        args = trl.SFTConfig(**training.settings(folder, max_grad_norm=0.05, gradient_accumulation_steps=2))
        made = dict(args=args, train_dataset=training.rows(training.LENGTHS * 2), processing_class=training.tokenizer())
        trainer = trainers.get_trainer(model, **made) if name == "ours" else trl.SFTTrainer(model=model, **made)
        entries = training.train(trainer)
        assert isinstance(trainer.optimizer.optimizer, optimizers.FusedAdamW) == (name == "ours")
        numbers = torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in entries])
        found[name] = {**training.trained(model), "numbers": numbers}
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
