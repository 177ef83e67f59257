"""Tokenizers, conversations and a tiny trainer for the tests of chat data."""

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

CORPUS = [
    "the quick brown fox jumps",
    "user assistant system one two three four",
    "hello there, how are you? fine.",
] * 9
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
USER, ANSWER = "<|im_start|>user\n", "<|im_start|>assistant\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def make_tokenizer(add_bos=False, special=SPECIAL, merge_newlines=False):
    """Byte-level BPE over a few words; characters outside ASCII are several tokens each."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merge_newlines)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["\n\n"] * 99 + CORPUS if merge_newlines else CORPUS
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False, initial_alphabet=alphabet),
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_spaced_tokenizer():
    """As Llama 2: a space before every piece of text, also after a special token, and bytes for the rest."""
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    vocabulary = {token: index for index, token in enumerate([*tokens, *letters, "▁u", "▁a"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "u"), ("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def chat(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def turns(*contents, system=None):
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def trained(tokenizer, row):
    """The text of each run of trained tokens."""
    runs, inside = [], False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (-100, token)
        if label != -100:
            runs = [*runs[:-1], [*runs[-1], token]] if inside else [*runs, [token]]
        inside = label != -100
    return [tokenizer.decode(run) for run in runs]


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def sft(tokenizer, rows, tmp_path, eval_rows=None, **args):
    settings = {"max_length": 128, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    settings |= {"save_strategy": "no", "max_steps": 1, "output_dir": str(tmp_path), "per_device_train_batch_size": 2}
    return SFTTrainer(
        model=tiny_model(),
        processing_class=tokenizer,
        train_dataset=texts(rows),
        eval_dataset=eval_rows,
        args=SFTConfig(**(settings | args)),
    )


def texts(rows):
    return datasets.Dataset.from_dict({"text": rows}) if isinstance(rows, list) else rows
