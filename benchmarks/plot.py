"""Draw tokens a second and peak memory of the table of whole training steps: benchmarks/results/finetune.svg.

    python benchmarks/plot.py [--out FILE.svg]

Needs matplotlib (`.[report]`). The rows are those of README.md's table.
"""

import argparse
import itertools
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from tables import RESULTS, batch_of, read, shown

COLORS = {"fastlm": "#1b7837", "unsloth": "#762a83", "liger": "#9970ab", "hf": "#888888"}
PANELS = (("tok_s", "tokens / s", "{:,.0f}"), ("peak_gib", "peak memory, GiB", "{:.1f}"))


def draw(rows: list[dict]) -> Figure:
    """Bars by workload, one a run; rows without a time are left out."""
    done = [row for row in rows if row["ms"] is not None]
    groups = [
        (name, list(group))
        for name, group in itertools.groupby(done, lambda row: f"{row['model']}, {row['mode']}, {batch_of(row)}")
    ]
    figure = Figure(figsize=(10, 1.2 + 0.34 * len(done) + 0.5 * len(groups)), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    places, labels, place = [], [], 0.0
    for name, group in groups:
        axes[0].text(0, place - 0.1, name, weight="bold", va="bottom")
        place -= 1
        for row in sorted(group, key=lambda row: row["ms"]):
            trainer = ", get_trainer" if row["trainer"] == "get_trainer" else ""
            places.append(place)
            labels.append(f"{row['impl']} {row['setting']}{trainer}")
            for axis, (key, _, form) in zip(axes, PANELS, strict=True):
                axis.barh(place, row[key], height=0.8, color=COLORS[row["impl"]])
                axis.text(row[key], place, " " + form.format(row[key]), va="center", fontsize=8)
            place -= 1
    for axis, (_, title, _) in zip(axes, PANELS, strict=True):
        axis.set_xlabel(title)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(places, labels)
    if done:
        figure.suptitle(f"{done[0]['gpu']}: more tokens and less memory are better", fontsize=11)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "finetune.svg")
    # the same rows give the same file
    matplotlib.rcParams.update({"svg.hashsalt": "fastlm", "svg.fonttype": "none"})
    draw(shown(read("finetune"))).savefig(parser.parse_args().out, metadata={"Date": None})
