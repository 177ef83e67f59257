"""Training that is killed in its second save, and resumed: `python checkpoint_worker.py FOLDER KILLS`. Every run is a fork of one process.

KILLS of get_trainer's trainer at random moments of the save, beside one at each of MOMENTS and, of a plain trainer with
`fastlm.callbacks()`, at each of PLAIN_MOMENTS. With `later` in place of KILLS: of asynchronous saves, at each of LATER_MOMENTS.

Writes FOLDER/<moment>/result.pt: {resumed, weights, log}, and FOLDER/result.pt of the run that nobody killed. With a rank in the
environment, it is one process of two that train and save together instead.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
import training
import transformers
import trl

import fastlm
from fastlm import FastLanguageModel, checkpoints, guards

STEPS, EVERY, KILLED = 6, 2, 4


def make(folder, plain: bool = False, callbacks=None, async_save: bool = False, **args):
    """get_trainer's, or TRL's own, with checkpoints; the adapters' dropout needs the saved state of torch's generator."""
    stock = tiny.model("llama", attention="sdpa")
    model = fastlm.patch_model(tiny.with_lora(stock, lora_dropout=0.1), strict=True)
    settings = training.settings(
        folder, **{"max_steps": STEPS, "save_strategy": "steps", "save_steps": EVERY, "learning_rate": 1e-2, **args}
    )
    datasets = dict(train_dataset=training.rows(), eval_dataset=training.rows((9, 14)))
    tokenizer = training.tokenizer()
    if plain:
        config = trl.SFTConfig(**settings)
        return trl.SFTTrainer(model=model, args=config, processing_class=tokenizer, callbacks=callbacks, **datasets)
    return FastLanguageModel.get_trainer(
        model, args=settings, processing_class=tokenizer, async_save=async_save, **datasets
    )


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name: str, condition, first=die) -> None:
    """Call `first` before a function, where the condition holds of its arguments."""
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        if condition(*args):
            first(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner, name: str, condition) -> None:
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        value = original(*args, **kwargs)
        if condition(*args):
            die()
        return value

    setattr(owner, name, wrapped)


def ends(position: int, *parts: str):
    """Whether a path among the arguments lies in the save that is to be killed and ends in one of these names."""
    return lambda *args: f"checkpoint-{KILLED}" in str(args[position]) and str(args[position]).endswith(parts)


def half_of(content, path, *_args, **_kwargs) -> None:
    whole = io.BytesIO()
    torch.save(content, whole)
    Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
    die()


def half_a_removal(path, *_args, **_kwargs) -> None:
    (Path(path) / "optimizer.pt").unlink()
    die()


PLACE = f"checkpoint-{KILLED}"
# moment -> how to die then, and the step that a run goes on from
MOMENTS = {
    "after-the-adapter": (lambda t: after(t, "save_model", ends(0, PLACE)), 2),
    "half-of-the-optimizer": (lambda t: before(torch, "save", ends(1, "optimizer.pt"), half_of), 2),
    "half-of-the-generators": (lambda t: before(torch, "save", ends(1, "rng_state.pth"), half_of), 2),
    "before-the-trainer-state": (
        lambda t: before(transformers.TrainerState, "save_to_json", ends(1, checkpoints.TRAINER_STATE)),
        2,
    ),
    "before-the-manifest": (lambda t: before(checkpoints, "manifest", ends(0, PLACE)), 2),
    "before-the-rename": (lambda t: before(os, "replace", ends(1, PLACE)), 2),
    "after-the-rename": (lambda t: after(os, "replace", ends(1, PLACE)), 4),
    # the older checkpoint goes when the new one is whole
    "in-the-rotation": (
        lambda t: before(shutil, "rmtree", lambda path, *_: str(path).endswith("checkpoint-2"), half_a_removal),
        4,
    ),
}
# a plain trainer writes into the folder with the final name, and removes the older one before the mark is off
PLAIN_MOMENTS = {
    name: MOMENTS[name]
    for name in (
        "after-the-adapter",
        "half-of-the-optimizer",
        "half-of-the-generators",
        "before-the-trainer-state",
        "in-the-rotation",
    )
} | {
    "before-the-manifest": (MOMENTS["before-the-manifest"][0], 4),
    "after-the-manifest": (lambda t: before(checkpoints, "unmark", ends(0, PLACE)), 4),
}


# where a save goes on beside the training
LATER_MOMENTS = ("before-the-manifest", "before-the-rename", "after-the-rename", "in-the-rotation")


def forked(function, *args) -> int:
    """Run in a child process. Returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start(function, *args), 0)[1])


def start(function, *args) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(*args)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def guarded(folder: Path, plain: bool, later: bool = False):
    return make(folder, plain, fastlm.callbacks() if plain else None, async_save=later, save_total_limit=1)


def killed_run(folder: Path, moment: str, plain: bool, later: bool = False) -> None:
    trainer = guarded(folder, plain, later)
    (PLAIN_MOMENTS if plain else MOMENTS)[moment][0](trainer)
    trainer.train()


def signalled_run(folder: Path, pipe: int) -> None:
    """A run that tells when its second save begins and ends."""
    trainer = make(folder, save_total_limit=1)
    is_second = ends(0, PLACE)
    before(checkpoints, "begin", is_second, lambda *_: os.write(pipe, b"b"))
    save = trainer._save_checkpoint

    def saved(model, trial):
        save(model, trial)
        if trainer.state.global_step == KILLED:
            os.write(pipe, b"e")

    trainer._save_checkpoint = saved
    trainer.train()


def whole_run(folder: Path) -> None:
    trainer = make(folder)
    trainer.train()
    keep(folder, trainer, resumed=None)


def resumed_run(folder: Path, plain: bool = False, later: bool = False) -> None:
    trainer = guarded(folder, plain, later)
    # a plain trainer takes the highest number; its callbacks have renamed what is half by now
    look = transformers.trainer_utils.get_last_checkpoint if plain else checkpoints.newest_whole
    found = look(str(folder))
    trainer.train(resume_from_checkpoint=True)
    keep(folder, trainer, resumed=os.path.basename(found))


def keep(folder: Path, trainer, resumed: str | None) -> None:
    result = dict(resumed=resumed, weights=training.trained(trainer.model), log=training.logged(trainer))
    torch.save(result, folder / "result.pt")


def two_processes(folder: Path) -> None:
    """Two that save one folder, and go on from it; the newest is damaged in between."""
    dist.init_process_group("gloo")
    trainer = make(folder / "run")
    trainer.train()
    weights = training.trained(trainer.model)
    dist.barrier()
    names = sorted(os.listdir(folder / "run"))
    files = sorted(os.listdir(folder / "run" / "checkpoint-4"))
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_bit(folder / "run" / "checkpoint-6" / "optimizer.pt")
    dist.barrier()
    again, loaded = make(folder / "run"), []
    again._load_from_checkpoint = lambda path: loaded.append(os.path.basename(path))
    # Trainer cannot: it asks torch.load for the device cpu:0 (or cpu:1)
    again._load_optimizer_and_scheduler = lambda path: None
    again.train(resume_from_checkpoint=True)
    after_resume = sorted(os.listdir(folder / "run"))
    errors = []
    if dist.get_rank() == 0:
        flip_a_bit(folder / "run" / "checkpoint-2" / "rng_state_1.pth")
    dist.barrier()
    try:
        make(folder / "run").train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    except ValueError as error:
        errors = [str(error)]
    result = dict(
        weights=weights,
        loaded=loaded,
        **one_process_disturbed(folder),
        names=names,
        files=files,
        after=after_resume,
        errors=errors,
    )
    torch.save(result, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


def one_process_disturbed(folder: Path) -> dict[str, object]:
    """The second process alone has a loss that is not finite, and is alone told to stop: both skip, and both stop."""
    trainer = make(folder / "disturbed")
    (guard,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, guards.FiniteSteps)]
    look, compute = guard.on_pre_optimizer_step, trainer.compute_loss
    skipped = []

    def compute_loss(*args, **kwargs):
        loss = compute(*args, **kwargs)
        return loss + float("inf") if dist.get_rank() == 1 and trainer.state.global_step == 1 else loss

    def on_pre_optimizer_step(args, state, control, **kwargs):
        look(args, state, control, **kwargs)
        skipped.append(guard.n_skipped)
        if dist.get_rank() == 1 and state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)

    trainer.compute_loss, guard.on_pre_optimizer_step = compute_loss, on_pre_optimizer_step
    code = None
    try:
        trainer.train()
    except SystemExit as end:
        code = end.code
    return dict(skipped=skipped, stopped_at=trainer.state.global_step, exit_code=code)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def warm_up(folder: Path) -> None:
    """What every fork would import and compile again. No backward: autograd's engine does not survive a fork."""
    for plain in (True, False):
        trainer = make(folder, plain, fastlm.callbacks())
        trainer.save_model(str(folder))
        trainer.create_model_card()
        trainer.create_optimizer_and_scheduler(STEPS)
        trainer.evaluate()
    gc.collect()
    gc.freeze()


def later_saves(folder: Path) -> None:
    warm_up(folder / "warm")
    assert forked(whole_run, folder) == 0
    for moment in LATER_MOMENTS:
        assert forked(killed_run, folder / moment, moment, False, True) == -signal.SIGKILL, moment
        assert forked(resumed_run, folder / moment, False, True) == 0, moment


def main(folder: Path, n_kills: int) -> None:
    warm_up(folder / "warm")
    assert forked(whole_run, folder) == 0
    for plain, moments in ((False, MOMENTS), (True, PLAIN_MOMENTS)):
        for moment in moments:
            place = folder / f"plain-{moment}" if plain else folder / moment
            assert forked(killed_run, place, moment, plain) == -signal.SIGKILL, place.name
            assert forked(resumed_run, place, plain) == 0, place.name
    # nobody is killed in the first of these: it measures how long the save takes
    chance, lasts = random.Random(11), None
    for i in range(n_kills + 1):
        reader, writer = os.pipe()
        name = folder / f"random-{i}"
        child = start(signalled_run, name, writer)
        assert os.read(reader, 1) == b"b"
        began = time.perf_counter()
        if lasts is None:
            assert os.read(reader, 1) == b"e"
            lasts = time.perf_counter() - began
            os.waitpid(child, 0)
            continue
        time.sleep(chance.random() * lasts)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert forked(resumed_run, name) == 0, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    if "RANK" in os.environ:
        two_processes(Path(sys.argv[1]))
    elif sys.argv[2] == "later":
        later_saves(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
