"""Jinja of the chat templates that no library ships with `{% generation %}` marks, written here from the formats.

They write text only: system, user and assistant, no tools, no images. The mark of an assistant turn encloses what the
model has to write: its content and its end-of-turn token.
"""

from __future__ import annotations

import re


def fill(text: str, **values: str) -> str:
    """Replaces names in capitals by Jinja expressions, in one pass: what was filled in is left alone."""
    return re.sub(r"\b[A-Z]+\b", lambda match: values.get(match[0], match[0]), text)


def headed(before: str, after: str, stop: str, tail: str, content: str = "message['content']") -> str:
    """Turns of the form before + role + after + content + stop + tail; each argument is a Jinja expression."""
    body = r"""
{%- for message in messages %}
    {{- BEFORE + message['role'] + AFTER }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- CONTENT + STOP }}
        {%- endgeneration %}
    {%- else %}
        {{- CONTENT + STOP }}
    {%- endif %}
    {{- TAIL }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- BEFORE + 'assistant' + AFTER }}
{%- endif %}"""
    return fill(body, BEFORE=before, AFTER=after, CONTENT=content, STOP=stop, TAIL=tail)


BEGIN = "{{- bos_token }}"

# takes the system turn out of messages, for formats that write it elsewhere
TAKE_SYSTEM = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}"""

_ALTERNATE = r"""
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] == 'system' %}
        {{- raise_exception('this template wants an optional system message, then user and assistant in turn') }}
    {%- endif %}"""

CHATML = headed("'<|im_start|>'", r"'\n'", "'<|im_end|>'", r"'\n'")

LLAMA3 = headed(
    "'<|start_header_id|>'", r"'<|end_header_id|>\n\n'", "'<|eot_id|>'", "''", content="message['content'] | trim"
)

# the date is a constant (the template's own default), so that rows do not change from day to day
LLAMA31_SYSTEM = r"""
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}
{{- (date_string if date_string is defined else '26 Jul 2024') + '\n\n' + system | trim + '<|eot_id|>' }}"""

# as mistral-common does for this version, the system text goes with the last user message
MISTRAL = (
    r"""
{%- set last_user = (messages | length - 1) // 2 * 2 %}
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- ' ' + message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '[INST] ' + (system + '\n\n' if loop.index0 == last_user and system else '') }}
        {{- message['content'] + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
)

VICUNA = (
    r"""
{{- system + ' ' }}
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {{- 'ASSISTANT:' }}
        {%- generation %}
            {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- 'USER: ' + message['content'] + ' ' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT:' }}
{%- endif %}"""
)

ALPACA = (
    r"""
{{- system + '\n\n' }}
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {{- '### Response:\n' }}
        {%- generation %}
            {{- message['content'] + eos_token }}
        {%- endgeneration %}
        {{- '' if loop.last else '\n\n' }}
    {%- else %}
        {{- '### Instruction:\n' + message['content'] + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '### Response:\n' }}
{%- endif %}"""
)

PHI4 = headed("'<|im_start|>'", "'<|im_sep|>'", "'<|im_end|>'", "''")

ZEPHYR = headed("'<|'", r"'|>\n'", "eos_token", r"'\n'")

GRANITE = headed("'<|start_of_role|>'", "'<|end_of_role|>'", "'<|end_of_text|>'", r"'\n'")

# the versions of Mistral's format with a system turn of its own
MISTRAL_V7 = r"""
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- else %}
        {%- generation %}
            {{- message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}"""
