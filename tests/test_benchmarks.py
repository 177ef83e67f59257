"""The benchmarks' dry runs: what they would time, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | dict(
    PYTHONPATH=os.pathsep.join(str(ROOT / p) for p in (".", "kernels")), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
)


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)


def test_every_op_runs_beside_torch(tmp_path):
    done = run("ops.py", "--small", "--only", "rms_norm", "nf4_decode", "linear_cross_entropy", "--without-compile")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {tuple(line[:4]) for line in lines if line[3] in ("fastlm", "torch")} == {
        (op, "typical", direction, impl)
        for op, directions in (("rms_norm", ("forward", "backward")), ("nf4_decode", ("forward",)), ("linear_cross_entropy", ("both",)))
        for direction in directions
        for impl in ("fastlm", "torch")
    }  # fmt: skip
    assert all(line[4] == "runs" for line in lines)


def test_times_need_a_name_and_a_gpu():
    done = run("ops.py", "--only", "rms_norm")
    assert done.returncode == 2 and ("--small" in done.stderr or "--run-id" in done.stderr)


def test_steps_of_two_libraries_pass_or_fail_the_gate(tmp_path):
    checkpoint = tmp_path / "tiny"
    assert run("finetune.py", "make", "--model", "tiny", "--out", checkpoint).returncode == 0
    common = ("--checkpoint", checkpoint, "--seq", 32, "--steps", 6, "--optim", "adamw_torch")
    for impl, trainer in (("hf", "plain"), ("fastlm", "get_trainer")):
        done = run(
            "finetune.py", "run", "--impl", impl, "--trainer", trainer, "--out", tmp_path / impl, "--busy", *common
        )
        assert done.returncode == 0, done.stderr
    results = {impl: json.loads((tmp_path / impl / "result.json").read_text()) for impl in ("hf", "fastlm")}
    assert results["fastlm"]["model"] == "tiny" and len(results["fastlm"]["losses"]) == 6
    assert results["fastlm"]["gpu_busy"] == 0.0
    # random rows and so few steps teach nothing, and the gate says so of both; all else agrees
    done = run("finetune.py", "gate", tmp_path / "hf", tmp_path / "fastlm")
    assert done.returncode == 1 and done.stdout.count("BAD") == 2, done.stdout
    for impl, result in results.items():
        result["losses"][-1] = result["losses"][0] * 0.8
        (tmp_path / impl / "result.json").write_text(json.dumps(result))
    done = run("finetune.py", "gate", tmp_path / "hf", tmp_path / "fastlm")
    assert done.returncode == 0 and done.stdout.count("ok ") == 2, done.stdout
    results["fastlm"]["losses"][2] *= 1.001
    (tmp_path / "fastlm/result.json").write_text(json.dumps(results["fastlm"]))
    assert run("finetune.py", "gate", tmp_path / "hf", tmp_path / "fastlm").returncode == 1


def test_the_longest_row_is_searched_and_predicted(tmp_path):
    checkpoint = tmp_path / "tiny"
    assert run("context.py", "make", "--model", "tiny", "--out", checkpoint).returncode == 0
    common = ("--checkpoint", checkpoint, "--cap-gib", 1)
    done = run("context.py", "predict", *common)
    assert done.returncode == 0 and 10_000 < int(done.stdout.split()[-1]) < 1_000_000, done.stderr
    done = run(
        "context.py", "search", "--impl", "fastlm", "--most", 128, "--steps", 1, "--out", tmp_path / "run", *common
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["max_tokens"], row["failed_tokens"], row["pinned_gib"]) == (128, None, 0.0) and row["grad_norms"][0] > 0


def test_ragged_rows_have_the_lengths_of_real_text(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import finetune

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(dict(text="a" * n)) + "\n" for n in (80, 400, 100_000)))
    settings = dict(
        impl="hf", checkpoint=tmp_path, out=tmp_path, setting="keep", mode="qlora", bs=2, seq=512, accum=1, trainer="plain",
        optim="adamw_8bit", steps=20, attention="sdpa", busy=False,
    )  # fmt: skip
    ragged = finetune.Run(**settings, data="ragged-padded", lengths=file)
    assert set(finetune.row_lengths(ragged, 60)) == {20, 100, 512}
    assert finetune.row_lengths(finetune.Run(**settings, data="dense", lengths=None), 3) == [512] * 3


def questions(folder):
    """Rows as GSM8K has them, of our own."""
    file = folder / "rows.jsonl"
    rows = (
        dict(question=f"What is {n} + {n}?", answer=f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}")
        for n in range(1, 25)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_preparation_makes_the_same_rows_as_trl(tmp_path):
    import checkpoint

    model = checkpoint.save(tmp_path / "model")
    done = run("preparation.py", "--data", questions(tmp_path), "--tokenizer", model, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["impl"] for row in rows] == ["fastlm", "fastlm-plain", "trl", "trl-completion"]
    assert all(row["rows"] == 24 and row["rows_s"] > 0 for row in rows)


def test_question_answering_is_judged_before_and_after(tmp_path):
    import checkpoint

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gsm8k

    file = questions(tmp_path)
    common = (
        "--train",
        file,
        "--test",
        file,
        "--out",
        tmp_path / "out.jsonl",
        "--model",
        checkpoint.save(tmp_path / "model"),
    )
    few = ("--seeds", 3, "--steps", 2, "--batch", 2, "--test-rows", 3, "--generate", 2, "--new-tokens", 4)
    done = run("gsm8k.py", *common, *few)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["impl"], row["seed"], len(row["losses"])) for row in rows] == [("trl", 3, 2), ("fastlm", 3, 2)]
    ours, theirs = rows[1], rows[0]
    assert all(abs(a - b) <= 1e-4 * b for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    for when in ("before", "after"):
        assert (
            abs(ours[when]["loss"] - theirs[when]["loss"]) <= 1e-4 * theirs[when]["loss"] and ours[when]["format"] == 0
        )
    assert ours["after"]["loss"] < ours["before"]["loss"]
    # a spread of several seeds, and a difference within and beyond it
    others = [dict(row, seed=4, losses=[loss + 0.2 for loss in row["losses"]]) for row in rows]
    text, agrees = gsm8k.verdict(rows + others)
    assert agrees and "spread of trl's 2 seeds: 0.20000" in text
    others[1]["losses"] = [loss + 0.5 for loss in others[1]["losses"]]
    text, agrees = gsm8k.verdict(rows + others)
    assert not agrees and "fastlm less trl: +0.25" in text


def test_the_plot_shows_the_rows_of_the_table(tmp_path):
    done = run("plot.py", "--out", tmp_path / "plot.svg")
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "plot.svg").read_text()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import tables

    rows = tables.shown(tables.read("finetune"))
    # one bar a row and panel, and the file in the repository is of these rows
    assert rows and all(f"{row['impl']} {row['setting']}" in drawn for row in rows)
    kept = (ROOT / "benchmarks/results/finetune.svg").read_text()
    for row in rows:
        assert f"{row['tok_s']:,.0f}" in drawn and f"{row['tok_s']:,.0f}" in kept
