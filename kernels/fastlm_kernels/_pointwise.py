"""Activations of MLPs without a gate, forward and backward, by torch's own kernels: computed in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def activation_fwd(x: Tensor, name: str) -> Tensor:
    """act(x): "gelu" (erf), "gelu_tanh", "relu2" (the square of relu) or "silu"."""
    if name == "relu2":
        return torch.relu(x).square_()
    if name == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def activation_bwd(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Gradient of x."""
    if name == "relu2":
        return torch.relu(x).mul_(2).mul_(dy)
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if name == "gelu_tanh" else "none")
