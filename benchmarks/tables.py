"""Write the measured tables of README.md from benchmarks/results/*.jsonl.

    python benchmarks/tables.py          # rewrites README.md
    python benchmarks/tables.py --check  # fails if it would change

A table stands between `<!-- table:NAME -->` and `<!-- end -->`. Each line of a results file is one run.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> list[dict]:
    """The rows of one results file, oldest first; none if it was not measured yet."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(rows: list[dict]) -> list[dict]:
    """The rows that stand beside each other, in the order of model and shape: of a workload, those of one machine start. Failed runs stay.

    Rows whose gate was not run or failed are kept in the file; no start is shown that has such a row.
    """
    # libraries stand beside each other only as one machine start measured them: the last one in which ours ran
    workload = lambda row: tuple(row[key] for key in ("model", "mode", "bs", "seq", "accum", "data", "gpu"))
    unproven = {(workload(row), row["run_id"]) for row in rows if row.get("gate", "passed") != "passed"}
    rows = [row for row in rows if (workload(row), row["run_id"]) not in unproven]
    starts = {workload(row): row["run_id"] for row in rows if row["impl"] == "fastlm"}
    latest = {
        (workload(row), row["trainer"], row["impl"], row["setting"]): row
        for row in rows
        if row["run_id"] == starts.get(workload(row))
    }
    return sorted(latest.values(), key=lambda row: (row["model"], row["mode"], row["bs"] * row["seq"], row["data"]))


def batch_of(row: dict) -> str:
    return f"{row['bs']}x{row['seq']}" + (f"x{row['accum']}" if row["accum"] > 1 else "") + f" {row['data']}"


def finetune(rows: list[dict]) -> str:
    """One line a run."""
    table = []
    for row in shown(rows):
        is_done = row["ms"] is not None
        table.append((
            row["model"], row["mode"], batch_of(row), row["trainer"], f"{row['impl']} {row['setting']}".strip(),
            f"{row['ms']:.0f}" if is_done else "out of memory", f"{row['tok_s']:,.0f}" if is_done else "–",
            f"{row['peak_gib']:.1f}" if is_done else "–", row["gpu"], f"{row['torch']} / {row['triton']}", row["commit"][:9],
        ))  # fmt: skip
    if not table:
        return "Nothing measured yet.\n"
    header = (
        "model",
        "mode",
        "batch",
        "trainer",
        "library",
        "ms/step",
        "tokens/s",
        "peak GiB",
        "GPU",
        "torch / triton",
        "commit",
    )
    return markdown(header, table)


def parity(rows: list[dict]) -> str:
    """One line for each kind of weights and precision: how our errors compare with stock's over all families."""
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["device"], row["weights"], row["mode"]), []).append(row)
    table = []
    for (device, weights, mode), lines in groups.items():
        # in float32 both are rounding noise: what counts is that ours is small
        ratios = [line["rms_ours"] / line["rms_stock"] for line in lines if line["rms_stock"]]
        typical = sorted(ratios)[len(ratios) // 2]
        table.append((
            weights, mode, str(len({line["family"] for line in lines})), f"{max(line['rms_ours'] for line in lines):.1e}",
            f"{typical:.2f}", f"{max(ratios):.2f}", "whole layers" if lines[0]["path"] == "block" else "parts", device,
            lines[0]["transformers"], lines[0]["commit"][:9],
        ))  # fmt: skip
    if not table:
        return "Nothing measured yet.\n"
    header = (
        "weights", "precision", "families", "largest RMS error", "RMS error, ours / stock: median", "largest", "runs as",
        "device", "transformers", "commit",
    )  # fmt: skip
    return markdown(header, table)


TABLES: dict[str, Callable[[list[dict]], str]] = {"finetune": finetune, "parity": parity}


def filled(text: str) -> str:
    """The text with every marked table made anew.

    Raises:
        KeyError: for a marker whose name is not in `TABLES`.
    """
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]](read(block[2])) + block[3], text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    before = README.read_text()
    after = filled(before)
    if not parser.parse_args().check:
        README.write_text(after)
    elif after != before:
        raise SystemExit("README.md differs from benchmarks/results: run python benchmarks/tables.py")
