"""Append measured steps to benchmarks/results/finetune.jsonl.

    python benchmarks/record.py --run-id ID --environment env.json LOG [LOG …]

A log is what one run printed; its last line that starts with RESULT holds the measurement as JSON. The environment file holds what
the machine was: gpu, driver, torch, triton and the libraries' versions, commit, command.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "finetune.jsonl"


def row_of(log: str, run_id: str, environment: dict) -> dict:
    """One row from what a run printed.

    Raises:
        ValueError: if the log holds no result: a run that failed is not a measurement.
    """
    lines = [line for line in log.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise ValueError("no line starts with RESULT: the run did not finish")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    model = re.sub(r"-bnb-4bit$", "", result["ckpt"])
    data = "dense"
    if result["ragged"]:
        data = "ragged-packed" if result["packing"] else "ragged-padded"
    return dict(
        run_id=run_id,
        impl=result["impl"],
        setting={"default": "default", "on": "recompute", "off": "keep"}[result["gc"]],
        trainer=result["trainer"],
        model=model,
        mode=result["mode"],
        bs=result["bs"],
        seq=result["seq"],
        accum=result["accum"],
        data=data,
        ms=result["ms"],
        min_ms=result["min_ms"],
        tok_s=result["tok_s"],
        peak_gib=result["peak_gib"],
        losses=result["loss"],
        grad_norms=result["grad_norm"],
        load_s=result["load_s"],
        first_s=result["first_s"],
        **environment,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--environment", required=True, type=Path)
    parser.add_argument("logs", nargs="+", type=Path)
    given = parser.parse_args()
    environment = json.loads(given.environment.read_text())
    rows = [row_of(log.read_text(errors="replace"), given.run_id, environment) for log in given.logs]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for row in rows:
        print(row["impl"], row["setting"], row["model"], f"{row['ms']} ms", f"{row['peak_gib']} GiB")


if __name__ == "__main__":
    main()
