"""The figure of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.results import Section

OURS, RIVALS = "#D55E00", "#0072B2"


def draw(sections: Mapping[str, Section], path: Path) -> None:
    """Draw those of the four panels that there are results for."""
    panels = {"boat": ratios, "target": losses, "memory": memory, "growth": growth}
    there = [name for name in panels if name in sections]
    if not there:
        return
    columns, rows = min(2, len(there)), (len(there) + 1) // 2
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


def losses(axis: Any, section: Section) -> None:
    for number, curve in enumerate(section.curves):
        mine = curve.name == "IVSP"
        # Ten colours for more curves than that: those of other libraries, whose names have two
        # words, are dashed.
        style = "--" if " " in curve.name else "-"
        colour = OURS if mine else f"C{number % 10}"
        axis.loglog(
            curve.xs,
            curve.ys,
            style,
            label=curve.name,
            color=colour,
            linewidth=2.5 if mine else 1.2,
        )
    # One that diverges leaves the picture.
    axis.set_ylim(5e-3, 2 * max(curve.ys[0] for curve in section.curves))
    for target in (0.1, 0.01):
        axis.axhline(target, color="0.7", linewidth=0.8, zorder=0)
    axis.set_title("validation loss, MNIST hyper-cleaning", fontsize=10)
    axis.set_xlabel("seconds of optimisation")
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
