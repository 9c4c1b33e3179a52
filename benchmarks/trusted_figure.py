"""The README's picture: test errors with a thousand trusted samples, a panel per data set.

Run: python -m benchmarks.trusted_figure [RESULTS.jsonl ...] [--out trusted.png]
Without results of ``python -m benchmarks.trusted`` it makes them first, and keeps them beside the
picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks import trusted

NAMES = {
    "trusted": "trusted samples alone",
    "self-training": "self-training, lenient",
    "self-training-strict": "self-training, strict",
    "ivsp": "learned weights, StreamingIVSP",
    "f2sa": "learned weights, F2SA",
    "oracle": "oracle: right labels only",
}
TITLES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "digits": "digits"}
BILEVEL = ("ivsp", "f2sa")
# Each solver with the multiplier that was chosen for it on MNIST with a hundred trusted samples.
CALLS = [
    ["--data", data, "--trusted", "1000", "--table", "1", *more]
    for data in ("mnist", "fashion_mnist")
    for more in (
        ["--methods", *(name for name in NAMES if name != "f2sa")],
        ["--methods", "f2sa", "--multiplier", "0.05"],
    )
]


def run(path: Path) -> None:
    """Write what ``benchmarks.trusted`` prints to a file; show how far it is."""
    with path.open("w") as file, redirect_stdout(file):
        for call in CALLS:
            print(f"python -m benchmarks.trusted {' '.join(call)}", file=sys.stderr, flush=True)
            trusted.main(call)


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw a point for each run and a bar for the mean of each method."""
    sets = list(dict.fromkeys(row["data"] for row in rows))
    figure = Figure(figsize=(4.2 * len(sets) + 1.2, 2.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        for place, (method, label) in enumerate(reversed(NAMES.items())):
            errors = [
                row["test_error"] for row in rows if row["data"] == name and row["method"] == method
            ]
            if not errors:
                continue
            color = "#0072B2" if method in BILEVEL else "#999999"
            axis.barh(place, mean(errors), 0.65, color=color, alpha=0.55)
            axis.plot(errors, [place] * len(errors), "o", color=color, markersize=3.5)
            axis.text(mean(errors) * 0.03, place, f"{mean(errors):.3f}", va="center", fontsize=8)
            axis.set_yticks([])
            if axis.get_subplotspec().is_first_col():
                axis.text(
                    -0.02,
                    place,
                    label,
                    transform=axis.get_yaxis_transform(),
                    ha="right",
                    va="center",
                    fontsize=9,
                )
        axis.set(title=TITLES[name], xlabel="test error after retraining")
        axis.spines[["top", "right", "left"]].set_visible(False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("trusted.png"))
    given = parser.parse_args(arguments)
    if not given.results:
        given.results = [given.out.with_suffix(".jsonl")]
        run(given.results[0])
    lines = [line for path in given.results for line in path.read_text().splitlines()]
    draw([json.loads(line) for line in lines if line.startswith("{")]).savefig(given.out, dpi=160)


if __name__ == "__main__":
    main()
