"""Conversations of other forms as role and content."""

import datasets
import pytest
from chats import turns

from fastlm.chat_templates import standardize_data_formats, standardize_sharegpt, to_sharegpt

SHARED = [{"from": "system", "value": "S"}, {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]


def test_standard_roles():
    data = datasets.Dataset.from_dict({"conversations": [SHARED, SHARED[1:]], "id": [7, 8]})
    expected = [
        {"conversations": turns("U", "A", system="S"), "id": 7},
        {"conversations": turns("U", "A"), "id": 8},
    ]
    assert list(standardize_sharegpt(data)) == expected
    assert list(standardize_sharegpt(data, batch_size=1)) == expected
    assert list(standardize_sharegpt(standardize_sharegpt(data))) == expected
    assert list(standardize_sharegpt(data.to_iterable_dataset())) == expected
    assert standardize_sharegpt(list(data)) == expected
    split = standardize_data_formats(datasets.DatasetDict(train=data, test=data.select([1])))
    assert isinstance(split, datasets.DatasetDict) and list(split["test"]) == expected[1:]
    messages = data.rename_column("conversations", "messages").map(lambda row: row, num_proc=1)
    assert standardize_sharegpt(messages)[0] == {"messages": expected[0]["conversations"], "id": 7}
    assert next(iter(data))["conversations"] == SHARED


def test_other_names_for_roles():
    data = [{"conversations": [{"role": "Mensch", "content": "U"}, {"role": "bot", "content": "A"}]}]
    made = standardize_sharegpt(data, aliases_for_user=["Mensch"], aliases_for_assistant=["bot"])
    assert made == [{"conversations": turns("U", "A")}]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"from": "narrator", "value": "x"}, "row 1, message 2: unknown role 'narrator'"),
        ({"from": "gpt", "value": "x", "weight": 0.5}, "row 1, message 2: unknown key 'weight' with value 0.5"),
        ({"from": "gpt"}, "row 1, message 2: a message needs"),
        ({"value": "x"}, "row 1, message 2: a message needs"),
        ({"from": "gpt", "role": "user", "value": "x"}, "row 1, message 2: a message needs"),
    ],
)
def test_messages_that_are_not_understood(message, words):
    rows = [{"conversations": SHARED}, {"conversations": [*SHARED[:2], message]}]
    for data in (rows, datasets.Dataset.from_list(rows)):
        with pytest.raises(ValueError, match=words):
            standardize_sharegpt(data)
    with pytest.raises(ValueError, match=words):
        list(standardize_sharegpt(datasets.Dataset.from_list(rows).to_iterable_dataset()))


def test_data_that_is_not_understood():
    with pytest.raises(ValueError, match=r"\['conversations', 'messages'\] is needed, got \['text'\]"):
        standardize_sharegpt(datasets.Dataset.from_dict({"text": ["x"]}))
    with pytest.raises(TypeError, match="str"):
        standardize_sharegpt("data")
    with pytest.raises(ValueError, match="'human' cannot stand for 'assistant'"):
        standardize_sharegpt([], aliases_for_assistant=["human"])
    with pytest.raises(TypeError, match="list of names"):
        standardize_sharegpt([], aliases_for_user="human")


TABLE = {"name": ["Ann", None, "{age} [["], "age": [3, 4, None], "answer": ["yes", "no", "5"]}
PATTERN = "Who?[[ {name}]][[, {age} years]]."


def table():
    return datasets.Dataset.from_dict(TABLE)


def test_columns_as_a_question():
    made = to_sharegpt(table(), PATTERN, output_column_name="answer")
    questions = ["Who? Ann, 3 years.", "Who?, 4 years.", "Who? {age} [[."]
    assert made["conversations"][:] == [
        [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        for question, answer in zip(questions, ("yes", "no", "5"), strict=True)
    ]
    assert made.column_names == ["conversations"]
    kept = to_sharegpt(table(), PATTERN, output_column_name="answer", remove_unused_columns=False)
    assert kept["instruction"][:] == questions and kept["age"][:] == TABLE["age"]
    split = to_sharegpt(datasets.DatasetDict(train=table()), PATTERN, output_column_name="answer")
    assert split["train"]["conversations"][:] == made["conversations"][:]
    plain = to_sharegpt(table(), merged_column_name="answer", output_column_name="answer")
    assert plain[0] == {"conversations": [{"from": "human", "value": "yes"}, {"from": "gpt", "value": "yes"}]}


def test_rows_joined_into_conversations():
    single = to_sharegpt(table(), PATTERN, output_column_name="answer")["conversations"][:]
    made = to_sharegpt(table(), PATTERN, output_column_name="answer", conversation_extension=3)["conversations"][:]
    assert len(made) == 3 and all(len(chat) == 6 for chat in made)
    # each conversation begins with its row; each row comes as often at each place
    assert [chat[:2] for chat in made] == single
    for place in (2, 4):
        assert sorted(map(str, (chat[place : place + 2] for chat in made))) == sorted(map(str, single))
    again = to_sharegpt(table(), PATTERN, output_column_name="answer", conversation_extension=3)["conversations"][:]
    assert again == made
    standard = standardize_sharegpt(to_sharegpt(table(), PATTERN, output_column_name="answer"))
    assert standard[0]["conversations"] == turns("Who? Ann, 3 years.", "yes")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"merged_prompt": "{nme}"}, r"names \['nme'\], but the data set has the columns \['name'"),
        ({"merged_prompt": "Who?"}, "names no column"),
        ({"merged_prompt": "{name} [[x]]"}, "each \\[\\[ of merged_prompt needs"),
        ({"merged_prompt": "[[{name}"}, "each \\[\\[ of merged_prompt needs"),
        ({"output_column_name": "output"}, "no column 'output'"),
        ({}, "no column 'instruction'"),
        ({"merged_prompt": PATTERN, "conversation_extension": 0}, "1 or more turns, got 0"),
    ],
)
def test_tables_that_are_not_understood(options, words):
    with pytest.raises(ValueError, match=words):
        to_sharegpt(table(), **{"output_column_name": "answer", **options})
    with pytest.raises(TypeError, match="list"):
        to_sharegpt([])
