"""A save that is killed leaves no checkpoint or a whole one, and a damaged checkpoint is refused by the name of its file."""

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import checkpoint_worker
import pytest
import torch
import training
import transformers
from safetensors.torch import save_file
from test_distributed import ROOT, run_two_processes

from fastlm import checkpoints, output
from fastlm.evaluation import LeaveNoTrace

TO_THE_BIT = 0.0
RECOUNTED = ("num_tokens",)
# files that a plain trainer does not write
OURS = (checkpoints.MANIFEST, output.LOCK)


# --- files ---


def written(output: Path, step: int, content: bytes = b"0123456789") -> Path:
    """A published checkpoint folder of a few files."""
    final = output / f"checkpoint-{step}"
    checkpoints.begin(str(final))
    stage = Path(checkpoints.stage_of(str(final)))
    part = stage / final.name
    (part / "adapter é").mkdir(parents=True)
    (part / checkpoints.TRAINER_STATE).write_text("{}")
    (part / "optimizer.pt").write_bytes(content)
    (part / "adapter é" / "adapter_model.safetensors").write_bytes(content * 2)
    assert checkpoints.publish(str(part), str(final)) == 3 * len(content) + 2
    stage.rmdir()
    return final


def test_the_manifest_is_of_every_file(tmp_path):
    final = written(tmp_path, 5, b"abc")
    listed = json.loads((final / checkpoints.MANIFEST).read_text())
    assert listed == checkpoints.manifest(str(final)) and listed["format"] == 1
    assert set(listed["files"]) == {checkpoints.TRAINER_STATE, "optimizer.pt", "adapter é/adapter_model.safetensors"}
    # FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert listed["files"]["optimizer.pt"] == dict(size=3, sha256=digest)
    checkpoints.verify(str(final))
    # what others add later is theirs
    (final / "notes.txt").write_text("mine")
    checkpoints.verify(str(final))


DAMAGES = {
    "flipped": (checkpoint_worker.flip_a_bit, "its bytes are not those that were saved"),
    "cut": (lambda path: os.truncate(path, 7), "is damaged: 7 bytes, "),
    "empty": (lambda path: path.write_bytes(b""), "is damaged: 0 bytes, "),
    "gone": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", ["optimizer.pt", "adapter é/adapter_model.safetensors"])
def test_damage_is_named(tmp_path, name, damage):
    final = written(tmp_path, 5)
    DAMAGES[damage][0](final / name)
    with pytest.raises(ValueError) as caught:
        checkpoints.verify(str(final))
    assert str(final / name) in str(caught.value) and DAMAGES[damage][1] in str(caught.value)
    assert "Resume from another checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2, "files": {}}',
        '{"format": 1}',
        '{"format": 1, "files": {"../../secret": {"size": 1, "sha256": ""}}}',
        '{"format": 1, "files": {"/etc/passwd": {"size": 1, "sha256": ""}}}',
        '{"format": 1, "files": {"optimizer.pt": 3}}',
    ],
)
def test_a_damaged_or_hostile_manifest_is_refused(tmp_path, text):
    final = written(tmp_path, 5)
    (final / checkpoints.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=checkpoints.MANIFEST):
        checkpoints.verify(str(final))


def test_checkpoints_of_others_are_checked_by_their_headers(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "adapter_model.safetensors")
    torch.save({"state": torch.ones(40)}, folder / "optimizer.pt")

    def refused(text: str) -> None:
        with pytest.raises(ValueError) as caught:
            checkpoints.verify(str(folder))
        assert text in str(caught.value)

    refused(f"{folder / checkpoints.TRAINER_STATE} is missing")
    (folder / checkpoints.TRAINER_STATE).write_text('{"global_step": ')
    refused(f"{folder / checkpoints.TRAINER_STATE} is not valid JSON")
    (folder / checkpoints.TRAINER_STATE).write_text('{"global_step": 3}')
    checkpoints.verify(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    refused("lacks model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-9])
        refused(f"{folder / name} is damaged")
        (folder / name).write_bytes(whole)
    checkpoints.verify(str(folder))
    with pytest.raises(ValueError, match="is not a folder"):
        checkpoints.verify(str(tmp_path / "checkpoint-9"))


def test_the_newest_whole_one_is_taken_and_damaged_ones_step_aside(tmp_path, caplog):
    assert checkpoints.newest_whole(str(tmp_path / "none")) is None and checkpoints.newest_whole(str(tmp_path)) is None
    for step in (5, 20, 100):
        written(tmp_path, step)
    (tmp_path / "checkpoint-300-notes").mkdir()
    (tmp_path / "checkpoint-400").write_text("a file")
    assert checkpoints.newest_whole(str(tmp_path)) == str(tmp_path / "checkpoint-100") and not caplog.records
    for _ in range(2):
        checkpoint_worker.flip_a_bit(tmp_path / "checkpoint-100" / "optimizer.pt")
        assert checkpoints.newest_whole(str(tmp_path)) == str(tmp_path / "checkpoint-20")
        assert f"{tmp_path / 'checkpoint-100' / 'optimizer.pt'} is damaged" in caplog.text
        written(tmp_path, 100)
    kept = [".checkpoint-100.damaged", ".checkpoint-100.damaged-2", "checkpoint-100"]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-100*")) == kept


def test_no_whole_checkpoint_is_an_error_that_names_all(tmp_path):
    for step in (5, 20):
        checkpoint_worker.flip_a_bit(written(tmp_path, step) / "optimizer.pt")
    with pytest.raises(ValueError) as caught:
        checkpoints.newest_whole(str(tmp_path))
    for step in (5, 20):
        assert str(tmp_path / f"checkpoint-{step}" / "optimizer.pt") in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-20", "checkpoint-5"]


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path, monkeypatch, caplog):
    """Saved again at the same step: between the two renames the older one is aside."""
    older = checkpoints.manifest(str(written(tmp_path, 5)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, 5, b"9876543210")
    assert sorted(os.listdir(tmp_path)) == [".checkpoint-5.replaced", ".checkpoint-5.writing"]
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path)) is None
    assert checkpoints.newest_whole(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    assert checkpoints.manifest(str(tmp_path / "checkpoint-5")) == older
    assert "gets its name checkpoint-5 back" in caplog.text
    written(tmp_path, 5, b"9876543210")
    assert os.listdir(tmp_path) == ["checkpoint-5"]
    assert (tmp_path / "checkpoint-5" / "optimizer.pt").read_bytes() == b"9876543210"


# --- killed saves ---


def kill_and_resume(folder: Path, n_random: int) -> None:
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(ROOT / "tests" / "checkpoint_worker.py"), str(folder), str(n_random)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120 + 10 * n_random)
    assert done.returncode == 0, done.stderr[-6000:]
    want = torch.load(folder / "result.pt", weights_only=True)
    assert want["log"][0]["loss"] != want["log"][-1]["loss"]
    expected = {moment: (step,) for moment, (_, step) in checkpoint_worker.MOMENTS.items()}
    expected |= {f"plain-{moment}": (step,) for moment, (_, step) in checkpoint_worker.PLAIN_MOMENTS.items()}
    expected |= {f"random-{i + 1}": (2, 4) for i in range(n_random)}
    for moment, steps in expected.items():
        got = torch.load(folder / moment / "result.pt", weights_only=True)
        assert got["resumed"] in [f"checkpoint-{step}" for step in steps], moment
        training.assert_same_run(got["log"], want["log"], TO_THE_BIT, but=RECOUNTED)
        training.assert_same_weights(got["weights"], want["weights"], TO_THE_BIT)
        left = {path.name for path in (folder / moment).glob("*checkpoint-*")}
        # what a plain trainer left half is beside it
        assert left - {".checkpoint-4.damaged"} == {"checkpoint-6"}, (moment, left)
        assert moment.startswith("plain") or left == {"checkpoint-6"}, (moment, left)
        checkpoints.verify(str(folder / moment / "checkpoint-6"))


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """From the newest whole checkpoint (one is kept at a time): losses and weights of the run that nobody killed, to the bit.

    Eight moments of a save and five random ones, and seven moments under a plain trainer: twenty kills.
    """
    kill_and_resume(tmp_path, 5)


@pytest.mark.slow
def test_two_hundred_killed_runs(tmp_path):
    kill_and_resume(tmp_path, 185)


# --- the trainer ---


def test_resuming_refuses_a_damaged_folder_and_goes_past_it(tmp_path, caplog):
    folder = tmp_path / "run"
    want = training.train(checkpoint_worker.make(folder))
    checkpoint_worker.flip_a_bit(folder / "checkpoint-6" / "adapter_model.safetensors")
    os.truncate(folder / "checkpoint-4" / "optimizer.pt", 1000)
    trainer = checkpoint_worker.make(folder, save_total_limit=1)
    for step, name in ((6, "adapter_model.safetensors"), (4, "optimizer.pt")):
        path = folder / f"checkpoint-{step}"
        for given in (path, str(path)):
            with pytest.raises(ValueError) as caught:
                trainer.train(resume_from_checkpoint=given)
            assert str(path / name) in str(caught.value)
    with caplog.at_level(logging.INFO, "fastlm"):
        trainer.train(resume_from_checkpoint=True)
    assert "adapter_model.safetensors is damaged" in caplog.text and "resuming from" in caplog.text
    assert "bytes saved in" in caplog.text
    training.assert_same_run(training.logged(trainer), want, TO_THE_BIT, but=RECOUNTED)
    names = sorted(path.name for path in folder.glob("*checkpoint-*"))
    assert names == [".checkpoint-4.damaged", ".checkpoint-6.damaged", "checkpoint-6"]
    checkpoints.verify(str(folder / "checkpoint-6"))


def test_without_a_checkpoint_the_error_is_the_trainers_own(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        checkpoint_worker.make(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("greater", [False, True])
def test_best_model_rotation_and_state_are_the_plain_trainers(tmp_path, greater):
    """The best checkpoint is the last one, or the first one; only one other is kept beside it.

    Of plain runs, that is the one whose evaluations leave no trace, as ours by themselves.
    """
    args = dict(
        eval_strategy="steps", eval_steps=2, save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=greater,
    )  # fmt: skip
    seen, trainers = {}, {}
    for name in ("ours", "plain"):
        trainer = trainers[name] = checkpoint_worker.make(tmp_path / name, plain=name == "plain", **args)
        kept = Watch()
        trainer.add_callback(kept)
        if name == "plain":
            trainer.add_callback(LeaveNoTrace())
        trainer.train()
        root = tmp_path / name
        seen[name] = dict(
            kept=kept.seen, best=Path(trainer.state.best_model_checkpoint).relative_to(root), metric=trainer.state.best_metric,
            left=sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.name not in OURS),
        )  # fmt: skip
        state = json.loads((Path(trainer.state.best_model_checkpoint) / checkpoints.TRAINER_STATE).read_text())
        assert Path(state["best_model_checkpoint"]) == Path(trainer.state.best_model_checkpoint)
    assert seen["ours"] == seen["plain"]
    assert seen["ours"]["best"] == Path("checkpoint-2" if greater else "checkpoint-6")
    ours, plain = trainers.values()
    training.assert_same_run(training.logged(ours), training.logged(plain), TO_THE_BIT)
    training.assert_same_weights(training.trained(ours.model), training.trained(plain.model), TO_THE_BIT)


class Watch(transformers.TrainerCallback):
    """Checkpoints that are there when a save ends."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(sorted(path.name for path in Path(args.output_dir).glob("*checkpoint-*")))


def test_uploads_read_the_published_folder(tmp_path, monkeypatch):
    uploaded = []

    def push(trainer, folder):
        checkpoints.verify(folder)
        uploaded.append(folder)

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    trainer = checkpoint_worker.make(tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    trainer.train()
    assert uploaded == [str(tmp_path / "checkpoint-2")]


def test_saving_a_model_by_hand_is_the_plain_trainers(tmp_path):
    for name, plain in (("ours", False), ("plain", True)):
        checkpoint_worker.make(tmp_path / name, plain=plain).save_model(str(tmp_path / name / "by-hand"))
    names = [sorted(path.name for path in (tmp_path / name / "by-hand").iterdir()) for name in ("ours", "plain")]
    assert names[0] == names[1] and "adapter_model.safetensors" in names[0]


def test_the_class_has_a_name_that_pickle_finds(tmp_path):
    kind = type(checkpoint_worker.make(tmp_path))
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert repr(kind) == "<class 'fastlm.trainers.CheckpointedSFTTrainer'>"


def test_two_processes_save_one_folder(tmp_path):
    """Both go past the damaged newest checkpoint together, and both refuse a path whose other process' file is damaged."""
    ranks = run_two_processes(tmp_path, "checkpoint_worker.py")
    for rank in ranks:
        assert [name for name in rank["names"] if "checkpoint" in name] == [
            "checkpoint-2",
            "checkpoint-4",
            "checkpoint-6",
        ]
        assert {"rng_state_0.pth", "rng_state_1.pth", checkpoints.MANIFEST, "optimizer.pt"} <= set(rank["files"])
        after = [name for name in rank["after"] if "checkpoint" in name]
        assert after == [".checkpoint-6.damaged", "checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert rank["loaded"] == ["checkpoint-4"]
        training.assert_same_weights(rank["weights"], ranks[0]["weights"], TO_THE_BIT)
        assert (rank["skipped"], rank["stopped_at"], rank["exit_code"]) == ([0, 1, 1], 3, 143)
        assert len(rank["errors"]) == 1 and "rng_state_1.pth is damaged" in rank["errors"][0]
