"""Vocabularies in GGUF: tokens, kinds, merges, scores and names of pre-tokenizers; the Modelfile's template and stop tokens."""

import hashlib
import json
from types import SimpleNamespace

import pytest
from exported import tokenizer as word_tokenizer
from gguf_models import CHATML, CORPUS, SPECIAL, byte_level, fields, model, sentencepiece
from tokenizers import AddedToken, normalizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from fastlm.chat_templates import get_chat_template
from fastlm.export import gguf_modelfile, gguf_pre
from fastlm.export.gguf import save_pretrained_gguf
from fastlm.export.gguf_vocab import read_vocabulary, safe_title

LLAMA_3 = PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START, REST = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}|{REST}"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = rf"{START}{UPPER}*{LOWER}+{SHORT}|{START}{UPPER}+{LOWER}*{SHORT}|\p{{N}}{{1,3}}|{REST}"


def read(tokenizer, n_rows=448, end_ids=()):
    return read_vocabulary(tokenizer, n_rows, list(end_ids))


@pytest.mark.parametrize(
    ("splits", "ignore_merges", "name"),
    [
        (None, False, "gpt-2"),
        ([0], False, "smollm"),
        ([PRETOKENIZE_REGEX], False, "qwen2"),
        ([LLAMA_3], True, "llama-bpe"),
        ([LLAMA_3], False, "dbrx"),
        ([TEKKEN], True, "tekken"),
        ([GPT_4O], False, "gpt-4o"),
    ],
)
def test_pre_tokenizers_by_their_splits(splits, ignore_merges, name):
    assert read(byte_level(splits, ignore_merges=ignore_merges)).pre == name


def test_pre_tokenizers_by_what_they_make_of_a_text(monkeypatch):
    odd = byte_level([r"\d|\D+"])
    with pytest.raises(ValueError, match=r"no name for: \['\\\\d\|\\\\D\+'\].*save_pretrained_merged"):
        read(odd)
    ids = odd(gguf_pre._TEXT)["input_ids"]
    monkeypatch.setitem(gguf_pre._BY_DIGEST, hashlib.sha256(str(ids).encode()).hexdigest(), "known")
    assert read(odd).pre == "known"


def test_byte_level_vocabulary(caplog):
    tokenizer = byte_level(normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<|mark|>", special=False), AddedToken("two words", special=False)])
    before = tokenizer.backend_tokenizer.to_str()
    found = read(tokenizer, end_ids=[2, 5])
    assert tokenizer.backend_tokenizer.to_str() == before and not caplog.text
    assert found.model == "gpt2" and found.scores is None and found.adds_prefix is None
    plain = json.loads(before)["model"]
    assert found.merges == [" ".join(pair) for pair in plain["merges"]]
    assert len(found.tokens) == len(found.kinds) == 448
    assert found.tokens[:6] == SPECIAL and found.kinds[:6] == [3] * 6
    assert {token: found.tokens.index(token) for token in plain["vocab"]} == plain["vocab"]
    assert set(found.kinds[6:400]) == {1}
    assert found.tokens[400:403] == ["<|mark|>", "two words", "[PAD402]"] and found.kinds[400:403] == [3, 4, 5]
    # the end of a turn by the generation settings, beside the tokenizer's own end
    assert found.special == {"bos": 1, "eos": 2, "unknown": 0, "padding": 3, "eot": 5}
    assert found.adds == {"bos": False, "eos": False} and found.template == CHATML
    read(byte_level(normalizer=normalizers.Lowercase()))
    assert "normalizer (Lowercase) has no form" in caplog.text


def test_an_added_token_without_a_row_is_left_out(caplog):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<image_soft_token>", special=True)])
    found = read(tokenizer, n_rows=400)
    assert len(found.tokens) == 400 and "<image_soft_token>" not in found.tokens
    assert "left out: '<image_soft_token>'" in caplog.text
    with pytest.raises(ValueError, match="tokens up to 400 .*has 399 rows"):
        read(tokenizer, n_rows=399)


def by_scores(text, vocabulary):
    """llama.cpp's way over one text: the neighbours whose union has the highest score become one, the leftmost first."""
    score = {
        token: value
        for token, value, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True)
        if kind == 1
    }
    pieces = list(("▁" if vocabulary.adds_prefix else "") + text.replace(" ", "▁"))
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in score]
        if not pairs:
            break
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        token for piece in pieces for token in ([piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_give_the_order_of_merges(prefix):
    tokenizer = sentencepiece(prefix=prefix)
    found = read(tokenizer)
    assert (found.model, found.pre, found.merges, found.adds_prefix) == ("llama", "default", None, prefix)
    assert found.adds == {"bos": True, "eos": False}
    assert found.kinds[0] == 2 and found.kinds[1:6] == [3] * 5 and found.kinds[6:262] == [6] * 256
    for text in (*CORPUS[:5], "Unseen words: zebra-crossing, 我想!", "a  b   c", "xyzzy quux"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert by_scores(text, found) == tokenizer.convert_ids_to_tokens(ids), text


def test_template_by_name_and_processors(tmp_path):
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ messages }}"}
    (file,) = save_pretrained_gguf(model("llama"), tmp_path, tokenizer, "q8_0")
    found = fields(file)
    assert found["tokenizer.chat_template"] == CHATML and found["tokenizer.chat_template.tool_use"] == "{{ messages }}"
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.tokens"][:6] == SPECIAL and len(found["tokenizer.ggml.tokens"]) == 448
    assert found["tokenizer.ggml.eos_token_id"] == 2 and found["tokenizer.ggml.add_bos_token"] is False


def test_tokenizers_without_a_form():
    with pytest.raises(ValueError, match="kind WordLevel has no form in GGUF"):
        read(word_tokenizer())
    with pytest.raises(TypeError, match="got SimpleNamespace"):
        read(SimpleNamespace())


# --- Modelfile ---

LLAMA_3_FILE = '''FROM ./tiny.Q4_K_M.gguf
TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|start_header_id|>system<|end_header_id|>

{{ .Content }}<|eot_id|>{{ else if eq .Role "user" }}<|start_header_id|>user<|end_header_id|>

{{ .Content }}<|eot_id|>{{ else if eq .Role "assistant" }}<|start_header_id|>assistant<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}{{ end }}<|start_header_id|>assistant<|end_header_id|>

"""
PARAMETER stop "</s>"
PARAMETER stop "<|im_end|>"
'''


def test_a_modelfile():
    tokenizer = get_chat_template(byte_level(), "llama-3")
    assert gguf_modelfile.modelfile("tiny.Q4_K_M.gguf", tokenizer, True, [2, 5]) == LLAMA_3_FILE


def go(template, messages):
    """What Go makes of a template of the few forms that are written: texts, range, if, and quoted strings."""
    head, _, rest = template.partition("{{ range .Messages }}")
    body, _, prompt = rest.rpartition("{{ end }}{{ end }}")
    default = head.partition('"system" }}')[2].removesuffix("{{ end }}")
    assert head == (f'{{{{ if ne (index .Messages 0).Role "system" }}}}{default}{{{{ end }}}}' if default else "")
    branches = {}
    for part in body.replace("{{ else if", "{{ if").split("{{ if eq .Role ")[1:]:
        role, _, text = part.partition(" }}")
        branches[json.loads(role)] = text
    made = "" if messages[0]["role"] == "system" else default
    for message in messages:
        made += branches[message["role"]].replace("{{ .Content }}", message["content"])
    return made + prompt


@pytest.mark.parametrize(
    "name", ["chatml", "llama-3.1", "mistral", "qwen-2.5", "gemma-3", "phi-4", "granite", "smollm2", "zephyr"]
)
def test_go_templates_render_what_jinja_does(name):
    tokenizer = get_chat_template(byte_level(), name)
    texts = gguf_modelfile.find_texts(tokenizer, adds_bos=True)
    turns = [("user", "Hi?"), ("assistant", "Yes, in\n\ntwo lines."), ("user", "Go on.")]
    conversations = [turns[:1], turns]
    if texts.system is not None:
        conversations += [[("system", "Be short."), *turns]]
    for turns in conversations:
        messages = [{"role": role, "content": content} for role, content in turns]
        jinja = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert go(gguf_modelfile.go_template(texts), messages) == jinja.removeprefix("<s>")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}. {{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}[{{ m.content | trim }}]{{ m.content | length }}{% endfor %}",
    ],
)
def test_templates_that_compute_are_left_to_the_file(template, caplog):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    text = gguf_modelfile.modelfile("a.gguf", tokenizer, False, [])
    assert text.splitlines()[1] == "# the chat template is the one inside the GGUF file" and "TEMPLATE" not in text
    assert "more than texts around messages" in caplog.text


def test_the_begin_token_is_left_out_where_it_is_added():
    """SmolLM2's begin token is also that of a turn, and not added."""
    tokenizer = byte_level()
    tokenizer.bos_token = "<|im_start|>"
    assert gguf_modelfile.find_texts(tokenizer, adds_bos=False).user == ("<|im_start|>user\n", "<|im_end|>\n")
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    assert gguf_modelfile.find_texts(tokenizer, adds_bos=True).default == ""
    assert gguf_modelfile.find_texts(tokenizer, adds_bos=False).default == "<s>"


def test_names_that_llama_cpp_reads_as_phi_3():
    tokenizer = byte_level()
    assert safe_title("my-Phi-3-tune", tokenizer) == "my-Phi-tune" and safe_title("phi4", tokenizer) == "phi4"
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|end|>", rstrip=True), AddedToken("<|endoftext|>")]}
    )
    assert safe_title("tune", tokenizer) == "tune (Phi-3)" and safe_title("Phi-3-tune", tokenizer) == "Phi-3-tune"


def test_braces_in_a_template_are_quoted():
    assert gguf_modelfile._go("a { b }") == "a { b }"
    assert gguf_modelfile._go("a {{ b }}") == '{{ "a {{ b }}" }}'


def test_no_template_no_line():
    tokenizer = byte_level()
    tokenizer.chat_template = None
    assert gguf_modelfile.modelfile("a.gguf", tokenizer, False, []) == 'FROM ./a.gguf\nPARAMETER stop "</s>"\n'
