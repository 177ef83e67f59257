"""Scripts and notebooks that were written for Unsloth, as fastlm scripts: what can be rewritten is, the rest is named."""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlm.config import NOT_SUPPORTED, NOT_SUPPORTED_PEFT
from fastlm.keywords import GONE, RENAMED, SWITCHES, TRAINER_RENAMED, TRAINER_SETTINGS

# names that fastlm has under the same name -> the module that they are imported from
_CHAT = (
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_sharegpt",
    "train_on_responses_only",
)
_TOP = (
    "FastLanguageModel", "FastModel", "UnslothTrainer", "UnslothTrainingArguments", "is_bf16_supported",
    "is_bfloat16_supported", "unsloth_train",
)  # fmt: skip
NAMES: Mapping[str, str] = {**dict.fromkeys(_TOP, "fastlm"), **dict.fromkeys(_CHAT, "fastlm.chat_templates")}
# calls that do nothing any more
_NO_OPS = ("PatchDPOTrainer", "PatchKTOTrainer", "PatchFastRL")
# names that have no counterpart -> what to do
MISSING: Mapping[str, str] = {
    "FastVisionModel": "vision models are not supported: load them with transformers and train with TRL",
    "FastTextModel": "use FastLanguageModel",
    "UnslothVisionDataCollator": "vision models are not supported",
    "add_new_tokens": "add tokens with the tokenizer and resize_token_embeddings, and train modules_to_save",
    "apply_chat_template": "use tokenizer.apply_chat_template",
    "create_ollama_modelfile": "save_pretrained_gguf writes a Modelfile beside the file",
}
# and methods
METHODS: Mapping[str, str] = {
    "fast_generate": "use model.generate()",
    "save_pretrained_torchao": "use save_pretrained_merged(..., save_method='torchao_fp8'), or 'torchao_int8'",
}
# arguments of calls that fastlm does not take and does not need
_DROPPED = {"get_chat_template": ("patch_saving", "use_zoo_tokenizer_patch")}
_TRL = ("SFTTrainer", "SFTConfig")
_OLD_OF_CONFIG = {*RENAMED, *GONE, *SWITCHES}
_LOADS = {"from_pretrained": NOT_SUPPORTED, "get_peft_model": NOT_SUPPORTED_PEFT}


@dataclass(frozen=True)
class Note:
    """Something that a person has to look at."""

    line: int
    text: str


@dataclass
class Migration:
    """One text, before and after.

    Attributes:
        name: of the file.
        before, after: the texts.
        notes: what has no counterpart.
        takes_trainer: its SFTTrainer or SFTConfig come from fastlm now, because their keywords are older than TRL's.
    """

    name: str
    before: str
    after: str
    notes: list[Note] = field(default_factory=list)
    takes_trainer: bool = False

    @property
    def is_changed(self) -> bool:
        return self.before != self.after

    @property
    def kind(self) -> str:
        """nothing, imports (one changed import is enough), or older keywords (the trainer comes from fastlm too)."""
        return "nothing" if not self.is_changed else "older keywords" if self.takes_trainer else "imports"

    def diff(self) -> str:
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, self.name, self.name))


class _Edits:
    """Replacements in a text, by the places of its syntax tree."""

    def __init__(self, text: str):
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[int, int, str]] = []

    def at(self, line: int, column: int) -> int:
        # columns of the tree count UTF-8 bytes
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def replace(self, node: Any, new: str) -> None:
        start, end = self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)
        self.found.append((start, end, new))

    def remove_keyword(self, node: ast.keyword) -> None:
        """With the comma behind it, and the line, if nothing else is on it."""
        start = self.at(node.lineno, node.col_offset)
        end = self.at(node.value.end_lineno or node.lineno, node.value.end_col_offset or 0)
        rest = re.compile(r"[ \t]*,[ \t]*").match(self.text, end)
        end = rest.end() if rest else end
        before = self.text[:start].rpartition("\n")[2]
        if not before.strip() and self.text[end : end + 1] == "\n":
            start, end = start - len(before), end + 1
        self.found.append((start, end, ""))

    def rename_keyword(self, node: ast.keyword, new: str) -> None:
        start = self.at(node.lineno, node.col_offset)
        self.found.append((start, start + len(node.arg or ""), new))

    def apply(self) -> str:
        text = self.text
        for start, end, new in sorted(self.found, reverse=True):
            text = text[:start] + new + text[end:]
        return text


def _callee(node: ast.Call) -> str:
    """The last name of what is called."""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _is_unsloth(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in ("unsloth", "unsloth_zoo")


class _Script:
    """The edits of one text that parses."""

    def __init__(self, text: str, takes_trainer: bool):
        self.edits = _Edits(text)
        self.notes: list[Note] = []
        self.takes_trainer = takes_trainer
        self.tree = ast.parse(text)

    def note(self, node: Any, text: str) -> None:
        self.notes.append(Note(node.lineno, text))

    def run(self) -> str:
        # statements that call what does nothing go whole
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _callee(node.value) in _NO_OPS:
                self.edits.replace(node, "pass")
            elif isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Attribute):
                self._attribute(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("UNSLOTH_"):
                self.note(node, f"the environment variable {node.value} has no effect: fastlm reads none")
        return self.edits.apply()

    def _import(self, node: ast.Import) -> None:
        kept = [alias for alias in node.names if not _is_unsloth(alias.name)]
        if len(kept) == len(node.names):
            return
        lines = [f"import {ast.unparse(alias)}" for alias in kept]
        lines += [f"import fastlm{f' as {a.asname}' if a.asname else ''}" for a in node.names if a.name == "unsloth"]
        for alias in node.names:
            if _is_unsloth(alias.name) and alias.name != "unsloth":
                self.note(node, f"{alias.name} has no counterpart")
        self._statements(node, lines)

    def _statements(self, node: ast.stmt, lines: list[str]) -> None:
        self.edits.replace(node, ("\n" + " " * node.col_offset).join(dict.fromkeys(lines)) or "pass")

    def _import_from(self, node: ast.ImportFrom) -> None:
        if self.takes_trainer and node.module in ("trl", "trl.trainer"):
            taken = [alias for alias in node.names if alias.name in _TRL]
            if taken:
                kept = [alias for alias in node.names if alias.name not in _TRL]
                self._statements(node, [*self._from(node.module, kept), *self._from("fastlm", taken)])
        if not _is_unsloth(node.module):
            return
        lines: list[str] = []
        for module in dict.fromkeys(NAMES.values()):
            lines += self._from(module, [alias for alias in node.names if NAMES.get(alias.name) == module])
        if any(alias.name == "*" for alias in node.names):
            lines += ["from fastlm import *"] if node.module == "unsloth" else ["from fastlm.chat_templates import *"]
        for alias in node.names:
            if alias.name not in NAMES and alias.name not in (*_NO_OPS, "*"):
                self.note(
                    node,
                    f"{alias.name} has no counterpart: {MISSING.get(alias.name, 'see the README for what there is')}",
                )
        self._statements(node, lines)

    @staticmethod
    def _from(module: str, names: list[ast.alias]) -> list[str]:
        return [f"from {module} import {', '.join(map(ast.unparse, names))}"] if names else []

    def _attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "unsloth":
            self.edits.replace(node.value, "fastlm")
        if node.attr in METHODS:
            self.note(node, f"{node.attr} is not there: {METHODS[node.attr]}")

    def _call(self, node: ast.Call) -> None:
        name = _callee(node)
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "use_gradient_checkpointing" and value == "unsloth":
                self.edits.replace(keyword.value, '"auto"')
            elif keyword.arg in _DROPPED.get(name, ()):
                self.edits.remove_keyword(keyword)
            elif name in _LOADS and keyword.arg in _LOADS[name] and isinstance(keyword.value, ast.Constant):
                if value not in _LOADS[name][keyword.arg]:
                    self.note(keyword, f"{keyword.arg}={value!r} has no counterpart in {name}")
            elif (
                name.endswith("Trainer")
                and name not in ("SFTTrainer", "UnslothTrainer")
                and keyword.arg in TRAINER_RENAMED
            ):
                self.edits.rename_keyword(keyword, TRAINER_RENAMED[keyword.arg])
            elif name.endswith(("TrainingArguments", "Config")) and name not in (
                "SFTConfig",
                "UnslothTrainingArguments",
            ):
                self._setting(name, keyword, value)

    def _setting(self, name: str, keyword: ast.keyword, value: Any) -> None:
        """A keyword of transformers' and TRL's other arguments."""
        old = keyword.arg or ""
        if not name.endswith("TrainingArguments") and name[:3] not in ("DPO", "KTO", "GRP", "ORP", "RLO"):
            return
        if old in RENAMED and old != "max_seq_length":
            self.edits.rename_keyword(keyword, RENAMED[old])
        elif old in GONE:
            self.edits.remove_keyword(keyword)
            if isinstance(keyword.value, ast.Constant) and value not in GONE[old]:
                self.note(keyword, f"{old}={value!r} is gone from {name}")
        elif old in SWITCHES:
            new, chosen = SWITCHES[old]
            if value:
                self.edits.rename_keyword(keyword, new)
                self.edits.replace(keyword.value, repr(chosen))
            else:
                self.edits.remove_keyword(keyword)


def _uses_old_keywords(tree: ast.AST) -> bool:
    """Whether TRL's own SFTTrainer or SFTConfig would refuse a call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, given = _callee(node), {keyword.arg for keyword in node.keywords}
        if name == "SFTTrainer" and given & {*TRAINER_RENAMED, *TRAINER_SETTINGS}:
            return True
        if name == "SFTConfig" and given & _OLD_OF_CONFIG:
            return True
    return False


# lines of a notebook that are no Python: commands of a shell, of IPython, and of a whole cell
_MAGIC = re.compile(r"^(?P<indent>[ \t]*)(?P<command>[!%?].*|.*\?)$")
_HIDDEN = "__fastlm_line_{}__"


def _hide(text: str) -> tuple[str, list[str]]:
    """A cell whose lines that are no Python are names, and those lines."""
    hidden: list[str] = []
    lines = []
    continues = False
    for line in text.split("\n"):
        match = _MAGIC.match(line)
        if continues:
            hidden[-1] += "\n" + line
        elif match:
            lines.append(match["indent"] + _HIDDEN.format(len(hidden)))
            hidden.append(line)
        else:
            lines.append(line)
            continue
        # a command may go on in the next line
        continues = line.rstrip().endswith("\\")
    return "\n".join(lines), hidden


def _show(text: str, hidden: list[str]) -> str:
    def line(match: re.Match[str]) -> str:
        # the line has its indentation
        return hidden[int(match[1])]

    return re.sub(rf"[ \t]*{_HIDDEN.format('([0-9]+)')}", line, text)


def _installs(line: str) -> bool:
    return re.search(r"\b(pip|uv)\b.*\binstall\b.*\bunsloth", line) is not None


def _migrated(text: str, name: str, takes_trainer: bool | None = None) -> Migration:
    """One script, or one cell."""
    hidden_text, hidden = _hide(text) if takes_trainer is not None else (text, [])
    try:
        tree = ast.parse(hidden_text)
        takes = _uses_old_keywords(tree) if takes_trainer is None else takes_trainer
        script = _Script(hidden_text, takes)
        after = script.run()
    except SyntaxError as error:
        if "unsloth" not in text:
            return Migration(name, text, text)
        return Migration(name, text, text, [Note(error.lineno or 1, f"not read, as this is no Python: {error.msg}")])
    shown = []
    for number, line in enumerate(hidden):
        if _installs(line):
            indent = line[: len(line) - len(line.lstrip())]
            command = re.sub(r"\\\s*\n\s*", "", line.strip())
            shown.append(f"{indent}pass  # fastlm instead of: {command}")
            at = next(
                n for n, text_line in enumerate(hidden_text.split("\n"), 1) if _HIDDEN.format(number) in text_line
            )
            script.notes.append(Note(at, "installs unsloth: install fastlm instead (README, Install)"))
        else:
            shown.append(line)
    took = takes and re.search(r"from fastlm import [^\n]*SFT(Trainer|Config)", after) is not None
    return Migration(name, text, _show(after, shown), sorted(script.notes, key=lambda note: note.line), took)


def migrate_script(text: str, name: str = "script.py") -> Migration:
    """An Unsloth script as a fastlm script.

    Args:
        text: Python.
        name: of the file, for the report.

    Returns:
        The text after, and notes on what has no counterpart. A text that is no Python comes back as it is, with a note.
    """
    return _migrated(text, name)


def migrate_notebook(text: str, name: str = "notebook.ipynb") -> Migration:
    """Likewise for the code cells of a notebook; everything else in the file stays as it is.

    Raises:
        ValueError: if the text is no notebook.
    """
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        sources = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name} is no notebook of Jupyter: {error!r}") from error
    takes = any(_parses(source) and _uses_old_keywords(ast.parse(_hide(source)[0])) for source in sources)
    made = Migration(name, text, text)
    for number, (cell, source) in enumerate(zip(cells, sources, strict=True), 1):
        part = _migrated(source, name, takes)
        made.notes += [Note(note.line, f"code cell {number}: {note.text}") for note in part.notes]
        made.takes_trainer |= part.takes_trainer
        if part.is_changed:
            lines = part.after.splitlines(keepends=True)
            cell["source"] = part.after if isinstance(cell["source"], str) else lines
    if any(_of(cell) != source for cell, source in zip(cells, sources, strict=True)):
        indent = re.match(r"\{\s*\n( *)", text)
        made.after = json.dumps(notebook, ensure_ascii=False, indent=len(indent[1]) if indent else None)
        made.after += "\n" if text.endswith("\n") else ""
    return made


def _of(cell: Mapping[str, Any]) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def _parses(source: str) -> bool:
    try:
        ast.parse(_hide(source)[0])
    except SyntaxError:
        return False
    return True


def migrate_files(path: Path) -> Iterator[Migration]:
    """A script, a notebook, or all of a folder that mention Unsloth.

    Raises:
        ValueError: for a path that is not there, or is neither.
    """
    if path.is_dir():
        for each in sorted((*path.rglob("*.py"), *path.rglob("*.ipynb"))):
            hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
            if not hidden and "unsloth" in each.read_text(encoding="utf-8", errors="replace").lower():
                yield from migrate_files(each)
        return
    if not path.is_file():
        raise ValueError(f"there is no file or folder {str(path)!r}")
    kinds = {".py": migrate_script, ".ipynb": migrate_notebook}
    if path.suffix not in kinds:
        raise ValueError(f"{path} is neither a script (.py) nor a notebook (.ipynb)")
    yield kinds[path.suffix](path.read_text(encoding="utf-8"), str(path))
