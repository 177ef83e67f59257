"""The table of families against the installed transformers: every name in a row is there, and the head shapes logits as stock does.

No weights are made for the names, so this runs in seconds on every release of transformers and fails where one renames a class.
"""

import operator

import pytest
import tiny
import torch
import transformers
from torch import nn

from fastlm.families import FAMILIES
from fastlm.forwards import causal_lm
from fastlm.forwards.causal_lm import TOKEN_OUTPUT
from fastlm.patching import bind


def row_of(name):
    """The row of a tiny model; its test is skipped where transformers has no such family."""
    model_type = tiny.MODELS[name][0]
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return FAMILIES[model_type]


def on_meta(name):
    """A model without memory, and its row."""
    family = row_of(name)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(tiny.config(name), attn_implementation="eager")
    return made, family


def modules_of(parent, names):
    return [parent.get_submodule(name) for name in names]


def norms_of(layer, family):
    """The norms that a row gives a layer, those of its queries and keys included."""
    names = [family.attention_norm, family.attention_out_norm, family.mlp_norm, family.mlp_out_norm]
    found = [getattr(layer, name) for name in names if name is not None]
    # a parallel layer of a family that also has others carries None
    found = [norm for norm in found if not (norm is None and isinstance(family.parallel, str))]
    has_qk_norms = family.qk_norms is not None
    if has_qk_norms and family.qk_norm_switch is not None:
        has_qk_norms = getattr(layer.self_attn, family.qk_norm_switch)
    return found + (modules_of(layer.self_attn, family.qk_norms) if has_qk_norms else [])


def projections_of(layer, family):
    return modules_of(layer.self_attn, [*family.qkv, family.out]) + modules_of(
        layer.mlp, [*family.gate_up, family.down]
    )


@pytest.mark.parametrize("name", tiny.MODELS)
def test_classes_and_modules(name):
    made, family = on_meta(name)
    assert (type(made).__name__, type(made.base_model).__name__) == (family.causal_lm, family.backbone)
    assert isinstance(made.lm_head, nn.Linear) and made.get_output_embeddings() is made.lm_head
    for layer in made.base_model.layers:
        kinds = (type(layer).__name__, type(layer.self_attn).__name__, type(layer.mlp).__name__)
        assert kinds == (family.layer, family.attention, family.mlp)
        norms, projections = norms_of(layer, family), projections_of(layer, family)
        assert {type(norm).__name__ for norm in norms} == {family.norm}
        for norm in norms:
            assert getattr(norm, family.norm_eps) > 0 and norm.weight is not None
        assert all(type(projection) is nn.Linear for projection in projections)
        # nothing with weights but these
        owners = {id(module) for module in layer.modules() if list(module.parameters(recurse=False))}
        assert owners == {id(module) for module in norms + projections}


@pytest.mark.parametrize("name", tiny.MODELS)
def test_shapes_of_projections(name):
    made, family = on_meta(name)
    config = made.config
    for layer in made.base_model.layers:
        head_size = layer.self_attn.head_dim
        widths = [n * head_size for n in (config.num_attention_heads, *2 * [config.num_key_value_heads])]
        qkv = [module.out_features for module in modules_of(layer.self_attn, family.qkv)]
        assert qkv == (widths if len(qkv) == 3 else [sum(widths)])
        gate_up = [module.out_features for module in modules_of(layer.mlp, family.gate_up)]
        assert sum(gate_up) == config.intermediate_size * (2 if family.is_gated else 1)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_settings_and_attributes(name):
    made, family = on_meta(name)
    config = made.config
    assert isinstance(getattr(config, family.activation), str)
    for setting in (family.softcap, family.logit_softcap, family.logit_scale, family.logit_divisor):
        assert setting is None or getattr(config, setting) > 0
    windows = set()
    for i, layer in enumerate(made.base_model.layers):
        attention = layer.self_attn
        assert attention.is_causal is True and attention.scaling > 0 and attention.layer_idx == i
        assert attention.attention_dropout == 0 and attention.config is config
        assert isinstance(family.parallel, bool) or isinstance(getattr(layer, family.parallel), bool)
        assert family.rotates is None or getattr(attention, family.rotates) in (None, False, True, 0, 1, 6)
        assert family.residual_multiplier is None or getattr(layer, family.residual_multiplier) != 1
        assert all(operator.attrgetter(path)(layer) == 0 for path in family.dropouts)
        assert not any(operator.attrgetter(path)(layer) for path in family.refuses)
        if family.window == "config":
            windows.add(config.sliding_window)
        elif family.window == "module":
            windows.add(attention.sliding_window)
        elif family.window == "layer_type":
            windows.add(config.sliding_window if config.layer_types[i] == "sliding_attention" else None)
    assert (6 in windows) == ("sliding_window" in tiny.MODELS[name][1] and config.sliding_window is not None)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_whether_layers_hand_keyword_arguments_on(name):
    family, made = row_of(name), tiny.model(name)
    seen = []
    for layer in made.base_model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: seen.append("probe" in given), with_kwargs=True
        )
    made(input_ids=tiny.ids(1, 5), use_cache=False, probe=None)
    assert seen == [family.layer_keeps_kwargs] * len(made.base_model.layers)


# --- rounding --------------------------------------------------------------------------------------------------------


def norm_reference(x, norm, family):
    """The norm as a row describes it: statistics in float32, rounded to the input's dtype where the row says."""
    h = x.float()
    if family.has_layer_norm:
        h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + getattr(norm, family.norm_eps))
    if family.norm_casts_before_weight:
        return norm.weight * h.to(x.dtype)
    h = h * (norm.weight.float() + family.norm_weight_offset)
    bias = dict(norm.named_parameters()).get("bias")
    return (h if bias is None else h + bias.float()).to(x.dtype)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_norms_round_where_the_row_says(name):
    """In bfloat16, to the bit where the stock norm is written out in Python, within one rounding where it is torch's."""
    family = row_of(name)
    layer = tiny.model(name, torch.bfloat16).base_model.layers[1]
    for norm in norms_of(layer, family):
        x = torch.randn(64, *norm.weight.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        want, got = norm(x), norm_reference(x, norm, family)
        if isinstance(norm, nn.LayerNorm):
            assert torch.allclose(got, want, rtol=2**-7, atol=1e-2)
        else:
            assert torch.equal(got, want)


# --- the head --------------------------------------------------------------------------------------------------------


def bound_head(name, dtype=torch.float32):
    """A stock model, and its like with our head bound to it and nothing else."""
    stock, ours = tiny.model(name, dtype), tiny.model(name, dtype)
    assert bind(ours, "head", causal_lm.forward, FAMILIES[ours.config.model_type], True) is None
    return stock, ours


SHAPED = ["gemma2", "gemma3", "vaultgemma", "cohere", "cohere-qk-norm", "cohere2", "granite"]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", [*SHAPED, "phi"])
def test_loss_and_every_gradient_of_a_shaped_head(name, layout):
    """Softcap, scale and divisor in the loss that never makes logits; phi's head has a bias."""
    stock, ours = bound_head(name)
    batch = tiny.padded_batch() if layout == "padded" else tiny.packed_batch()
    want_loss, want = tiny.loss_and_gradients(stock, batch, use_cache=False)
    loss, got = tiny.loss_and_gradients(ours, batch, use_cache=False)
    assert abs(loss - want_loss) <= 1e-5 * want_loss
    assert set(got) == set(want) and all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPED)
def test_logits_are_those_of_stock_to_the_bit(name, dtype):
    """Read after a training step or made for an evaluation with labels; the loss of the latter too."""
    stock, ours = bound_head(name, dtype)
    batch = tiny.padded_batch()
    for training in (True, False):
        want, got = (made.train(training)(**batch, use_cache=False) for made in (stock, ours))
        assert torch.equal(got.logits, want.logits)
        assert abs(got.loss - want.loss) <= (1e-5 if dtype is torch.float32 else 2e-3) * want.loss


@pytest.mark.parametrize("name", SHAPED)
def test_the_shape_changes_the_loss(name):
    """Caps, scales and divisors of these models are ones that a head without them would be caught by."""
    made = tiny.model(name)
    hidden = made.base_model(input_ids=tiny.ids(2, 21)).last_hidden_state
    shape = causal_lm.LogitShape.of(made.config, FAMILIES[made.config.model_type])
    products = made.lm_head(hidden)
    assert tiny.relative(shape.logits(products), products) > 0.05


@pytest.mark.parametrize("name", SHAPED)
def test_statistics_of_tokens(name):
    """Log-probability, entropy and top-1 as a trainer asks for them, and the gradient of weighted log-probabilities."""
    stock, ours = bound_head(name)
    batch = tiny.padded_batch()
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    log_p = stock(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits[:, :-1].log_softmax(-1)
    want = log_p.gather(-1, labels.where(kept, 0)[..., None])[..., 0].where(kept, 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1).where(kept, 0.0)
    output = ours(**batch, **{TOKEN_OUTPUT: lambda **fields: fields})
    got = output["statistics"]
    assert torch.equal(output["label_mask"], kept)
    assert tiny.relative(got.log_probs.detach(), want.detach()) <= 1e-5
    assert tiny.relative(got.entropy, entropy.detach()) <= 1e-5
    assert torch.equal(got.is_top1, (log_p.argmax(-1) == labels) & kept)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(5))
    (want * weights).sum().backward()
    (got.log_probs * weights).sum().backward()
    for (parameter_name, truth), ours_p in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert tiny.relative(ours_p.grad, truth.grad) <= 1e-5, parameter_name


@pytest.mark.parametrize("name", SHAPED)
def test_statistics_are_those_of_trl(name):
    """TRL's fused head reads caps, scales and divisors from the config by itself; ours answers in its place."""
    from trl.trainer.utils import add_fused_lm_head

    stock, ours = bound_head(name)
    add_fused_lm_head(stock, outputs=("log_probs", "entropy", "is_top1"))
    batch = tiny.padded_batch()
    with torch.no_grad():
        want = stock(**batch, fused_lm_head=True)
        got = ours(**batch, **{TOKEN_OUTPUT: lambda **fields: fields})
    assert abs(got["loss"] - want.loss) <= 1e-5 * want.loss
    assert tiny.relative(got["statistics"].log_probs, want.log_probs) <= 1e-5
    assert tiny.relative(got["statistics"].entropy, want.entropy) <= 1e-5
    assert torch.equal(got["statistics"].is_top1, want.is_top1) and torch.equal(got["label_mask"], want.label_mask)
