"""Running: generation, rotary scaling, checkpointing, embeddings as input, gradients of other shapes."""

import pytest
import torch
from tiny_models import (
    PROJ,
    build,
    close,
    close_grads,
    close_number,
    device_of,
    differs,
    grads_of,
    ids,
    labels_like,
    load,
    logits,
    loss_and_grads,
    ref,
    rope,
    to_device,
    with_lora,
)

LORA = dict(r=4, lora_alpha=8, target_modules=PROJ, lora_dropout=0.0)


@pytest.mark.parametrize(
    "arch,over", [("llama", {}), ("qwen2", {}), ("mistral", dict(sliding_window=8)), ("gemma2", {})]
)
def test_batched_generation_with_left_padding(arch, over):
    """Greedy answers of a left-padded batch equal those of each prompt alone, token by token."""
    from fastlm import FastLanguageModel

    path = build(arch, **over)
    rows = [ids(1, n, seed=n)[0].tolist() for n in (3, 17, 9)]
    want = ref("generate", path=path, rows=rows, max_new_tokens=10)
    model, tok = load(path)
    FastLanguageModel.for_inference(model)
    tok.padding_side = "left"
    n = max(map(len, rows))
    x = torch.tensor([[3] * (n - len(r)) + r for r in rows])
    m = torch.tensor([[0] * (n - len(r)) + [1] * len(r) for r in rows])
    for turn in ("first", "second"):  # nothing may be left over from the first call
        y = model.generate(
            **to_device(dict(input_ids=x, attention_mask=m), model),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=3,
        )
        assert y[:, n:].tolist() == want, turn
    assert tok.padding_side == "left", "generate changed the tokenizer"


def test_single_generation_with_an_adapter():
    from fastlm import FastLanguageModel

    path = build("llama")
    from tiny_models import workdir

    out = ref("make_adapter", path=path, out=workdir("peft"), lora=LORA)
    rows = [ids(1, 7, seed=2)[0].tolist()]
    want = ref("generate", path=path, rows=rows, adapter=out, max_new_tokens=12)
    assert want != ref("generate", path=path, rows=rows, max_new_tokens=12)
    model, _ = load(out)
    FastLanguageModel.for_inference(model)
    x = torch.tensor(rows).to(device_of(model))
    y = model.generate(
        input_ids=x,
        attention_mask=torch.ones_like(x),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=3,
    )
    assert y[:, 7:].tolist() == want


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "name,parts",
    [
        ("llama3", rope("llama3", theta=500000.0, **LLAMA3)),
        ("linear", rope("linear", factor=4.0)),
        ("plain, theta 1e6", rope("default", theta=1e6)),
    ],
)
def test_rotary_scaling_past_the_original_length(name, parts):
    """200 tokens, four times the original length.  Unscaled rotary looks fine at first and drifts later."""
    path, plain = build("llama", max_position_embeddings=512, **parts), build("llama", max_position_embeddings=512)
    batch = dict(input_ids=ids(1, 200))
    want = ref("forward", path=path, batch=batch)
    differs(want[:, 100:], ref("forward", path=plain, batch=batch)[:, 100:], what=name)
    model, _ = load(path, max_seq_length=256)
    close(logits(model, batch), want, what=name)


def test_own_position_ids():
    """Positions with gaps: attention scores depend on the distances given, not on the index in the row."""
    path = build("llama")
    x = ids(1, 12)
    pos = torch.tensor([[0, 1, 2, 10, 11, 12, 40, 41, 60, 61, 62, 100]])
    want = ref("forward", path=path, batch=dict(input_ids=x, position_ids=pos))
    differs(want, ref("forward", path=path, batch=dict(input_ids=x)), what="positions")
    model, _ = load(path)
    mask = torch.ones_like(x)
    close(
        logits(model, dict(input_ids=x, position_ids=pos, attention_mask=mask)),
        ref("forward", path=path, batch=dict(input_ids=x, position_ids=pos, attention_mask=mask)),
    )


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_checkpointing_changes_no_gradient(arch):
    """With checkpointing on, every adapter of every layer gets its gradient, though the inputs need none."""
    path = build(arch)
    x = ids(2, 20)
    batch = dict(input_ids=x, labels=labels_like(x))
    want = ref("forward", path=path, batch=batch, want="grads", only="lora_", lora=LORA)
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8, use_gradient_checkpointing=True)
    loss, grads = loss_and_grads(model, batch, only="lora_")
    close_number(loss, want["loss"])
    close_grads(grads, want["grads"])


def test_embeddings_as_input():
    path = build("llama")
    x = ids(2, 14)
    y = labels_like(x)
    want = ref("embeds", path=path, input_ids=x, labels=y)
    model, _ = load(path)
    model.train()
    e = want["embeds"].clone().to(device_of(model)).requires_grad_()
    out = model(inputs_embeds=e, labels=y.to(e.device), use_cache=False)
    close_number(out.loss.item(), want["loss"])
    out.loss.backward()
    close_grads({"embeds": e.grad}, {"embeds": want["grad"]})
    with torch.no_grad():
        model.eval()
        got = model(inputs_embeds=want["embeds"].to(e.device), use_cache=False).logits
    close(got, ref("forward", path=path, batch=dict(input_ids=x)))


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_gradients_through_strided_logits(arch):
    """The gradient that enters the model is strided and expanded, not contiguous."""
    path = build(arch)
    batch = dict(input_ids=ids(2, 12))
    want = ref("forward", path=path, batch=batch, want="grads", only="lora_", lora=LORA, grad_through="strided logits")
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8)
    model.train()
    y = model(**to_device(batch, model), use_cache=False).logits
    (y[..., ::2].pow(2).mean() + y.transpose(0, 1)[1::2].mean()).backward()
    close_grads(grads_of(model, "lora_"), want["grads"])


@pytest.mark.parametrize("rows,length", [(1, 1), (3, 1), (1, 2)])
def test_very_short_inputs(rows, length):
    path = build("qwen2")
    batch = dict(input_ids=ids(rows, length))
    model, _ = load(path)
    close(logits(model, batch), ref("forward", path=path, batch=batch))


def test_longer_than_max_seq_length_is_not_cut_silently():
    """60 tokens into a model loaded for 32: a clear error, or all 60 positions; never 32 of them."""
    path = build("llama")
    batch = dict(input_ids=ids(1, 60))
    want = ref("forward", path=path, batch=batch)
    model, _ = load(path, max_seq_length=32)
    try:
        got = logits(model, batch)
    except (ValueError, RuntimeError) as e:
        assert "32" in str(e) or "max_seq_length" in str(e), f"unclear: {e}"
        return
    close(got, want)


def test_dropout_off_in_eval_and_unbiased_in_training():
    path = build("llama")
    batch = dict(input_ids=ids(2, 16))
    want = ref("forward", path=path, batch=batch, lora=dict(LORA, lora_dropout=0.5))
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8, lora_dropout=0.5)
    close(logits(model, batch), want, what="eval")
    model.train()
    with torch.no_grad():
        many = [model(**to_device(batch, model), use_cache=False).logits.float().cpu() for _ in range(3)]
    assert not torch.equal(many[0], many[1]), "lora_dropout=0.5 has no effect in training"


def test_biases_are_trained_when_asked():
    path = build("qwen2")
    x = ids(2, 12)
    batch = dict(input_ids=x, labels=x.clone())
    lora = dict(LORA, target_modules=["q_proj", "v_proj"], bias="lora_only")
    want = ref("forward", path=path, batch=batch, want="grads", lora=lora)
    assert any(n.endswith("q_proj.bias") for n in want["grads"])
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], bias="lora_only")
    loss, grads = loss_and_grads(model, batch)
    close_number(loss, want["loss"])
    close_grads(grads, want["grads"])


@pytest.mark.parametrize(
    "arch,over",
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("mistral", dict(sliding_window=8)),
        ("gpt_oss", {}),
    ],
)
def test_cached_steps_equal_the_whole_row(arch, over):
    """Prompt of 6, then 14 single tokens through the cache: the same logits as all 20 at once, beyond the window too."""
    from fastlm import FastLanguageModel

    path = build(arch, **over)
    x = ids(2, 20)
    want = ref("forward", path=path, batch=dict(input_ids=x))
    model, _ = load(path)
    FastLanguageModel.for_inference(model)
    x = x.to(device_of(model))
    with torch.no_grad():
        out = model(input_ids=x[:, :6], use_cache=True)
        got = [out.logits.float().cpu()]
        for i in range(6, 20):
            out = model(input_ids=x[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            got.append(out.logits.float().cpu())
    close(torch.cat(got, 1), want, what=arch)


def test_generate_without_a_cache_is_the_same():
    from fastlm import FastLanguageModel

    path = build("qwen2")
    rows = [ids(1, 9, seed=5)[0].tolist()]
    want = ref("generate", path=path, rows=rows, max_new_tokens=12)
    model, _ = load(path)
    FastLanguageModel.for_inference(model)
    x = torch.tensor(rows).to(device_of(model))
    for cache in (True, False, True):
        y = model.generate(
            input_ids=x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=3,
            use_cache=cache,
        )
        assert y[:, 9:].tolist() == want, cache
