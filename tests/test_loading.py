"""Loading: what each argument and each file may be, and what is said where it may not."""

import inspect
import json
import os
import pickle
import shutil
from pathlib import Path

import checkpoint
import pytest
import tiny
import torch
import training
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import fastlm
from fastlm import FastLanguageModel, quant
from fastlm.config import NOT_SUPPORTED, NOT_SUPPORTED_PEFT, WITHOUT_EFFECT, WITHOUT_EFFECT_PEFT

torch.set_num_threads(1)
X = torch.arange(4, 45)[None].repeat(2, 1)
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def load(path, **settings):
    """A model in 16-bit mode and float32, unless the settings say otherwise."""
    given = {"load_in_16bit": True, "dtype": "float32", **settings}
    return FastLanguageModel.from_pretrained(path, **{k: v for k, v in given.items() if v is not None})[0]


def logits(model, x=X):
    with torch.no_grad():
        return model(input_ids=x).logits.float()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = FastLanguageModel.get_peft_model(load(base), r=8)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(tmp_path):
    def copy_of(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy_of


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: Path, change) -> None:
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (dict(dtype="int8"), ValueError, r"dtype must be float16, bfloat16 or float32 .*'int8'"),
        (dict(dtype=torch.float64), ValueError, "dtype must be .*torch.float64"),
        (dict(load_in_4bit=True, load_in_8bit=True), ValueError, "load_in_4bit and load_in_8bit and load_in_16bit cannot"),
        (dict(load_in_4bit=1), ValueError, "load_in_4bit must be True, False or None, got 1"),
        (dict(full_finetuning="yes"), ValueError, "full_finetuning must be True, False or None, got 'yes'"),
        (dict(max_seq_length=0), ValueError, "max_seq_length must be a positive integer or None, got 0"),
        (dict(max_seq_length=2048.0), ValueError, "max_seq_length .*got 2048.0"),
        (dict(max_seq_length=True), ValueError, "max_seq_length .*got True"),
        (dict(max_seq_length=9000), ValueError, r"more than the 4096 tokens.*'rope_type': 'linear', 'factor': 3.0"),
        (dict(rope_scaling="linear"), ValueError, "rope_scaling must be a dict"),
        (dict(rope_scaling={"factor": 2.0}), ValueError, "needs a 'rope_type', one of .*linear"),
        (dict(rope_scaling={"rope_type": "nope", "factor": 2.0}), ValueError, "one of .*linear.*nope"),
        (dict(rope_scaling={"rope_type": "linear"}), ValueError, "needs a factor of 1 or more"),
        (dict(rope_scaling={"rope_type": "linear", "factor": "2"}), ValueError, "needs a factor of 1 or more"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 0.5}), ValueError, "needs a factor of 1 or more"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 2.0}), ValueError, "lacks low_freq_factor, high_freq_factor"),
        (
            dict(max_seq_length=9000, rope_scaling={"rope_type": "linear", "factor": 2.0}), ValueError,
            "more than the 8192 tokens that rope_scaling allows",
        ),
        (dict(use_safetensors="no"), ValueError, "use_safetensors must be True or False, got 'no'"),
        (dict(trust_remote_code="x"), ValueError, "trust_remote_code must be True or False"),
        (dict(strict=1), ValueError, "strict must be True or False, got 1"),
        (dict(random_state=-1), ValueError, r"random_state must be an integer in 0..2\*\*32-1, got -1"),
        (dict(use_gradient_checkpointing="often"), ValueError, "must be 'auto', True or False, got 'often'"),
        (dict(device_map="cuda"), ValueError, "asks for a GPU, and PyTorch sees none"),
        (dict(device_map={"": 3}), ValueError, "asks for a GPU, and PyTorch sees none"),
        (dict(lora_r=0), ValueError, r"r must be an integer in 1..4096, got 0"),
        (dict(lora_alpha=16), ValueError, "lora_alpha=16 was given without lora_r"),
        (dict(lora_r=8, load_in_16bit=None, full_finetuning=True), ValueError, "exclude each other"),
        (dict(number_of_bits=4), TypeError, "unexpected keyword argument 'number_of_bits'"),
        (dict(fast_inference=True), NotImplementedError, r"fast_inference=True is not supported yet.*leave the argument out"),
        (dict(quantization_config={"a": 1}), NotImplementedError, "choose with load_in_4bit"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_arguments(base, settings, error, says):
    if torch.cuda.is_available() and "device_map" in settings:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(error, match=says):
        load(base, **settings)


UNSLOTH = (
    "model_name max_seq_length dtype load_in_4bit load_in_8bit load_in_16bit full_finetuning token device_map "
    "device_map_planner_kwargs rope_scaling fix_tokenizer trust_remote_code use_gradient_checkpointing resize_model_vocab "
    "revision use_exact_model_name offload_embedding float32_mixed_precision fast_inference gpu_memory_utilization "
    "float8_kv_cache random_state max_lora_rank disable_log_stats qat_scheme load_in_fp8 unsloth_tiled_mlp text_only "
    "on_model_resolved quantization_config float8_training num_labels offload_layers prefetch_depth local_files_only "
    "cache_dir rope_parameters max_memory return_logits fullgraph auto_model whisper_language whisper_task "
    "unsloth_force_compile target_parameters"
)
UNSLOTH_PEFT = (
    "model r target_modules lora_alpha lora_dropout bias layers_to_transform layers_pattern finetune_last_n_layers "
    "use_gradient_checkpointing random_state max_seq_length use_rslora modules_to_save init_lora_weights loftq_config "
    "temporary_location qat_scheme target_parameters ensure_weight_tying offload_layers checkpoint_skip_layers use_dora "
    "exclude_modules prefetch_depth lora_bias block_swap_layers finetune_vision_layers finetune_language_layers "
    "finetune_attention_modules finetune_mlp_modules finetune_audio_layers task_type"
)


def test_every_argument_of_an_unsloth_script_is_known(base):
    own = set(inspect.signature(FastLanguageModel.from_pretrained).parameters) | set(WITHOUT_EFFECT)
    assert set(UNSLOTH.split()) <= own | set(NOT_SUPPORTED)
    neutral = {name: values[0] for name, values in NOT_SUPPORTED.items()}
    model = load(base, **neutral, **dict.fromkeys(WITHOUT_EFFECT, 0.7))
    own = set(inspect.signature(FastLanguageModel.get_peft_model).parameters) | set(WITHOUT_EFFECT_PEFT)
    assert set(UNSLOTH_PEFT.split()) <= own | set(NOT_SUPPORTED_PEFT) | set(LoraConfig.__dataclass_fields__)
    neutral = {name: values[0] for name, values in NOT_SUPPORTED_PEFT.items()}
    FastLanguageModel.get_peft_model(model, **neutral, **dict.fromkeys(WITHOUT_EFFECT_PEFT, 2048))
    for name in NOT_SUPPORTED:
        with pytest.raises(NotImplementedError, match=rf"from_pretrained\(\): {name}="):
            load(base, **{name: {"a": 1}})
    for name in NOT_SUPPORTED_PEFT:
        with pytest.raises(NotImplementedError, match=rf"get_peft_model\(\): {name}="):
            FastLanguageModel.get_peft_model(tiny.model("llama"), **{name: {"a": 1}})


def test_a_notebook_runs_unchanged(base):
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(base), max_seq_length=2048, dtype=None, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    loss = model(**tokenizer(["hello there"], return_tensors="pt"), labels=X[:1, :11]).loss
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert model.max_seq_length == 2048 and model.config.max_position_embeddings == 4096


def test_modes(base):
    kinds = {}
    for mode in ("load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning"):
        model = FastLanguageModel.from_pretrained(base, dtype="float32", **{mode: True})[0]
        trained = sum(p.requires_grad for p in model.parameters())
        kinds[mode] = (type(model.model.layers[0].mlp.up_proj).__name__, trained)
    n_parameters = len(list(model.parameters()))
    assert kinds == {
        "load_in_4bit": ("Linear4bit", 0),
        "load_in_8bit": ("Linear8bitLt", 0),
        "load_in_16bit": ("Linear", 0),
        "full_finetuning": ("Linear", n_parameters),
    }
    assert quant.is_4bit(FastLanguageModel.from_pretrained(base)[0].model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match="loaded with full_finetuning=True"):
        FastLanguageModel.get_peft_model(model)
    wrapped = load(base, lora_r=4)
    assert wrapped.peft_config["default"].r == wrapped.peft_config["default"].lora_alpha == 4


@pytest.mark.parametrize(
    ("scaling", "window"),
    [
        (dict(rope_type="linear", factor=4.0), 1024),
        (dict(type="linear", factor=4), 1024),
        (dict(rope_type="yarn", factor=4.0), 1024),
        (dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64), 512),
        (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), 2048),
        # scales by the length of the row, counted from the window: the window stays
        (dict(rope_type="dynamic", factor=4.0), 256),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_rope_scaling_is_that_of_transformers(tmp_path, scaling, window):
    tiny.model("llama").save_pretrained(tmp_path)
    training.tokenizer().save_pretrained(tmp_path)
    ours = load(tmp_path, rope_scaling=dict(scaling), max_seq_length=500)
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 256, **scaling}
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type"))
    if parameters["rope_type"] in ("linear", "dynamic"):
        del parameters["original_max_position_embeddings"]
    stock = tiny.model("llama", rope_parameters=parameters)
    x, plain = tiny.ids(1, 400), logits(tiny.model("llama"), tiny.ids(1, 400))
    assert tiny.relative(logits(ours, x), logits(stock, x)) <= 1e-5 < tiny.relative(logits(stock, x), plain)
    assert ours.config.max_position_embeddings == window and ours.max_seq_length == 500


def test_models_without_a_window_or_rope(tmp_path):
    config = transformers.BloomConfig(vocab_size=259, hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    checkpoint.tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).max_seq_length is None and load(tmp_path, max_seq_length=99).max_seq_length == 99
    with pytest.raises(ValueError, match="a 'bloom' model has no RoPE"):
        load(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0})


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_of_directories(base, tmp_path, monkeypatch):
    want = logits(load(base))
    monkeypatch.chdir(tmp_path)
    for name in ("with a space", "ümläut-模型", "a.b[c]{d}+e", "org/model"):
        shutil.copytree(base, tmp_path / name)
        assert torch.equal(logits(load(name)), want) and torch.equal(logits(load(name + "/")), want)
    os.symlink(tmp_path / "org", tmp_path / "link")
    assert torch.equal(logits(load("link/model")), want) and torch.equal(logits(load(Path("./org/model"))), want)
    for name in ("./nope", "../nope", "/nope/model", "~/nope", "a/b/c", "no such model", "C:\\models\\m"):
        with pytest.raises(FileNotFoundError, match="there is no directory .*give an existing directory or a hub id"):
            load(name)
    with pytest.raises(FileNotFoundError, match="is a file: give the directory that holds it"):
        load(base / WEIGHTS)
    with pytest.raises(OSError, match="'org/nope' is no directory here and cannot be had from the hub"):
        load("org/nope")
    with pytest.raises(TypeError, match="model_name must be a hub id or a path, got NoneType"):
        load(None)
    with pytest.raises(ValueError, match="got an empty string"):
        load("")


# --- files of a model ------------------------------------------------------------------------------------------------

DAMAGE = {
    "cut": (lambda data: data[: len(data) // 2], "is damaged: .* bytes, but its header describes"),
    "longer": (lambda data: data + b"x", "is damaged: .* bytes, but its header describes"),
    "empty": (lambda data: b"", "is damaged: 0 bytes"),
    "text": (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "do not start with a safetensors header"),
    "garbage": (lambda data: data[:8] + b"x" * 40 + data[48:], "header cannot be read"),
    "list": (lambda data: (2).to_bytes(8, "little") + b"[]", "header cannot be read"),
    "no-offsets": (lambda data: (8).to_bytes(8, "little") + b'{"a":{}}', "header cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_damaged_weights_are_named(base, adapter, copied, kind, how):
    folder, name = {"model": (base, WEIGHTS), "adapter": (adapter, ADAPTER)}[kind]
    here = copied(folder)
    damage, says = DAMAGE[how]
    (here / name).write_bytes(damage((here / name).read_bytes()))
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        load(here)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"architectures": ["Llama'), ("config.json", ""), ("config.json", "[]"),
        ("tokenizer.json", "{"), ("tokenizer_config.json", "{"),
    ],
)  # fmt: skip
def test_damaged_json_is_named(base, copied, name, text):
    here = copied(base)
    (here / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} (is not valid JSON|must hold a JSON object)"):
        load(here)


def test_missing_files(base, copied, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no config.json"):
        load(tmp_path)
    here = copied(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(here)
    (here / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load(here)
    model.save_pretrained(here, max_shard_size="100KB")
    assert torch.equal(logits(load(here)), logits(load(base)))
    (here / "model-00002-of-00002.safetensors").rename(here / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match="lacks model-00002-of-00002.safetensors, which model.safetensors.index"
    ):
        load(here)
    (here / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json is damaged: it holds no weight_map"):
        load(here)
    here = Path(shutil.copytree(base, tmp_path / "silent"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / name).unlink()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load(here)


@pytest.mark.parametrize("mode", ["load_in_16bit", "load_in_4bit", "load_in_8bit"])
def test_weights_of_another_model_are_an_error_not_random_values(base, copied, mode):
    here = copied(base)
    edit(here / "config.json", num_hidden_layers=3)
    settings = dict(load_in_16bit=None) | {mode: True}
    with pytest.raises(ValueError, match=r"model.layers.2.input_layernorm.weight is missing \(and 8 more\)"):
        load(here, **settings)
    edit(here / "config.json", num_hidden_layers=2, intermediate_size=96)
    with pytest.raises(ValueError, match=r"layers.0.mlp.\w+.weight is .*(128, 64|64, 128).*not .*(96, 64|64, 96)"):
        load(here, **settings)


class RunsCode:
    def __reduce__(self):
        return (pytest.fail, ("code in a pickle ran",))


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_pickled_weights_are_refused_unless_asked_for(base, adapter, copied, kind):
    folder, name, pickled = {
        "model": (base, WEIGHTS, "pytorch_model.bin"), "adapter": (adapter, ADAPTER, "adapter_model.bin"),
    }[kind]  # fmt: skip
    here = copied(folder)
    torch.save(load_file(here / name), here / pickled)
    (here / name).unlink()
    with pytest.raises(ValueError, match=f"only pickled weights .{pickled}.*pass use_safetensors=False"):
        load(here)
    assert tiny.relative(logits(load(here, use_safetensors=False)), logits(load(folder))) <= 1e-5
    torch.save({"a": RunsCode()}, here / pickled)
    with pytest.raises(pickle.UnpicklingError):
        load(here, use_safetensors=False)


# --- adapters --------------------------------------------------------------------------------------------------------


def narrower(tensors):
    return {k: v[:4] if "lora_A" in k else v[:, :4] for k, v in tensors.items()}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda d: (d / "adapter_config.json").write_text('{"r"'), ValueError, "adapter_config.json is not valid JSON"),
        (lambda d: (d / "adapter_config.json").write_text("[]"), ValueError, "must hold a JSON object, got list"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), ValueError, "does not name its base model"),
        (lambda d: edit(d / "adapter_config.json", peft_type="NEW"), ValueError, "cannot be read: KeyError: 'NEW'"),
        (lambda d: edit(d / "adapter_config.json", r=4), ValueError, r"does not fit .*size mismatch for .*lora_A"),
        (lambda d: edit(d / "adapter_config.json", r=0), ValueError, "does not fit .*positive"),
        (lambda d: edit(d / "adapter_config.json", target_modules=["q_proj"]), ValueError, "has no place in it"),
        (lambda d: edit(d / "adapter_config.json", task_type="SEQ_CLS"), ValueError, "task SEQ_CLS, not CAUSAL_LM"),
        (
            lambda d: edit(d / "adapter_config.json", base_model_name_or_path="/nope/base"), FileNotFoundError,
            "was trained on '/nope/base', which does not exist here.*base_model_name_or_path",
        ),
        (
            lambda d: edit(d / "adapter_config.json", base_model_name_or_path="nope/base"), OSError,
            "'nope/base', the base model of the adapter .* cannot be had from the hub",
        ),
        (lambda d: edit_tensors(d / ADAPTER, narrower), ValueError, r"size mismatch for .*\[4, 64\].*\[8, 64\]"),
        (lambda d: edit_tensors(d / ADAPTER, lambda t: dict(list(t.items())[1:])), ValueError, "it lacks base_model"),
        (lambda d: (d / ADAPTER).unlink(), FileNotFoundError, "holds no weights: adapter_model.safetensors"),
    ],
    ids=[
        "cut", "list", "nothing", "type", "rank-4", "rank-0", "targets", "task", "no-base", "no-hub-base", "narrower",
        "one-less", "no-weights",
    ],
)  # fmt: skip
def test_broken_adapters(adapter, copied, change, error, says):
    here = copied(adapter)
    change(here)
    with pytest.raises(error, match=says):
        load(here)


@pytest.mark.parametrize("over", [dict(num_hidden_layers=3), dict(num_hidden_layers=1), dict(hidden_size=32)], ids=str)
def test_an_adapter_of_another_base(base, adapter, copied, tmp_path, over):
    config = transformers.AutoConfig.from_pretrained(base)
    for name, value in over.items():
        setattr(config, name, value)
    config.head_dim = config.hidden_size // 4
    other = Path(shutil.copytree(base, tmp_path / "other"))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(other)
    here = copied(adapter)
    edit(here / "adapter_config.json", base_model_name_or_path=str(other))
    with pytest.raises(ValueError, match=r"does not fit this base model.*(layers\.\d|size mismatch)"):
        load(here)


def test_what_an_adapter_is_not(adapter):
    for settings, says in (
        (dict(lora_r=8), "is an adapter already: leave lora_r out"),
        (dict(load_in_16bit=None, full_finetuning=True), "is an adapter: full_finetuning=True needs"),
    ):
        with pytest.raises(ValueError, match=says):
            load(adapter, **settings)


# --- quantized checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4", "8bit"])
def test_checkpoints_that_are_quantized_already(base, tmp_path, kind):
    settings = dict(load_in_8bit=True) if kind == "8bit" else dict(load_in_4bit=True, bnb_4bit_quant_type=kind)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=transformers.BitsAndBytesConfig(**settings)
    )
    quant.keep_cpu_layout(stock)
    stock.save_pretrained(tmp_path)
    checkpoint.tokenizer().save_pretrained(tmp_path)
    stored, other = ("load_in_8bit", "load_in_4bit") if kind == "8bit" else ("load_in_4bit", "load_in_8bit")
    for flags in ({}, {stored: True}):
        ours = load(tmp_path, **{"load_in_16bit": None, **flags})
        assert tiny.relative(logits(ours), logits(stock)) <= 1e-5
    for flag in ("load_in_16bit", "full_finetuning", other):
        with pytest.raises(
            ValueError, match=r"is stored in [48] bit and cannot be loaded in .*leave the load_in_… flags"
        ):
            load(tmp_path, **{"load_in_16bit": None, flag: True})
    ours = FastLanguageModel.get_peft_model(ours, r=4).train()
    ours(input_ids=X, labels=X).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.requires_grad)
    layers = [row for row in fastlm.report(ours) if ".layers." in row.layer]
    if kind == "nf4":
        assert all(row.path == "block" and not row.reason for row in layers)
        return
    what = {"fp4": "stored as fp4, not nf4", "8bit": "8-bit"}[kind]
    assert all(row.reason == f"self_attn: its weights are {what}; mlp: its weights are {what}" for row in layers)
    assert all(row.parts == ("norm",) and not row.fallback_calls for row in layers)
    with pytest.raises(RuntimeError, match=f"would stay stock: its weights are {what}"):
        load(tmp_path, load_in_16bit=None, strict=True)


@pytest.mark.parametrize("name", sorted(tiny.MODELS))
def test_every_family_loads_onto_whole_layers(tmp_path, name, base):
    """Strict, from a folder, whatever attention the release of transformers would choose by itself."""
    tiny.model(name, torch.bfloat16).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", load_in_16bit=True, strict=True)
    x = tiny.ids(2, 40)
    model.train()(input_ids=x, labels=x, use_cache=False)
    assert {row.path for row in fastlm.report(model) if ".layers." in row.layer} == {"block"}


def test_capped_scores_never_lose_their_cap(tmp_path, base):
    """Where the layer stays stock, attention is one that knows the cap."""
    tiny.model("gemma2", attention_dropout=0.1).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", load_in_16bit=True, dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
