"""Conversations of other forms as role and content."""

import datasets
import pytest
from chats import turns

from fastlm.chat_templates import standardize_data_formats, standardize_sharegpt

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
