"""The figure of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.results import Section

OURS, RIVALS = "#D55E00", "#0072B2"


def draw(sections: Mapping[str, Section], path: Path) -> None:
    """Draw those of the five panels that there are results for."""
    panels = {
        "boat": ratios,
        "stationarity": stationarity,
        "accuracy": accuracy,
        "memory": memory,
        "growth": growth,
    }
    there = [name for name in panels if name in sections]
    if not there:
        return
    columns = min(3, len(there))
    rows = -(-len(there) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, name in zip(axes, there, strict=False):
        panels[name](axis, sections[name])
    for axis in axes[len(there) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=150)


def ratios(axis: Any, section: Section) -> None:
    rows = [row for row in section.rows if row.value is not None]
    axis.barh(
        [row.what.replace(" / ", "\n/ ") for row in rows], [row.value for row in rows], color=RIVALS
    )
    axis.axvline(1.0, color=OURS)
    axis.invert_yaxis()
    axis.set_title("time of an iteration, BOAT / ours", fontsize=10)


def stationarity(axis: Any, section: Section) -> None:
    descents(axis, section)
    axis.set_title("KKT residual, MNIST hyper-cleaning", fontsize=10)
    axis.set_xlabel("passes of f and g")


def accuracy(axis: Any, section: Section) -> None:
    descents(axis, section)
    axis.set_title("test error, MNIST hyper-cleaning", fontsize=10)
    axis.set_xlabel("seconds of processor time")


def descents(axis: Any, section: Section) -> None:
    for number, curve in enumerate(section.curves):
        # Ten colours for more curves than that: those of other libraries, whose names have two
        # words, are dashed.
        style = "--" if " " in curve.name else "-"
        axis.plot(curve.xs, curve.ys, f"o{style}", label=curve.name, color=f"C{number % 10}")
    for line in axis.lines:
        line.set(linewidth=1.2, markersize=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.legend(fontsize=5.5, ncols=2)


def memory(axis: Any, section: Section) -> None:
    for curve in section.curves:
        axis.plot(curve.xs, curve.ys, "o-", label=curve.name, markersize=3)
    axis.set_ylim(bottom=0)
    axis.set_title("peak memory beyond the data (MiB)", fontsize=10)
    axis.set_xlabel("inner steps")
    axis.legend(fontsize=7)


def growth(axis: Any, section: Section) -> None:
    for curve in section.curves:
        axis.loglog(curve.xs, curve.ys, "o-", label=curve.name, markersize=3)
    axis.set_title("seconds of an iteration of IVSP", fontsize=10)
    axis.set_xlabel("coordinates, samples, episodes")
    axis.legend(fontsize=7)
