"""A host or a device whose memory is full: what is held, what is left, what would need less, and a run that goes on."""

import errno
import re

import checkpoint_worker
import pytest
import torch
import training
import transformers

from fastlm import checkpoints, host_memory
from fastlm.memory import prediction

# more than any address space
TOO_MANY = 2**60


def no_more_processes():
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def no_more_workers():
    # torch's words for a worker that the system ended
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


CAUSES = {
    "torch": (lambda: torch.empty(TOO_MANY, dtype=torch.uint8), "DefaultCPUAllocator"),
    "python": (lambda: bytearray(TOO_MANY), "the memory of the host is full"),
    "fork": (no_more_processes, "Cannot allocate memory"),
    "worker": (no_more_workers, "is killed by signal: Killed"),
}


class At(transformers.TrainerCallback):
    def __init__(self, action):
        self.action = action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.action()


@pytest.mark.parametrize("cause", list(CAUSES))
def test_the_error_has_numbers_and_changes_and_the_run_goes_on(tmp_path, cause):
    action, says = CAUSES[cause]
    trainer = checkpoint_worker.make(tmp_path)
    trainer.add_callback(At(action))
    with pytest.raises(MemoryError) as caught:
        trainer.train()
    text = str(caught.value)
    assert says in text and caught.value.__cause__ is not None
    held, free, total = map(
        float, re.search(r"holds ([\d.]+) GiB, ([\d.]+) of ([\d.]+) GiB are available", text).groups()
    )
    assert 0.1 < held < total and 0 <= free < total
    assert "a per_device_train_batch_size below 2 with as many more gradient_accumulation_steps" in text
    assert "optim='adamw_8bit'" in text and "resume_from_checkpoint=True" in text
    checkpoints.verify(str(tmp_path / "checkpoint-2"))
    again = checkpoint_worker.make(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


def test_changes_are_those_that_apply(tmp_path):
    args = transformers.TrainingArguments(
        **training.settings(tmp_path, dataloader_num_workers=3, optim="adamw_8bit", per_device_train_batch_size=1)
    )
    text = str(host_memory.explain(MemoryError(), args))
    assert "fewer dataloader_num_workers than 3, rows that are streamed" in text and "batch_size" not in text


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "no space"), ValueError("MemoryError")]
)
def test_other_errors_stay_what_they_are(tmp_path, error):
    assert host_memory.explain(error, None) is None
    trainer = checkpoint_worker.make(tmp_path)

    def fails():
        raise error

    trainer.add_callback(At(fails))
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error


# --- the device's memory ---


@pytest.mark.parametrize("in_layer", [False, True], ids=["elsewhere", "in-a-layer"])
def test_an_error_of_the_devices_memory_says_what_would_fit(tmp_path, monkeypatch, in_layer):
    """Once: what a layer found out itself is not said again."""
    says = "CUDA out of memory. Tried to allocate 2.00 GiB."
    if in_layer:
        says += " The layer was run again at the cost of all kept activations, and that was not enough."
    monkeypatch.setattr(prediction, "_device_bytes", lambda: 1 << 20)
    trainer = checkpoint_worker.make(tmp_path)

    def fails():
        raise torch.OutOfMemoryError(says)

    trainer.add_callback(At(fails))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith(says) and text.endswith("go on with resume_from_checkpoint=True")
    # two rows, of at most 31 tokens
    assert (re.search(r"2 x \d+ tokens need [\d.]+ GiB at least", text) is None) == in_layer
    checkpoints.verify(str(tmp_path / "checkpoint-2"))
