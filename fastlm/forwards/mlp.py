"""Gated MLPs: one function with its adapters, or the modules around a fused activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from fastlm import adapters
from fastlm.families import Family
from fastlm.forwards.projections import is_decode_step, project, shared_views
from fastlm.patching import Fallback, patch_of
from fastlm_kernels.glu import glu
from fastlm_kernels.lora_mlp import lora_glu_mlp


@dataclass(frozen=True)
class MLPFacts:
    """activation: name of the op's activation that equals the config's. kind: transformers' class of it."""

    activation: str
    kind: type


# transformers' names of an activation -> the op's
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def activation_name(config: Any, family: Family) -> str | None:
    """The op's name of the activation that a model of this family has, or None if no kernel computes it."""
    name = ACTIVATIONS.get(getattr(config, family.activation))
    return None if name == "relu2" and family.is_gated else name


def activations(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The activation modules of an MLP, by name."""
    places = ("transformers.activations", "torch.nn.modules.activation")
    return [(name, child) for name, child in module._modules.items() if type(child).__module__ in places]


def _kind(config: Any, family: Family) -> type:
    return type(ACT2FN[getattr(config, family.activation)])


def make_facts(config: Any, family: Family) -> MLPFacts | None:
    """None where no kernel computes the activation."""
    name = activation_name(config, family)
    return None if name is None else MLPFacts(name, _kind(config, family))


def unfit_activation(module: nn.Module, config: Any, family: Family) -> str | None:
    """Why no kernel computes the activation of this MLP, or None: there is none, or somebody gave it another than its config's."""
    name = getattr(config, family.activation)
    if activation_name(config, family) is None:
        return f"activation {name!r} has no kernel"
    wanted = _kind(config, family)
    others = [type(child).__name__ for _, child in activations(module) if type(child) is not wanted]
    return f"its activation is a {others[0]}, not the {wanted.__name__} of its config" if others else None


def fits(family: Family) -> bool:
    """Whether `forward` computes what this family's MLP does."""
    return family.gate_up == ("gate_proj", "up_proj") and family.down == "down_proj"


def forward(self: nn.Module, x: Tensor) -> Tensor:
    patch = patch_of(self)
    activation = patch.facts.activation
    if any(type(child) is not patch.facts.kind for _, child in activations(self)):
        raise Fallback("its activation was replaced")
    if is_decode_step(x):
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), activation))
    gate_up = shared_views((self.gate_proj, self.up_proj), x, patch)
    if gate_up is not None:
        # the down projection reads an activation that has the width and dtype of gate and up
        down = adapters.view_linear(self.down_proj, x)
        is_one_function = not isinstance(down, str) and (
            gate_up[0].dtype == gate_up[0].out_dtype == down.dtype == down.out_dtype
            and gate_up[0].lora_dtype == down.lora_dtype
        )
        if is_one_function:
            gate, up = (view.projection for view in gate_up)
            return lora_glu_mlp(x.to(down.dtype), gate, up, down.projection, activation, down.lora_dtype)
    gate, up = project((self.gate_proj, self.up_proj), x, patch)
    return project((self.down_proj,), glu(gate, up, activation), patch)[0]
