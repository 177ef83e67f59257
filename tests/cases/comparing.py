"""Comparisons of the case checks, and parameters by plain names.

Environment:
  CASES_TOL     multiplies every tolerance (default 1; try 10 on a GPU)
"""

import os

import torch

TOL = float(os.environ.get("CASES_TOL", "1"))


def gap(a, b):
    """Largest absolute difference, relative to the size of b."""
    a, b = a.detach().float().cpu(), b.detach().float().cpu()
    assert a.shape == b.shape, f"shape {tuple(a.shape)} != {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0
    assert torch.isfinite(a).all(), "not finite"
    return (a - b).abs().max().item() / max(1.0, b.abs().max().item())


def close(a, b, tol=2e-4, what=""):
    g = gap(a, b)
    assert g <= tol * TOL, f"{what}: differs by {g:.3g} (allowed {tol * TOL:.3g})"


def close_number(a, b, tol=2e-4, what=""):
    a, b = float(a), float(b)
    assert a == a, f"{what}: NaN"
    assert abs(a - b) <= tol * TOL * max(1.0, abs(b)), f"{what}: {a!r} != {b!r}"


def close_grads(got, want, tol=1e-3):
    """Both are dicts: name -> gradient."""
    assert set(got) == set(want), (
        f"missing: {sorted(set(want) - set(got))[:4]}, extra: {sorted(set(got) - set(want))[:4]}"
    )
    scale = max(v.abs().max().item() for v in want.values())
    for name in sorted(want):
        a, b = got[name].float().cpu(), want[name].float().cpu()
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), f"{name}: not finite"
        err = (a - b).abs().max().item()
        own = b.abs().max().item()
        assert err <= tol * TOL * max(own, 1e-3 * scale), f"{name}: off by {err:.3g}, size {own:.3g}"


def differs(a, b, by=2e-2, what=""):
    """Guards a check: the two references must be far apart, or the check says nothing."""
    g = gap(a, b)
    assert g > by, f"weak check {what}: references differ by only {g:.3g}"


def plain_name(name):
    """'base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight' and the like
    -> 'model.layers.0.mlp.up_proj.lora_A.weight'."""
    for junk in ("_orig_mod.", "module.", "base_model.model.", "base_layer.", "default."):
        name = name.replace(junk, "")
    return name[: -len(".default")] if name.endswith(".default") else name


def lora_params(model):
    return {plain_name(n): p for n, p in model.named_parameters() if "lora_" in n}


def set_lora(model, seed=0, std=0.1):
    """Gives every LoRA matrix, B too, values that depend on its name and the seed alone."""
    found = lora_params(model)
    assert found, "no LoRA parameters"
    with torch.no_grad():
        for i, name in enumerate(sorted(found)):
            g = torch.Generator().manual_seed(1000 * seed + i)
            p = found[name]
            p.copy_((torch.randn(p.shape, generator=g) * std).to(p.dtype).to(p.device))
    return model


def grads_of(model, only=None):
    out = {}
    for n, p in model.named_parameters():
        if p.requires_grad and (only is None or only in n):
            assert p.grad is not None, f"{n} got no gradient"
            out[plain_name(n)] = p.grad.detach().float().cpu().clone()
    return out


def device_of(model):
    return next(model.parameters()).device


def to_device(batch, model):
    d = device_of(model)
    return {k: (v.to(d) if torch.is_tensor(v) else v) for k, v in batch.items()}
