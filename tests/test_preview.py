"""What a preview counts, warns of and shows."""

import io
import re

import datasets
import pytest
from chats import chat, make_tokenizer, sft, texts, tiny_model, turns
from golden_masks import GOLDEN
from rich.console import Console

from fastlm.chat_templates import get_chat_template, train_on_responses_only
from fastlm.data import load, preview
from fastlm.data.statistics import Statistics


@pytest.fixture(scope="module")
def tokenizer():
    return get_chat_template(make_tokenizer(), "chatml")


def rows_of(*rows):
    """Rows as `(input_ids, labels)`."""
    return datasets.Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in rows])


def shown(found):
    """The text of each row, with what is trained in ⟦…⟧."""
    return [
        "".join(f"⟦{text}⟧" if kind.startswith("trained") else text for text, kind in row).replace("⟧⟦", "")
        for row in found.rows
    ]


def test_rows_and_counts_of_a_trainer(tokenizer, tmp_path):
    data = load([{"question": "hello", "answer": "fine"}, {"question": "one two", "answer": "three"}, {"question": ""}])
    trainer = train_on_responses_only(sft(tokenizer, data, tmp_path))
    found = preview(trainer)
    expected = ["<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n⟦{}<|im_end|>⟧\n".format(*pair)
                for pair in (("hello", "fine"), ("one two", "three"))]  # fmt: skip
    assert shown(found) == expected
    ids = [len(row["input_ids"]) for row in trainer.train_dataset]
    trained = [sum(label != -100 for label in row["labels"]) for row in trainer.train_dataset]
    made = found.statistics
    assert (made.n_rows, made.n_samples, made.n_tokens, made.n_trained) == (2, 2, sum(ids), sum(trained))
    assert made.lengths == ids and made.trained_share == sum(trained) / sum(ids)
    assert made.n_untrained == made.n_cut == made.n_open == 0
    assert found.warnings == ()
    assert found.notes == ("dropped 1: the question is empty (the first is row 2)",)
    # a pipe has no colours: brackets say what is trained
    assert f"{expected[0]}" in str(found) and "\x1b" not in str(found)
    assert re.search(rf"trained +{sum(trained)} \({sum(trained) / sum(ids):.1%}\)", str(found))


def test_questions_that_are_trained_too(tokenizer, tmp_path):
    data = load([{"question": "hello", "answer": "fine"}])
    (warning,) = preview(sft(tokenizer, data, tmp_path)).warnings
    assert "every token is trained, the questions too: train_on_responses_only(trainer)" in warning
    # texts have no questions
    assert preview(sft(tokenizer, texts(["hello"]), tmp_path)).warnings == ()


def test_a_data_set_that_no_trainer_prepared(tokenizer):
    """The labels are those of train_on_responses_only, for every conversation labelled by hand."""
    for _, name, messages, labelled in GOLDEN:
        data = datasets.Dataset.from_dict(
            {"messages": [messages]}, datasets.Features({"messages": datasets.List(datasets.Json())})
        )
        found = preview(data, get_chat_template(make_tokenizer(), name), max_tokens=5000)
        made = re.sub(r"(?<=Current date: )\d{4}-\d\d-\d\d", "DATE", shown(found)[0])
        assert made == labelled, name
    sides = [
        {"prompt": "one ", "completion": "two"},
        {"prompt": turns("U", "A", "V"), "completion": turns("", "B")[1:]},
    ]
    assert shown(preview(load(sides[:1]), tokenizer)) == ["one⟦ two<|im_end|>⟧"]
    (text,) = shown(preview(load(sides[1:]), tokenizer))
    assert text.count("⟦") == 1 and text.endswith(
        "A<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n⟦B<|im_end|>⟧\n"
    )
    assert shown(preview(texts(["one"]), tokenizer)) == ["⟦one<|im_end|>⟧"]


def test_packed_rows(tokenizer, tmp_path):
    data = load([{"question": word, "answer": "fine"} for word in ("one", "two", "three")])
    trainer = train_on_responses_only(sft(tokenizer, data, tmp_path, packing=True, max_length=256))
    found = preview(trainer)
    assert (found.statistics.n_rows, found.statistics.n_samples) == (1, 3)
    assert shown(found)[0].count("⟦fine<|im_end|>⟧") == 3
    assert "[sample 1 of this row]" in shown(found)[0] and "1 (3 samples)" in str(found)
    assert found.warnings == ()


BOS, EOS, PAD, A, B = 1, 2, 3, 40, 41
ALL = {
    "two begin tokens": (([BOS, BOS, A, EOS],) * 2, "1 of 1 samples begin with two begin tokens"),
    "no begin token": (([A, EOS],) * 2, "1 of 1 samples begin without the begin token"),
    "no end token": (([BOS, A, B],) * 2, "1 of 1 samples do not train an end token last"),
    "end not trained": (([BOS, A, EOS], [BOS, A, -100]), "1 of 1 samples do not train an end token last"),
    "nothing": (([BOS, A, EOS], [-100] * 3), "1 of 1 rows have no token to train"),
    "unknown": (([BOS, 0, EOS],) * 2, "1 trained tokens are the unknown token"),
    "padding": (([BOS, A, PAD, EOS],) * 2, "1 trained tokens are padding"),
}


@pytest.mark.parametrize("name", ALL)
def test_warnings(name):
    row, words = ALL[name]
    (warning,) = preview(rows_of(row), make_tokenizer(add_bos=True)).warnings
    assert words in warning


def test_more_warnings(tmp_path):
    tokenizer = make_tokenizer()
    assert preview(rows_of(([A, EOS], [A, EOS])), tokenizer).warnings == ()
    (warning,) = preview(rows_of(*[([A, EOS], [A, EOS])] * 3), tokenizer).warnings
    assert "2 of 3 rows repeat an earlier one" in warning
    same = make_tokenizer()
    same.pad_token = same.eos_token
    (warning,) = preview(rows_of(([A, EOS], [A, EOS])), same).warnings
    assert "the padding token is also an end token" in warning
    trainer = sft(tokenizer, texts(["one two three four " * 9, "one"]), tmp_path, max_length=16)
    (warning,) = preview(trainer).warnings
    assert warning.startswith("1 of 2 rows are as long as max_length=16")
    trainer = sft(tokenizer, rows_of(([A, 400, EOS], [A, 400, EOS])), tmp_path)
    (warning,) = preview(trainer).warnings
    assert warning.startswith("1 tokens have no row in the model's embedding of 400")
    # an end token that only generation knows
    model = tiny_model()
    model.generation_config.eos_token_id = [EOS, B]
    trainer.model = model
    trainer.train_dataset = rows_of(([A, B], [A, B]))
    assert preview(trainer).warnings == ()


def test_text_of_strangers_does_not_act(tokenizer):
    """Control characters show; markup is text; a character of several tokens shows once."""
    nasty = "<script>alert(1)</script>\x1b[2J\u202e[bold]é😀&"
    found = preview(texts([nasty]), tokenizer)
    visible = nasty.replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")
    assert shown(found) == [f"⟦{visible}<|im_end|>⟧"]
    assert f"⟦{visible}<|im_end|>⟧" in str(found)
    page = found._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\x1b" not in page


def test_colours_and_html(tokenizer, tmp_path):
    trainer = train_on_responses_only(sft(tokenizer, texts([chat(("user", "hello"), ("assistant", "fine"))]), tmp_path))
    found = preview(trainer)
    output = io.StringIO()
    Console(file=output, force_terminal=True, color_system="standard", width=80).print(found)
    assert "\x1b[1;30;102mfine\x1b[0m" in output.getvalue() and "⟦" not in output.getvalue()
    page = found._repr_html_()
    assert "<span style='background:#9be39b;color:#000'>fine</span>" in page and "<svg" in page
    assert "1 rows" in page


def test_long_rows_and_many_rows(tokenizer):
    found = preview(texts(["one " * 500, *(["two"] * 99)]), tokenizer, rows=1, count_rows=10, max_tokens=5)
    assert re.search(r"\[[\d,]+ more tokens\]$", shown(found)[0]) and len(found.rows) == 1
    assert found.statistics.n_rows == 10 and found.notes[0] == "10 of 100 rows are counted, spread evenly"
    stream = preview(texts(["two"] * 30).to_iterable_dataset(), tokenizer, count_rows=7)
    assert stream.statistics.n_rows == 7 and stream.notes[0] == "a stream: the first 7 rows are counted"


def test_histogram_and_quantiles():
    made = Statistics(lengths=[1, 1, 2, 5, 10])
    assert made.histogram(5) == [(1, 2, 3), (3, 4, 0), (5, 6, 1), (7, 8, 0), (9, 10, 1)]
    assert sum(n for *_, n in made.histogram()) == 5
    assert (made.quantile(0.5), made.quantile(1.0)) == (2, 10)
    assert Statistics().histogram() == [] and Statistics().trained_share == 0.0


def test_what_cannot_be_shown(tokenizer):
    with pytest.raises(TypeError, match="a tokenizer is needed.*NoneType"):
        preview(texts(["one"]))
    with pytest.raises(TypeError, match="source must be a trainer.*list"):
        preview([{"text": "one"}], tokenizer)
    with pytest.raises(ValueError, match="has no rows"):
        preview(texts(["one"]).select([]), tokenizer)
    with pytest.raises(ValueError, match=r"got the columns \['chosen', 'rejected'\]: fastlm.data.load"):
        preview(datasets.Dataset.from_list([{"chosen": "a", "rejected": "b"}]), tokenizer)
