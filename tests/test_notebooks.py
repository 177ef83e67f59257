"""The notebooks are those of the scripts beside them, and run from top to bottom on a tiny model."""

import importlib.util
import json
import re
from pathlib import Path

import checkpoint
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# what a run prints or writes, whatever the weights
SAYS = {
    "quickstart": "exact match: 0% before",
    "chat_data": "dropped 1: the answer is missing (the first is row 32)",
    "response_only": "⟦It is 0.<|im_end|>⟧",
    "continued_pretraining": "perplexity of an unseen text: ",
    "evaluation": "step 2: {'exact': 0.0, 'json': 0.0, 'number': ",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(checkpoint.save(tmp_path_factory.mktemp("model")))


def test_every_notebook_is_its_script():
    spec = importlib.util.spec_from_file_location("build", FOLDER / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in build.SCRIPTS} == set(SAYS)
    for script in build.SCRIPTS:
        assert script.with_suffix(".ipynb").read_text() == build.notebook(script.read_text()), "run build.py"
    made = json.loads(build.notebook("# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\ny = 2\n"))
    assert made["nbformat"] == 4 and [cell["source"] for cell in made["cells"]] == [
        ["# A\n", "\n", "b"],
        ["x = 1\n", "\n", "y = 2"],
    ]
    assert made["cells"][0].keys() == {"cell_type", "id", "metadata", "source"}
    assert made["cells"][1].keys() == {"cell_type", "id", "metadata", "source", "execution_count", "outputs"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    program: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        source = re.sub(r'^MODEL = ".*"$', f"MODEL = {model!r}", "".join(cell["source"]), flags=re.MULTILINE)
        source = re.sub(r"^STEPS = \d+$", "STEPS = 2", source, flags=re.MULTILINE)
        # the few steps here must be judged and saved too
        source = source.replace("eval_steps=20", "eval_steps=1").replace("save_steps=20", "save_steps=1")
        source = source.replace("per_device_train_batch_size=16", "per_device_train_batch_size=4")
        exec(compile(source, f"{path.name}[{number}]", "exec"), program)
    assert SAYS[path.stem] in capsys.readouterr().out
    summary = [entry for entry in program["trainer"].state.log_history if "train_loss" in entry]
    # random weights: about ln(259)
    assert len(summary) == 1 and 4.5 < summary[0]["train_loss"] < 6.5
    if path.stem != "evaluation":
        assert (tmp_path / path.stem / "adapter/adapter_model.safetensors").is_file()
