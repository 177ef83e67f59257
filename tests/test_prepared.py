"""Conversations tokenized many at a time are the rows that TRL's trainer makes one by one."""

import datasets
import pytest
import training
from chats import make_spaced_tokenizer, make_tokenizer, tiny_model, turns

import fastlm
from fastlm.chat_templates import get_chat_template, train_on_responses_only
from fastlm.data import load
from fastlm.data.prepared import with_tokens

ROWS = [{"messages": turns("Q one", "A" * n, "é你😀 two", "B\n\n", system="S" if n % 2 else None)} for n in range(1, 9)]


@pytest.mark.parametrize("settings", [{}, dict(max_length=150), dict(packing=True, max_length=300)], ids=str)
@pytest.mark.parametrize("name", ["chatml", "llama-3", "qwen-3"])
@pytest.mark.parametrize("make", [make_tokenizer, make_spaced_tokenizer])
def test_the_trainers_rows(tmp_path, make, name, settings):
    from trl import SFTConfig, SFTTrainer

    tokenizer, data = get_chat_template(make(), name), load(ROWS)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token
    args = training.settings(tmp_path, **{"max_length": None, **settings})
    common = dict(train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    stock = SFTTrainer(tiny_model(), args=SFTConfig(**args), **common)
    ours = fastlm.FastLanguageModel.get_trainer(fastlm.patch_model(tiny_model()), args=args, **common)
    for kind in ("train_dataset", "eval_dataset"):
        got, want = getattr(ours, kind), getattr(stock, kind)
        assert got.column_names == want.column_names and got[:] == want[:]
    for trainer in (stock, ours):
        train_on_responses_only(trainer)
    assert ours.train_dataset[:] == stock.train_dataset[:]


def test_other_rows_are_left_to_the_trainer():
    tokenizer = get_chat_template(make_tokenizer(), "chatml")
    data = load(ROWS)
    assert with_tokens(data, tokenizer, {}).column_names == ["messages", "input_ids"]
    others = [
        (data, tokenizer, dict(assistant_only_loss=True)),
        (data, tokenizer, dict(packing=True)),
        (data, make_tokenizer(), {}),
        (data, None, {}),
        (None, tokenizer, {}),
        (ROWS, tokenizer, {}),
        (data.to_iterable_dataset(), tokenizer, {}),
        (datasets.Dataset.from_list([{"text": "a"}]), tokenizer, {}),
        (data.add_column("chat_template_kwargs", [{}] * len(data)), tokenizer, {}),
    ]
    for rows, chosen, settings in others:
        assert with_tokens(rows, chosen, settings) is rows
