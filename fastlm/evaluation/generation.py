"""What a model writes after prompts, and how well it fits: before, during and after training."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Trainer, TrainerCallback

from fastlm.data.prepared import ends_of
from fastlm.evaluation.state import undisturbed

logger = logging.getLogger(__name__)

# a text that a model wrote and the one that was hoped for -> how well it fits, 0 to 1
Score = Callable[[str, str], float]


def exact_match(text: str, reference: str) -> float:
    """1 if both are the same, white space at the ends aside."""
    return float(text.strip() == reference.strip())


def json_valid(text: str, reference: str) -> float:
    """1 if the text is JSON and nothing else."""
    try:
        json.loads(text)
    except ValueError:
        return 0.0
    return 1.0


def pattern_found(pattern: str) -> Score:
    """A score: 1 if the regular expression is found in the text."""
    compiled = re.compile(pattern)
    return lambda text, reference: float(compiled.search(text) is not None)


def pattern_equal(pattern: str) -> Score:
    """A score: 1 if what the pattern's first group (or the pattern) matches last in the text is what it matches last in the reference.

    `pattern_equal(r"#### *(-?[0-9.,]+)")` compares final answers and leaves the way to them free. A text without a match fits nothing.
    """
    compiled = re.compile(pattern)

    def last(text: str) -> str | None:
        found = [match[1] if compiled.groups else match[0] for match in compiled.finditer(text)]
        return found[-1] if found else None

    return lambda text, reference: float(last(text) is not None and last(text) == last(reference))


def split_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
    """The tokens of a row's prompt, as training writes them, and the text of its answer.

    A conversation's last answer is the one hoped for, what stands before it is the prompt.

    Raises:
        ValueError: for a row of neither form.
    """
    prompt, answer = row.get("prompt"), row.get("completion")
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1 and messages[-1].get("role") == "assistant":
        prompt, answer = messages[:-1], messages[-1:]
    if isinstance(prompt, str) and isinstance(answer, str):
        return tokenizer(prompt, verbose=False)["input_ids"], answer
    if isinstance(prompt, list) and isinstance(answer, list) and answer:
        tools = row.get("tools")
        ids = tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            return_dict=False,
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            **(row.get("chat_template_kwargs") or {}),
        )
        return list(ids), answer[0].get("content") or ""
    raise ValueError(
        "a row needs prompt and completion, or messages that end with an answer, got the columns "
        f"{sorted(k for k, v in row.items() if v is not None)}: fastlm.data.load makes them from other forms"
    )


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
) -> list[str]:
    """What a model writes after each prompt, taking the likeliest token every time, without special tokens.

    Prompts of similar lengths run together, padded on the left. The model, its mode and the generators of random numbers are
    afterwards as they were.

    Args:
        model: any causal language model of transformers, or a PEFT model.
        tokenizer: its padding side does not matter and stays as it is.
        prompts: texts, or tokens.
        max_new_tokens: after which an answer is cut.
        batch_size: prompts that run together.

    Raises:
        ValueError: for an empty prompt, or numbers below 1.
    """
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(f"max_new_tokens and batch_size must be 1 or more, got {max_new_tokens} and {batch_size}")
    tokens = [tokenizer(each, verbose=False)["input_ids"] if isinstance(each, str) else list(each) for each in prompts]
    if not all(tokens):
        raise ValueError(f"prompt {next(n for n, ids in enumerate(tokens) if not ids)} is empty")
    ends = sorted(ends_of(tokenizer, model).ends)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=True, pad_token_id=pad,
        eos_token_id=ends or None,
    )  # fmt: skip
    texts = [""] * len(tokens)
    device = model.get_input_embeddings().weight.device
    # the longest first: memory that does not suffice shows at once
    order = sorted(range(len(tokens)), key=lambda n: -len(tokens[n]))
    with undisturbed(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            longest = len(tokens[chosen[0]])
            ids = torch.tensor([[pad] * (longest - len(tokens[n])) + tokens[n] for n in chosen])
            mask = torch.tensor([[0] * (longest - len(tokens[n])) + [1] * len(tokens[n]) for n in chosen])
            written = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=settings
            )
            for n, text in zip(
                chosen, tokenizer.batch_decode(written[:, longest:], skip_special_tokens=True), strict=True
            ):
                texts[n] = text
    return texts


class GenerationEvaluation(TrainerCallback):
    """Lets a model in training write answers to held-out rows, and logs how well they fit.

        trainer.add_callback(GenerationEvaluation(trainer, rows, {"exact": exact_match}))

    The scores are logged as `eval_exact` with all other numbers, and count as metrics of the evaluation: `metric_for_best_model="exact"`
    chooses by them. Losses, weights and random numbers of the training are those of a run without. Where several processes train,
    each generates for all rows and finds the same.

    Attributes:
        texts: what the model wrote last, in the order of the rows.
    """

    def __init__(
        self,
        trainer: Trainer,
        rows: Any,
        scores: Mapping[str, Score],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_new_tokens: int = 128,
        batch_size: int = 16,
        every_steps: int | None = None,
    ):
        """
        Args:
            trainer: that this is added to.
            rows: of `prompt` and `completion`, or of `messages` that end with an answer; a data set or a list.
            scores: by name; `exact_match`, `json_valid`, `pattern_found(…)`, `pattern_equal(…)`, or any function of a text and
                its reference.
            tokenizer: in place of the trainer's.
            max_new_tokens, batch_size: as `generate`.
            every_steps: generate after every so many steps; None: with the trainer's evaluations (`eval_strategy`).

        Raises:
            ValueError: if there are no rows or scores, for a row of another form, or if nothing would ever generate.
            TypeError: for a trainer, tokenizer or score of another type.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers Trainer, got {type(trainer).__name__}")
        tokenizer = trainer.processing_class if tokenizer is None else tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"a tokenizer is needed, as tokenizer= or the trainer's, got {type(tokenizer).__name__}")
        if not scores or not len(rows):
            raise ValueError(f"rows and scores are needed, got {len(rows)} rows and {len(scores)} scores")
        wrong = [name for name, score in scores.items() if not callable(score)]
        if wrong:
            raise TypeError(f"the scores {wrong} are no functions of a text and its reference")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be 1 or more, or None, got {every_steps}")
        if every_steps is None and trainer.args.eval_strategy == "no":
            raise ValueError(
                "nothing would generate: give every_steps, or eval_strategy and eval_dataset to the trainer"
            )
        self.trainer, self.tokenizer, self.scores = trainer, tokenizer, dict(scores)
        self.prompts, self.references = zip(*(split_row(dict(row), tokenizer) for row in rows), strict=True)
        self.settings = dict(max_new_tokens=max_new_tokens, batch_size=batch_size)
        self.every_steps = every_steps
        self.texts: list[str] = []

    def __call__(self) -> dict[str, float]:
        """Generate now; the mean of every score, by its name."""
        self.texts = generate(self.trainer.model, self.tokenizer, self.prompts, **self.settings)
        pairs = list(zip(self.texts, self.references, strict=True))
        return {
            name: sum(float(score(text, reference)) for text, reference in pairs) / len(pairs)
            for name, score in self.scores.items()
        }

    def _log(self) -> dict[str, float]:
        found = {f"eval_{name}": value for name, value in self().items()}
        # in evaluation mode: in the other one, TRL would log and forget what it counts in training
        with undisturbed(self.trainer.model):
            self.trainer.log(dict(found))
        return found

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        if self.every_steps is None:
            metrics.update(self._log())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every_steps is not None and state.global_step % self.every_steps == 0:
            self._log()
