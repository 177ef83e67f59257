"""What is said of wrong arguments and wrong objects, tokenizers made safe, and machines that lack something."""

import copy
import filecmp
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import checkpoint
import datasets
import dill
import pytest
import tiny
import torch
import training
import transformers
import trl
from tokenizers import processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaForSequenceClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import fastlm
from fastlm import FastLanguageModel, adapters, loading, tokenization, trainers
from fastlm_kernels._launch import check_dtype

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]
TRAINED = dict(output_dir="unused", report_to="none", disable_tqdm=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("base"))


def plain(**over):
    return fastlm.patch_model(tiny.model("llama", attention="sdpa", **over))


# --- adapters' arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "error", "says"),
    [
        ("r", (0, -1, 1.5, True, "8", None, 5000), ValueError, r"r must be an integer in 1..4096, got "),
        ("lora_alpha", (0, -1, "16", None, float("nan"), float("inf"), True), ValueError, "lora_alpha must be a positive"),
        ("lora_dropout", (1, -0.1, "0", None, float("nan")), ValueError, r"lora_dropout must be in \[0, 1\), got "),
        ("bias", ("bad", None, True), ValueError, "bias must be one of 'none', 'all', 'lora_only', got "),
        ("target_modules", ([], (), ""), ValueError, r"target_modules is empty: name some of \['down_proj'"),
        (
            "target_modules", ("q_projj", "nope", ["q_proj", "nope"], ["mlp"], ["input_layernorm"], "q_proj"), ValueError,
            r"no layers of this model .*its linear layers are \['down_proj', .*'v_proj'\]\. 'all-linear'",
        ),
        ("target_modules", ("(",), ValueError, "is no regular expression"),
        ("target_modules", (None, 5, [1]), ValueError, "must be a list of names, got "),
        ("layers_to_transform", ([99], 99, [0, 99], [-1]), ValueError, r"are not in this model: its layers are 0\.\.1"),
        ("layers_to_transform", ("x", [1.0], ["1"]), ValueError, "must be a layer's number or a list of them"),
        ("layers_pattern", ("blocks",), ValueError, "needs layers_to_transform"),
        ("modules_to_save", (["nope"],), ValueError, r"'nope' is not in this model: .*'embed_tokens'.*'lm_head'"),
        ("modules_to_save", ("lm_head",), ValueError, "modules_to_save must be a list of names, got 'lm_head'"),
        ("init_lora_weights", (None, 3), ValueError, "must be True, False or the name of one of PEFT's methods"),
        ("init_lora_weights", ("nope",), ValueError, "nope"),
        ("use_rslora", ("yes", 1), ValueError, "use_rslora must be True or False"),
        ("use_dora", (None,), ValueError, "use_dora must be True or False"),
        ("loftq_config", (3,), ValueError, "loftq_config must be a dict or None"),
        ("random_state", ("x", None, -1, 1.5), ValueError, "random_state must be an integer"),
        ("use_gradient_checkpointing", ("x", None, 1), ValueError, "must be 'auto', True or False"),
        ("task_type", ("SEQ_CLS",), ValueError, "task_type must be 'CAUSAL_LM'"),
        ("finetune_last_n_layers", (2,), NotImplementedError, "finetune_last_n_layers=2 is not supported yet"),
        ("rank", (8,), TypeError, "unexpected keyword argument 'rank'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)  # fmt: skip
def test_wrong_arguments_leave_the_model_as_it_was(name, values, error, says):
    model = plain()
    for value in values:
        with pytest.raises(error, match=says):
            FastLanguageModel.get_peft_model(model, **{name: value})
    assert not adapters.has_adapter(model)
    if error is not NotImplementedError:
        FastLanguageModel.get_peft_model(model, r=2)


def test_a_second_adapter_is_refused():
    model = FastLanguageModel.get_peft_model(plain(), r=2)
    with pytest.raises(ValueError, match="has an adapter already"):
        FastLanguageModel.get_peft_model(model, r=2)
    with pytest.raises(ValueError, match="has an adapter already"):
        FastLanguageModel.get_peft_model(adapters.base_model(model), r=2)


# --- objects ---------------------------------------------------------------------------------------------------------

SMALL = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaModel(tiny.config("llama")),
        lambda: LlamaForSequenceClassification(tiny.config("llama")),
        lambda: BertForMaskedLM(BertConfig(**SMALL)),
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        lambda: torch.nn.Linear(2, 2),
    ],
    ids=["backbone", "classifier", "encoder", "encoder-decoder", "torch"],
)
def test_other_models_are_refused(make):
    made = make()
    with pytest.raises(TypeError, match=f"causal language model .*needed, got {type(made).__name__}"):
        fastlm.patch_model(made)
    with pytest.raises(TypeError, match=f"causal language model .*needed, got {type(made).__name__}"):
        FastLanguageModel.get_peft_model(made)
    assert fastlm.revert(made) is made


@pytest.mark.parametrize("thing", [None, "org/model", (torch.nn.Linear(2, 2), None)], ids=["none", "str", "tuple"])
def test_what_is_no_model(thing):
    calls = (fastlm.patch_model, fastlm.report, fastlm.revert, FastLanguageModel.get_peft_model)
    calls += (FastLanguageModel.for_training, FastLanguageModel.for_inference)
    calls += (lambda model: FastLanguageModel.get_trainer(model, train_dataset=[{"text": "a"}]),)
    for call in calls:
        with pytest.raises(TypeError, match=f"got {type(thing).__name__}.*from_pretrained returns two things"):
            call(thing)
    with pytest.raises(TypeError, match="a model of transformers .*got Linear"):
        fastlm.report(torch.nn.Linear(2, 2))


def test_trainers_refuse_what_cannot_be_trained():
    model = FastLanguageModel.get_peft_model(plain(), r=2)
    make = FastLanguageModel.get_trainer
    for empty in (None, [], datasets.Dataset.from_list([])):
        with pytest.raises(ValueError, match="train_dataset is empty"):
            make(model, train_dataset=empty, args=TRAINED)
    rows = training.rows((5, 6))
    masked = datasets.Dataset.from_list([dict(input_ids=[5, 6, 7], labels=[-100] * 3)] * 2)
    with pytest.raises(ValueError, match="no row of train_dataset has a token to train on: all labels are -100"):
        make(model, train_dataset=masked, args=TRAINED, processing_class=training.tokenizer())
    with pytest.raises(TypeError, match="must be an SFTConfig or a dict of its arguments, got TrainingArguments"):
        make(model, train_dataset=rows, args=transformers.TrainingArguments("unused"))
    with pytest.raises(TypeError, match="learning_speed"):
        make(model, train_dataset=rows, args=dict(TRAINED, learning_speed=1.0))


# --- states ----------------------------------------------------------------------------------------------------------


def paths(model) -> set[str]:
    return {row.path for row in fastlm.report(model) if ".layers." in row.layer}


def test_reports_of_every_state():
    model, x = tiny.model("llama", attention="sdpa"), tiny.ids(2, 40)
    want = model(input_ids=x).logits
    report = fastlm.report(model)
    assert "not patched, attention implementation sdpa" in str(report) and len(report) == 2
    assert all(row.reason == "the model is not patched" and row.path == "stock" for row in report)
    assert fastlm.revert(model) is model and fastlm.revert(model) is model
    for _ in range(2):
        assert fastlm.patch_model(model) is model
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        report = fastlm.report(model)
        assert [row.layer for row in report][2:] == ["LlamaForCausalLM (head)", "model (backbone)", "model.norm (norm)"]
        assert all(row.calls for row in report) and all(row.as_dict()["fallback_calls"] == 0 for row in report)
        for _ in range(2):
            fastlm.revert(model)
            assert paths(model) == {"stock"} and torch.equal(model(input_ids=x).logits, want)
    wrapped = tiny.with_lora(fastlm.patch_model(model))
    for _ in range(2):
        fastlm.patch_model(wrapped)
    wrapped.train()(input_ids=x, labels=x).loss.backward()
    assert paths(wrapped) == {"block"}
    twin = copy.deepcopy(wrapped)
    fastlm.revert(wrapped)
    assert paths(wrapped) == {"stock"} and paths(twin) == {"block"}
    assert tiny.relative(twin.eval()(input_ids=x).logits, wrapped.eval()(input_ids=x).logits) <= 1e-5


def test_a_pickled_model_is_stock_until_it_is_patched_again():
    """dill carries what pickle refuses: transformers' own rotary functions, where Hugging Face's kernels are installed."""
    model, x = plain(), tiny.ids(2, 40)
    want = model(input_ids=x).logits
    again = dill.loads(dill.dumps(model))
    assert paths(again) == {"stock"} and "when it was pickled" in fastlm.report(again).rows[0].reason
    assert tiny.relative(again(input_ids=x).logits, want) <= 1e-5
    layer = model.model.layers[1]
    layer.mlp = pickle.loads(pickle.dumps(layer.mlp))
    for made in (again, model):
        fastlm.patch_model(made)
        assert torch.equal(made(input_ids=x).logits, want) and paths(made) <= {"parts", "block"}
        assert made.model.layers[1].mlp.__dict__["_fastlm_patch"].calls > 0
        assert tiny.relative(fastlm.revert(made)(input_ids=x).logits, want) <= 1e-5


def test_a_copy_of_a_4bit_model_is_patched_on_its_own(base):
    model, _ = FastLanguageModel.from_pretrained(base, dtype="float32", lora_r=4)
    x = tiny.ids(2, 40)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    twin.train()(input_ids=x, labels=x).loss.backward()
    fastlm.revert(model)
    assert paths(twin) == {"block"} and paths(model) == {"stock"}
    assert not any(parameter.grad is not None for parameter in model.parameters())
    with twin.disable_adapter():
        assert tiny.relative(twin.eval()(input_ids=x).logits, model.eval()(input_ids=x).logits) <= 1e-5


# --- tokenizers ------------------------------------------------------------------------------------------------------


def begins(tokenizer, bos="<|im_start|>"):
    """The tokenizer that puts its begin token before every text."""
    tokenizer.bos_token = bos
    marked = dict(single=f"{bos} $A", pair=f"{bos} $A {bos} $B")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        **marked, special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("special", "pad", "says"),
    [
        (dict(pad_token="<|endoftext|>"), "<|endoftext|>", None),
        (dict(pad_token="<|im_end|>"), "<|endoftext|>", r"padding token: '<\|endoftext\|>' \(it was '<\|im_end\|>'\)"),
        (dict(pad_token=None), "<|endoftext|>", r"padding token: '<\|endoftext\|>' \(it was not set\)"),
        (dict(pad_token=None, eos_token="<|endoftext|>", unk_token="<|im_start|>"), "<|im_start|>", "it was not set"),
        (dict(pad_token=None, eos_token="<|endoftext|>"), None, "is not set and the vocabulary has no better one"),
        (dict(pad_token="<|endoftext|>", eos_token="<|endoftext|>"), "<|endoftext|>", "has no better one"),
    ],
    ids=["fine", "end", "none", "unknown", "nothing", "nothing-better"],
)
def test_padding_is_not_the_end(caplog, special, pad, says):
    tokenizer = checkpoint.tokenizer()
    for name, token in special.items():
        setattr(tokenizer, name, token)
    with caplog.at_level(logging.INFO, "fastlm"):
        tokenization.choose_padding(tokenizer, len(tokenizer))
    assert tokenizer.pad_token == pad
    assert re.search(says, caplog.text) if says else not caplog.text
    # ids beyond the model's rows are no choice
    tokenizer.pad_token = None
    tokenization.choose_padding(tokenizer, 0)
    assert tokenizer.pad_token is None


def test_one_begin_token():
    stock, ours = begins(checkpoint.tokenizer()), begins(checkpoint.tokenizer())
    tokenization.one_begin_token(ours)
    bos, b = "<|im_start|>", stock.bos_token_id
    a, c = stock("a", add_special_tokens=False)["input_ids"] + stock("c", add_special_tokens=False)["input_ids"]
    assert stock(bos + "ac")["input_ids"] == [b, b, a, c] and ours(bos + "ac")["input_ids"] == [b, a, c]
    assert ours([bos + "a", "c"])["input_ids"] == [[b, a], [b, c]]
    assert ours(bos + "a", bos + "c")["input_ids"] == [b, a, b, b, c]
    padded = ours([bos + "a", "ac"], padding=True, return_tensors="pt")
    assert padded["input_ids"].tolist() == [[b, a, stock.pad_token_id], [b, a, c]]
    assert padded["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    same = (("ac",), {}), ((bos + "a",), dict(add_special_tokens=False)), (([("a", "c")],), {}), (("",), {})
    same += ((bos + "a",), dict(return_offsets_mapping=True)), ((["a", "c"],), dict(is_split_into_words=True))
    for arguments, settings in same:
        assert ours(*arguments, **settings) == stock(*arguments, **settings)
    for again in (copy.deepcopy(ours), dill.loads(dill.dumps(ours))):
        assert again(bos + "a")["input_ids"] == [b, a]
    # a plain pickle is the class's tokenizer, which needs no fastlm to load
    assert pickle.loads(pickle.dumps(ours))("a")["input_ids"] == [b, a]
    rows = datasets.Dataset.from_list([{"text": bos + "a"}] * 2)
    assert rows.map(lambda row: ours(row["text"]))["input_ids"][0] == [b, a]
    plain_one = checkpoint.tokenizer()
    tokenization.one_begin_token(plain_one)
    assert "_encode_plus" not in plain_one.__dict__


@pytest.mark.parametrize("is_padded", [False, True])
def test_tokenizer_files_stay_as_they_were(base, tmp_path, is_padded):
    """Byte for byte what transformers' own load and save writes, with the padding and truncation that were stored."""
    stored = tmp_path / "stored"
    transformers.AutoModelForCausalLM.from_pretrained(base).save_pretrained(stored)
    tokenizer = begins(checkpoint.tokenizer())
    if is_padded:
        tokenizer("hello", padding="max_length", truncation=True, max_length=12)
    tokenizer.save_pretrained(stored)
    transformers.AutoTokenizer.from_pretrained(stored).save_pretrained(tmp_path / "stock")
    ours = FastLanguageModel.from_pretrained(stored, load_in_16bit=True, dtype="float32")[1]
    assert "_encode_plus" in ours.__dict__
    ours.save_pretrained(tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert filecmp.cmp(tmp_path / "ours" / name, tmp_path / "stock" / name, shallow=False), name
    assert filecmp.cmp(tmp_path / "ours/tokenizer.json", stored / "tokenizer.json", shallow=False)


# --- machines that lack something ------------------------------------------------------------------------------------

STEP = """
import os, sys, torch
torch.set_num_threads(1)
import fastlm
from fastlm import FastLanguageModel
def step(**settings):
    model, _ = FastLanguageModel.from_pretrained({base!r}, dtype="float32", lora_r=4, use_gradient_checkpointing=False, **settings)
    x = torch.arange(4, 45)[None]
    loss = model.train()(input_ids=x, labels=x).loss
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in model.parameters() if p.requires_grad)
    print(fastlm.report(model))
    return model
"""
WITHOUT_PACKAGES = """
import sys
sys.modules["bitsandbytes"] = sys.modules["triton"] = None
{step}
step(load_in_16bit=True)
for flags in (dict(), dict(load_in_8bit=True)):
    try:
        step(**flags)
    except ImportError as error:
        print("ImportError", error)
"""
WITHOUT_NETWORK = """
import socket
def refuse(*args, **kwargs):
    print("NETWORK", args, flush=True)
    raise OSError("no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
{step}
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    assert name not in os.environ
step(load_in_4bit=True).save_pretrained({out!r})
step(load_in_16bit=True)
FastLanguageModel.from_pretrained({out!r}, dtype="float32")
"""
IMPORT = """
import sys, time
start = time.perf_counter()
import fastlm
assert set(fastlm.__all__) <= set(dir(fastlm))
seconds = time.perf_counter() - start
print(sorted(set(sys.modules) & {{"torch", "transformers", "peft", "trl", "bitsandbytes", "triton", "numpy"}}), seconds < 0.5)
"""


def run(code: str, base, out="") -> str:
    clean = {
        k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TRITON_INTERPRET")
    }
    clean |= dict(PYTHONPATH=f"{ROOT}:{ROOT}/kernels", CUDA_VISIBLE_DEVICES="")
    step = STEP.format(base=str(base))
    code = code.format(step=step, out=str(out))
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_bitsandbytes_and_triton(base):
    out = run(WITHOUT_PACKAGES, base)
    assert out.count(" block  torch") == 2 and "triton" not in out
    says = "ImportError 4-bit and 8-bit loading needs bitsandbytes.*pip install bitsandbytes.*load_in_16bit=True"
    assert len(re.findall(says, out)) == 2


def test_local_directories_open_no_connection(base, tmp_path):
    out = run(WITHOUT_NETWORK, base, tmp_path)
    assert "NETWORK" not in out and out.count(" block  torch") == 4


def test_import_is_lazy(base):
    assert run(IMPORT, base) == "[] True\n"


@pytest.fixture
def old_card(monkeypatch):
    """A GPU of compute capability 7.5, as far as anybody asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")


@pytest.fixture
def bf16_config():
    config = trl.SFTConfig(**TRAINED, bf16=True, use_cpu=True)
    config.use_cpu = False
    return config


def test_no_bfloat16_on_old_cards(bf16_config, old_card):
    assert loading.choose_dtype(None) is torch.float16 and loading.choose_dtype(torch.float32) is torch.float32
    with pytest.raises(
        ValueError, match=r"dtype=bfloat16 needs compute capability 8.0.*Tesla T4.*7.5.*float16.*fp16=True"
    ):
        loading.choose_dtype(torch.bfloat16)
    with pytest.raises(TypeError, match=r"compute capability 8.0.*has 7.5.*float16 and train with fp16=True"):
        check_dtype(torch.bfloat16, (7, 5))
    check_dtype(torch.float16, (7, 5))
    check_dtype(torch.bfloat16, (8, 0))
    for dtype, wanted in (
        (torch.float16, (False, True)),
        (torch.bfloat16, (False, False)),
        (torch.float32, (False, False)),
    ):
        settings = {}
        trainers._choose_precision(tiny.model("llama", dtype), settings)
        assert (settings["bf16"], settings["fp16"]) == wanted
    for args in (dict(TRAINED, bf16=True), bf16_config):
        with pytest.raises(
            ValueError, match="bf16=True needs compute capability 8.0, Tesla T4 is older: use fp16=True"
        ):
            FastLanguageModel.get_trainer(plain(), train_dataset=training.rows((5,)), args=args)


def test_adapters_that_were_cast_to_bfloat16_run_in_float16_on_old_cards(old_card, monkeypatch):
    assert not adapters._supports_bfloat16(torch.device("cuda", 0)) and adapters._supports_bfloat16(torch.device("cpu"))
    model = tiny.with_lora(tiny.model("llama", torch.float16), dtype=torch.bfloat16)
    projection, x = model.base_model.model.model.layers[0].mlp.up_proj, torch.ones(2, 64, dtype=torch.float16)
    assert adapters.view_linear(projection, x).lora_dtype is None
    monkeypatch.setattr(adapters, "_supports_bfloat16", lambda device: False)
    view = adapters.view_linear(projection, x)
    assert view.lora_dtype is view.dtype is torch.float16 and view.projection.lora_a.dtype is torch.bfloat16
    fastlm.patch_model(model)
    loss, gradients = tiny.loss_and_gradients(model, dict(input_ids=tiny.ids(2, 40), labels=tiny.ids(2, 40)))
    assert torch.isfinite(loss) and all(g.dtype is torch.bfloat16 and g.any() for g in gradients.values())
