"""What the model will see: rows with their trained tokens, counts, and warnings, for a terminal or a notebook."""

from __future__ import annotations

import html
import io
import itertools
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlm.chat_templates._token_text import TokenText
from fastlm.chat_templates.labels import conversation_of
from fastlm.data.batches import TokenBatches
from fastlm.data.prepared import ends_of, tokenized
from fastlm.data.statistics import IGNORED, Statistics, bounds, count, labels_of, warnings_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from transformers import PreTrainedTokenizerBase

# kinds of text in a row, with their style in a terminal and in HTML
_STYLES = {
    "trained": ("bold black on bright_green", "background:#9be39b;color:#000"),
    "trained special": ("bold black on green", "background:#4fb54f;color:#000"),
    "ignored": ("", ""),
    "ignored special": ("dim", "opacity:.55"),
    "note": ("italic dim", "opacity:.55;font-style:italic"),
}
_OPEN, _CLOSE = "⟦", "⟧"
Piece = tuple[str, str]


def _visible(text: str) -> str:
    """Text whose control characters show instead of acting on a terminal; line breaks stay."""
    return "".join(
        char if char == "\n" or not unicodedata.category(char).startswith("C") else f"\\u{ord(char):04x}"
        for char in text
    )


@dataclass(frozen=True)
class Preview:
    """What `preview` found. `print` it, or let a notebook show it.

    Attributes:
        name: of the data set.
        statistics: the counts.
        warnings: what a person should look at.
        rows: the rows shown, each as pieces of text with their kind: trained or ignored, special or not, or a note.
        notes: how the numbers were made.
    """

    name: str
    statistics: Statistics
    warnings: tuple[str, ...]
    rows: tuple[tuple[Piece, ...], ...]
    notes: tuple[str, ...]

    def facts(self) -> list[tuple[str, str]]:
        made = self.statistics
        packed = f" ({made.n_samples:,} samples)" if made.n_samples != made.n_rows else ""
        return [
            ("rows", f"{made.n_rows:,}{packed}"),
            ("tokens", f"{made.n_tokens:,}"),
            ("trained", f"{made.n_trained:,} ({made.trained_share:.1%})"),
            (
                "length",
                f"median {made.quantile(0.5):,}, 95 % up to {made.quantile(0.95):,}, longest {made.quantile(1.0):,}",
            ),
            ("cut at max_length", f"{made.n_cut:,}"),
            ("nothing to train", f"{made.n_untrained:,}"),
            *(("note", note) for note in self.notes),
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.panel import Panel
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, value in self.facts():
            table.add_row(Text(name, style="bold"), Text(value))
        yield Panel(table, title=Text(self.name), expand=False)
        bins = self.statistics.histogram()
        most = max((n for *_, n in bins), default=1)
        chart = Table.grid(padding=(0, 1))
        for first, last, n in bins:
            chart.add_row(Text(f"{first:,}–{last:,}", justify="right"), Text("█" * -(-30 * n // most)), Text(f"{n:,}"))
        yield Panel(chart, title="rows by length in tokens", expand=False)
        for warning in self.warnings:
            yield Text.assemble(("look: ", "bold red"), warning)
        # without colours, brackets say what is trained
        is_plain = console.color_system is None
        for number, pieces in enumerate(self.rows):
            yield Rule(Text(f"row {number}"), style="dim")
            text, inside = Text(), False
            for content, kind in pieces:
                is_trained = kind.startswith("trained")
                if is_plain and is_trained != inside:
                    text.append(_OPEN if is_trained else _CLOSE)
                inside = is_trained
                text.append(content, style=_STYLES[kind][0])
            yield text.append(_CLOSE) if is_plain and inside else text

    def __str__(self) -> str:
        from rich.console import Console

        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = None if is_terminal else 120
        console = Console(
            file=io.StringIO(), force_terminal=is_terminal, color_system="auto" if is_terminal else None, width=width
        )
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    def _repr_html_(self) -> str:
        def cells(pairs: Sequence[tuple[str, str]]) -> str:
            return "".join(
                f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(value)}</td></tr>"
                for name, value in pairs
            )

        parts = [f"<h4>{html.escape(self.name)}</h4><table>{cells(self.facts())}</table>", self._histogram_svg()]
        parts += [
            f"<p style='margin:2px'><b style='color:#c00'>look:</b> {html.escape(text)}</p>" for text in self.warnings
        ]
        for number, pieces in enumerate(self.rows):
            spans = "".join(
                f"<span style='{_STYLES[kind][1]}'>{html.escape(content)}</span>" for content, kind in pieces
            )
            parts.append(
                f"<details{' open' if number == 0 else ''}><summary>row {number}</summary>"
                f"<pre style='white-space:pre-wrap;line-height:1.5'>{spans}</pre></details>"
            )
        return f"<div style='max-width:100ch'>{''.join(parts)}</div>"

    def _histogram_svg(self) -> str:
        bins = self.statistics.histogram()
        if not bins:
            return ""
        most, width, height = max(n for *_, n in bins), 40, 80
        bars = "".join(
            f"<rect x='{index * width}' y='{height - round(height * n / most)}' width='{width - 2}' "
            f"height='{round(height * n / most)}' fill='#4fb54f'><title>{first}–{last} tokens: {n} rows</title></rect>"
            for index, (first, last, n) in enumerate(bins)
        )
        ends = f"<text x='0' y='{height + 14}' font-size='12' fill='currentColor'>{bins[0][0]} tokens</text>"
        ends += f"<text x='{len(bins) * width}' y='{height + 14}' font-size='12' fill='currentColor' text-anchor='end'>{bins[-1][1]}</text>"
        return f"<svg width='{len(bins) * width}' height='{height + 20}' role='img' aria-label='rows by length'>{bars}{ends}</svg>"


class _Shown:
    """Rows of tokens as pieces of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int):
        self.text = TokenText(tokenizer)
        self.special = set(tokenizer.get_added_vocab().values())
        self.max_tokens = max_tokens

    def __call__(self, row: Mapping[str, Any]) -> tuple[Piece, ...]:
        ids, labels = list(row["input_ids"]), labels_of(row)
        pieces: list[Piece] = []
        for number, (start, stop) in enumerate(bounds(row)):
            if start >= self.max_tokens:
                break
            if number:
                pieces.append((f"\n[sample {number} of this row]\n", "note"))
            stop = min(stop, self.max_tokens)
            text, starts, ends = self.text(ids[start:stop])
            here = 0
            for offset, (first, last) in enumerate(zip(starts, ends, strict=True)):
                kind = "ignored" if labels[start + offset] == IGNORED else "trained"
                kind += " special" if ids[start + offset] in self.special else ""
                # tokens that are parts of one character cover it together: it shows once
                content = _visible(text[max(first, here) : last])
                here = max(here, last)
                if pieces and pieces[-1][1] == kind:
                    pieces[-1] = (pieces[-1][0] + content, kind)
                elif content:
                    pieces.append((content, kind))
        if len(ids) > self.max_tokens:
            pieces.append((f"\n[{len(ids) - self.max_tokens:,} more tokens]", "note"))
        return tuple(pieces)


def preview(
    source: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    rows: int = 3,
    *,
    count_rows: int | None = 10_000,
    max_tokens: int = 600,
) -> Preview:
    """Show what the model will see: rows with the trained tokens marked, counts, and warnings.

    Trained tokens are green in a terminal and in a notebook, in ⟦ ⟧ where there are no colours.

    Args:
        source: a prepared trainer (its train_dataset, as it is), or a data set: with `input_ids` and `labels`, or one that
            `fastlm.data.load` made, which is tokenized here as an SFTTrainer would, with labels on the answers.
        tokenizer: in place of the trainer's.
        rows: how many to show, from the first on.
        count_rows: how many to count, spread evenly over the data set (the first ones of a stream); None for all.
        max_tokens: of each row shown.

    Returns:
        A `Preview`: `print(preview(trainer))`, or the last line of a notebook cell.

    Raises:
        TypeError: if there is no tokenizer, or source is neither a trainer nor a data set.
        ValueError: for an empty data set or one without columns to read.
    """
    import datasets
    from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer

    model = args = None
    name = "data set"
    data = source
    if isinstance(source, Trainer):
        model, args, data, name = source.model, source.args, source.train_dataset, "train_dataset"
        tokenizer = source.processing_class if tokenizer is None else tokenizer
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"a tokenizer is needed, as tokenizer= or in the trainer, got {type(tokenizer).__name__}")
    if not isinstance(data, (datasets.Dataset, datasets.IterableDataset, TokenBatches)):
        raise TypeError(f"source must be a trainer with a data set, or a data set, got {type(data).__name__}")
    sample, notes = _sampled(data, rows, count_rows)
    if not sample:
        raise ValueError(f"the {name} has no rows")
    # what load and train_on_responses_only left out
    notes += [part for part in (data.info.description or "").split("; ") if part.startswith("dropped ")]
    is_chat = conversation_of(sample[0]) is not None
    if "input_ids" not in sample[0]:
        sample = tokenized(sample, tokenizer)
        notes.append("not prepared by a trainer: tokenized here, uncut, with labels on the answers")
    ends = ends_of(tokenizer, model, args)
    made = count(sample, ends)
    shown = _Shown(tokenizer, max_tokens)
    return Preview(
        name, made, tuple(warnings_of(made, ends, is_chat)), tuple(shown(row) for row in sample[:rows]), tuple(notes)
    )


def _sampled(data: Any, rows: int, count_rows: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows to count, the first ones to show among them."""
    import datasets

    if isinstance(data, datasets.IterableDataset):
        taken = list(data if count_rows is None else itertools.islice(data, max(rows, count_rows)))
        return taken, [f"a stream: the first {len(taken):,} rows are counted"]
    if count_rows is None or len(data) <= count_rows:
        return list(data), []
    step = len(data) / count_rows
    chosen = sorted({*range(min(rows, len(data))), *(int(n * step) for n in range(count_rows))})
    return list(data.select(chosen)), [f"{len(chosen):,} of {len(data):,} rows are counted, spread evenly"]
