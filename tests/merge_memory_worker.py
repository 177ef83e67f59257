"""Host memory of a merged save, in a process of its own: prints the megabytes of the live model's process and of its peak, as JSON.

The model is in 4 bits, its packed entries are random, and it is made without ever being whole in 16 bits.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn

from fastlm import quant
from fastlm.export import save_pretrained_merged

MEBIBYTE = 2**20


def four_bit(layer: nn.Linear, example) -> nn.Module:
    bnb = quant.bitsandbytes()
    entries = layer.in_features * layer.out_features
    packed = torch.randint(0, 256, (entries // 2, 1), dtype=torch.uint8)
    state = dict(example)
    n_blocks = entries // 64
    state["absmax"] = torch.randint(100, 156, (n_blocks,), dtype=torch.uint8)
    state["nested_absmax"] = torch.full((-(-n_blocks // 256),), 1e-3)
    key = next(key for key in state if "quant_state" in key)
    settings = json.loads(bytes(state[key].tolist()))
    settings["shape"] = [layer.out_features, layer.in_features]
    settings["nested_offset"] = 0.04
    state[key] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    made = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
    )
    made.weight = bnb.nn.Params4bit.from_prequantized(
        packed, {f"weight.{name}": value for name, value in state.items()}, device="cpu", module=made
    )
    return made


def model(**sizes):
    config = tf.LlamaConfig(tie_word_embeddings=False, max_position_embeddings=512, **sizes)
    with torch.device("meta"):
        skeleton = tf.LlamaForCausalLM(config).to(torch.bfloat16)
    bnb = quant.bitsandbytes()
    _, state = bnb.functional.quantize_4bit(
        torch.randn(256, 256).bfloat16(), quant_type="nf4", compress_statistics=True
    )
    example = state.as_dict(packed=True)
    for layer in skeleton.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, four_bit(child, example))
    for module in skeleton.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                value = torch.empty(parameter.shape, dtype=torch.bfloat16)
                value.normal_(0, 0.02) if value.ndim > 1 else value.fill_(1.0)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    # its frequencies are no parameters
    skeleton.model.rotary_emb = type(skeleton.model.rotary_emb)(config)
    skeleton.config.quantization_config = tf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quant.keep_cpu_layout(skeleton)
    adapted = get_peft_model(
        skeleton, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return adapted.eval()


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE


def peak_resident() -> float:
    # getrusage's would count what the process that started this one had in memory
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main(settings):
    save, device = settings.pop("save"), settings.pop("device", "cpu")
    small = dict(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with tempfile.TemporaryDirectory(dir=settings.pop("folder")) as folder:
        # what libraries load on their first use is no memory of the save
        save_pretrained_merged(model(**small), folder + "/small", **save)
        live = model(**settings).to(device)
        before, start = resident(), time.perf_counter()
        save_pretrained_merged(live, folder + "/out", **save)
        seconds = time.perf_counter() - start
        written = sum(path.stat().st_size for path in Path(folder, "out").glob("*.safetensors"))
    peak = peak_resident()
    gpu = torch.cuda.max_memory_allocated() / MEBIBYTE if device != "cpu" else 0.0
    print(
        json.dumps(
            dict(gpu_peak_mib=gpu, live_mib=before, peak_mib=peak, written_mib=written / MEBIBYTE, seconds=seconds)
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
