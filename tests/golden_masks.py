"""What each chat template writes of fixed conversations, with what the model has to write in ⟦…⟧: labelled by hand.

An answer begins where the generation prompt ends (so `<think>` is the model's own only where no prompt holds it) and ends
with its end-of-turn token. Questions, system texts, tools and their results, and white space between turns are not its.
"""

import re

from chats import EMPTY_THOUGHT, turns

LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n".format
DATE = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
CHATML = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦A1<|im_end|>⟧\n"
    "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n⟦A2<|im_end|>⟧\n"
)
PHI = (
    "<|system|>\nS<|end|>\n<|user|>\nU1<|end|>\n<|assistant|>\n⟦A1<|end|>⟧\n"
    "<|user|>\nU2<|end|>\n<|assistant|>\n⟦A2<|end|>\n<|endoftext|>⟧"
)
DEEPSEEK = (
    "<s>S<｜User｜>U1<｜Assistant｜>⟦A1<｜end▁of▁sentence｜>⟧<｜User｜>U2<｜Assistant｜>⟦A2<｜end▁of▁sentence｜>⟧"
)
# of today, as TRL's template writes it
HARMONY_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: DATE\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)

# S system, U1 A1 U2 A2; gemma has no system
TWO_TURNS = {
    "chatml": CHATML,
    "smollm2": CHATML,
    "qwen-2.5": CHATML,
    "qwen-3-instruct": CHATML,
    "qwen-3": CHATML.replace("⟦", "⟦" + EMPTY_THOUGHT),
    "qwen-3.5": CHATML.replace("⟦", "<think>\n⟦\n</think>\n\n"),
    "lfm-2": "<s>" + CHATML,
    "llama-3": (
        f"<s>{LLAMA('system')}S<|eot_id|>{LLAMA('user')}U1<|eot_id|>{LLAMA('assistant')}⟦A1<|eot_id|>⟧"
        f"{LLAMA('user')}U2<|eot_id|>{LLAMA('assistant')}⟦A2<|eot_id|>⟧"
    ),
    "llama-3.1": (
        f"<s>{LLAMA('system')}{DATE}S<|eot_id|>{LLAMA('user')}U1<|eot_id|>{LLAMA('assistant')}⟦A1<|eot_id|>⟧"
        f"{LLAMA('user')}U2<|eot_id|>{LLAMA('assistant')}⟦A2<|eot_id|>⟧"
    ),
    "mistral": "<s>[INST] U1[/INST]⟦ A1</s>⟧[INST] S\n\nU2[/INST]⟦ A2</s>⟧",
    "mistral-v7": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U1[/INST]⟦A1</s>⟧[INST]U2[/INST]⟦A2</s>⟧",
    "gemma": (
        "<s><start_of_turn>user\nU1<end_of_turn>\n<start_of_turn>model\n⟦A1<end_of_turn>⟧\n"
        "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n⟦A2<end_of_turn>⟧\n"
    ),
    "gemma-3": (
        "<s><start_of_turn>user\nS\n\nU1<end_of_turn>\n<start_of_turn>model\n⟦A1<end_of_turn>⟧\n"
        "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n⟦A2<end_of_turn>⟧\n"
    ),
    "phi-3": PHI,
    "phi-3.5": PHI,
    "phi-4": (
        "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U1<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦A1<|im_end|>⟧<|im_start|>user<|im_sep|>U2<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦A2<|im_end|>⟧"
    ),
    "zephyr": (
        "<|system|>\nS</s>\n<|user|>\nU1</s>\n<|assistant|>\n⟦A1</s>⟧\n<|user|>\nU2</s>\n<|assistant|>\n⟦A2</s>⟧\n"
    ),
    "vicuna": "<s>S USER: U1 ASSISTANT:⟦ A1</s>⟧USER: U2 ASSISTANT:⟦ A2</s>⟧",
    "alpaca": (
        "S\n\n### Instruction:\nU1\n\n### Response:\n⟦A1</s>⟧\n\n### Instruction:\nU2\n\n### Response:\n⟦A2</s>⟧"
    ),
    "granite": (
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>U1<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦A1<|end_of_text|>⟧\n"
        "<|start_of_role|>user<|end_of_role|>U2<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦A2<|end_of_text|>⟧\n"
    ),
    "gpt-oss": (
        f"{HARMONY_SYSTEM}<|end|><|start|>developer<|message|># Instructions\n\nS\n\n<|end|>"
        "<|start|>user<|message|>U1<|end|><|start|>assistant⟦<|channel|>final<|message|>A1<|end|>⟧"
        "<|start|>user<|message|>U2<|end|><|start|>assistant⟦<|channel|>final<|message|>A2<|return|>⟧"
    ),
    "deepseek-r1": DEEPSEEK,
    "deepseek-v3": DEEPSEEK,
    "glm-4.5": (
        "[gMASK]<sop><|system|>\nS<|user|>\nU1<|assistant|>⟦\n<think></think>\nA1<|user|>⟧\nU2"
        "<|assistant|>⟦\n<think></think>\nA2<|user|>⟧"
    ),
    "aya": (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U1<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦A1<|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U2<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦A2<|END_OF_TURN_TOKEN|>⟧"
    ),
}

# U1, A1 thought over with T1, U2, A2 thought over with T2
THOUGHT = "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦<think>\nT1\n</think>\n\nA1<|im_end|>⟧\n"
THOUGHT += THOUGHT.replace("1", "2")
THINKING = {
    "qwen-3": THOUGHT,
    "qwen-3.5": THOUGHT.replace("⟦<think>\n", "<think>\n⟦"),
    "deepseek-r1": (
        "<s><｜User｜>U1<｜Assistant｜><think>\n⟦T1\n</think>\n\nA1<｜end▁of▁sentence｜>⟧"
        "<｜User｜>U2<｜Assistant｜><think>\n⟦T2\n</think>\n\nA2<｜end▁of▁sentence｜>⟧"
    ),
    # what was thought in earlier turns is not written
    "glm-4.5": (
        "[gMASK]<sop><|user|>\nU1<|assistant|>⟦\n<think></think>\nA1<|user|>⟧\nU2"
        "<|assistant|>⟦\n<think>T2</think>\nA2<|user|>⟧"
    ),
    "gpt-oss": (
        f"{HARMONY_SYSTEM}<|end|>"
        "<|start|>user<|message|>U1<|end|><|start|>assistant⟦<|channel|>final<|message|>A1<|end|>⟧"
        "<|start|>user<|message|>U2<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>T2<|end|><|start|>assistant<|channel|>final<|message|>A2<|return|>⟧"
    ),
}

# U1, a call of f with a = 1, its result R1, A1
HERMES = (
    '<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    "<|im_end|>⟧\n<|im_start|>user\n<tool_response>\nR1\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n⟦A1<|im_end|>⟧\n"
)
TOOLS = {
    "qwen-2.5": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n" + HERMES
    ),
    "qwen-3-instruct": HERMES,
    "qwen-3": HERMES.replace("⟦", "⟦" + EMPTY_THOUGHT),
    "qwen-3.5": HERMES.replace("⟦", "<think>\n⟦\n</think>\n\n").replace(
        '{"name": "f", "arguments": {"a": 1}}\n', "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    ),
    "lfm-2": (
        "<s><|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦<|tool_call_start|>[f(a=1)]<|tool_call_end|><|im_end|>⟧\n"
        "<|im_start|>tool\n<|tool_response_start|>R1<|tool_response_end|><|im_end|>\n"
        "<|im_start|>assistant\n⟦A1<|im_end|>⟧\n"
    ),
    "glm-4.5": (
        "[gMASK]<sop><|user|>\nU1<|assistant|>⟦\n<think></think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "</tool_call><|observation|>⟧\n<tool_response>\nR1\n</tool_response>"
        "<|assistant|>⟦\n<think></think>\nA1<|user|>⟧"
    ),
    "deepseek-v3": (
        "<s><｜User｜>U1<｜Assistant｜>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>⟦<｜tool▁outputs▁end｜>A1<｜end▁of▁sentence｜>⟧"
    ),
    "gpt-oss": (
        f"{HARMONY_SYSTEM}<|end|><|start|>user<|message|>U1<|end|>"
        '<|start|>assistant⟦ to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>⟧'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"R1"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>A1<|return|>⟧"
    ),
}

CALL = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def two_turns(name):
    return turns("U1", "A1", "U2", "A2", system=None if name == "gemma" else "S")


def thinking(name):
    messages = turns("U1", "A1", "U2", "A2")
    for answer, thought in zip(messages[1::2], ("T1", "T2"), strict=True):
        if name == "deepseek-r1":
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
        else:
            answer["thinking" if name == "gpt-oss" else "reasoning_content"] = thought
    return messages


def tool_use(_):
    call = {"role": "assistant", "content": "", "tool_calls": CALL}
    return [*turns("U1"), call, {"role": "tool", "name": "f", "content": "R1"}, *turns("", "A1")[1:]]


GOLDEN = [
    (kind.__name__, name, kind(name), text)
    for kind, texts in ((two_turns, TWO_TURNS), (thinking, THINKING), (tool_use, TOOLS))
    for name, text in texts.items()
]


def marked(text, spans):
    """A text with ⟦…⟧ around spans; the date of today is DATE."""
    pieces, here = [], 0
    for start, end in spans:
        pieces += [text[here:start], "⟦", text[start:end], "⟧"]
        here = end
    return re.sub(r"(?<=Current date: )\d{4}-\d\d-\d\d", "DATE", "".join([*pieces, text[here:]]))


def answers(labelled):
    """What is in ⟦…⟧."""
    return re.findall("⟦(.*?)⟧", labelled, flags=re.DOTALL)
