"""However the logits of a training step are read, they are stock's tensor."""

import copy
import io
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from accelerate.utils import convert_to_fp32, recursively_apply

import fastlm
from fastlm.forwards.causal_lm import DeferredLogits

X = tiny.ids(2, 40)
BATCH = dict(input_ids=X, labels=X)


def pair(dtype=torch.float32):
    return [
        tiny.with_lora(tiny.model("gemma2", dtype), dtype=dtype).train(),
        fastlm.patch_model(tiny.with_lora(tiny.model("gemma2", dtype, "sdpa"), dtype=dtype)).train(),
    ]


def saved(output):
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["logits"]


READERS = {
    "attribute": lambda output: output.logits,
    "key": lambda output: output["logits"],
    "index": lambda output: output[1],
    "slice": lambda output: output[:2][1],
    "get": lambda output: output.get("logits"),
    "values": lambda output: list(output.values())[1],
    "items": lambda output: next(value for key, value in output.items() if key == "logits"),
    "dict": lambda output: dict(output)["logits"],
    "unpacked": lambda output: dict(**output)["logits"],
    "dict copy": lambda output: output.copy()["logits"],
    "tuple": lambda output: output.to_tuple()[1],
    "copy": lambda output: copy.copy(output).logits,
    "leaves": lambda output: pytree.tree_leaves(output)[1],
    "tree_map": lambda output: pytree.tree_map(lambda leaf: leaf * 1, output).logits,
    "tree_map twice": lambda output: pytree.tree_map(lambda leaf: leaf, pytree.tree_map(lambda leaf: leaf, output))[
        "logits"
    ],
    "accelerate": lambda output: recursively_apply(lambda leaf: leaf * 1, output).logits,
}
FROZEN_READERS = {
    "pickle": lambda output: pickle.loads(pickle.dumps(output)).logits,
    "deepcopy": lambda output: copy.deepcopy(output).logits,
    "pickled values": lambda output: pickle.loads(pickle.dumps(list(output.values())))[1],
    "copied values": lambda output: copy.deepcopy(list(output.values()))[1],
    "torch.save": saved,
    "numpy": lambda output: torch.from_numpy(list(output.values())[1].numpy()),
    "list": lambda output: torch.tensor(list(output.values())[1].tolist()),
}


@pytest.mark.parametrize("reader", list(READERS))
def test_logits_with_a_graph(reader):
    found = []
    for made in pair():
        logits = READERS[reader](made(**BATCH, use_cache=False))
        assert isinstance(logits, torch.Tensor) and logits.requires_grad and logits.shape == (2, 40, 160)
        F.cross_entropy(logits[:, :-1].flatten(0, 1) / 0.7, X[:, 1:].flatten()).backward()
        found.append((logits, {n: p.grad for n, p in made.named_parameters() if p.grad is not None}))
    assert tiny.relative(found[1][0], found[0][0]) <= 1e-5
    assert set(found[0][1]) == set(found[1][1])
    assert all(tiny.relative(found[1][1][n], want) <= 1e-5 for n, want in found[0][1].items())


@pytest.mark.parametrize("reader", list(FROZEN_READERS))
def test_logits_without_a_graph(reader):
    with torch.no_grad():
        want, got = (FROZEN_READERS[reader](made(**BATCH, use_cache=False)) for made in pair())
    assert type(got) is torch.Tensor and not got.requires_grad
    assert tiny.relative(got, want) <= 1e-5


def test_other_keys_are_nothing():
    _, ours = pair()
    output = ours(**BATCH, use_cache=False)
    assert output.get("attentions") is None and output.get("nothing", 3) == 3 and output.get("loss") is output.loss


def test_what_trainers_do_to_an_output_waits(monkeypatch):
    """accelerate's cast and FSDP's hooks make no logits, and hold for those that are made later."""
    stock, ours = pair(torch.bfloat16)
    made, make = [], DeferredLogits.__call__
    monkeypatch.setattr(DeferredLogits, "__call__", lambda self: made.append(1) or make(self))
    output = convert_to_fp32(ours(**BATCH, use_cache=False))
    seen = []
    for leaf in pytree.tree_leaves(output):
        assert leaf.requires_grad and leaf.dtype is torch.float32
        leaf.register_hook(lambda gradient: seen.append(gradient.shape))
    assert not made
    want = convert_to_fp32(stock(**BATCH, use_cache=False))
    assert output.logits.dtype is want.logits.dtype is torch.float32
    assert tiny.relative(output.logits, want.logits) <= 2e-2
    (output.logits.sum() + output.loss).backward()
    assert sorted(seen, key=len) == [(), (2, 40, 160)] and made


def test_precision_is_that_of_the_step():
    stock, ours = pair()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [made(**BATCH, use_cache=False) for made in (stock, ours)]
    assert [output.logits.dtype for output in outputs] == [torch.bfloat16] * 2


class Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_a_gradient_that_nobody_would_get_is_an_error():
    _, ours = pair()
    output = ours(**BATCH, use_cache=False)
    with pytest.raises(RuntimeError, match=r"never made.*Read them as output.logits"):
        Taken.apply(list(output.values())[1]).sum().backward()
    Taken.apply(ours(**BATCH, use_cache=False).logits).sum().backward()
