"""A long run that is disturbed all the way: `python soak_worker.py FOLDER STEPS`. Each stretch of it is a fork of one process.

A stretch is killed, terminated, or ends by itself; between stretches, and inside them, the model is evaluated, generates, has its adapter
switched off and on and is saved. Writes FOLDER/result.pt: {weights, disturbed_weights, disturbances, ends, growth_bytes}.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import sys
from pathlib import Path

import checkpoint_worker
import torch
import training
import transformers
from checkpoint_worker import forked

from fastlm import FastLanguageModel

EVERY = 10


class Disturbs(transformers.TrainerCallback):
    """At random steps: an evaluation, generation, a switch of adapters, a save, or the end of the process."""

    def __init__(self, trainer, chance: random.Random, told: Path) -> None:
        self.trainer, self.chance, self.told = trainer, chance, told

    def on_step_end(self, args, state, control, model=None, **kwargs):
        disturbances = {
            "kill": (0.012, lambda: os.kill(os.getpid(), signal.SIGKILL)),
            "terminate": (0.01, lambda: signal.raise_signal(signal.SIGTERM)),
            "evaluate": (0.05, lambda: evaluate(self.trainer)),
            "save": (0.05, lambda: setattr(control, "should_save", True)),
            "generate": (0.05, lambda: generate(model)),
            "switch": (0.05, lambda: switch(model)),
            "save-by-hand": (0.02, lambda: self.trainer.save_model(str(Path(args.output_dir).parent / "by-hand"))),
        }
        for name, (share, action) in disturbances.items():
            if self.chance.random() < share:
                with self.told.open("a") as file:
                    file.write(f"{name}\n")
                action()


def evaluate(trainer) -> None:
    # a data loader takes its seed from torch's generator, and dropout what comes after that, in a stock trainer too
    with torch.random.fork_rng(devices=[]):
        trainer.evaluate()


def generate(model) -> None:
    FastLanguageModel.for_inference(model)
    model.generate(input_ids=torch.arange(5, 12)[None], max_new_tokens=4, do_sample=False)
    FastLanguageModel.for_training(model)


def switch(model) -> None:
    ids = torch.arange(5, 12)[None]
    with torch.no_grad(), model.disable_adapter():
        model.eval()(input_ids=ids)
    model.train()


def stretch(folder: Path, steps: int, number: int) -> None:
    trainer = checkpoint_worker.make(
        folder / "run", max_steps=steps, save_steps=EVERY, save_total_limit=2, logging_steps=EVERY
    )
    trainer.add_callback(Disturbs(trainer, random.Random(number), folder / "disturbances"))
    is_first = not list((folder / "run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=None if is_first else True)
    torch.save(dict(weights=training.trained(trainer.model)), folder / "disturbed.pt")


class Memory(transformers.TrainerCallback):
    """Resident bytes of this process after a fifth of the steps and at the end."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (state.max_steps // 5, state.max_steps):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.seen.append(pages * os.sysconf("SC_PAGE_SIZE"))


def undisturbed(folder: Path, steps: int) -> None:
    memory = Memory()
    trainer = checkpoint_worker.make(
        folder / "whole", max_steps=steps, save_steps=EVERY, save_total_limit=2, logging_steps=EVERY
    )
    trainer.add_callback(memory)
    trainer.train()
    result = dict(weights=training.trained(trainer.model), growth=memory.seen[1] - memory.seen[0])
    torch.save(result, folder / "whole.pt")


def main(folder: Path, steps: int) -> None:
    checkpoint_worker.warm_up(folder / "warm")
    assert forked(undisturbed, folder, steps) == 0
    ends: collections.Counter[int] = collections.Counter()
    while not (folder / "disturbed.pt").exists():
        code = forked(stretch, folder, steps, sum(ends.values()))
        ends[code] += 1
        assert code in (0, 143, -signal.SIGKILL), code
    whole, disturbed = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("whole", "disturbed"))
    told = collections.Counter((folder / "disturbances").read_text().split())
    result = dict(
        weights=whole["weights"], growth_bytes=whole["growth"], disturbed_weights=disturbed["weights"],
        disturbances=dict(told), ends=dict(ends),
    )  # fmt: skip
    torch.save(result, folder / "result.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
