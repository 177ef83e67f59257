"""Every family of the table: patched against stock, values and every gradient, then back to the bit."""

import copy
import pickle

import pytest
import tiny
import torch

import fastlm
from fastlm.forwards.backbone import CACHE
from fastlm.patching import patch_of

EXACT = 1e-5
FAMILY_MODELS = list(tiny.MODELS)


def patched(made, strict=True):
    return fastlm.patch_model(made, strict=strict)


def pair(name, dtype=torch.float32, lora=True, lora_dtype=None, **settings):
    """The stock model with eager attention, and a patched one with the same weights."""
    stock, ours = tiny.model(name, dtype), tiny.model(name, dtype, attention="sdpa")
    if lora:
        stock, ours = (tiny.with_lora(m, dtype=lora_dtype, **settings) for m in (stock, ours))
    return stock, patched(ours)


def assert_same_step(stock, ours, batch, tolerance=EXACT, **call):
    want_loss, want = tiny.loss_and_gradients(stock, batch, **call)
    loss, got = tiny.loss_and_gradients(ours, batch, **call)
    assert abs(loss - want_loss) <= tolerance * abs(want_loss)
    assert set(got) == set(want) and want
    for name in want:
        assert want[name].abs().max() > 0, f"{name}: the reference has no gradient"
        assert tiny.relative(got[name], want[name]) <= tolerance, name


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits(name):
    stock, ours = pair(name)
    x = tiny.ids(2, 21)
    with torch.no_grad():
        assert tiny.relative(ours(input_ids=x).logits, stock(input_ids=x).logits) <= EXACT


@pytest.mark.parametrize("batch", ["dense", "right-padded", "left-padded", "packed"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_loss_and_gradients(name, batch):
    stock, ours = pair(name)
    batches = {
        "dense": lambda: dict(input_ids=tiny.ids(2, 21), labels=tiny.ids(2, 21)),
        "right-padded": lambda: tiny.padded_batch("right"),
        "left-padded": lambda: tiny.padded_batch("left"),
        "packed": tiny.packed_batch,
    }
    assert_same_step(stock, ours, batches[batch](), use_cache=False)
    layers = [row for row in fastlm.report(ours) if ".layers." in row.layer]
    assert all(row.path == "block" and row.calls == 1 and not row.fallback_calls for row in layers) and len(layers) == 2


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_full_fine_tuning_trains_every_parameter(name):
    stock, ours = pair(name, lora=False)
    assert_same_step(stock, ours, dict(input_ids=tiny.ids(2, 21), labels=tiny.ids(2, 21)))


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_recomputing_changes_no_bit(name):
    """What a plan keeps changes no value: gradients are equal to the bit, and the model tells the truth about its state."""
    stock, ours = pair(name)
    batch = tiny.padded_batch()
    kept = tiny.loss_and_gradients(ours, batch)
    assert not ours.base_model.model.is_gradient_checkpointing
    for made in (stock, ours):
        made.gradient_checkpointing_enable()
        made.enable_input_require_grads()
    assert ours.base_model.model.is_gradient_checkpointing
    assert not any(layer.gradient_checkpointing for layer in ours.base_model.model.model.layers)
    again = tiny.loss_and_gradients(ours, batch)
    assert torch.equal(kept[0], again[0]) and all(torch.equal(kept[1][n], again[1][n]) for n in kept[1])
    assert_same_step(stock, ours, batch)
    fastlm.revert(ours)
    assert all(layer.gradient_checkpointing for layer in ours.base_model.model.model.layers)


def test_parts_recompute_where_the_block_does_not_fit():
    """A layer whose own weights are trained runs its parts, and recomputes when it was told to."""
    stock, ours = pair("llama", lora=False)
    for made in (stock, ours):
        made.gradient_checkpointing_enable()
    assert_same_step(stock, ours, tiny.padded_batch())
    assert patch_of(ours.model.layers[0].mlp).calls == 2 and all(row.path == "parts" for row in fastlm.report(ours))


def test_gradients_may_be_taken_twice():
    _, ours = pair("llama")
    for recompute in (False, True):
        if recompute:
            ours.gradient_checkpointing_enable()
            ours.enable_input_require_grads()
        ours.train().zero_grad()
        loss = ours(**tiny.padded_batch()).loss
        loss.backward(retain_graph=True)
        once = {n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None}
        loss.backward()
        assert all(torch.allclose(p.grad, 2 * once[n]) for n, p in ours.named_parameters() if p.grad is not None)


def test_hooks_inside_a_layer_are_called():
    _, ours = pair("llama")
    fastlm.patch_model(ours, strict=False)
    seen = []
    ours.base_model.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    tiny.loss_and_gradients(ours, tiny.padded_batch())
    rows = [row for row in fastlm.report(ours) if ".layers." in row.layer]
    assert seen == [1] and "hooks" in rows[1].reason and rows[0].path == "block"


def test_cu_seqlens_from_a_collator():
    stock, ours = pair("llama")
    batch = tiny.packed_batch((7, 1, 11, 5))
    want_loss, want = tiny.loss_and_gradients(stock, batch, use_cache=False)
    cu = torch.tensor([0, 7, 8, 19, 24], dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=11, max_length_k=11)
    loss, got = tiny.loss_and_gradients(ours, batch, use_cache=False, **lengths)
    assert abs(loss - want_loss) <= EXACT * want_loss
    assert max(tiny.relative(got[n], want[n]) for n in want) <= EXACT


def test_packed_rows_do_not_see_each_other_with_the_default_cache():
    _, ours = pair("llama")
    ours.eval()
    batch = tiny.packed_batch((9, 8))
    with torch.no_grad():
        together = ours(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        second = ours(input_ids=batch["input_ids"][:, 9:]).logits
    assert tiny.relative(together[:, 9:], second) <= EXACT


# --- precision -------------------------------------------------------------------------------------------------------


def errors(made, batch, truth_loss, truth):
    loss, got = tiny.loss_and_gradients(made, batch)
    gradients = torch.cat([got[n].double().flatten() for n in sorted(truth)])
    want = torch.cat([truth[n].double().flatten() for n in sorted(truth)])
    return abs(float(loss) - float(truth_loss)), float((gradients - want).norm() / want.norm())


@pytest.mark.parametrize("mode", ["bf16", "fp16", "autocast"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_no_worse_than_stock_at_the_same_precision(name, mode):
    """RMS error of loss and gradients to the float32 truth, over several batches: at most 1.1 times stock's."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[mode]
    lora_dtype = dtype if mode != "autocast" else torch.float32
    stock, ours = pair(name, dtype, lora_dtype=lora_dtype)
    exact = tiny.with_lora(tiny.model(name, dtype).float(), dtype=torch.float32)
    for ours_p, exact_p in zip(stock.parameters(), exact.parameters(), strict=True):
        exact_p.data.copy_(ours_p.data)
    theirs_sum = ours_sum = 0.0
    # so many that chance decides nothing
    for seed in range(12):
        batch = dict(input_ids=tiny.ids(2, 24, seed), labels=tiny.ids(2, 24, seed))
        truth_loss, truth = tiny.loss_and_gradients(exact, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            theirs_sum += errors(stock, batch, truth_loss, truth)[1]
            ours_sum += errors(ours, batch, truth_loss, truth)[1]
    assert ours_sum <= 1.1 * theirs_sum, (ours_sum, theirs_sum)


# --- adapters --------------------------------------------------------------------------------------------------------


def test_adapter_may_come_after_patching():
    stock = tiny.with_lora(tiny.model("llama"))
    ours = tiny.with_lora(patched(tiny.model("llama", attention="sdpa")))
    assert_same_step(stock, ours, tiny.padded_batch())
    layers = [row for row in fastlm.report(ours) if ".layers." in row.layer]
    assert all(row.path == "block" and row.calls and not row.fallback_calls for row in layers)


@pytest.mark.parametrize(
    "settings",
    [
        dict(targets=["q_proj", "down_proj"]),
        dict(targets=["k_proj"]),
        dict(targets=["gate_proj"]),
        dict(rank_pattern={"q_proj": 7}, alpha_pattern={"up_proj": 5}),
        dict(use_rslora=True),
        dict(bias="lora_only"),
        dict(bias="all"),
        dict(layers_to_transform=[1]),
        dict(modules_to_save=["lm_head"]),
    ],
    ids=lambda s: "-".join(s),
)
def test_adapter_settings(settings):
    stock, ours = pair("llama-biases", **settings)
    assert_same_step(stock, ours, tiny.padded_batch())
    assert not any(row.fallback_calls for row in fastlm.report(ours))


@pytest.mark.parametrize("settings", [dict(use_dora=True), dict(lora_bias=True)], ids=lambda s: "-".join(s))
def test_what_cannot_be_fused_runs_stock_and_says_so(settings):
    stock, ours = (
        tiny.with_lora(tiny.model("llama"), **settings),
        tiny.with_lora(tiny.model("llama", attention="sdpa"), **settings),
    )
    fastlm.patch_model(ours)
    assert_same_step(stock, ours, tiny.padded_batch())
    rows = [row for row in fastlm.report(ours) if row.fallback_calls]
    assert rows and all("adapter 'default'" in row.reason for row in rows)


def test_two_adapters_switching_and_disabling():
    stock = tiny.with_lora(tiny.model("llama"))
    ours = patched(tiny.with_lora(tiny.model("llama", attention="sdpa")), strict=False)
    for made in (stock, ours):
        made.add_adapter("second", made.peft_config["default"])
        generator = torch.Generator().manual_seed(9)
        for name, parameter in sorted(made.named_parameters()):
            if ".second." in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    x = tiny.ids(2, 40)

    def logits(made):
        with torch.no_grad():
            return made(input_ids=x).logits

    first = logits(ours)
    for made in (stock, ours):
        made.set_adapter("second")
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT and not torch.equal(first, logits(ours))
    with stock.disable_adapter(), ours.disable_adapter():
        assert tiny.relative(logits(ours), logits(stock)) <= EXACT
    for made in (stock, ours):
        made.base_model.set_adapter(["default", "second"])
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT
    assert any("2 adapters" in row.reason for row in fastlm.report(ours))


def test_merge_and_unmerge():
    stock, ours = pair("llama")
    x = tiny.ids(2, 40)
    with torch.no_grad():
        before = ours(input_ids=x).logits
        ours.merge_adapter()
        assert tiny.relative(ours(input_ids=x).logits, before) <= EXACT
        ours.unmerge_adapter()
        assert tiny.relative(ours(input_ids=x).logits, before) <= EXACT


def test_dropout_is_replayed_and_unbiased():
    """A recomputed layer draws the mask of its first run, and the mean over masks is the value without dropout."""
    made = patched(tiny.with_lora(tiny.model("llama", attention="sdpa"), lora_dropout=0.3))
    batch = tiny.padded_batch()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            made.gradient_checkpointing_enable()
            made.enable_input_require_grads()
        torch.manual_seed(3)
        gradients.append(tiny.loss_and_gradients(made, batch)[1])
    for name in gradients[0]:
        assert torch.equal(gradients[0][name], gradients[1][name]), name
    torch.manual_seed(4)
    again = tiny.loss_and_gradients(made, batch)[1]
    assert any(not torch.equal(again[name], gradients[0][name]) for name in again)
    made.eval()
    with torch.no_grad():
        assert torch.equal(made(input_ids=batch["input_ids"]).logits, made(input_ids=batch["input_ids"]).logits)


# --- local -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_revert_is_bit_equal(name):
    stock, ours = tiny.model(name, attention="sdpa"), tiny.model(name, attention="sdpa")
    keys = {id(m): set(m.__dict__) for m in ours.modules()}
    batch = tiny.padded_batch()
    fastlm.revert(patched(ours))
    assert {id(m): set(m.__dict__) for m in ours.modules()} == keys
    want_loss, want = tiny.loss_and_gradients(stock, batch)
    loss, got = tiny.loss_and_gradients(ours, batch)
    assert torch.equal(loss, want_loss) and all(torch.equal(got[n], want[n]) for n in want)


def test_a_stock_model_beside_it_is_untouched():
    """Also when both were made from one config object."""
    from transformers import AutoModelForCausalLM

    shared = tiny.config("llama")
    first, second = (AutoModelForCausalLM.from_config(shared, attn_implementation="sdpa").eval() for _ in range(2))
    second.load_state_dict(first.state_dict())
    batch = tiny.padded_batch()
    before = tiny.loss_and_gradients(second, batch)
    patched(first)
    tiny.loss_and_gradients(first, batch)
    after = tiny.loss_and_gradients(second, batch)
    assert torch.equal(before[0], after[0]) and all(torch.equal(before[1][n], after[1][n]) for n in before[1])
    assert second.config._attn_implementation == "sdpa" and "forward" not in second.__dict__


def test_revert_reaches_a_wrapper_that_captured_our_forward():
    stock, ours = tiny.model("llama", attention="sdpa"), patched(tiny.model("llama", attention="sdpa"))
    captured = ours.forward
    ours.forward = lambda *args, **kwargs: captured(*args, **kwargs)
    fastlm.revert(ours)
    batch = tiny.padded_batch()
    with torch.no_grad():
        assert torch.equal(ours(**batch).logits, stock(**batch).logits)


def test_deepcopy_is_patched_on_its_own_and_pickle_is_stock():
    ours = patched(tiny.model("llama", attention="sdpa"))
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()
    x = tiny.ids(1, 40)
    with torch.no_grad():
        assert not torch.equal(twin(input_ids=x).logits, ours(input_ids=x).logits)
    fastlm.revert(ours)
    assert all(row.path == "stock" for row in fastlm.report(ours))
    assert all(row.path != "stock" for row in fastlm.report(twin))
    mlp = twin.model.layers[1].mlp
    loaded = pickle.loads(pickle.dumps(mlp))
    h = torch.randn(3, 64)
    fastlm.revert(twin)
    assert torch.equal(loaded(h), mlp(h)) and "_fastlm_patch" not in mlp.__dict__


def test_no_mask_is_built_for_padded_and_packed_rows(monkeypatch):
    from transformers import masking_utils

    ours = patched(tiny.model("llama", attention="sdpa"))

    def refuse(*args, **kwargs):
        raise AssertionError("a [S, S] mask was built")

    from fastlm.forwards import backbone

    monkeypatch.setattr(backbone, "sdpa_mask", refuse)
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["fastlm"] is backbone.mask_function
    for batch in (tiny.padded_batch(), tiny.padded_batch("left"), tiny.packed_batch()):
        tiny.loss_and_gradients(ours, batch, use_cache=False)


# --- logits ----------------------------------------------------------------------------------------------------------


def test_logits_are_there_for_whoever_reads_them():
    stock, ours = pair("llama")
    batch = tiny.padded_batch()
    real = batch["attention_mask"].bool()
    for training in (True, False):
        want, got = stock.train(training)(**batch), ours.train(training)(**batch)
        assert tiny.relative(got.logits[real], want.logits[real]) <= EXACT
        assert tiny.relative(got["logits"][real], want["logits"][real]) <= EXACT
        assert tiny.relative(got[1][real], want[1][real]) <= EXACT
        # a training step makes no cache unless it is asked for
        assert list(got.keys()) == [key for key in want if not (training and key == CACHE)]
        as_tuple, wanted = (m(**batch, return_dict=False, use_cache=False) for m in (ours, stock))
        assert len(as_tuple) == len(wanted) and tiny.relative(as_tuple[1][real], wanted[1][real]) <= EXACT
        unlabelled = {k: v for k, v in batch.items() if k != "labels"}
        kept, wanted_kept = (m(**unlabelled, logits_to_keep=2).logits for m in (ours, stock))
        assert tiny.relative(kept[:1], wanted_kept[:1]) <= EXACT


def test_num_items_and_all_ignored():
    stock, ours = pair("llama")
    batch = tiny.padded_batch()
    assert_same_step(stock, ours, batch, num_items_in_batch=17)
    assert_same_step(stock, ours, batch, num_items_in_batch=torch.tensor(17))
    loss, gradients = tiny.loss_and_gradients(ours, dict(batch, labels=torch.full_like(batch["labels"], -100)))
    assert loss == 0 and all(torch.isfinite(g).all() and not g.any() for g in gradients.values())


def test_hidden_states_are_returned():
    stock, ours = pair("llama")
    x = tiny.ids(2, 40)
    want, got = (m(input_ids=x, labels=x, output_hidden_states=True).hidden_states for m in (stock, ours))
    assert len(want) == len(got) and all(tiny.relative(a, b) <= EXACT for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_greedy_tokens_are_identical(name, side):
    stock, ours = pair(name)
    batch = tiny.padded_batch("left") if side == "left" else dict(input_ids=tiny.ids(2, 11))
    batch.pop("labels", None)
    settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=3)
    for made in (stock, ours):
        made.eval()
    assert torch.equal(ours.generate(**batch, **settings), stock.generate(**batch, **settings))


# --- other families --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(tiny.OTHERS))
def test_other_families_train_on_single_parts(name):
    stock, ours = tiny.with_lora(tiny.model(name)), fastlm.patch_model(tiny.with_lora(tiny.model(name)))
    assert_same_step(stock, ours, tiny.padded_batch())
    rows = fastlm.report(ours).rows
    assert rows[0].path == "parts" and rows[0].parts == ("linear",) and "no row for" in rows[0].reason
    with pytest.raises(RuntimeError, match="strict=True"):
        fastlm.patch_model(tiny.model(name), strict=True)


def test_strict_raises_at_call_time():
    ours = patched(tiny.model("llama", attention="sdpa"))
    ours.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="eager"):
        ours(input_ids=tiny.ids(1, 8))


def test_a_chosen_attention_implementation_is_kept():
    ours = fastlm.patch_model(tiny.model("llama", attention="eager"))
    assert ours.config._attn_implementation == "eager"
    report = fastlm.report(ours)
    assert "'eager' was asked for" in report.rows[0].reason and "mlp" in report.rows[0].parts
    assert "attention" not in report.rows[0].parts
