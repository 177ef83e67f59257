"""The README's code runs as printed, on a tiny model in place of the named ones, and its tables are those of the results."""

import importlib.util
import json
import re
from pathlib import Path

import checkpoint
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
HUB_ID = re.compile(r'(?<=from_pretrained\()"[\w.-]+/[\w.-]+"')


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_readme_code_runs(tmp_path, monkeypatch):
    """All blocks, top to bottom, as one program; only model names and the number of steps differ."""
    model = checkpoint.save(tmp_path / "tiny chat model")
    row = {"messages": [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}]}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks()
    assert len(blocks) == 6
    assert len(HUB_ID.findall(README)) == 3
    program: dict = {}
    for block in blocks:
        block = HUB_ID.sub(repr(str(model)), block).replace("max_steps=60", "max_steps=2")
        if not torch.cuda.is_available():
            block = block.replace('SFTConfig("output"', 'SFTConfig("output", use_cpu=True')
        exec(compile(block, "README.md", "exec"), program)
        if "trainer" in program:
            (summary,) = [entry for entry in program.pop("trainer").state.log_history if "train_loss" in entry]
            # random weights: about ln(259)
            assert 4.5 < summary["train_loss"] < 6.5
    assert program["slow"] == []
    assert {path.name for path in (tmp_path / "merged").glob("*.safetensors")} == {"model.safetensors"}
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def test_example_is_short():
    """The first example is what a reader types: fifteen lines."""
    first = [line for line in python_blocks()[0].splitlines() if line.strip()]
    assert len(first) <= 15


def test_links_and_commands_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    extras = re.findall(r"`\.\[(\w+)\]`", README)
    assert extras and all(
        re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for name in extras
    )


def test_every_op_is_in_the_kernels_table():
    files = {path.name for path in (ROOT / "kernels/fastlm_kernels").glob("[a-z]*.py")} - {"testing.py"}
    table = (ROOT / "kernels/README.md").read_text()
    assert set(re.findall(r"^\| \[\w+\]\(fastlm_kernels/(\w+\.py)\)", table, re.MULTILINE)) == files


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_results(tables):
    assert tables.filled(README) == README


def test_a_table_is_made_from_its_rows(tables, tmp_path, monkeypatch):
    row = dict(
        run_id="a", impl="fastlm", setting="default", trainer="sft", model="llama-8b", mode="qlora", bs=2, seq=2048, accum=1,
        data="dense", ms=1234.5, tok_s=3318.0, peak_gib=10.04, losses=[2.0, 1.0], grad_norms=[1.0, 1.0], gpu="H200",
        torch="2.11.0", triton="3.6.0", commit="0123456789abcdef",
    )  # fmt: skip
    failed = row | dict(impl="hf", ms=None, tok_s=None, peak_gib=None)
    repeated = row | dict(ms=1000.0, tok_s=4096.0)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "finetune.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, failed, repeated)))
    text = tables.filled("above\n<!-- table:finetune -->\nold\n<!-- end -->\nbelow\n")
    assert text.startswith("above\n<!-- table:finetune -->\n| model |") and text.endswith("\n<!-- end -->\nbelow\n")
    lines = text.splitlines()
    assert (
        "| llama-8b | qlora | 2x2048 dense | sft | fastlm default | 1000 | 4,096 | 10.0 | H200 | 2.11.0 / 3.6.0 | 012345678 |"
        in lines
    )
    assert (
        "| llama-8b | qlora | 2x2048 dense | sft | hf default | out of memory | – | – | H200 | 2.11.0 / 3.6.0 | 012345678 |"
        in lines
    )
    assert len(lines) == 8
