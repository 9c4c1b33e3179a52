"""The files of a comparison: a table of all evaluations, a summary, and a figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["COUNTS", "MethodResult", "scale", "write_results"]

COUNTS = ("iteration", "optimization_time", "passes")
_LABELS = {"auroc": "AUROC", "kkt_residual": "KKT residual (only IVSP aims at it)"}
# A solver has the same colour in every figure: Okabe and Ito's palette, which colour-blind readers
# can tell apart, and beyond its seven Tol's.
_COLOURS = {
    **{"IVSP": "#D55E00", "PNGBiO": "#0072B2", "MEHA": "#009E73", "SLM": "#CC79A7"},
    **{"F2SA": "#E69F00", "VPBGD": "#56B4E9", "BOME": "#000000", "AID": "#882255"},
    **{"ITD": "#44AA99", "SOBA": "#999933", "DARTS": "#888888", "F2BA": "#332288"},
    **{"HJFBiO": "#AA4499", "PBGDFree": "#117733", "LuMei": "#661100"},
}
_STYLES = ("-", "--", ":", "-.")


class MethodResult(NamedTuple):
    """One method of a comparison.

    Attributes:
        name: The name of its config.
        solver: The name of its solver class.
        rows: One record per evaluation: iteration, optimization_time, passes, and every metric.
        error: The error that ended the run early, if there was one.
    """

    name: str
    solver: str
    rows: list[dict[str, float]]
    error: str | None = None


def write_results(out: Path, results: Sequence[MethodResult], title: str) -> None:
    """Write results.csv, summary.md, and the figure as PNG and SVG."""
    names = dict.fromkeys(name for result in results for row in result.rows for name in row)
    metrics = [name for name in names if name not in COUNTS]
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["method", "solver", *COUNTS, *metrics])
        writer.writeheader()
        for result in results:
            method = {"method": result.name, "solver": result.solver}
            writer.writerows({**method, **row} for row in result.rows)
    (out / "summary.md").write_text(summary(results, metrics, title))
    if metrics:
        import matplotlib as mpl

        style: Any = {"axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
        with mpl.rc_context({"font.size": 10, **style}):
            figure = draw(results, metrics, title)
            for suffix in ("png", "svg"):
                figure.savefig(out / f"figure.{suffix}", dpi=160)


def _label(metric: str) -> str:
    return _LABELS.get(metric, metric.replace("_", " "))


def summary(results: Sequence[MethodResult], metrics: Sequence[str], title: str) -> str:
    """Return a table of the last metrics in Markdown; the best of each is bold."""
    columns = ["method", *map(_label, metrics), "iterations", "time (s)", "passes", "note"]
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    best = {}
    for name in metrics:
        # A run that ended early does not compete.
        found = [r.rows[-1][name] for r in results if r.rows and name in r.rows[-1] and not r.error]
        rises = any(word in name.lower() for word in ("auroc", "accuracy"))
        best[name] = (max if rises else min)(found, default=math.nan)
    for result in results:
        last = result.rows[-1] if result.rows else {}
        cells = [result.name]
        for name in (*metrics, *COUNTS):
            text = f"{last[name]:{'.3g' if name in metrics else '.6g'}}" if name in last else ""
            bold = name in last and not result.error and last[name] == best.get(name)
            cells.append(f"**{text}**" if bold else text)
        cells.append((result.error or "").replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[MethodResult], metrics: Sequence[str], title: str) -> Any:
    """Draw each metric against optimisation time, one panel per metric."""
    from matplotlib.figure import Figure

    columns = len(metrics) if len(metrics) <= 4 else 3
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * rows + 0.7), layout="constrained")
    solvers = [result.solver for result in results]
    for number, metric in enumerate(metrics, 1):
        axis: Any = figure.add_subplot(rows, columns, number)
        for index, result in enumerate(results):
            points = [row for row in result.rows if metric in row]
            axis.plot(
                [row["optimization_time"] for row in points],
                [row[metric] for row in points],
                color=_COLOURS.get(result.solver, f"C{index}"),
                linestyle=_STYLES[solvers[:index].count(result.solver) % len(_STYLES)],
                label=result.solver if solvers.count(result.solver) == 1 else result.name,
            )
        scale(axis, [row[metric] for result in results for row in result.rows if metric in row])
        axis.set(xlabel="optimisation time (s)", xlim=(0.0, None))
        axis.set_title(_label(metric), fontsize=10)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2 * columns, frameon=False)
    return figure


def scale(axis: Any, values: Sequence[float]) -> None:
    """Make an axis logarithmic if its values are not negative and span more than a power of ten."""
    finite = [value for value in values if math.isfinite(value)]
    sizes = [value for value in finite if value != 0.0]
    if not sizes or min(sizes) < 0.0 or max(sizes) <= 10 * min(sizes):
        return
    if len(sizes) == len(finite):
        axis.set_yscale("log")
    else:
        # A violation that has reached zero is drawn at the bottom of a logarithmic axis.
        axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(sizes))))
        axis.set_ylim(bottom=0.0)
