"""Tokens: padding that equals the end token, two begin tokens, response-only labels."""

import pytest
from tiny_models import CHATML_BOS, build, load, with_lora, workdir


def sft(model, tok, texts, **args):
    from datasets import Dataset
    from tiny_models import device_of
    from trl import SFTConfig, SFTTrainer

    args = dict(
        dict(
            output_dir=workdir("sft"),
            report_to="none",
            max_length=128,
            use_cpu=device_of(model).type == "cpu",
            bf16=False,
            fp16=False,
            disable_tqdm=True,
            per_device_train_batch_size=2,
            max_steps=1,
            save_strategy="no",
            logging_steps=1,
        ),
        **args,
    )
    return SFTTrainer(
        model=model, processing_class=tok, train_dataset=Dataset.from_dict({"text": texts}), args=SFTConfig(**args)
    )


def chat(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def test_end_token_is_learnt_when_padding_equals_it():
    """The checkpoint says pad == eos.  After loading, a padded batch must still train the real end token."""
    from transformers import DataCollatorForLanguageModeling

    path = build("llama", tokenizer=dict(pad="</s>"))
    model, tok = load(path)
    eos = tok.eos_token_id
    assert tok.pad_token_id is not None and tok.pad_token_id < model.get_input_embeddings().weight.shape[0]
    batch = DataCollatorForLanguageModeling(tok, mlm=False)(
        [{"input_ids": [10, 11, eos]}, {"input_ids": [10, 11, 12, 13, eos]}]
    )
    assert batch["labels"][0].tolist() == [10, 11, eos, -100, -100]
    assert batch["labels"][1].tolist() == [10, 11, 12, 13, eos]


def test_one_begin_token_only():
    """The tokenizer prepends <s> by itself, and the chat template writes it too: rows must hold one."""
    path = build("llama", tokenizer=dict(add_bos=True, chat_template=CHATML_BOS))
    model, tok = load(path)
    text = tok.apply_chat_template(
        [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "fine"}], tokenize=False
    )
    assert text.count("<s>") == 1
    trainer = sft(with_lora(model, r=4), tok, [text, text])
    row = list(trainer.train_dataset[0]["input_ids"])
    assert row[0] == tok.bos_token_id and row.count(tok.bos_token_id) == 1


def test_begin_token_for_plain_text_is_kept():
    path = build("llama", tokenizer=dict(add_bos=True))
    model, tok = load(path)
    trainer = sft(with_lora(model, r=4), tok, ["hello there", "one two three"])
    row = list(trainer.train_dataset[0]["input_ids"])
    assert row[0] == tok.bos_token_id and row.count(tok.bos_token_id) == 1


def spans(tok, text):
    """Token indices of (every assistant answer with its <|im_end|>, everything that must stay masked)."""
    answer, masked = [], []
    enc = tok(text, add_special_tokens=False)["input_ids"]
    start, end = tok.convert_tokens_to_ids("<|im_start|>"), tok.convert_tokens_to_ids("<|im_end|>")
    head = tok("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    i, inside = 0, False
    while i < len(enc):
        if enc[i : i + len(head)] == head:
            masked += range(i, i + len(head))
            i, inside = i + len(head), True
            continue
        if enc[i] == start:
            inside = False
        if inside:
            answer.append(i)
            if enc[i] == end:
                inside = None  # the newline after it may be trained or not
        elif inside is False:
            masked.append(i)
        i += 1
    return enc, answer, masked


def test_response_only_labels():
    """Both answers of a two-turn chat are trained, each with its end-of-turn token; nothing of the user is."""
    from fastlm.chat_templates import train_on_responses_only

    path = build("llama")
    model, tok = load(path)
    texts = [
        chat(
            ("user", "please add seven and five."),
            ("assistant", "the sum is twelve."),
            ("user", "how are you today?"),
            ("assistant", "i am fine, thank you."),
        ),
        chat(("system", "hello there"), ("user", "one two three"), ("assistant", "four five six")),
    ]
    trainer = train_on_responses_only(
        sft(with_lora(model, r=4), tok, texts),
        instruction_part="<|im_start|>user\n",
        response_part="<|im_start|>assistant\n",
    )
    for row, text in zip(trainer.train_dataset, texts, strict=False):
        enc, answer, masked = spans(tok, text)
        assert len(answer) > 4 and len(masked) > 4
        x, y = list(row["input_ids"]), list(row["labels"])
        assert x[: len(enc)] == enc
        assert [y[i] for i in answer] == [enc[i] for i in answer]
        assert all(y[i] == -100 for i in masked)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    for b, text in zip(batch["labels"].tolist(), texts, strict=False):  # and the collator keeps them
        enc, answer, masked = spans(tok, text)
        assert [b[i] for i in answer] == [enc[i] for i in answer] and all(b[i] == -100 for i in masked)


def test_wrong_markers_are_an_error_not_a_zero_loss():
    from fastlm.chat_templates import train_on_responses_only

    path = build("llama")
    model, tok = load(path)
    trainer = sft(with_lora(model, r=4), tok, [chat(("user", "hello"), ("assistant", "fine"))] * 2)
    with pytest.raises(Exception) as e:
        train_on_responses_only(trainer, instruction_part="[INST]", response_part="[/INST]")
    assert any(w in str(e.value).lower() for w in ("response", "label", "marker", "instruction"))


def test_get_chat_template():
    from fastlm.chat_templates import get_chat_template

    _, tok = load(build("llama"))
    tok = get_chat_template(tok, chat_template="chatml")
    msgs = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = tok.apply_chat_template(msgs, tokenize=False)
    assert text.endswith(chat(("user", "hi"), ("assistant", "yo"))) or text.rstrip("\n").endswith("yo<|im_end|>")
    prompt = tok.apply_chat_template(msgs[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")
    with pytest.raises(Exception):  # noqa: B017
        get_chat_template(tok, chat_template="no-such-template")


def test_answers_cut_away_are_dropped_and_the_rest_is_kept():
    """In one of three rows the answer lies beyond the limit.  It must not stay as a row without any label."""
    from tiny_models import losses_of

    from fastlm.chat_templates import train_on_responses_only

    model, tok = load(build("llama"))
    ok = chat(("user", "hello"), ("assistant", "fine, thank you."))
    far = chat(("user", "one two three four five six seven " * 40), ("assistant", "yes"))
    t = train_on_responses_only(
        sft(with_lora(model, r=4), tok, [ok, far, ok], max_length=64, max_steps=2),
        instruction_part="<|im_start|>user\n",
        response_part="<|im_start|>assistant\n",
    )
    rows = [list(r["labels"]) for r in t.train_dataset]
    assert len(rows) == 2 and all(any(v != -100 for v in r) for r in rows)
    t.train()
    assert all(v > 0.1 for v in losses_of(t)), losses_of(t)


def test_markers_of_one_token():
    """[INST] and [/INST] are single special tokens: both answers of a two-turn row are trained."""
    from fastlm.chat_templates import train_on_responses_only

    path = build("llama")
    model, tok = load(path)
    tok.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    text = "[INST]hello there[/INST]fine</s>[INST]one two[/INST]three four</s>"
    t = train_on_responses_only(
        sft(with_lora(model, r=4), tok, [text, text]), instruction_part="[INST]", response_part="[/INST]"
    )
    x, y = list(t.train_dataset[0]["input_ids"]), list(t.train_dataset[0]["labels"])
    a, b = tok.convert_tokens_to_ids("[INST]"), tok.convert_tokens_to_ids("[/INST]")
    eos, on = tok.eos_token_id, False
    for i, v in enumerate(x):
        if v == b:
            on = True
        elif v == a:
            on = False
        elif on:
            assert y[i] == v, (i, "an answer token is masked")
        else:
            assert y[i] == -100, (i, "a user token is trained")
    assert sum(1 for i, v in enumerate(x) if v == eos and y[i] == eos) >= 2
