"""Labels on answers only: through a real SFTTrainer, for awkward tokens, and with markers found out from templates."""

import copy
import importlib.resources
import json

import datasets
import pytest
from chats import (
    ANSWER,
    EMPTY_THOUGHT,
    USER,
    chat,
    make_spaced_tokenizer,
    make_tokenizer,
    sft,
    texts,
    tiny_model,
    trained,
    turns,
)
from golden_masks import GOLDEN
from golden_masks import answers as answers_of
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from fastlm.chat_templates import get_chat_template, train_on_responses_only
from fastlm.chat_templates._token_text import TokenText
from fastlm.chat_templates.markers import derive_markers
from fastlm.chat_templates.templates import TEMPLATES


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


TWO_TURNS = chat(
    ("system", "one"), ("user", "hello"), ("assistant", "fine."), ("user", "two"), ("assistant", "three four")
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWERS = ["fine.<|im_end|>\n", "three four<|im_end|>\n</s>"]


def test_answers_of_a_trainer(tokenizer, tmp_path):
    rows = [TWO_TURNS, chat(("user", "hello"), ("assistant", "fox"))]
    trainer = sft(tokenizer, rows, tmp_path, eval_rows=texts(rows[1:]))
    before = [row["input_ids"] for row in trainer.train_dataset]
    assert train_on_responses_only(trainer, USER, ANSWER) is trainer
    assert [row["input_ids"] for row in trainer.train_dataset] == before
    assert trained(tokenizer, trainer.train_dataset[0]) == ANSWERS
    assert trained(tokenizer, trainer.train_dataset[1]) == ["fox<|im_end|>\n</s>"]
    assert trained(tokenizer, trainer.eval_dataset[0]) == ["fox<|im_end|>\n</s>"]
    batch = next(iter(trainer.get_train_dataloader()))
    kept = [
        {"input_ids": ids.tolist(), "labels": y.tolist()}
        for ids, y in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert sorted(text for row in kept for text in trained(tokenizer, row)) == sorted([*ANSWERS, "fox<|im_end|>\n</s>"])
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0.1


def test_assistant_only_loss(tokenizer, tmp_path):
    """TRL's own masking reads the marks of our templates."""
    rows = datasets.Dataset.from_dict({"messages": [turns("hello", "fine.", "two", "three four", system="one")]})
    trainer = sft(get_chat_template(tokenizer, "chatml"), rows, tmp_path, assistant_only_loss=True)
    assert trained(tokenizer, trainer.train_dataset[0]) == ["fine.<|im_end|>", "three four<|im_end|>"]
    before = trainer.train_dataset[0]["labels"]
    assert train_on_responses_only(trainer).train_dataset[0]["labels"] == before


def test_each_of_several_eval_datasets(tokenizer, tmp_path):
    rows = [TWO_TURNS]
    trainer = sft(tokenizer, rows, tmp_path, eval_rows={"a": texts(rows), "b": texts(rows * 2)})
    train_on_responses_only(trainer, USER, ANSWER)
    assert [len(each) for each in trainer.eval_dataset.values()] == [1, 2]
    assert all(trained(tokenizer, row) == ANSWERS for each in trainer.eval_dataset.values() for row in each)
    train, trainer.train_dataset = trainer.train_dataset, texts([TWO_TURNS]).map(lambda row: tokenizer(row["text"]))
    trainer.eval_dataset["b"] = texts(["no answer"] * 2).map(lambda row: tokenizer(row["text"]))
    with pytest.raises(ValueError, match=r"eval_dataset\['b'\]: no row contains"):
        train_on_responses_only(trainer, USER, ANSWER)
    # all data sets are masked, or none
    assert "labels" not in trainer.train_dataset.column_names
    assert trained(tokenizer, train[0]) == ANSWERS


def test_last_response_only(tokenizer, tmp_path):
    trainer = train_on_responses_only(sft(tokenizer, [TWO_TURNS], tmp_path), USER, ANSWER, last_response_only=True)
    assert trained(tokenizer, trainer.train_dataset[0]) == ANSWERS[1:]


def function(tokenizer, instruction=USER, response=ANSWER, **options):
    return train_on_responses_only(None, instruction, response, tokenizer=tokenizer, return_function=True, **options)


def answers(tokenizer, text, *markers, **options):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return trained(tokenizer, {"input_ids": ids, **function(tokenizer, *markers, **options)({"input_ids": ids})})


def test_function_for_map(tokenizer):
    labels = function(tokenizer)
    data = texts([TWO_TURNS, "no answer", ""]).map(lambda row: tokenizer(row["text"]))
    expected = [["fine.<|im_end|>\n", "three four<|im_end|>\n"], [], []]
    for made in (data.map(labels), data.map(labels, batched=True), data.with_format("torch").map(labels, batched=True)):
        assert [trained(tokenizer, row) for row in made.with_format(None)] == expected
    assert [trained(tokenizer, row) for row in data.with_format("numpy").map(labels).with_format(None)] == expected
    assert labels({"input_ids": []}) == {"labels": []}


def test_line_breaks_that_merge_across_the_marker():
    """The response marker ends in a line break, the answer begins with one, and both are one token."""
    tokenizer = make_tokenizer(merge_newlines=True)
    pair = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(pair) == 1 and tokenizer(ANSWER, add_special_tokens=False)["input_ids"][-1] != pair[0]
    text = chat(("user", "hello"), ("assistant", "\nfine"), ("user", "\ntwo"), ("assistant", "three"))
    assert answers(tokenizer, text) == ["\n\nfine<|im_end|>\n", "three<|im_end|>\n"]
    text = "Q:\none\n\nA:\n\ntwo\n\nQ:\n\nthree\n\nA:\nfour"
    assert answers(tokenizer, text, "Q:\n", "A:\n") == ["\n\ntwo\n\n", "four"]


def test_markers_of_one_token(tokenizer):
    text = "[INST]hello[/INST]fine</s>[INST]one[/INST]two three</s>"
    assert answers(tokenizer, text, "[INST]", "[/INST]") == ["fine</s>", "two three</s>"]


def test_characters_of_several_tokens(tokenizer):
    text = "问：é？答：好😀问：x答：\ufffd\ufffdü"
    assert answers(tokenizer, text, "问：", "答：") == ["好😀", "\ufffd\ufffdü"]


def test_spaces_that_a_tokenizer_adds():
    tokenizer = make_spaced_tokenizer()
    ids = tokenizer(TWO_TURNS, add_special_tokens=False)["input_ids"]
    assert USER not in tokenizer.decode(ids)  # it comes back with a space behind <|im_start|>
    assert answers(tokenizer, TWO_TURNS) == ["fine.<|im_end|> \n", "three four<|im_end|> \n"]
    assert answers(tokenizer, "### Q: one ### A: é two</s> ### Q: x ### A: u", "### Q:", "### A:") == ["é two</s>", "u"]


@pytest.mark.parametrize("force_match", [True, False])
def test_force_match(tokenizer, force_match):
    text = "Q: one\nA: two\nQ:three\nA:four"
    # the space is one token with the first word
    exact, loose = [" two\nQ:three\nA:four"], [" two", "four"]
    assert answers(tokenizer, text, "\nQ: ", "A: ", force_match=force_match) == (exact if force_match else loose)


def test_other_turns_end_an_answer(tokenizer):
    """A tool's or a system's turn behind an answer opens with the same token as the markers."""
    text = chat(("user", "hello"), ("assistant", "fine"), ("tool", "two"), ("assistant", "three"), ("system", "x"))
    assert answers(tokenizer, text) == ["fine<|im_end|>\n", "three<|im_end|>\n"]


def test_packed_samples(tokenizer, tmp_path):
    """The next sample of a row begins with a text of its own, which is no part of the last answer."""
    rows = [f"Rules: {n} {n}\n[INST]one[/INST]fox {n}" for n in "123456"]
    trainer = sft(tokenizer, rows, tmp_path, packing=True, max_length=64)
    assert len(trainer.train_dataset) < 6 and "seq_lengths" in trainer.train_dataset.column_names
    lengths = trainer.train_dataset["seq_lengths"][:]
    train_on_responses_only(trainer, "[INST]", "[/INST]", last_response_only=True)
    found = [text for row in trainer.train_dataset for text in trained(tokenizer, row)]
    assert sorted(found) == [f"fox {n}</s>" for n in "123456"]
    assert trainer.train_dataset["seq_lengths"][:] == lengths
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0.1


def test_wrapped_packing(tmp_path):
    tokenizer = make_tokenizer(add_bos=True)
    tokenizer.eos_token = "<|im_end|>"
    rows = [f"Rules: {n}\n[INST]one[/INST]fox {n}" for n in "123456"]
    trainer = sft(tokenizer, rows, tmp_path, packing=True, packing_strategy="wrapped", max_length=1000)
    with pytest.raises(ValueError, match="wrapped"):
        train_on_responses_only(trainer, "[INST]", "[/INST]", last_response_only=True)
    train_on_responses_only(trainer, "[INST]", "[/INST]")
    assert trained(tokenizer, trainer.train_dataset[0]) == [f"fox {n}<|im_end|>" for n in "123456"]


def test_labels_that_are_ignored_stay_ignored(tokenizer, tmp_path):
    prompt = [turns("hello", "fine", "two")]
    rows = datasets.Dataset.from_dict({"prompt": prompt, "completion": [[{"role": "assistant", "content": "three"}]]})
    trainer = sft(get_chat_template(tokenizer, "chatml"), rows, tmp_path)
    train_on_responses_only(trainer, USER, ANSWER)
    assert trained(tokenizer, trainer.train_dataset[0]) == ["three<|im_end|>"]
    ids = tokenizer(TWO_TURNS)["input_ids"]
    ones = [1] * len(ids)
    last = [0] * (len(ids) - 8) + [1] * 8
    for name in ("attention_mask", "completion_mask", "assistant_masks"):
        row = {"input_ids": ids, name: last}
        labels = function(tokenizer)(row)["labels"]
        assert labels[:-8] == [-100] * (len(ids) - 8) and labels[-3] == ids[-3] != -100
        assert function(tokenizer)(row | {name: ones}) == function(tokenizer)({"input_ids": ids})


def test_rows_whose_answer_is_cut_off(tokenizer, tmp_path, caplog):
    far = chat(("user", "one two three " * 40), ("assistant", "yes"))
    trainer = sft(tokenizer, [TWO_TURNS, far, TWO_TURNS], tmp_path, max_length=64)
    train_on_responses_only(trainer, USER, ANSWER)
    assert [trained(tokenizer, row) for row in trainer.train_dataset] == [ANSWERS] * 2
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("fastlm")]
    assert len(warnings) == 1 and "1 of 3 in train_dataset" in warnings[0] and "max_length=64" in warnings[0]
    with pytest.raises(
        ValueError, match=r"no row contains the response marker.*all responses lie beyond max_length=64"
    ):
        train_on_responses_only(sft(tokenizer, [far], tmp_path, max_length=64), USER, ANSWER)
    short = len(tokenizer(TWO_TURNS.split("fine")[0])["input_ids"])
    with pytest.raises(
        ValueError, match=f"no label is left in 1 rows: 1 as long as max_length={short}, all responses lie beyond it"
    ):
        train_on_responses_only(sft(tokenizer, [TWO_TURNS], tmp_path, max_length=short), USER, ANSWER)


@pytest.mark.parametrize(
    ("markers", "words"),
    [
        (
            ("[INST]", "[/INST]"),
            r"no row contains the instruction marker '\[INST\]' and the response marker '\[/INST\]'",
        ),
        ((USER, "### Response:"), "no row contains the response marker '### Response:'.*begins '<.im_start.>system"),
        (("### Instruction:", ANSWER), "no row contains the instruction marker"),
        ((USER, USER), "must not hold the other"),
        ((USER, None), "give both"),
        ((USER, " "), "give both"),
    ],
)
def test_wrong_markers(tokenizer, tmp_path, markers, words):
    with pytest.raises(ValueError, match=words):
        train_on_responses_only(sft(tokenizer, [TWO_TURNS], tmp_path), *markers)


def test_wrong_trainers(tokenizer, tmp_path):
    data = texts([TWO_TURNS])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    ids = data.map(lambda row: tokenizer(row["text"]), remove_columns="text")

    def trainer(train_dataset, collator=DataCollatorForSeq2Seq, **options):
        options = {"processing_class": tokenizer} | options
        return Trainer(tiny_model(), args, data_collator=collator(tokenizer), train_dataset=train_dataset, **options)

    masked = train_on_responses_only(trainer(ids), USER, ANSWER).train_dataset
    assert [text.removesuffix("</s>") for text in trained(tokenizer, masked[0])] == [
        text.removesuffix("</s>") for text in ANSWERS
    ]
    with pytest.raises(ValueError, match="no column input_ids"):
        train_on_responses_only(trainer(data), USER, ANSWER)
    with pytest.raises(ValueError, match="has no rows"):
        train_on_responses_only(trainer(ids.select([])), USER, ANSWER)
    with pytest.raises(TypeError, match="list"):
        train_on_responses_only(trainer(list(ids)), USER, ANSWER)
    with pytest.raises(TypeError, match="NoneType"):
        train_on_responses_only(trainer(ids, processing_class=None), USER, ANSWER)
    with pytest.raises(ValueError, match="neither"):
        train_on_responses_only(trainer(None), USER, ANSWER)
    with pytest.raises(TypeError, match="must be strings"):
        train_on_responses_only(trainer(ids), [USER], [ANSWER])
    with pytest.raises(ValueError, match="return_function"):
        train_on_responses_only(None, USER, ANSWER, tokenizer=tokenizer)

    def rebuilds(each):
        return DataCollatorForLanguageModeling(each, mlm=False)

    with pytest.raises(ValueError, match="labels of its own"):
        train_on_responses_only(trainer(ids, rebuilds), USER, ANSWER)


def test_iterable_datasets(tokenizer, tmp_path):
    rows = texts([TWO_TURNS, "no answer"]).to_iterable_dataset()
    trainer = train_on_responses_only(sft(tokenizer, rows, tmp_path), USER, ANSWER)
    assert [trained(tokenizer, row) for row in trainer.train_dataset] == [ANSWERS]
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0.1


def test_two_processes(tokenizer, tmp_path):
    trainer = sft(tokenizer, [TWO_TURNS] * 4, tmp_path)
    train_on_responses_only(trainer, USER, ANSWER, num_proc=2)
    assert [trained(tokenizer, row) for row in trainer.train_dataset] == [ANSWERS] * 4


def test_two_processes_by_the_template(tokenizer, tmp_path):
    templated = get_chat_template(tokenizer, "qwen-3")
    rows = conversation_rows("hello", "fine", n=4)
    trainer = train_on_responses_only(sft(templated, rows, tmp_path), num_proc=2)
    assert [trained(templated, row) for row in trainer.train_dataset] == [[f"{EMPTY_THOUGHT}fine<|im_end|>"]] * 4


MARKERS = {
    "llama-3": tuple(f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant")),
    "mistral": ("[INST] ", "[/INST]"),
    "mistral-v7": ("[INST]", "[/INST]"),
    "qwen-3.5": (USER, ANSWER + "<think>\n"),
    "gemma": ("<start_of_turn>user\n", "<start_of_turn>model\n"),
    "phi-3": ("<|user|>\n", "<|assistant|>\n"),
    "phi-4": ("<|im_start|>user<|im_sep|>", "<|im_start|>assistant<|im_sep|>"),
    "vicuna": ("USER: ", "ASSISTANT:"),
    "alpaca": ("### Instruction:\n", "### Response:\n"),
    "granite": ("<|start_of_role|>user<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>"),
    "gpt-oss": ("<|end|><|start|>user<|message|>", "<|start|>assistant"),
    "deepseek-r1": ("<｜User｜>", "<｜Assistant｜>"),
    "glm-4.5": ("<|user|>\n", "<|assistant|>"),
    "aya": ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
}
MARKERS |= dict.fromkeys(("chatml", "qwen-2.5", "qwen-3", "qwen-3-instruct", "smollm2", "lfm-2"), (USER, ANSWER))
MARKERS |= {"llama-3.1": MARKERS["llama-3"], "gemma-3": MARKERS["gemma"], "phi-3.5": MARKERS["phi-3"]}
MARKERS |= {"zephyr": MARKERS["phi-3"], "deepseek-v3": MARKERS["deepseek-r1"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_markers_from_the_template(tokenizer, name):
    assert derive_markers(get_chat_template(tokenizer, name)) == MARKERS[name]


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        # the end-of-turn token only between turns, never behind the last
        ("{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
         "{{ m.content + ('' if loop.last else '</s>') }}{% endif %}{% endfor %}", ("[INST]", "[/INST]")),
        # a prompt for reasoning, which earlier answers have lost
        ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + ('<think>\\n' if m.role != 'user' and loop.last else '') "
         "+ m.content + '<|im_end|>\\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}", (USER, ANSWER)),
        # as Llama 2
        ("{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% else %}"
         "{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}", ("<s>[INST] ", "[/INST]")),
        # no end of turn at all
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", ("user: ", "assistant: ")),
    ],
)  # fmt: skip
def test_markers_from_other_templates(tokenizer, template, markers):
    assert derive_markers(get_chat_template(tokenizer, (template, None))) == markers


def test_markers_that_cannot_be_derived(tokenizer):
    for template, words in (
        (None, "no chat template"),
        ("{{ raise_exception('x') }}", "does not render two turns of user and assistant .x."),
        ("{% for m in messages %}{{ m.content + '\n' }}{% endfor %}", "tells user and assistant turns apart"),
        ("{{ messages[-1].content }}", "once and in order"),
        ("{{ messages[0]", "does not render"),
    ):
        templated = copy.deepcopy(tokenizer)
        templated.chat_template = template
        with pytest.raises(ValueError, match=f"{words}.*instruction_part"):
            function(templated, None, None)


def test_text_of_tokens(tokenizer):
    """Pieces join to the text, and each token covers the characters that it is a part of."""
    for text in (TWO_TURNS, "é你<|im_end|>\n\n 😀😀x", "\ufffd", ""):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        joined, starts, ends = TokenText(tokenizer)(ids)
        assert joined == text and len(starts) == len(ends) == len(ids)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert list(zip(starts, ends, strict=True)) == encoded


def labelled(kind, tokenizer, name, messages, tmp_path, **args):
    """Trained texts of a conversation that went through a trainer: as messages, as a text, or packed with another."""
    templated = get_chat_template(tokenizer, name)
    if kind == "text":
        rows = texts([templated.apply_chat_template(messages, tokenize=False)] * 2)
    else:
        # Json keeps the keys of each message as they are
        feature = datasets.List(datasets.Json())
        rows = datasets.Dataset.from_dict({"messages": [messages] * 2}, datasets.Features({"messages": feature}))
    trainer = sft(templated, rows, tmp_path, max_length=2048, packing=kind == "packed", **args)
    rows = train_on_responses_only(trainer).train_dataset
    return templated, [text for row in rows for text in trained(templated, row)]


@pytest.mark.parametrize("kind", ["messages", "text", "packed"])
@pytest.mark.parametrize(("what", "name", "messages", "golden"), GOLDEN, ids=[f"{g[0]}-{g[1]}" for g in GOLDEN])
def test_golden_masks(tokenizer, tmp_path, kind, what, name, messages, golden):
    """All ways through a trainer train the answers that were labelled by hand, and nothing else."""
    templated, found = labelled(kind, tokenizer, name, messages, tmp_path)
    expected = answers_of(golden) * 2
    if kind != "messages" and (what, name) == ("tool_use", "deepseek-v3"):
        # no marker stands before an answer that follows the results of tools
        expected = [answer for answer in expected if "A1" not in answer]
    if kind == "text":
        # TRL closes texts with the end-of-sequence token
        found = [text.removesuffix(templated.eos_token).rstrip() if text not in expected else text for text in found]
    assert found == expected


def conversation_rows(*contents, n=1, **columns):
    return datasets.Dataset.from_dict({"messages": [turns(*contents)] * n} | {k: [v] * n for k, v in columns.items()})


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("make", [make_tokenizer, make_spaced_tokenizer])
def test_conversations_cut_at_either_end(tmp_path, make, mode):
    """Every length: the labels are those of the whole conversation, cut as the row was.

    The second tokenizer gives back a text with further spaces: there the ids tell where a row was cut.
    """
    templated = get_chat_template(make(), "chatml")
    messages = turns("one two", "fox é jumps", "three", "four five six")
    whole = templated.apply_chat_template(messages, return_dict=False)
    rows = datasets.Dataset.from_dict({"messages": [messages]})
    full = train_on_responses_only(sft(templated, rows, tmp_path, max_length=1024)).train_dataset[0]
    assert full["input_ids"] == whole
    assert [text.strip() for text in trained(templated, full)] == ["fox é jumps<|im_end|>", "four five six<|im_end|>"]
    labels = function(templated, None, None)
    for length in range(1, len(whole) + 1):
        cut = slice(None, length) if mode == "keep_start" else slice(-length, None)
        assert labels({"messages": messages, "input_ids": whole[cut]})["labels"] == full["labels"][cut]


def test_conversations_cut_by_the_trainer(tokenizer, tmp_path, caplog):
    templated = get_chat_template(tokenizer, "chatml")
    far, near = turns("one two three " * 40, "yes"), turns("hello", "fine")
    rows = datasets.Dataset.from_dict({"messages": [near, far, turns("hello")]})
    trainer = train_on_responses_only(sft(templated, rows, tmp_path, max_length=64))
    assert [trained(templated, row) for row in trainer.train_dataset] == [["fine<|im_end|>"]]
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("fastlm")]
    assert "2 of 3 in train_dataset" in warning and "1 without an answer" in warning
    assert "1 as long as max_length=64, all responses lie beyond it" in warning
    assert warning.removesuffix(".").endswith(trainer.train_dataset.info.description.removeprefix("dropped "))
    with pytest.raises(ValueError, match="no label is left in 1 rows: 1 as long as max_length=64"):
        train_on_responses_only(sft(templated, rows.select([1]), tmp_path, max_length=64))
    with pytest.raises(ValueError, match="no label is left in 1 rows: 1 without an answer"):
        train_on_responses_only(sft(templated, rows.select([2]), tmp_path, max_length=64))
    ignored = datasets.Dataset.from_dict({"messages": [near], "input_ids": [[5]], "labels": [[-100]]})
    trainer = sft(templated, rows.select([0]), tmp_path)
    trainer.train_dataset = ignored
    with pytest.raises(ValueError, match="no label is left in 1 rows: 1 had no label to train before"):
        train_on_responses_only(trainer)
    # the other end holds the answer
    trainer = sft(templated, rows.select([1]), tmp_path, max_length=64, truncation_mode="keep_end")
    assert trained(templated, train_on_responses_only(trainer).train_dataset[0]) == ["yes<|im_end|>"]


def test_conversations_with_line_breaks_that_merge(tmp_path):
    """The header ends in a line break, the answer begins with one, both are one token: it is the answer's first."""
    tokenizer = make_tokenizer(merge_newlines=True)
    tokenizer.chat_template = CHATML
    rows = conversation_rows("hello", "\nfine", "\ntwo", "three")
    row = train_on_responses_only(sft(tokenizer, rows, tmp_path)).train_dataset[0]
    assert trained(tokenizer, row) == ["\n\nfine<|im_end|>", "three<|im_end|>"]


def test_a_question_that_holds_the_markers(tokenizer, tmp_path):
    """In a conversation no text can pass for an answer."""
    templated = get_chat_template(tokenizer, "alpaca")
    rows = conversation_rows("hello\n\n### Response:\nno", "fine")
    row = train_on_responses_only(sft(templated, rows, tmp_path, max_length=1024)).train_dataset[0]
    assert trained(templated, row) == ["fine</s>"]


def test_tools_and_template_options_of_a_row(tokenizer, tmp_path):
    templated = get_chat_template(tokenizer, "qwen-3")
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    rows = conversation_rows("hello", "fine", tools=json.dumps(tools), chat_template_kwargs={"enable_thinking": False})
    row = train_on_responses_only(sft(templated, rows, tmp_path, max_length=2048)).train_dataset[0]
    assert "# Tools" in templated.decode(row["input_ids"])
    assert trained(templated, row) == [f"{EMPTY_THOUGHT}fine<|im_end|>".removeprefix(EMPTY_THOUGHT)]


def test_streams_of_conversations(tokenizer, tmp_path, caplog):
    templated = get_chat_template(tokenizer, "chatml")
    rows = datasets.concatenate_datasets([conversation_rows("hello", "fine", n=3), conversation_rows("hello")])
    trainer = train_on_responses_only(sft(templated, rows.to_iterable_dataset(), tmp_path))
    assert [trained(templated, row) for row in trainer.train_dataset] == [["fine<|im_end|>"]] * 3
    assert "1 of the first 4 read of train_dataset" in caplog.text
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0.1
    with pytest.raises(ValueError, match="no label is left in the first 1 rows"):
        train_on_responses_only(sft(templated, rows.select([3]).to_iterable_dataset(), tmp_path))


def test_prompt_and_completion(tokenizer, tmp_path):
    """The prompt's own answers stay as the trainer masked them."""
    templated = get_chat_template(tokenizer, "chatml")
    data = {"prompt": [turns("hello", "fine", "two")], "completion": [turns("", "three")[1:]]}
    for only, expected in ((True, ["three<|im_end|>"]), (False, ["fine<|im_end|>", "three<|im_end|>"])):
        trainer = sft(templated, datasets.Dataset.from_dict(data), tmp_path, completion_only_loss=only)
        assert trained(templated, train_on_responses_only(trainer).train_dataset[0]) == expected


def test_rows_that_are_not_their_conversation(tokenizer, tmp_path):
    """Somebody else's tokens: found by markers if the template has them, refused if not."""
    templated = get_chat_template(tokenizer, "chatml")
    ids = tokenizer(TWO_TURNS, add_special_tokens=False)["input_ids"]
    row = {"messages": turns("a", "b"), "input_ids": ids}
    labels = function(templated, None, None)(row)["labels"]
    assert trained(templated, row | {"labels": labels}) == ["fine.<|im_end|>", "three four<|im_end|>"]
    # without its last answer, which no marker would find
    templated.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    trainer = sft(templated, datasets.Dataset.from_list([row]), tmp_path)
    with pytest.raises(ValueError, match="is not what the chat template makes of its conversation"):
        train_on_responses_only(trainer)


def test_the_template_that_the_trainer_chose(tokenizer, tmp_path):
    """assistant_only_loss=True swaps Qwen3's own template for TRL's, which renders in another way."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = (importlib.resources.files("trl") / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    trainer = sft(own, conversation_rows("hello", "fine", "two", "three"), tmp_path, assistant_only_loss=True)
    row = train_on_responses_only(trainer).train_dataset[0]
    assert trained(own, row) == [f"{EMPTY_THOUGHT}fine<|im_end|>", f"{EMPTY_THOUGHT}three<|im_end|>"]
