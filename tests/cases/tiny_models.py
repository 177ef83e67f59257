"""Builders and reference values for the case checks.

Everything here is made on the spot: tiny randomly initialised transformers models
and a small byte-level tokenizer.  No network is used.

Reference values are computed by plain transformers / peft / torch in float32 on the
CPU, in a separate process that never imports the package under test.  So a package
that replaces pieces of transformers in its own process can't change the values it is
compared with.
"""

import atexit
import io
import os
import struct
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from comparing import (  # noqa: F401  the checks take all of these from here
    close,
    close_grads,
    close_number,
    device_of,
    differs,
    gap,
    grads_of,
    lora_params,
    plain_name,
    set_lora,
    to_device,
)
from texts import CHATML, CHATML_BOS, ids, labels_like, make_tokenizer  # noqa: F401

PROJ = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rope(rope_type="default", theta=10000.0, **kw):
    """The rope part of a config, for transformers 4 and 5 alike."""
    import transformers

    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **kw}}
    out = {"rope_theta": theta}
    if rope_type != "default":
        out["rope_scaling"] = {"rope_type": rope_type, **kw}
    return out


def config_for(arch, **over):
    import transformers as tf

    base = dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.12,
        tie_word_embeddings=False,
    )
    per = {
        "llama": ("LlamaConfig", {}),
        "mistral": ("MistralConfig", dict(sliding_window=None)),
        "qwen2": ("Qwen2Config", {}),
        "qwen3": ("Qwen3Config", dict(head_dim=32)),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        ),
        "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
        "gemma": ("GemmaConfig", dict(head_dim=32, tie_word_embeddings=True)),
        "gemma2": (
            "Gemma2Config",
            dict(
                head_dim=32,
                query_pre_attn_scalar=24,
                sliding_window=8,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=4.0,
                tie_word_embeddings=True,
            ),
        ),
        "gemma3": (
            "Gemma3TextConfig",
            dict(
                head_dim=32,
                query_pre_attn_scalar=24,
                sliding_window=8,
                tie_word_embeddings=True,
                layer_types=["sliding_attention", "full_attention"],
            ),
        ),
        "phi3": ("Phi3Config", dict(sliding_window=None)),
        "phi": ("PhiConfig", {}),
        "glm": ("GlmConfig", dict(head_dim=16)),
        "gpt_oss": (
            "GptOssConfig",
            dict(
                head_dim=16,
                sliding_window=8,
                num_local_experts=4,
                num_experts_per_tok=2,
                layer_types=["sliding_attention", "full_attention"],
            ),
        ),
    }
    cls, extra = per[arch]
    base.update(extra)
    base.update(over)
    return getattr(tf, cls)(**base)


def _build(out, arch, seed=0, tokenizer=None, model_seed_std=0.3, dtype=None, **over):
    """In the reference process: makes the model and saves it, with a tokenizer, in `out`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    cfg = config_for(arch, **over)
    model = AutoModelForCausalLM.from_config(cfg).float()
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            # norms at one, biases at zero and sinks at zero would hide mistakes
            if p.ndim == 1 or (p.ndim == 2 and p.shape[0] <= 8):
                p.add_(torch.randn(p.shape, generator=g) * model_seed_std)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(out)
    make_tokenizer(**(tokenizer or {})).save_pretrained(out)
    return out


def _load(path, attn="eager", adapter=None, trainable=True):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attn)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=trainable)
    return model


def _lora(model, lora):
    from peft import LoraConfig, get_peft_model

    lora = dict(lora)
    seed, std = lora.pop("seed", 0), lora.pop("std", 0.1)
    # a wrapped peft model needs input gradients only for checkpointing, not here
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", bias=lora.pop("bias", "none"), **lora))
    return set_lora(model, seed, std)


def _forward(
    path,
    batch,
    lora=None,
    adapter=None,
    want="logits",
    only=None,
    grad_through=None,
    train=False,
    config=None,
    disable_adapter=False,
    freeze_base=True,
):
    """Logits, or loss and gradients, of plain transformers / peft."""
    model = _load(path, adapter=adapter)
    if config:
        for k, v in config.items():
            setattr(model.config, k, v)
    if lora is not None:
        model = _lora(model, lora)
    model.train(train)
    if want == "logits":
        with torch.no_grad():
            if disable_adapter:
                with model.disable_adapter():
                    return model(**batch, use_cache=False).logits.float()
            return model(**batch, use_cache=False).logits.float()
    if grad_through == "strided logits":
        y = model(**batch, use_cache=False).logits
        loss = y[..., ::2].pow(2).mean() + y.transpose(0, 1)[1::2].mean()
    else:
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.item(), "grads": grads_of(model, only)}


def _separate(path, rows, lora=None):
    """Each row on its own: list of logits."""
    model = _load(path)
    if lora is not None:
        model = _lora(model, lora)
    model.eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([r]), use_cache=False).logits[0].float() for r in rows]


def _generate(path, rows, max_new_tokens=8, adapter=None):
    model = _load(path, adapter=adapter).eval()
    out = []
    for r in rows:
        x = torch.tensor([r])
        y = model.generate(
            input_ids=x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=3,
        )
        out.append(y[0, len(r) :].tolist())
    return out


def _embeds(path, input_ids, labels):
    """Loss and the gradient that reaches the input embeddings."""
    model = _load(path).train()
    e = model.get_input_embeddings()(input_ids).detach().requires_grad_()
    loss = model(inputs_embeds=e, labels=labels, use_cache=False).loss
    loss.backward()
    return {"embeds": e.detach(), "loss": loss.item(), "grad": e.grad}


class Collate:
    """Right-pads with 3, ignores padding in the labels."""

    def __call__(self, rows):
        n = max(len(r["input_ids"]) for r in rows)

        def pad(v, fill):
            return list(v) + [fill] * (n - len(v))

        return {
            "input_ids": torch.tensor([pad(r["input_ids"], 3) for r in rows]),
            "attention_mask": torch.tensor([pad([1] * len(r["input_ids"]), 0) for r in rows]),
            "labels": torch.tensor([pad(r["labels"], -100) for r in rows]),
        }


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def rows_of_lengths(lengths, seed=0, vocab=500, ignored=2):
    """Rows with different numbers of trained tokens."""
    out = []
    for i, n in enumerate(lengths):
        x = ids(1, n, vocab=vocab, seed=seed * 100 + i)[0].tolist()
        out.append({"input_ids": x, "labels": [-100] * ignored + x[ignored:]})
    return out


def trainer_for(model, rows, eval_rows=None, compute_metrics=None, **args):
    from transformers import Trainer, TrainingArguments

    args = dict(
        dict(
            output_dir=workdir("out"),
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            seed=7,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            optim="adamw_torch",
            max_grad_norm=1e9,
            dataloader_num_workers=0,
            remove_unused_columns=False,
            use_cpu=device_of(model).type == "cpu",
            disable_tqdm=True,
            label_names=["labels"],
        ),
        **args,
    )
    return Trainer(
        model=model,
        args=TrainingArguments(**args),
        train_dataset=Rows(rows),
        eval_dataset=Rows(eval_rows) if eval_rows else None,
        data_collator=Collate(),
        compute_metrics=compute_metrics,
    )


def losses_of(trainer):
    return [h["loss"] for h in trainer.state.log_history if "loss" in h]


def lora_state(model):
    return {n: p.detach().float().cpu().clone() for n, p in lora_params(model).items()}


def _train(path, rows, lora, eval_rows=None, **args):
    """Plain transformers.Trainer: the logged losses and the LoRA matrices at the end."""
    model = _lora(_load(path), lora)
    t = trainer_for(model, rows, eval_rows=eval_rows, **args)
    t.train()
    out = {"losses": losses_of(t), "lora": lora_state(model)}
    if eval_rows:
        out["eval_loss"] = t.evaluate()["eval_loss"]
    return out


def _make_adapter(path, out, lora):
    model = _lora(_load(path), lora)
    model.save_pretrained(out)
    return out


def _state(path):
    from transformers import AutoModelForCausalLM

    m = AutoModelForCausalLM.from_pretrained(path)
    return {k: v.clone() for k, v in m.state_dict().items()}


def _load_report(path):
    """What plain transformers says when it loads a directory: (missing, unexpected, dtype)."""
    from transformers import AutoModelForCausalLM

    m, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "dtype": str(m.dtype),
    }


def _cross_entropy(logits, labels, num_items=None):
    import torch.nn.functional as F

    x, y = logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1)
    if num_items is None:
        return F.cross_entropy(x, y, ignore_index=-100).item()
    return (F.cross_entropy(x, y, ignore_index=-100, reduction="sum") / num_items).item()


def _tokenize(path, texts, add_special_tokens=False):
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(path)
    return [tok(t, add_special_tokens=add_special_tokens)["input_ids"] for t in texts]


_CALLS = {
    f.__name__.lstrip("_"): f
    for f in (
        _build,
        _forward,
        _separate,
        _generate,
        _make_adapter,
        _state,
        _load_report,
        _cross_entropy,
        _tokenize,
        _embeds,
        _train,
    )
}

_server = None


def _send(stream, obj):
    buf = io.BytesIO()
    torch.save(obj, buf)
    data = buf.getvalue()
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream):
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the reference process ended; run tiny_models.py --serve by hand to see why")
    data = stream.read(struct.unpack("<Q", head)[0])
    return torch.load(io.BytesIO(data), weights_only=False)


def ref(call, **kw):
    """Runs one of the reference functions above in the clean process."""
    global _server
    if _server is None or _server.poll() is not None:
        env = dict(os.environ, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        _server = subprocess.Popen(
            [sys.executable, "-u", os.path.abspath(__file__), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=tempfile.gettempdir(),
        )
        atexit.register(_server.kill)
    _send(_server.stdin, (call, kw))
    ok, value = _receive(_server.stdout)
    assert ok, f"reference {call} failed:\n{value}"
    return value


def _serve():
    import traceback

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to stderr
    while True:
        try:
            call, kw = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _send(out, (True, _CALLS[call](**kw)))
        except BaseException:
            _send(out, (False, traceback.format_exc()))


_built = {}
_root = None


def workdir(name="w"):
    global _root
    if _root is None:
        import shutil

        _root = tempfile.mkdtemp(prefix="cases_")
        atexit.register(shutil.rmtree, _root, ignore_errors=True)
    return tempfile.mkdtemp(prefix=name + "_", dir=_root)


def build(arch, **kw):
    """Directory of a tiny model with a tokenizer; the same arguments give the same directory."""
    key = (arch, repr(sorted(kw.items(), key=lambda t: t[0])))
    if key not in _built:
        _built[key] = ref("build", out=workdir(arch), arch=arch, **kw)
    return _built[key]


def load(path, **kw):
    from fastlm import FastLanguageModel

    kw.setdefault("max_seq_length", 128)
    kw.setdefault("dtype", torch.float32)
    kw.setdefault("load_in_4bit", False)
    return FastLanguageModel.from_pretrained(model_name=str(path), **kw)


def with_lora(model, r=8, lora_alpha=16, target_modules=PROJ, seed=0, std=0.1, randomise=True, **kw):
    from fastlm import FastLanguageModel

    kw.setdefault("lora_dropout", 0)
    kw.setdefault("bias", "none")
    kw.setdefault("use_gradient_checkpointing", False)
    kw.setdefault("random_state", 3407)
    model = FastLanguageModel.get_peft_model(model, r=r, lora_alpha=lora_alpha, target_modules=target_modules, **kw)
    return set_lora(model, seed, std) if randomise else model


def logits(model, batch):
    model.eval()
    with torch.no_grad():
        return model(**to_device(batch, model), use_cache=False).logits.float().cpu()


def loss_and_grads(model, batch, only=None, backward=True):
    model.train()
    model.zero_grad()
    loss = model(**to_device(batch, model), use_cache=False).loss
    loss.backward()
    return loss.item(), grads_of(model, only)


if __name__ == "__main__" and "--serve" in sys.argv:
    _serve()
