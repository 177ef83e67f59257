"""Token ids, a small corpus, and the byte-level tokenizer that is learnt from it on the spot."""

import torch


def ids(batch, seq, vocab=500, seed=0, low=8):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, vocab, (batch, seq), generator=g)


def labels_like(input_ids, every=3):
    """A copy in which every third label is ignored."""
    y = input_ids.clone()
    y[:, ::every] = -100
    return y


CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "user asks a question and the assistant gives an answer",
    "below is an instruction that describes a task",
    "hello there, how are you today? i am fine, thank you.",
    "one two three four five six seven eight nine ten",
    "please add seven and five. the sum is twelve.",
    "a short poem about rivers and mountains in spring",
] * 8

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_BOS = "{{ bos_token }}" + CHATML


def make_tokenizer(add_bos=False, pad="<pad>", chat_template=CHATML, newline_merge=False):
    """A byte-level BPE tokenizer with 320 entries, learnt from CORPUS.

    newline_merge=True: two newlines in a row become one token, as in several large vocabularies.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    corpus = CORPUS
    if newline_merge:
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"[\r\n]+| ?[^\s]+|\s+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        corpus = ["\n\n"] * 50 + CORPUS
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    if add_bos:
        tok.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token=pad,
        model_max_length=4096,
    )
    fast.chat_template = chat_template
    return fast
