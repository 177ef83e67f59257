"""The chat templates: exact renderings, marks, and the copy of a tokenizer that carries one."""

import datetime
import hashlib
import importlib.resources
import logging
import re
from pathlib import Path

import pytest
from chats import ANSWER, EMPTY_THOUGHT, USER, chat, make_tokenizer, trained, turns
from golden_masks import DATE, GOLDEN, LLAMA, THINKING, TOOLS, TWO_TURNS, answers, marked, thinking, tool_use
from transformers import AutoTokenizer

from fastlm import tokenization
from fastlm.chat_templates import get_chat_template
from fastlm.chat_templates.spans import AnswerSpans
from fastlm.chat_templates.templates import TEMPLATES


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def plain(labelled):
    """A labelled text without its labels, and of today."""
    today = datetime.date.today().isoformat()
    return labelled.replace("⟦", "").replace("⟧", "").replace("Current date: DATE", f"Current date: {today}")


def test_every_template_is_labelled():
    assert set(TWO_TURNS) == set(TEMPLATES)


@pytest.mark.parametrize(("kind", "name", "messages", "labelled"), GOLDEN, ids=[f"{g[0]}-{g[1]}" for g in GOLDEN])
def test_rendering_and_marks(tokenizer, kind, name, messages, labelled):
    templated = get_chat_template(tokenizer, name)
    text, spans = AnswerSpans(templated)(messages)
    assert marked(text, spans) == labelled
    assert templated.apply_chat_template(messages, tokenize=False) == plain(labelled)
    # transformers' own mask, which assistant_only_loss=True trains, holds every answer; what it holds beside them is
    # the header, which the prompt holds too, and white space
    row = templated.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    labels = [token if mask else -100 for token, mask in zip(row["input_ids"], row["assistant_masks"], strict=True)]
    runs = trained(templated, {"input_ids": row["input_ids"], "labels": labels})
    for run, answer in zip(runs, answers(labelled), strict=True):
        before, _, after = run.partition(answer)
        assert answer in run and not after.strip()
        assert before in ("", "\n", "<think>\n", "<｜Assistant｜>", "<｜Assistant｜><think>\n", "<|start|>assistant")


@pytest.mark.parametrize(("kind", "name", "messages", "labelled"), GOLDEN, ids=[f"{g[0]}-{g[1]}" for g in GOLDEN])
def test_answers_without_marks(tokenizer, kind, name, messages, labelled):
    """The differences between renderings tell the same answers as the marks."""
    templated = get_chat_template(tokenizer, name)
    without = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", templated.chat_template)
    text, spans = AnswerSpans(templated, without)(messages)
    if kind == "tool_use" and name == "deepseek-v3":
        # nothing but a mark tells that the model closes the results of its tools
        labelled = labelled.replace("⟦<｜tool▁outputs▁end｜>", "<｜tool▁outputs▁end｜>⟦")
    assert marked(text, spans) == labelled


ORIGINALS = {row.body: name for name, row in TEMPLATES.items() if row.is_trl}


@pytest.mark.parametrize("body", [*ORIGINALS, "llama3_1", "llama3_2"])
def test_renderings_are_those_of_the_models_own_templates(tokenizer, body):
    """TRL ships the originals; what training templates change is the thinking of earlier turns and a last end token."""
    name = ORIGINALS.get(body, "llama-3.1")
    original = (importlib.resources.files("trl") / f"chat_templates/{body}.jinja").read_text(encoding="utf-8")
    templated = get_chat_template(tokenizer, name, map_eos_token=False)
    # for the originals that write the end token: what these models call it
    eos = {"eos_token": "<|endoftext|>"} if name.startswith("phi") else {}
    for words in (("U1", "A1"), ("U1",), (" U1 ", " A1 ")):
        messages = turns(*words, system=None if name == "gemma" else "S")
        for is_prompt in {len(words) == 1, False}:
            options = {"date_string": "26 Jul 2024", "add_generation_prompt": is_prompt, "tokenize": False}
            expected = templated.apply_chat_template(messages, chat_template=original, **options, **eos)
            made = templated.apply_chat_template(messages, **options)
            # TRL lets the answer end with the next turn's token, which is what this model stops at
            assert made.removesuffix("<|user|>" if name == "glm-4.5" else "") == expected


def test_answers_where_turns_render_in_another_way_later(tokenizer):
    """Qwen3's own template drops the thoughts of earlier turns, so no earlier rendering begins the whole one."""
    original = (importlib.resources.files("trl") / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    text, spans = AnswerSpans(tokenizer, original)(thinking("qwen-3"))
    assert marked(text, spans) == THINKING["qwen-3"].replace("<think>\nT1\n</think>\n\n", "")


def test_gemma_has_no_system(tokenizer):
    gemma, gemma3 = get_chat_template(tokenizer, "gemma"), get_chat_template(tokenizer, "Gemma3")
    for options in ({}, {"add_generation_prompt": True}):
        texts = [each.apply_chat_template(turns("U", "A", "V"), tokenize=False, **options) for each in (gemma, gemma3)]
        assert texts[0] == texts[1]
    assert texts[0] == (
        "<s><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(Exception, match="System role not supported"):
        gemma.apply_chat_template(turns("U", system="S"), tokenize=False)


DEFAULT_SYSTEMS = {
    "qwen2.5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    + USER,
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    + USER,
    "llama-3.2": "<s>" + LLAMA("system") + DATE + "<|eot_id|>" + LLAMA("user"),
    "vicuna": "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: ",
    "alpaca": "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n",
    "chatml": USER,
    "qwen3": USER,
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\n",
    "mistral": "<s>[INST] ",
}


@pytest.mark.parametrize("name", DEFAULT_SYSTEMS)
def test_conversation_without_system(tokenizer, name):
    templated = get_chat_template(tokenizer, name)
    assert (
        templated.apply_chat_template(turns("U"), tokenize=False).split("U")[0] == DEFAULT_SYSTEMS[name].split("U")[0]
    )
    assert templated.apply_chat_template(turns("Q"), tokenize=False).startswith(DEFAULT_SYSTEMS[name] + "Q")


def test_reasoning(tokenizer):
    templated = get_chat_template(tokenizer, "qwen3")
    expected = "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nA<|im_end|>\n"
    messages = turns("U", "<think>\nwhy\n</think>\n\nA")
    assert templated.apply_chat_template(messages, tokenize=False).endswith(expected)
    messages = [*turns("U"), {"role": "assistant", "content": "A", "reasoning_content": "why"}]
    assert templated.apply_chat_template(messages, tokenize=False).endswith(expected)
    prompt = templated.apply_chat_template(
        turns("U"), tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert prompt.endswith(ANSWER + EMPTY_THOUGHT)


@pytest.mark.parametrize("name", [name for name, row in TEMPLATES.items() if row.has_tools])
def test_roles_and_contents_that_a_template_cannot_write_raise(tokenizer, name):
    templated = get_chat_template(tokenizer, name)
    for message in (
        {"role": "narrator", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
        {"role": "user", "content": None},
    ):
        with pytest.raises(Exception, match=r"role must be|content must be"):
            templated.apply_chat_template([*turns("U", "A"), message], tokenize=False)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "qwen-3"])
def test_keys_that_a_data_set_filled_with_none(tokenizer, name):
    templated = get_chat_template(tokenizer, name)
    filled = [{"tool_calls": None, "thinking": None, "reasoning_content": None} | m for m in turns("U", "A")]
    expected = templated.apply_chat_template(turns("U", "A"), tokenize=False)
    assert templated.apply_chat_template(filled, tokenize=False) == expected


@pytest.mark.parametrize("name", [name for name, row in TEMPLATES.items() if row.has_tools])
def test_tool_calls_alone(tokenizer, name):
    """No content, None and an empty one are the same."""
    templated = get_chat_template(tokenizer, name)
    messages = tool_use(name)
    made = []
    for content in ({}, {"content": None}, {"content": ""}):
        call = {key: value for key, value in messages[1].items() if key != "content"} | content
        made.append(templated.apply_chat_template([messages[0], call, *messages[2:]], tokenize=False))
    assert made == [plain(TOOLS[name])] * 3


@pytest.mark.parametrize("name", [name for name, row in TEMPLATES.items() if not row.has_tools])
def test_messages_that_a_template_cannot_write_raise(tokenizer, name):
    templated = get_chat_template(tokenizer, name)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for messages, options in (
        (turns("U"), {"tools": tools}),
        ([*turns("U"), call], {}),
        ([*turns("U", "A"), {"role": "tool", "content": "4"}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "U"}]}], {}),
        ([{"role": "user", "content": None}], {}),
    ):
        with pytest.raises(Exception, match=r"writes no tools|role must be|content must be"):
            templated.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("name", ["mistral", "gemma-3", "vicuna", "alpaca"])
def test_turns_must_alternate(tokenizer, name):
    templated = get_chat_template(tokenizer, name)
    for messages in (turns("U") * 2, turns("U", "A") + turns(system="S")):
        with pytest.raises(Exception, match="in turn|must alternate"):
            templated.apply_chat_template(messages, tokenize=False)


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def test_the_given_tokenizer_stays_as_it_is(tmp_path):
    given = make_tokenizer()
    given.chat_template = "{{ messages }}"
    given.save_pretrained(tmp_path / "before")
    vocabulary, text = given.get_vocab(), "hello <|im_start|>user\n<|im_end|></s>"
    templated = get_chat_template(given, "chatml")
    given.save_pretrained(tmp_path / "after")
    assert hashes(tmp_path / "before") == hashes(tmp_path / "after")
    assert (given.chat_template, given.eos_token) == ("{{ messages }}", "</s>")
    templated.save_pretrained(tmp_path / "copy")
    for each in (templated, AutoTokenizer.from_pretrained(tmp_path / "copy")):
        assert (each.eos_token, each.pad_token, each.bos_token) == ("<|im_end|>", "<pad>", "<s>")
        assert each.get_vocab() == vocabulary
        assert each(text)["input_ids"] == given(text)["input_ids"]
        assert each.apply_chat_template(turns("U", "A"), tokenize=False) == chat(("user", "U"), ("assistant", "A"))


def test_end_of_turn_becomes_end_token_only_if_the_vocabulary_has_it(tokenizer, caplog):
    assert get_chat_template(tokenizer, "llama-3").eos_token == "<|eot_id|>"
    assert get_chat_template(tokenizer, "llama-3").eos_token_id == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert get_chat_template(tokenizer, "llama-3", map_eos_token=False).eos_token == "</s>"
    assert get_chat_template(tokenizer, "zephyr").eos_token == "</s>"
    assert not caplog.records
    missing = get_chat_template(tokenizer, "phi-3")
    assert missing.eos_token == "</s>" and len(missing) == len(tokenizer)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "<|end|>" in caplog.text


def test_own_template(tokenizer):
    own = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    templated = get_chat_template(tokenizer, (own, "<|im_end|>"), system_message='a "b" {{ c }} %} \\ é\n')
    assert templated.apply_chat_template(turns("U"), tokenize=False) == (
        'system:a "b" {{ c }} %} \\ é\n<|im_end|>user:U<|im_end|>'
    )
    assert templated.apply_chat_template(turns("U", system="S"), tokenize=False) == "system:S<|im_end|>user:U<|im_end|>"
    assert templated.eos_token == "<|im_end|>"
    assert get_chat_template(tokenizer, (own, None)).eos_token == "</s>"


def test_system_message_replaces_the_templates_own(tokenizer):
    templated = get_chat_template(tokenizer, "qwen-2.5", system_message="X")
    assert templated.apply_chat_template(turns("U"), tokenize=False) == chat(("system", "X"), ("user", "U"))
    assert templated.apply_chat_template(turns("U", system="S"), tokenize=False) == chat(("system", "S"), ("user", "U"))


@pytest.mark.parametrize("name", ["chatml", "mistral", "llama-3.1"])
def test_mapping(tokenizer, name):
    names = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    templated = get_chat_template(tokenizer, name, mapping=names)
    plain = get_chat_template(tokenizer, name)
    standard = turns("U", "A", "V", system="S")
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
        for m in standard
    ]
    expected = plain.apply_chat_template(standard, tokenize=False, add_generation_prompt=True)
    for messages in (shared, standard):
        assert templated.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    names = {"role": "NAMES", "content": "CONTENT ROLE"}
    templated = get_chat_template(tokenizer, name, mapping=names)
    messages = [{"NAMES": m["role"], "CONTENT ROLE": m["content"]} for m in standard]
    assert templated.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", ["chatml", "alpaca", "llama-3"])
def test_one_begin_token(name):
    """Where the tokenizer puts a begin token before plain text, a chat has one, rendered or not."""
    tokenizer = make_tokenizer(add_bos=True)
    tokenization.one_begin_token(tokenizer)
    templated = get_chat_template(tokenizer, name)
    text = templated.apply_chat_template(turns("one"), tokenize=False)
    ids = templated.apply_chat_template(turns("one"), return_dict=False)
    assert ids == templated(text)["input_ids"]
    assert ids[0] == 1 and ids.count(1) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"chat_template": "no-such"}, ValueError, "unknown chat template 'no-such'.*chatml.*llama-3.2"),
        ({"chat_template": ("{{ x }}",)}, ValueError, "pair"),
        ({"chat_template": 3}, TypeError, "int"),
        ({"mapping": {"rôle": "from"}}, ValueError, "'role', 'content', 'user', 'assistant'"),
        ({"mapping": {"role": "content"}}, ValueError, "one name"),
        ({"mapping": {"role": None}}, ValueError, "a name for each"),
    ],
)
def test_wrong_arguments(tokenizer, arguments, error, words):
    with pytest.raises(error, match=words):
        get_chat_template(tokenizer, **arguments)
    with pytest.raises(TypeError, match="str"):
        get_chat_template("a tokenizer")
