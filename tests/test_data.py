"""Data sets from what a person has: forms, files, dropped rows with their reasons, and what a trainer makes of them."""

import json
import logging
import random
from pathlib import Path

import datasets
import pandas
import pytest
from chats import make_tokenizer, sft, trained, turns

from fastlm.chat_templates import get_chat_template, train_on_responses_only
from fastlm.data import load

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
SHARED = [{"from": "system", "value": "S"}, {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]
# form, a row, what it becomes
FORMS = [
    ("alpaca", {"instruction": "U", "input": "", "output": "A"}, {"messages": turns("U", "A")}),
    ("alpaca", {"instruction": "U", "input": "I", "output": "A"}, {"messages": turns("U\n\nI", "A")}),
    ("alpaca", {"Instruction": "U", "response": "A"}, {"messages": turns("U", "A")}),
    (
        "alpaca",
        {"instruction": "V", "output": "B", "system": "S", "history": [["U", "A"]]},
        {"messages": turns("U", "A", "V", "B", system="S")},
    ),
    ("question-answer", {"question": "U", "answer": "A", "id": 3}, {"messages": turns("U", "A")}),
    ("question-answer", {"prompt": "U", "response": "A"}, {"messages": turns("U", "A")}),
    ("chat", {"conversations": SHARED}, {"messages": turns("U", "A", system="S")}),
    ("chat", {"messages": turns("U", "A")}, {"messages": turns("U", "A")}),
    ("chat", {"messages": json.dumps(turns("U", "A"))}, {"messages": turns("U", "A")}),
    ("chat", {"conversations": SHARED[1:], "system": "S"}, {"messages": turns("U", "A", system="S")}),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "U"}]}, *turns("", "A")[1:]]},
        {"messages": turns("U", "A")},
    ),
    (
        "chat",
        {
            "messages": [
                *turns("U"),
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]},
                {"role": "tool", "name": "f", "content": ""},
                {"role": "assistant", "content": "A", "reasoning_content": "why"},
            ],
            "tools": TOOLS,
        },
        {
            "messages": [
                *turns("U"),
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "", "name": "f"},
                {"role": "assistant", "content": "A", "reasoning_content": "why"},
            ],
            "tools": json.dumps(TOOLS),
        },
    ),
    (
        "chat",
        {
            "conversations": [
                {"from": "human", "value": "U"},
                {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"a": 1}})},
                {"from": "observation", "value": "R"},
                {"from": "gpt", "value": "A"},
            ]
        },
        {
            "messages": [
                *turns("U"),
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "R"},
                *turns("", "A")[1:],
            ]
        },
    ),
    ("prompt-completion", {"prompt": "U", "completion": "A"}, {"prompt": "U", "completion": "A"}),
    (
        "prompt-completion",
        {"prompt": turns("U"), "completion": turns("", "A")[1:]},
        {"prompt": turns("U"), "completion": turns("", "A")[1:]},
    ),
    (
        "unpaired-preference",
        {"prompt": "U", "completion": "A", "label": 1},
        {"prompt": "U", "completion": "A", "label": True},
    ),
    (
        "preference",
        {"question": "U", "chosen": "A", "rejected": "B", "score": 1.5},
        {"prompt": "U", "chosen": "A", "rejected": "B"},
    ),
    (
        "preference",
        {"chosen": SHARED, "rejected": [*SHARED[:2], {"from": "gpt", "value": "B"}]},
        {"chosen": turns("U", "A", system="S"), "rejected": turns("U", "B", system="S")},
    ),
    ("text", {"text": "T", "meta": None}, {"text": "T"}),
]


@pytest.mark.parametrize(("form", "row", "expected"), FORMS, ids=[f"{n}-{f[0]}" for n, f in enumerate(FORMS)])
def test_forms(form, row, expected, tmp_path):
    """The same rows from a list, a file, a data set and a stream."""
    lines = tmp_path / "rows.jsonl"
    lines.write_text((json.dumps(row) + "\n") * 2)
    keeps_keys = {name: datasets.Json() for name in row}
    made = datasets.Dataset.from_dict({name: [value] * 2 for name, value in row.items()}, datasets.Features(keeps_keys))
    for source in ([row] * 2, str(lines), lines, made, made.to_iterable_dataset(), datasets.DatasetDict(train=made)):
        assert list(load(source)) == [expected] * 2
    assert load([row], form=form).info.description.startswith(f"1 of 1 rows of the form {form} ")


def test_files(tmp_path):
    rows = [{"instruction": f"U{n}", "output": "A"} for n in range(3)]
    expected = [{"messages": turns(f"U{n}", "A")} for n in range(3)]
    frame = pandas.DataFrame(rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": rows}))
    (tmp_path / "c.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "d.json").write_text("\ufeff" + json.dumps(frame.to_dict("list")))
    frame.to_csv(tmp_path / "e.csv", index=False)
    frame.to_csv(tmp_path / "f.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "g.parquet")
    files = sorted(tmp_path.iterdir())
    for path in files:
        assert list(load(path)) == expected, path
    assert list(load(frame)) == list(load(frame.to_dict("list"))) == expected
    for path in files[1:]:
        path.unlink()
    (tmp_path / "sub").mkdir()
    files[0].rename(tmp_path / "sub/a.json")
    (tmp_path / "z.jsonl").write_text(json.dumps(rows[0]))
    assert list(load(tmp_path)) == [*expected, expected[0]]
    load(rows).save_to_disk(tmp_path / "saved")
    assert list(load(str(tmp_path / "saved"))) == expected
    splits = datasets.DatasetDict(train=load(rows), test=load(rows[:1]))
    splits.save_to_disk(tmp_path / "splits")
    assert list(load(tmp_path / "splits", split="test")) == expected[:1]


def test_columns_that_few_rows_have():
    """What only some rows bring is read, and what is not read is said."""
    rows = [*[{"instruction": "U", "output": "A"}] * 9, {"instruction": "U", "input": "I", "output": "A", "score": 1}]
    made = load(rows)
    assert made[9] == {"messages": turns("U\n\nI", "A")} and "ignores 'score'" in made.info.description


def test_columns_by_name():
    rows = [{"frage": "U", "antwort": "A"}]
    assert list(load(rows, columns={"question": "frage", "answer": "antwort"})) == [{"messages": turns("U", "A")}]


DROPS = [
    ({"output": "A"}, "the question is missing"),
    ({"instruction": "U", "output": float("nan")}, "the answer is missing"),
    ({"instruction": "U", "output": " \n"}, "the answer is empty"),
    ({"instruction": 3, "output": "A"}, "the question is int, not text"),
    ({"instruction": "U", "input": ["I"], "output": "A"}, "the input is list, not text"),
    (
        {"instruction": "\ud800", "output": "A"},
        "the question holds bytes or halves of characters that are no Unicode text",
    ),
    ({"instruction": "U", "output": "A", "history": [["U"]]}, "the history is no list of pairs of question and answer"),
    ("U", "the row is str, no object"),
]


def test_dropped_rows_are_counted_and_explained(caplog):
    good = [{"instruction": "U", "output": "A"}] * 9
    dataset = load([*good, *(row for row, _ in DROPS), DROPS[0][0]])
    assert list(dataset) == [{"messages": turns("U", "A")}] * 9
    (warning,) = [record for record in caplog.records if record.name.startswith("fastlm")]
    assert warning.levelno == logging.WARNING and warning.getMessage() == dataset.info.description
    assert "9 of 18 rows" in dataset.info.description
    assert f"dropped 2: {DROPS[0][1]} (the first is row 9)" in dataset.info.description
    for n, (_, reason) in enumerate(DROPS[1:], 10):
        assert f"dropped 1: {reason} (the first is row {n})" in dataset.info.description


CHAT_DROPS = [
    ([], "the conversation is empty"),
    (None, "the conversation is missing"),
    ("no JSON", "the conversation is a text that is no JSON"),
    ({"role": "user"}, "the conversation is dict, no list"),
    (["U"], "a message is str, not an object"),
    (turns("U"), "the conversation has no answer of an assistant"),
    ([{"role": "narrator", "content": "x"}], "a message has the unknown role 'narrator'"),
    ([{"content": "x"}], "a message has no role"),
    (turns("U", ""), "the content of a message of role assistant is empty"),
    (turns("U", 5), "the content of a message of role assistant is int, not text"),
    (turns([{"type": "image", "url": "x"}], "A"), "the content of a message of role user holds parts that are no text"),
    ([*turns("U"), {"role": "assistant", "tool_calls": [{"x": 1}]}], "a tool call has no function name"),
    (
        [*turns("U"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}],
        "the arguments of a tool call are no object",
    ),
]


@pytest.mark.parametrize(("messages", "reason"), CHAT_DROPS, ids=[reason for _, reason in CHAT_DROPS])
def test_conversations_that_are_dropped(messages, reason, caplog):
    good = {"messages": turns("U", "A")}
    dataset = load([good, {"messages": messages}])
    assert list(dataset) == [good]
    assert f"dropped 1: {reason} (the first is row 1)" in dataset.info.description
    stream = load(datasets.IterableDataset.from_generator(lambda: iter([good, {"messages": messages}])))
    assert list(stream) == [good]
    assert "so far 1 of 2 rows" in caplog.text


def test_lines_that_are_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "T"}\n{"text": \n[1]\n\n{"text": "\xff"}\n')
    dataset = load(tmp_path / "a.jsonl")
    assert list(dataset) == [{"text": "T"}]
    for reason in ("the line is no JSON", "the line is JSON, but no object", "the text holds bytes or halves"):
        assert f"dropped 1: {reason}" in dataset.info.description
    (tmp_path / "b.csv").write_text("prompt,completion\nU,A\nU\nU,A,B\n")
    dataset = load(tmp_path / "b.csv")
    assert list(dataset) == [{"prompt": "U", "completion": "A"}]
    assert "dropped 2: the line has more or fewer cells than the header" in dataset.info.description


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        ([{"x": 1}], {}, ValueError, r"columns \['x'\] are of no form.*messages or conversations|conversations .chat."),
        ([], {}, ValueError, "the source is empty"),
        ([{"text": ""}] * 3, {}, ValueError, "no row is left: 0 of 3 rows.*dropped 3: the text is empty"),
        ("no/such/file.jsonl", {}, ValueError, "no file or folder 'no/such/file.jsonl'"),
        (Path("no-such"), {}, ValueError, "no file or folder 'no-such'"),
        (7, {}, TypeError, "int"),
        ([{"text": "T"}], {"form": "chat"}, ValueError, "form is 'chat', but the columns .*text"),
        ([{"text": "T"}], {"form": "chats"}, ValueError, "form must be one of chat, alpaca"),
        ([{"text": "T"}], {"columns": {"text": "y"}}, ValueError, r"names \['y'\], but the rows have \['text'\]"),
        ({"a": [1], "b": []}, {}, ValueError, "different lengths: {'a': 1, 'b': 0}"),
        ([{"text": "T"}], {"chunk_length": 4}, TypeError, "NoneType"),
        ([{"text": "T"}], {"overlap": 4}, ValueError, "give chunk_length"),
        (
            [{"prompt": "U", "completion": "A"}, {"prompt": turns("U"), "completion": turns("", "A")[1:]}],
            {},
            ValueError,
            "'prompt' holds texts in some rows and messages in others",
        ),
    ],
)
def test_sources_that_are_not_understood(source, options, error, words):
    with pytest.raises(error, match=words):
        load(source, **options)


def test_more_wrong_arguments(tmp_path):
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "T"}]))
    with pytest.raises(ValueError, match=r"split 'test' is not there: the data set has \['train'\]"):
        load(splits, split="test")
    (tmp_path / "a.jsonl").write_text('{"text": "T"}')
    for source in (splits["train"], [{"text": "T"}], tmp_path / "a.jsonl"):
        with pytest.raises(ValueError, match="split='test' is of a data set with several"):
            load(source, split="test")
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(ValueError, match=r"a.bin is of no kind that is known: use one of .json"):
        load(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="holds no file of a kind"):
        load(tmp_path)
    with pytest.raises(ValueError, match="chunk_length is for texts"):
        load([{"prompt": "U", "completion": "A"}], tokenizer=make_tokenizer(), chunk_length=4)
    with pytest.raises(ValueError, match="overlap=4, chunk_length=4"):
        load([{"text": "T"}], tokenizer=make_tokenizer(), chunk_length=4, overlap=4)


@pytest.mark.parametrize(("length", "overlap"), [(7, 0), (7, 3), (1, 0), (1000, 10)])
def test_chunks_lose_no_token_and_train_each_once(tmp_path, length, overlap):
    tokenizer = make_tokenizer(add_bos=True)
    (tmp_path / "a.txt").write_text("the quick brown fox jumps. " * 4)
    (tmp_path / "b.md").write_text("one")
    documents = [tokenizer(path.read_text())["input_ids"] + [2] for path in sorted(tmp_path.iterdir())]
    made = load(tmp_path, tokenizer=tokenizer, chunk_length=length, overlap=overlap)
    assert made.column_names == ["input_ids", "labels"]
    assert all(len(row["input_ids"]) <= length for row in made)
    labels = [label for row in made for label in row["labels"] if label != -100]
    assert labels == [token for document in documents for token in document]
    for row in made:
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    again = [row["input_ids"][:overlap] for row in made if row["labels"][0] == -100]
    before = [row["input_ids"][-overlap:] for row in list(made)[: len(again)]] if overlap else []
    assert again == before
    trainer = sft(tokenizer, made, tmp_path / "out", max_length=length)
    assert trainer.train_dataset["labels"][:] == made["labels"][:]


def test_a_trainer_takes_what_load_makes(tmp_path):
    templated = get_chat_template(make_tokenizer(), "qwen-3")
    rows = [FORMS[11][1], {"messages": turns("U", "A"), "tools": None}]
    trainer = train_on_responses_only(sft(templated, load(rows), tmp_path, max_length=2048))
    thought = "<think>\n{}\n</think>\n\n".format
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert [trained(templated, row) for row in trainer.train_dataset] == [
        [thought("") + call, thought("why") + "A<|im_end|>"],
        [thought("") + "A<|im_end|>"],
    ]
    preferences = load([FORMS[16][1]])
    assert preferences.column_names == ["prompt", "chosen", "rejected"]


WORDS = ["", " ", "\n", "a", "two words", "é你😀", "\x00", "\u202eright\u200d", "\ud83d", "x" * 5000, "<|im_end|>"]
OTHERS = [None, 0, -1.5, True, float("nan"), [], ["a"], {}, {"a": 1}, b"bytes"]


def is_good(value):
    return isinstance(value, str) and value.strip() != "" and value.encode("utf-8", "replace").decode() == value


@pytest.mark.parametrize("n", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["alpaca", "chat"])
def test_fuzzed_rows(form, n, tmp_path):
    """Every row comes out right, or is counted with a reason; what comes out can be rendered and tokenized."""
    draw = random.Random(n)

    def cell():
        return draw.choice(draw.choice([WORDS[3:8], WORDS[3:8], WORDS, OTHERS]))

    def message():
        names = draw.choice([("role", "content")] * 5 + [("from", "value"), ("role", "value"), ("speaker", "content")])
        role = draw.choice(["user", "assistant", "gpt", "human", "system"] * 6 + ["narrator", None, 3])
        return {names[0]: role, names[1]: cell()} if draw.random() < 0.97 else draw.choice(OTHERS)

    rows, expected = [], []
    for _ in range(n):
        if form == "alpaca":
            row = {"instruction": cell(), "input": draw.choice(["", "more", cell()]), "output": cell()}
            extra = row["input"]
            fits = extra is None or extra != extra or (isinstance(extra, str) and (not extra.strip() or is_good(extra)))
            if is_good(row["instruction"]) and is_good(row["output"]) and fits:
                joined = [row["instruction"], *([extra] if is_good(extra) else [])]
                expected.append(turns("\n\n".join(joined), row["output"]))
        else:
            messages = [message() for _ in range(draw.randint(0, 4))]
            row = {"messages": draw.choice([messages, messages, messages, cell()])}
            known = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
            made = []
            for each in row["messages"] if isinstance(row["messages"], list) else [None]:
                pair = isinstance(each, dict) and (
                    each.get("role", each.get("from")),
                    each.get("content", each.get("value")),
                )
                is_system = pair and pair[0] == "system" and isinstance(pair[1], str)
                is_text = pair and (is_good(pair[1]) or (is_system and not pair[1].strip()))
                made.append({"role": known[pair[0]], "content": pair[1]} if is_text and pair[0] in known else None)
            if all(made) and any(each["role"] == "assistant" for each in made):
                expected.append(made)
        rows.append(row)
    dataset = load(rows)
    assert dataset["messages"][:] == expected
    assert dataset.info.description.startswith(f"{len(expected):,} of {n:,} rows")
    counted = [int(part.split(":")[0].replace(",", "")) for part in dataset.info.description.split("dropped ")[1:]]
    assert len(expected) + sum(counted) == n and 0.05 * n < len(expected) < 0.9 * n
    templated = get_chat_template(make_tokenizer(), "chatml")
    for messages in expected:
        templated.apply_chat_template(messages)
