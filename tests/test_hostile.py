"""Model files of strangers are data: nothing in them runs, nothing outside their folder is read or written, and what is wrong is named."""

import contextlib
import functools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import checkpoint_worker
import peft
import pytest
import torch
import training
import transformers
from safetensors.torch import load_file, save_file

import fastlm
from fastlm import FastLanguageModel, checkpoints, files, template_check
from fastlm.chat_templates import get_chat_template
from fastlm.chat_templates.templates import TEMPLATES

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent.parent
SECONDS = 15


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])).save_pretrained(folder)
    return folder


@pytest.fixture
def canary(tmp_path):
    """A path that hostile code would make; the test fails if it is there, whatever else it looked at (also under python -O)."""
    path = tmp_path / "canary"
    yield path
    if path.exists():
        pytest.fail("code of a file ran")


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def edited(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path, **settings):
    return FastLanguageModel.from_pretrained(str(folder), load_in_16bit=True, dtype="float32", **settings)


def code(canary: Path) -> str:
    return f"llama\n__import__('os').system('touch {canary}')"


# --- text that looks like code ---

CONFIG = {
    "model_type": lambda text: text,
    "architectures": lambda text: [text],
    "dtype": lambda text: text,
    "torch_dtype": lambda text: text,
    "hidden_act": lambda text: text,
    "rope_parameters": lambda text: {"rope_type": text, "rope_theta": 1e4},
    "rope_scaling": lambda text: {"type": text, "factor": 2.0},
    "attn_implementation": lambda text: text,
    "_attn_implementation": lambda text: text,
    "quantization_config": lambda text: {"quant_method": text},
    "transformers_weights": lambda text: text,
    "_name_or_path": lambda text: text,
    "auto_map": lambda text: {"AutoConfig": text, "AutoModelForCausalLM": text},
}
TEXTS = {
    "newline": code,
    "quote": lambda canary: f"'); __import__('os').system('touch {canary}') #",
    "shell": lambda canary: f"$(touch {canary})`touch {canary}`;touch {canary}",
    "path": lambda canary: f"../../../../../..{canary}",
    "jinja": lambda canary: "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.mark.parametrize("field", CONFIG)
def test_text_in_a_config_is_data(base, tmp_path, canary, field):
    for name, text in TEXTS.items():
        here = copied(base, tmp_path / name)
        edited(here / "config.json", **{field: CONFIG[field](text(canary))})
        # a field that nothing reads is nobody's error; a wrong value that is read names its file
        with contextlib.suppress(ValueError, OSError, ImportError):
            load(here)


@pytest.mark.parametrize(
    "field", ["tokenizer_class", "chat_template", "backend", "eos_token", "tokenizer_file", "auto_map"]
)
def test_text_in_a_tokenizer_is_data(base, tmp_path, canary, field):
    for name, text in TEXTS.items():
        here = copied(base, tmp_path / name)
        value = {"AutoTokenizer": [text(canary)] * 2} if field == "auto_map" else text(canary)
        edited(here / "tokenizer_config.json", **{field: value})
        with contextlib.suppress(ValueError, OSError):
            load(here)


@pytest.mark.parametrize(
    "field", ["target_modules", "bias", "init_lora_weights", "base_model_name_or_path", "peft_type"]
)
def test_text_in_an_adapter_is_data(adapter, tmp_path, canary, field):
    for name, text in TEXTS.items():
        here = copied(adapter, tmp_path / name)
        edited(here / "adapter_config.json", **{field: text(canary)})
        with pytest.raises((ValueError, OSError)):
            load(here)


def test_text_as_a_template_name_is_data(canary):
    for text in TEXTS.values():
        with pytest.raises(ValueError, match="unknown chat template"):
            get_chat_template(checkpoint.tokenizer(), text(canary))


def test_values_that_no_config_has_are_errors_that_name_the_file(base, tmp_path):
    wrong = {"dtype": "float33", "hidden_act": "nope", "num_hidden_layers": "2", "rope_parameters": 3, "head_dim": 0}
    for field, value in wrong.items():
        here = copied(base, tmp_path / field)
        edited(here / "config.json", **{field: value})
        with pytest.raises(ValueError, match=r"config\.json"):
            load(here)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
)
def test_a_model_far_larger_than_its_weights_is_never_made(base, tmp_path, field):
    edited(copied(base, tmp_path / "here") / "config.json", **{field: 10**9})
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"{field}|attention heads"):
        load(tmp_path / "here")
    if time.perf_counter() - start > SECONDS:
        pytest.fail("it took too long")


# --- paths ---


def sharded(base: Path, target: Path, **names: str) -> Path:
    """The model with an index that names its one shard as given."""
    here = copied(base, target)
    tensors = load_file(here / "model.safetensors")
    (here / "model.safetensors").rename(here / "model-00001-of-00001.safetensors")
    for stem, name in names.items():
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, name)}
        (here / f"{stem.replace('_bin', '')}.{'bin' if '_bin' in stem else 'safetensors'}.index.json").write_text(
            json.dumps(index)
        )
    return here


def test_a_shard_outside_the_folder_is_not_read(base, tmp_path):
    load(sharded(base, tmp_path / "good", model="model-00001-of-00001.safetensors"))
    outside = tmp_path / "outside.safetensors"
    shutil.copy(base / "model.safetensors", outside)
    for number, name in enumerate(
        ["../outside.safetensors", str(outside), "./../outside.safetensors", "..", "", "a/b.safetensors"]
    ):
        with pytest.raises(ValueError, match="is no file beside it: nothing outside the folder is read"):
            load(sharded(base, tmp_path / str(number), model=name))
        with pytest.raises(ValueError, match="is no file beside it: nothing outside the folder is read"):
            load(sharded(base, tmp_path / f"bin{number}", pytorch_model_bin=name), use_safetensors=False)


def test_weights_named_in_the_config_stay_inside(base, tmp_path):
    shutil.copy(base / "model.safetensors", tmp_path / "outside.safetensors")
    edited(copied(base, tmp_path / "here") / "config.json", transformers_weights="../outside.safetensors")
    with pytest.raises(ValueError, match="inside the model directory"):
        load(tmp_path / "here")


def test_template_names_stay_names(base, tmp_path):
    for number, name in enumerate(["../../outside", "/outside", "a\nb", ""]):
        here = copied(base, tmp_path / str(number))
        (here / "chat_template.jinja").unlink()
        templates = [dict(name="default", template=checkpoint.TEMPLATE), dict(name=name, template="x")]
        edited(here / "tokenizer_config.json", chat_template=templates)
        with pytest.raises(ValueError, match="the name of a chat template"):
            load(here)


def test_an_adapters_name_is_a_name_when_it_is_saved(base, tmp_path):
    model, _ = load(base)
    outside = tmp_path / "outside"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = fastlm.patch_model(peft.get_peft_model(model, config, adapter_name=str(outside)))
    with pytest.raises(ValueError, match="an adapter's name becomes a folder"):
        model.save_pretrained_merged(tmp_path / "saved", save_method="lora")
    if outside.exists() or (tmp_path / "saved").exists():
        pytest.fail("something was written")


# --- files that are not what they say ---


def header(content: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content)) + content + data


def entry(begin: int, end: int) -> dict:
    return dict(dtype="F32", shape=[(end - begin) // 4], data_offsets=[begin, end])


HEADERS = {
    "deep": header(b"[" * 100_000),
    "overlap": header(json.dumps(dict(a=entry(0, 8), b=entry(4, 12))).encode(), bytes(12)),
    "hole": header(json.dumps(dict(a=entry(0, 4), b=entry(8, 12))).encode(), bytes(12)),
    "late": header(json.dumps(dict(a=entry(4, 12))).encode(), bytes(12)),
    "long": struct.pack("<Q", 2**63) + b"{}",
    "text": header(b'{"a": 3}'),
    "list": header(b"[]"),
    "number": header(b'{"a": {"data_offsets": [0, 1' + b"0" * 5000 + b"]}}"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_file_of_another_making_is_refused_by_name(base, tmp_path, name):
    here = copied(base, tmp_path / "here")
    (here / "model.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(ValueError) as caught:
        load(here)
    if f"{here}/model.safetensors is damaged" not in str(caught.value):
        pytest.fail(str(caught.value))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 10_000, '{"a": ', "\ud800".encode("utf-8", "surrogatepass").decode("latin1") * 3]
)
def test_json_that_python_cannot_read_names_its_file(base, tmp_path, text):
    for name in ("config.json", "adapter_config.json"):
        here = copied(base, tmp_path / name)
        (here / name).write_text(text, encoding="latin1")
        with pytest.raises(ValueError, match=name):
            load(here)


# --- pickles ---


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def test_pickled_weights_never_run(base, adapter, tmp_path, canary):
    for folder, name in ((base, "pytorch_model.bin"), (adapter, "adapter_model.bin")):
        here = copied(folder, tmp_path / name)
        next(here.glob("*.safetensors")).unlink()
        torch.save({"w": Payload(canary)}, here / name)
        with pytest.raises(ValueError, match="holds only pickled weights"):
            load(here)
        # asked for, and still no code
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            load(here, use_safetensors=False)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_pickles_of_a_checkpoint_never_run(tmp_path, canary, name):
    """In a checkpoint of others, without a manifest: ours is refused before."""
    checkpoint_worker.make(tmp_path, max_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    torch.save(Payload(canary), folder / name)
    trainer = checkpoint_worker.make(tmp_path, max_steps=4)
    with pytest.raises(ValueError, match="is damaged"):
        trainer.train(resume_from_checkpoint=str(folder))
    (folder / checkpoints.MANIFEST).unlink()
    # nobody reads the trainer's arguments
    with contextlib.nullcontext() if name == "training_args.bin" else pytest.raises(pickle.UnpicklingError):
        trainer.train(resume_from_checkpoint=str(folder))


# --- code that comes with a model ---

MODULE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({canary!r}).touch()
class MineConfig(LlamaConfig):
    model_type = "mine"
class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize("model_type", ["mine", "llama"])
def test_code_of_a_model_needs_the_flag_that_says_so(base, tmp_path, canary, monkeypatch, model_type):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    here = copied(base, tmp_path / "here")
    (here / "mine.py").write_text(MODULE.format(canary=str(canary)))
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    edited(here / "config.json", auto_map=auto_map, model_type=model_type)
    if model_type == "mine":
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load(here)
    else:
        # transformers has a class of its own for this name
        load(here)
    if canary.exists():
        pytest.fail("code of a model ran unasked")
    model, _ = load(here, trust_remote_code=True)
    if type(model).__name__ != "MineForCausalLM" or not canary.exists():
        pytest.fail("the flag is not forwarded")
    canary.unlink()


@pytest.mark.parametrize("field", ["megatron_config", "corda_config", "lora_ga_config", "arrow_config"])
def test_an_adapter_imports_and_reads_nothing_else(adapter, tmp_path, field):
    here = copied(adapter, tmp_path / "here")
    edited(here / "adapter_config.json", megatron_core="antigravity", **{field: {"cache_file": "../x"}})
    with pytest.raises(ValueError, match=f"has {field}="):
        load(here)


# --- adapters of other models ---


def rewritten(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


MISFITS = {
    "empty": (lambda tensors: {}, "it lacks base_model"),
    "another-shape": (
        lambda tensors: {k: v[..., :1].clone() for k, v in tensors.items()},
        r"size mismatch for .*\[.*\].*\[.*\]",
    ),
    "other-layers": (
        lambda tensors: {k.replace("layers.1.", "layers.7."): v for k, v in tensors.items()},
        "it lacks .*layers.1.",
    ),
    "other-parts": (
        lambda tensors: {k.replace("q_proj", "k_proj"): v for k, v in tensors.items()},
        "it lacks .*q_proj",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_adapter_of_another_model_is_refused(adapter, tmp_path, name):
    change, says = MISFITS[name]
    here = copied(adapter, tmp_path / "here")
    rewritten(here, change)
    with pytest.raises(ValueError, match=f"does not fit this base model.*{says}") as caught:
        load(here)
    if str(here) not in str(caught.value):
        pytest.fail("the adapter is not named")


def test_an_adapter_on_another_base_is_refused(adapter, base, tmp_path):
    other = copied(base, tmp_path / "wider")
    config = transformers.LlamaConfig.from_pretrained(base, hidden_size=96, head_dim=24)
    transformers.LlamaForCausalLM(config).save_pretrained(other)
    here = copied(adapter, tmp_path / "here")
    edited(here / "adapter_config.json", base_model_name_or_path=str(other))
    with pytest.raises(ValueError, match=r"does not fit this base model.*\[2, 64\].*\[2, 96\]"):
        load(here)


def test_settings_that_no_adapter_has_are_refused(adapter, tmp_path):
    for number, change in enumerate(
        [
            dict(r=10**9),
            dict(r=2.5),
            dict(rank_pattern={"q_proj": 10**9}),
            dict(rank_pattern=[1]),
            dict(trainable_token_indices={"": 2}),
        ]
    ):
        here = copied(adapter, tmp_path / str(number))
        edited(here / "adapter_config.json", **change)
        with pytest.raises(ValueError, match=r"adapter_config\.json has "):
            load(here)


def test_patterns_that_never_end_are_refused(adapter, tmp_path):
    slow = ["(a+)+$", "(.*)*x", r"((?:[a-z.0-9]+)*)*!", "(x+x+)+y", "(.*){30}", "("]
    for number, pattern in enumerate(slow):
        changes = dict(target_modules=pattern), dict(exclude_modules=pattern), dict(rank_pattern={pattern: 2})
        for place, change in enumerate(changes):
            here = copied(adapter, tmp_path / f"{number}-{place}")
            edited(here / "adapter_config.json", **change)
            with pytest.raises(ValueError, match="repeats a repetition|is no regular expression"):
                load(here)
    for number, pattern in enumerate(
        [r".*layers\.\d+\.(self_attn\.q_proj|mlp\.(up)_proj)", r"(?:.*?(?:self_attn).*?(?:q_proj)|[(*+)]?.*up_proj)"]
    ):
        here = copied(adapter, tmp_path / f"good-{number}")
        edited(here / "adapter_config.json", target_modules=pattern)
        load(here)


# --- chat templates ---

ENDLESS = {
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive": "{% for m in [messages] * 9 recursive %}{{ loop([m] * 9) if loop.depth < 40 }}{% endfor %}",
    "namespace": "{% set n = namespace(x=1) %}{% for a in range(99999) %}{% for b in range(99999) %}{% set n.x = a %}{% endfor %}{% endfor %}",  # noqa: E501
    "power": "{{ 9 ** 9 ** 9 }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_refused_in_seconds(base, tmp_path, name):
    here = copied(base, tmp_path / "here")
    (here / "chat_template.jinja").write_text(checkpoint.TEMPLATE + ENDLESS[name])
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"the chat template 'default' in {here} (does not end|computes powers)"):
        load(here)
    if time.perf_counter() - start > SECONDS:
        pytest.fail("it took too long")
    if sys.gettrace() is not None and "coverage" not in sys.modules:
        pytest.fail("the tracing stays on")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ ('%s' | attr('format'))('x').__class__ }}",
    "{{ messages.append({}) }}",
    "{% include '/etc/passwd' %}",
    "{{ self.__init__.__globals__ }}",
]


def test_templates_are_rendered_in_the_sandbox(base, tmp_path, canary):
    for number, text in enumerate(ESCAPES):
        here = copied(base, tmp_path / str(number))
        (here / "chat_template.jinja").write_text(text.replace("CANARY", str(canary)))
        _, tokenizer = load(here)
        chat = [{"role": "user", "content": "a"}]
        # an error, or a text that says nothing of the process
        with contextlib.suppress(Exception):
            if any(
                word in tokenizer.apply_chat_template(chat, tokenize=False) for word in ("class", "root:", "function")
            ):
                pytest.fail(f"{text} is not sandboxed")


def test_honest_templates_pass(base):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for name in TEMPLATES:
        made = get_chat_template(tokenizer, name)
        before = made.chat_template
        template_check.check_templates(made, "here")
        if made.chat_template != before:
            pytest.fail(name)
    for odd in (
        None,
        "{% if %}",
        "{{ f(**x) }}{{ f(1, **x) }}",
        "{{ raise_exception('no') }}",
        {"default": "x", "tool_use": "y"},
    ):
        tokenizer.chat_template = odd
        template_check.check_templates(tokenizer, "here")


# --- without assert, and in numbers ---


def pytest_under(*options: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        *options,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        __file__,
        "-k",
        "not optimized and not fuzzed and not text and not honest and not macros and not recursive",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_refusals_hold_optimized():
    """python -O removes every assert, also pytest's: what is left of these tests are errors that must be raised."""
    done = pytest_under("-O")
    if done.returncode:
        pytest.fail(done.stdout[-3000:])


@functools.cache
def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def fuzz(folder: Path, count: int, seed: int) -> None:
    command = [sys.executable, str(ROOT / "tests" / "fuzz_worker.py"), str(folder), str(count), str(seed)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60 + count)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ended = json.loads(done.stdout.splitlines()[-1])["ended"]
    assert sum(ended.values()) == count and not [how for how in ended if how.startswith("other")], ended
    # neither all harmless nor all refused: both kinds were met
    assert count // 10 < ended["loaded"] < count - count // 10, ended


@pytest.mark.parametrize("seed", [1, 2])
def test_fuzzed_configs_end_in_an_error_or_a_model(tmp_path, seed):
    fuzz(tmp_path, 500, seed)


@pytest.mark.slow
def test_ten_thousand_fuzzed_configs(tmp_path):
    fuzz(tmp_path, 10_000, 3)


def test_files_are_checked_without_a_model(tmp_path):
    """A config alone, and weights that nobody describes."""
    files.check_sizes(str(tmp_path), {"num_hidden_layers": 10**9})
    training.save_base(tmp_path / "base")
    files.check_sizes(str(tmp_path / "base"), {})
