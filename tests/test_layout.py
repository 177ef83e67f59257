"""The shape of the repository: what imports what, what a wheel holds, and that importing fastlm leaves everything else alone."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import fingerprint
import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
CODE = ("fastlm", "kernels", "benchmarks", "examples")
MAX_LINES = 500
CHECKOUT = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "tests"))
# Third party -> the files and folders of fastlm/ that may import it. Everything else sees tensors and our own dataclasses.
DOORS = {
    "accelerate": (),
    "bitsandbytes": ("quant.py",),
    "compressed_tensors": ("export/",),
    "datasets": ("trainers.py", "chat_templates/", "data/"),
    "filelock": ("output.py",),
    "gguf": ("export/gguf_types.py",),
    "huggingface_hub": ("loading.py", "quant.py", "export/"),
    "jinja2": ("chat_templates/", "data/", "template_check.py", "export/gguf_modelfile.py"),
    "lm_eval": ("evaluation/harness.py",),
    "numpy": ("chat_templates/", "evaluation/", "export/gguf_types.py"),
    "peft": ("adapters.py",),
    "rich": ("data/", "cli.py"),
    "safetensors": ("loading.py", "export/"),
    "torch": ("",),
    "torchao": ("export/",),
    "transformers": (
        "loading.py",
        "binding.py",
        "forwards/",
        "export/",
        "chat_templates/",
        "data/",
        "trainers.py",
        "migrated.py",
        "cli.py",
        "cli_doctor.py",
        "signals.py",
        "guards.py",
        "services.py",
        "output.py",
        "tokens.py",
        "evaluation/",
    ),
    "trl": ("trainers.py", "migrated.py", "cli_config.py", "chat_templates/", "data/batches.py"),
    "typer": ("cli.py",),
    "yaml": ("cli_config.py",),
}
# What a part of fastlm may import of the rest of it: only what stands below it.
BELOW = {
    "block/": ("fastlm.block",),
    "forwards/": (
        "fastlm.forwards",
        "fastlm.block",
        "fastlm.adapters",
        "fastlm.families",
        "fastlm.memory",
        "fastlm.patching",
        "fastlm.quant",
    ),
    "checkpoints.py": ("fastlm.files",),
    "config.py": (),
    "families.py": (),
    "files.py": (),
    "optimizers.py": (),
    "output.py": ("fastlm.adapters", "fastlm.checkpoints"),
    "memory/budget.py": (),
    "memory/manager.py": ("fastlm.block", "fastlm.memory"),
    "memory/planner.py": ("fastlm.block", "fastlm.memory"),
    "memory/sizes.py": ("fastlm.block",),
    "patching.py": (),
    "signals.py": (),
    "template_check.py": (),
    "quant.py": ("fastlm.patching",),
}


def project_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function, by statement or by `import_module("name")`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.add(node.module)
            # `from fastlm import adapters` names a module
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.update(argument.value for argument in node.args if isinstance(argument, ast.Constant))
    return found


def third_parties(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)


def run_python(code: str, *options: str, cwd: Path = ROOT, **environment: str) -> str:
    """Output of a fresh interpreter that sees neither this one's path nor Triton's interpreter."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the folder name `kernels` ---


def test_nothing_else_is_called_kernels():
    """With an __init__.py our source root would hide the package `kernels` that transformers imports."""
    assert not (ROOT / "kernels/__init__.py").exists()
    tracked = [path for top in (*CODE, "tests") for path in (ROOT / top).rglob("*")]
    tracked += list(ROOT.glob("*"))
    named = {path.relative_to(ROOT).as_posix() for path in tracked if path.name in ("kernels", "kernels.py")}
    assert named == {"kernels"}


WHICH_KERNELS = """
import importlib.util
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
import transformers.integrations.hub_kernels
spec = importlib.util.find_spec("kernels")
print(spec.origin if spec else None, is_kernels_available())
"""


def test_transformers_finds_the_installed_kernels_from_the_repository_root():
    try:
        importlib.metadata.version("kernels")
        is_installed = True
    except importlib.metadata.PackageNotFoundError:
        is_installed = False
    origin, available = run_python(WHICH_KERNELS).split()
    if is_installed:
        assert Path(origin).is_relative_to(SITE_PACKAGES)
    else:
        assert (origin, available) == ("None", "False")


def test_transformers_finds_no_kernels_where_none_is_installed(tmp_path):
    """A site-packages of links to everything but Hugging Face's `kernels`, read in place of the real one."""
    for entry in SITE_PACKAGES.iterdir():
        if not re.match(r"kernels($|[-_].*)", entry.name):
            (tmp_path / entry.name).symlink_to(entry)
    # -S: no site-packages of its own; `-c` still puts the repository root first
    assert run_python(WHICH_KERNELS, "-S", PYTHONPATH=str(tmp_path)).split() == ["None", "False"]


# --- who imports what ---


def test_kernels_know_torch_and_triton_alone():
    # the optional attention library is imported inside the function that calls it
    allowed = {"torch", "triton", "fastlm_kernels", "flash_attn"}
    outsiders = {path.name: third_parties(path) - allowed for path in python_files("kernels")}
    assert not {name: found for name, found in outsiders.items() if found}


def test_triton_is_used_in_the_kernels_alone():
    for path in python_files("fastlm", "benchmarks", "examples"):
        decorators = [
            ast.unparse(decorator)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
        ]
        assert not any("triton.jit" in name or name == "jit" for name in decorators), path
    assert not [path.name for path in python_files("fastlm") if "triton" in third_parties(path)]


def test_every_third_party_has_one_door():
    astray = []
    for path in python_files("fastlm"):
        name = path.relative_to(ROOT / "fastlm").as_posix()
        for party in third_parties(path) - {"fastlm", "fastlm_kernels"}:
            if not any(name == door or (door[-1:] in ("/", "") and name.startswith(door)) for door in DOORS[party]):
                astray.append(f"{name} imports {party}")
    assert not astray


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"] + extras}
    # the one that is imported by another name
    names = {"yaml": "pyyaml"}
    imported = {names.get(party, party) for path in python_files("fastlm") for party in third_parties(path)}
    assert imported - {"fastlm", "fastlm_kernels"} <= declared


def test_parts_import_only_what_stands_below_them():
    for path in python_files("fastlm"):
        name = path.relative_to(ROOT / "fastlm").as_posix()
        own = {module for module in imports(path) if module.split(".")[0] == "fastlm"} - {"fastlm"}
        if name != "__init__.py":
            assert not {module for module in own if module.startswith("fastlm.model")}, f"{name} imports the facade"
        for part, below in BELOW.items():
            if name == part or (part.endswith("/") and name.startswith(part)):
                astray = {module for module in own if not module.startswith(below)} if below else own
                assert not astray, f"{name} imports {astray}"


def test_examples_and_benchmarks_use_the_public_surface_or_the_kernels():
    for path in python_files("examples"):
        assert not {module for module in imports(path) if module.startswith("fastlm._")}
    for path in python_files("fastlm", "kernels"):
        assert not imports(path) & {"tests", "benchmarks", "examples"}


def test_files_are_short():
    too_long = {path.name: n for path in python_files(*CODE) if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not too_long


# --- what importing fastlm does ---

LOAD_LIBRARIES = """
import torch, transformers, peft, trl, bitsandbytes, accelerate, datasets
from transformers import LlamaForCausalLM, Trainer
from trl import SFTTrainer
from peft import LoraModel
"""
LOAD_FASTLM = """
import importlib, pkgutil, fastlm, fastlm_kernels
for package in (fastlm, fastlm_kernels):
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(info.name)
from fastlm import FastLanguageModel
"""
SHOW = "\nfingerprint.show()\n"


def fingerprints(code: str) -> list[dict[str, str]]:
    return fingerprint.read(run_python("import fingerprint" + code, PYTHONPATH=CHECKOUT))


def test_importing_fastlm_changes_no_other_library():
    stock, after = fingerprints(LOAD_LIBRARIES + SHOW + LOAD_FASTLM + SHOW)
    assert len(stock) > 20_000
    assert not fingerprint.differences(stock, after)
    (imported_later,) = fingerprints(LOAD_FASTLM + LOAD_LIBRARIES + SHOW)
    # numbers and texts may be addresses and random names of a process: above they are compared within one
    changed = fingerprint.differences(stock, imported_later)
    assert not {key: pair for key, pair in changed.items() if not all(value and value[0] == "=" for value in pair)}


IMPORT_TIME = """
import sys, time
import torch, transformers
# what any training script loads anyway
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
start = time.process_time()
from fastlm import FastLanguageModel, patch_model, report, revert
print(time.process_time() - start)
assert "trl" not in sys.modules
"""


def test_import_takes_less_than_three_seconds_beyond_transformers():
    # processor time: what else runs on the machine must not matter
    assert float(run_python(IMPORT_TIME, PYTHONPATH=CHECKOUT).split()[-1]) < 3.0


# --- the wheel ---


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory) -> Path:
    """A folder with the built wheel unpacked by pip. The sources are copied, so nothing is built inside the checkout."""
    work = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", ".venv*", ".git", ".*_cache", "build", "dist")
    for name in ("fastlm", "kernels", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, work / "source" / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, work / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(work), str(work / "source")]
    subprocess.run(build, check=True, cwd=work)
    (wheel,) = work.glob("fastlm-*.whl")
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--target", str(work / "site"), str(wheel)], check=True, cwd=work
    )
    return work / "site"


def test_wheel_holds_the_two_packages_and_nothing_else(installed_wheel):
    top = {path.name for path in installed_wheel.iterdir()}
    # pip puts the command beside them
    assert top == {"fastlm", "fastlm_kernels", f"fastlm-{project_version()}.dist-info", "bin"}
    assert {path.name for path in (installed_wheel / "bin").iterdir()} == {"fastlm"}
    for source, package in (("fastlm", "fastlm"), ("kernels/fastlm_kernels", "fastlm_kernels")):
        want = {
            p.relative_to(ROOT / source)
            for p in (ROOT / source).rglob("*")
            if p.suffix == ".py" or p.name == "py.typed"
        }
        got = {
            p.relative_to(installed_wheel / package)
            for p in (installed_wheel / package).rglob("*")
            if p.suffix == ".py" or p.name == "py.typed"
        }
        assert got == want and Path("py.typed") in got


def test_wheel_works_from_any_folder(installed_wheel, tmp_path):
    code = """
import torch, fastlm, fastlm_kernels, transformers
from fastlm import FastLanguageModel, report
from fastlm_kernels.rms_norm import rms_norm
config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
model = fastlm.patch_model(transformers.LlamaForCausalLM(config), strict=True)
x = torch.arange(6)[None]
model(input_ids=x, labels=x).loss.backward()
assert all(row.calls for row in report(model)), report(model)
print(fastlm.__file__, fastlm_kernels.__file__, fastlm.__version__)
"""
    *files, version = run_python(code, cwd=tmp_path, PYTHONPATH=str(installed_wheel)).split()
    assert all(Path(file).is_relative_to(installed_wheel) for file in files)
    assert version == project_version()
