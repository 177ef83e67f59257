"""The decoder layer on the GPU: what it launches, what it waits for, and what is equal to the bit."""

import warnings

import pytest
import tiny
import torch

import fastlm
from fastlm import binding

pytestmark = pytest.mark.gpu
SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
LENGTHS = (70, 1, 111, 54)


def on_gpu(name, dtype=torch.bfloat16, **over):
    made = tiny.with_lora(tiny.model(name, dtype, "sdpa", **{**SHAPE, **over}).cuda(), dtype=dtype)
    return fastlm.patch_model(made, strict=True).train()


def recomputing(made):
    """Everything is made again, however much memory there is."""
    binding.set_checkpointing(made.get_base_model(), True)
    made.enable_input_require_grads()


def dense():
    x = tiny.ids(2, 200).cuda()
    return dict(input_ids=x, labels=x)


def packed(with_lengths):
    batch = {k: v.cuda() for k, v in tiny.packed_batch(LENGTHS).items()}
    if with_lengths:
        cu = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32).cuda()
        longest = max(LENGTHS)
        batch |= dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest)
    return batch


def padded():
    x = tiny.ids(3, 200).cuda()
    mask = torch.ones_like(x)
    mask[1, 150:], mask[2, 90:] = 0, 0
    return dict(input_ids=x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100))


def waits(made, batch):
    """How often forward and backward wait for the device, after a first step that compiles."""
    step = lambda: made(**batch, use_cache=False, num_items_in_batch=64).loss.backward()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(w.message) for w in caught if "synchroniz" in str(w.message)]


@pytest.mark.parametrize("recomputes", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral-window"])
def test_nothing_waits_for_the_device(name, recomputes):
    made = on_gpu(name)
    if recomputes:
        recomputing(made)
    assert waits(made, dense()) == []
    assert waits(made, packed(with_lengths=True)) == []
    # where samples lie is only in the data: once for a batch, not for a layer
    assert len(waits(made, packed(with_lengths=False))) <= 1
    assert len(waits(made, padded())) <= 1


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_deterministic_runs_are_equal_to_the_bit(name):
    made = fastlm.patch_model(on_gpu(name), strict=True, deterministic=True)
    for batch in (dense(), packed(with_lengths=False), padded()):
        kept, again = (tiny.loss_and_gradients(made, batch, use_cache=False) for _ in range(2))
        recomputing(made)
        recomputed = tiny.loss_and_gradients(made, batch, use_cache=False)
        binding.set_checkpointing(made.get_base_model(), None)
        made.gradient_checkpointing_disable()
        for other in (again, recomputed):
            assert torch.equal(other[0], kept[0]) and all(torch.equal(other[1][n], kept[1][n]) for n in kept[1])


def test_launches_of_a_layer():
    """Kernels in forward and backward of one layer with adapters on every projection, everything made again."""
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for n_layers in (2, 6):
        made = on_gpu("llama", num_hidden_layers=n_layers)
        recomputing(made)
        batch = dense()
        made(**batch, use_cache=False).loss.backward()
        made.zero_grad()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            made(**batch, use_cache=False).loss.backward()
            torch.cuda.synchronize()
        counts.append(sum(e.device_type == torch.autograd.DeviceType.CUDA for e in seen.events()))
    assert (counts[1] - counts[0]) / 4 <= 120, counts
