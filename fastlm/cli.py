"""The `fastlm` command: train from a file, preview data, chat, merge, migrate, and what a bug report needs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastlm.cli_config import EXAMPLE, ConfigError, TrainSettings, read

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_console = Console()
logger = logging.getLogger(__name__)

_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrides a key; may be repeated.")
]
_File = Annotated[Path | None, typer.Argument(help="A YAML file; `fastlm example` prints one.")]
_Rows = Annotated[int, typer.Option(help="Rows to show.")]


def _fail(error: Exception) -> typer.Exit:
    logger.debug("what the error below came from", exc_info=error)
    _console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return typer.Exit(2)


def _show(facts: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="bold"), Text(value))
    _console.print(table)


def _settings(file: Path | None, overrides: list[str] | None, **flags: Any) -> TrainSettings:
    """Of a file, then of flags that are given, then of --set."""
    places = {
        "model": "model.model_name",
        "data": "data.source",
        "output": "trainer.output_dir",
        "max_steps": "trainer.max_steps",
    }
    # JSON is YAML: a path stays the text that it is
    given = [f"{places[name]}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    try:
        return read(file, [*given, *(overrides or [])])
    except ConfigError as error:
        raise _fail(error) from error


def _prepared(settings: TrainSettings) -> tuple[Any, Any, Any]:
    """Model, tokenizer and trainer of a configuration.

    Raises:
        ValueError, TypeError: what the functions say of their arguments.
    """
    import fastlm
    from fastlm.chat_templates import get_chat_template, train_on_responses_only

    train = fastlm.data.load(**settings.data)
    evaluated = None if settings.eval_data is None else fastlm.data.load(**settings.eval_data)
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(**settings.model)
    if settings.chat_template is not None:
        tokenizer = get_chat_template(tokenizer, settings.chat_template)
    if settings.new_tokens:
        fastlm.add_new_tokens(model, tokenizer, settings.new_tokens)
    if settings.lora is not None:
        model = fastlm.FastLanguageModel.get_peft_model(model, **settings.lora)
    elif not settings.model.get("full_finetuning"):
        model = fastlm.FastLanguageModel.get_peft_model(model)
    # a batch is one row, which is cut nowhere but by choice
    whole = {} if settings.batches is None else {"per_device_train_batch_size": 1, "max_length": None}
    trainer = fastlm.FastLanguageModel.get_trainer(
        model, train_dataset=train, args=whole | settings.trainer, eval_dataset=evaluated, processing_class=tokenizer
    )
    is_chat = bool({"messages", "prompt"} & set(train.column_names or []))
    if settings.responses_only or (settings.responses_only is None and is_chat):
        train_on_responses_only(trainer)
    if settings.batches is not None:
        fastlm.data.batch_by_tokens(trainer, **settings.batches)
    return model, tokenizer, trainer


def _predicted(model: Any, trainer: Any, settings: TrainSettings) -> str:
    """What the largest batch of a run needs, or why that is not known."""
    import fastlm

    args = trainer.args
    batch, length = args.per_device_train_batch_size, args.max_length
    if settings.batches is not None:
        length = settings.batches["tokens_per_batch"]
    elif length is None:
        length = max(len(row) for row in trainer.train_dataset["input_ids"])
    try:
        found = fastlm.estimate(model, batch, length, optim=args.optim)
    except (ValueError, TypeError) as error:
        return f"not predicted: {error}"
    return f"{batch} rows of {length:,} tokens need {found}"


@app.command()
def train(
    file: _File = None,
    model: Annotated[str | None, typer.Option(help="model.model_name")] = None,
    data: Annotated[str | None, typer.Option(help="data.source")] = None,
    output: Annotated[str | None, typer.Option(help="trainer.output_dir")] = None,
    max_steps: Annotated[int | None, typer.Option(help="trainer.max_steps")] = None,
    overrides: _Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Load, prepare and show; train nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="From the newest whole checkpoint of output_dir.")] = False,
) -> None:
    """Fine-tune by a YAML file, by flags, or by both: flags win."""
    settings = _settings(file, overrides, model=model, data=data, output=output, max_steps=max_steps)
    import fastlm

    try:
        made, tokenizer, trainer = _prepared(settings)
    except (ValueError, TypeError) as error:
        raise _fail(error) from error
    if dry_run:
        _console.print(fastlm.data.preview(trainer, rows=1))
        _console.print(Text(str(fastlm.report(made))))
        _console.print(Text(f"memory: {_predicted(made, trainer, settings)}"))
        return
    result = trainer.train(resume_from_checkpoint=True if resume else None)
    folder = Path(trainer.args.output_dir) / "final"
    made.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    _show([("steps", str(result.global_step)), ("loss", f"{result.training_loss:.4f}"), ("saved to", str(folder))])


@app.command()
def example() -> None:
    """Print a YAML file for `fastlm train`."""
    typer.echo(EXAMPLE, nl=False)


@app.command()
def preview(
    data: Annotated[str, typer.Argument(help="A file, a folder, or a data set on the hub.")],
    model: Annotated[str, typer.Option(help="Folder or hub id of the tokenizer.")],
    chat_template: Annotated[str | None, typer.Option(help="By name; the tokenizer's own if left out.")] = None,
    rows: _Rows = 3,
    html: Annotated[Path | None, typer.Option(help="Write a page instead.")] = None,
) -> None:
    """Show what a model will see of a data set, with the answers marked."""
    from transformers import AutoTokenizer

    import fastlm
    from fastlm.chat_templates import get_chat_template

    try:
        dataset = fastlm.data.load(data)
        tokenizer = AutoTokenizer.from_pretrained(model)
        if chat_template is not None:
            tokenizer = get_chat_template(tokenizer, chat_template)
        found = fastlm.data.preview(dataset, tokenizer, rows)
    except (ValueError, TypeError, OSError) as error:
        raise _fail(error) from error
    _console.print(Text(dataset.info.description or "a stream"))
    if html is None:
        _console.print(found)
    else:
        html.write_text(f"<!doctype html><meta charset='utf-8'>{found._repr_html_()}", encoding="utf-8")
        _show([("written", str(html))])


def _loaded(model: str, **modes: Any) -> tuple[Any, Any]:
    import fastlm

    try:
        return fastlm.FastLanguageModel.from_pretrained(model, **modes)
    except (ValueError, TypeError, OSError) as error:
        raise _fail(error) from error


_FourBit = Annotated[bool, typer.Option(help="Load in 4 bit, or in 16.")]


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="A model's folder; its configuration is read, not its weights.")],
    batch: Annotated[int, typer.Option(help="Rows of a batch.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens of a row.")] = 2048,
    mode: Annotated[str, typer.Option(help="4bit or 16bit.")] = "4bit",
    r: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    optim: Annotated[str, typer.Option(help="As the trainer's.")] = "adamw_8bit",
    device_gib: Annotated[float | None, typer.Option(help="Memory of the GPU; by default of the one here.")] = None,
) -> None:
    """Say how much memory training with LoRA will need, part by part, and what would fit."""
    import fastlm

    settings: dict[str, Any] = dict(mode=mode, r=r, optim=optim, device_gib=device_gib)
    try:
        found = fastlm.estimate(model, batch, seq, **settings)
        facts = [(name, f"{n_bytes / 2**30:.2f} GiB") for name, n_bytes in found.parts.items()]
        facts += [("together", f"{found.total / 2**30:.2f} GiB"), ("layers", str(found.choice))]
        if found.available is not None:
            facts += [
                ("it fits" if found.fits else "it does not fit", f"{found.available / 2**30:.2f} GiB are there"),
                ("largest batch", str(fastlm.max_batch_size(model, seq, **settings))),
                ("longest row", f"{fastlm.max_seq_length(model, batch, **settings):,} tokens"),
            ]
    except (ValueError, TypeError, OSError) as error:
        raise _fail(error) from error
    _show(facts)


@app.command()
def report(model: str, load_in_4bit: _FourBit = True) -> None:
    """Say what runs fast in a model, layer by layer, and why something does not."""
    import fastlm

    loaded, _ = _loaded(model, load_in_4bit=load_in_4bit, load_in_16bit=not load_in_4bit)
    _console.print(Text(str(fastlm.report(loaded))))


@app.command()
def chat(
    model: str,
    prompt: Annotated[str | None, typer.Option(help="Answer this and stop.")] = None,
    system: Annotated[str | None, typer.Option(help="A system text.")] = None,
    load_in_4bit: _FourBit = False,
    max_new_tokens: int = 512,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
) -> None:
    """Talk to a model, or to an adapter in its folder. An empty line ends it."""
    from transformers import TextStreamer

    import fastlm

    loaded, tokenizer = _loaded(model, load_in_4bit=load_in_4bit, load_in_16bit=not load_in_4bit)
    fastlm.FastLanguageModel.for_inference(loaded)
    if tokenizer.chat_template is None:
        raise _fail(ValueError("the tokenizer has no chat template: save one with it (get_chat_template)"))
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        asked = prompt if prompt is not None else typer.prompt("you", default="", show_default=False)
        if not asked.strip():
            return
        messages.append({"role": "user", "content": asked})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        inputs = inputs.to(loaded.device)
        output = loaded.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
        written = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": written})
        if prompt is not None:
            return


@app.command()
def merge(
    adapter: Annotated[str, typer.Argument(help="The adapter's folder.")],
    output: Annotated[Path, typer.Argument(help="The folder to write.")],
    method: Annotated[str, typer.Option(help="merged_16bit, merged_4bit, compressed_tensors_fp8, ….")] = "merged_16bit",
) -> None:
    """Write an adapter and its base model as one model, in 16 bit or another format."""
    loaded, tokenizer = _loaded(adapter, load_in_16bit=True)
    try:
        loaded.save_pretrained_merged(str(output), tokenizer, save_method=method)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise _fail(error) from error
    _show([("written", str(output))])


@app.command()
def migrate(
    paths: Annotated[list[Path], typer.Argument(help="Scripts, notebooks, or folders of them.")],
    diff: Annotated[bool, typer.Option("--diff", help="Show what changes.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
) -> None:
    """Turn scripts and notebooks for Unsloth into ones for fastlm, and name what has no counterpart."""
    from fastlm.migrate import migrate_files

    kinds: dict[str, int] = {}
    try:
        for path in paths:
            for made in migrate_files(path):
                kinds[made.kind] = kinds.get(made.kind, 0) + 1
                _console.print(Text.assemble((made.name, "bold"), f": {made.kind}"))
                for note in made.notes:
                    _console.print(Text(f"  line {note.line}: {note.text}"))
                if diff and made.is_changed:
                    typer.echo(made.diff(), nl=False)
                if write and made.is_changed:
                    Path(made.name).write_text(made.after, encoding="utf-8")
    except ValueError as error:
        raise _fail(error) from error
    told = {
        "imports": "need other imports",
        "older keywords": "also take SFTTrainer from fastlm",
        "nothing": "need nothing",
    }
    _show([(f"{count}", told[kind]) for kind, count in sorted(kinds.items())])
    if not write and any(kind != "nothing" for kind in kinds):
        _console.print(Text("nothing was written: --write changes the files, --diff shows how"))


@app.command()
def doctor() -> None:
    """Print what a bug report needs."""
    from fastlm.cli_doctor import facts

    _show(facts())


@app.callback()
def _main(quiet: Annotated[bool, typer.Option("--quiet", help="Warnings only.")] = False) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fastlm").setLevel(logging.WARNING if quiet else logging.INFO)


if __name__ == "__main__":
    app()
