"""What `fastlm train` reads: a YAML file whose sections are the arguments of the Python functions."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = """\
model:                      # FastLanguageModel.from_pretrained
  model_name: Qwen/Qwen3-0.6B
  max_seq_length: 2048
  load_in_4bit: true
lora:                       # FastLanguageModel.get_peft_model; leave it out with model.full_finetuning
  r: 16
  lora_alpha: 16
data:                       # fastlm.data.load
  source: train.jsonl
# eval_data: {source: test.jsonl}
# chat_template: chatml     # fastlm.chat_templates.get_chat_template; the model's own if left out
# new_tokens: [<scratch>]   # fastlm.add_new_tokens
responses_only: true        # train_on_responses_only
# batches: {tokens_per_batch: 8192, long: split}    # fastlm.data.batch_by_tokens
trainer:                    # trl.SFTConfig
  output_dir: output
  learning_rate: 2.0e-4
  per_device_train_batch_size: 2
  num_train_epochs: 1
"""


class ConfigError(ValueError):
    """A mistake in a configuration; the text names the key and what to write."""


@dataclass
class TrainSettings:
    """The sections of a configuration.

    Attributes:
        model, lora, data, eval_data, batches, trainer: arguments of the functions named in `EXAMPLE`; `lora` and `batches` are None for
            none.
        chat_template: a name, or None for the tokenizer's own.
        new_tokens: texts that become tokens.
        responses_only: train the answers alone; None: where the rows are conversations.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    eval_data: dict[str, Any] | None = None
    batches: dict[str, Any] | None = None
    chat_template: str | None = None
    new_tokens: list[str] | None = None
    responses_only: bool | None = None


_SECTIONS = tuple(each.name for each in dataclasses.fields(TrainSettings))


def _allowed() -> dict[str, set[str]]:
    """Keys of each section, read from what they are given to."""
    import trl

    import fastlm
    from fastlm import config

    def arguments(function: Any) -> set[str]:
        return {
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }

    model = fastlm.FastLanguageModel
    loads = arguments(fastlm.data.load) - {"tokenizer"}
    return {
        "model": arguments(model.from_pretrained) | {*config.NOT_SUPPORTED, *config.WITHOUT_EFFECT},
        "lora": arguments(model.get_peft_model) - {"model"} | {"rank_pattern", "alpha_pattern", "exclude_modules"},
        "data": loads,
        "eval_data": loads,
        "batches": arguments(fastlm.data.batch_by_tokens) - {"trainer"},
        "trainer": {each.name for each in dataclasses.fields(trl.SFTConfig) if each.init},
    }


def _unknown(key: str, where: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(key, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return ConfigError(f"unknown key {key!r} {where}: {hint}")


_OPENS = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSES = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_DEEPEST = 20


def parse(text: str, overrides: Iterable[str] = (), name: str = "the configuration") -> TrainSettings:
    """Settings from YAML, with `section.key=value` after it.

    Raises:
        ConfigError: for text that is no YAML, unknown keys, values of another kind, or a missing model or data.
    """
    given = _loaded(text, name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be sections with keys, got {type(given).__name__}")
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()}
    for override in overrides:
        _override(merged, override)
    for section in merged:
        if section not in _SECTIONS:
            raise _unknown(str(section), f"in {name}", _SECTIONS)
    allowed = _allowed()
    for section, keys in allowed.items():
        value = merged.get(section)
        if value is None:
            merged.pop(section, None)
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{section} must have keys of its own, as `{section}:` and lines below it, got {value!r}")
        for key in value:
            if key not in keys:
                raise _unknown(str(key), f"of {section}", keys)
    for section, key in (("model", "model_name"), ("data", "source")):
        if not merged.get(section, {}).get(key):
            raise ConfigError(f"{section}.{key} is missing: what to {'train' if section == 'model' else 'train on'}")
    for key, kind in (("chat_template", str), ("responses_only", bool), ("new_tokens", list)):
        if not isinstance(merged.get(key), (kind, type(None))):
            raise ConfigError(f"{key} must be {kind.__name__}, got {merged[key]!r}")
    sections: dict[str, Any] = merged
    settings = TrainSettings(**sections)
    if settings.batches is not None and "tokens_per_batch" not in settings.batches:
        raise ConfigError("batches.tokens_per_batch is missing: how many tokens a batch may hold")
    if settings.lora is not None and settings.model.get("full_finetuning"):
        raise ConfigError("lora and model.full_finetuning exclude each other: leave one out")
    return settings


def _loaded(text: str, name: str) -> Any:
    """What YAML says. Refuses what takes more time or memory to look at than to write: aliases, and nesting without an end."""
    depth = 0
    try:
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):
                raise ConfigError(f"{name} has the alias *{token.value}: write the value again in its place")
            depth += isinstance(token, _OPENS) - isinstance(token, _CLOSES)
            if depth > _DEEPEST:
                raise ConfigError(
                    f"{name} is nested more than {_DEEPEST} deep: sections hold keys, and keys hold values"
                )
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {error}") from error


def _override(merged: dict[str, Any], override: str) -> None:
    place, sign, text = override.partition("=")
    section, dot, key = place.strip().partition(".")
    if not sign or not section or (dot and not key):
        raise ConfigError(f"an override is section.key=value, as trainer.max_steps=10, got {override!r}")
    value = _loaded(text, f"the value of {place.strip()}")
    if not dot:
        merged[section] = value
        return
    if not isinstance(merged.setdefault(section, {}), dict):
        raise ConfigError(f"{section} is {merged[section]!r} and has no key {key!r}")
    merged[section][key] = value


def read(path: Path | None, overrides: Iterable[str]) -> TrainSettings:
    """Settings of a file, or of the overrides alone."""
    if path is None:
        return parse("", overrides, "the command")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return parse(text, overrides, str(path))
