"""What a comparison leaves behind: a table of all evaluations, a summary, and a figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MethodResult", "write_csv", "write_figure", "write_summary"]

# Okabe and Ito's palette, which colour-blind readers can tell apart; a solver has the same colour in every figure.
_COLOURS = {
    "IVSP": "#D55E00",
    "PNGBiO": "#0072B2",
    "MEHA": "#009E73",
    "SLM": "#CC79A7",
    "F2SA": "#E69F00",
    "VPBGD": "#56B4E9",
    "BOME": "#000000",
}
_STYLES = ("-", "--", ":", "-.")


@dataclass
class MethodResult:
    """One method of a comparison.

    Attributes:
        name: The name of its config.
        solver: The name of its solver class.
        rows: One record per evaluation: iteration, optimization_time, passes, and every metric.
        error: Why it ended before its budget, if it did.
    """

    name: str
    solver: str
    rows: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None


def _metrics(results: Sequence[MethodResult]) -> list[str]:
    names = dict.fromkeys(name for result in results for row in result.rows for name in row)
    return [name for name in names if name not in ("iteration", "optimization_time", "passes")]


def write_csv(path: Path, results: Sequence[MethodResult]) -> None:
    """Write one row per method and evaluation."""
    columns = ["method", "solver", "iteration", "optimization_time", "passes", *_metrics(results)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for result in results:
            for row in result.rows:
                writer.writerow({"method": result.name, "solver": result.solver, **row})


def write_summary(path: Path, results: Sequence[MethodResult], title: str) -> None:
    """Write the final figures as a table, and a ranking per metric, in Markdown."""
    metrics = [name for name in _metrics(results) if any(r.rows and name in r.rows[-1] for r in results)]
    finals = {r.name: r.rows[-1] if r.rows and not r.error else {} for r in results}
    best = {name: min((f[name] for f in finals.values() if name in f), default=math.nan) for name in metrics}
    best |= {
        name: max(f[name] for f in finals.values() if name in f) for name in metrics if _rises(name) and any(finals.values())
    }
    head = ["method", *metrics, "iterations", "passes", "time (s)", "note"]
    lines = [f"# {title}", "", _row(head), _row(["---"] * len(head))]
    for result in results:
        final = finals[result.name] or (result.rows[-1] if result.rows else {})
        cells = [_number(final.get(name), bold=not result.error and final.get(name) == best[name]) for name in metrics]
        counts = [str(int(final[k])) if k in final else "" for k in ("iteration", "passes")]
        spent = f"{final['optimization_time']:.2f}" if final else ""
        lines.append(_row([result.name, *cells, *counts, spent, (result.error or "").replace("|", "/")]))
    lines += ["", "Ranking (best first; runs that ended early are left out):", ""]
    for name in metrics:
        ranked = sorted((f[name], method) for method, f in finals.items() if name in f)
        lines.append(f"- **{name}**: {', '.join(method for _, method in (reversed(ranked) if _rises(name) else ranked))}")
    path.write_text("\n".join(lines) + "\n")


def _rises(name: str) -> bool:
    """Whether a metric is better when larger."""
    return any(word in name.lower() for word in ("auroc", "accuracy"))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, bold: bool) -> str:
    text = "" if value is None else f"{value:.3g}"
    return f"**{text}**" if bold and text else text


def write_figure(path: Path, results: Sequence[MethodResult], title: str) -> None:
    """Draw each metric against optimisation time, one panel each, as PNG and SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    metrics = _metrics(results)
    drawn = sorted((r for r in results if r.rows), key=lambda r: r.solver != "IVSP")
    if not metrics or not drawn:
        return
    columns = len(metrics) if len(metrics) <= 4 else 3
    lines = math.ceil(len(metrics) / columns)
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}):
        figure = Figure(figsize=(3.4 * columns, 2.8 * lines + 0.7), layout="constrained")
        axes: list[Any] = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axis, name in zip(axes, metrics, strict=False):
            values = [row[name] for r in drawn for row in r.rows if name in row and math.isfinite(row[name])]
            positive = [v for v in values if v > 0]
            for index, result in enumerate(drawn):
                points = [(row["optimization_time"], row[name]) for row in result.rows if name in row]
                main = result.solver == "IVSP"
                axis.plot(
                    *zip(*points, strict=True) if points else ([], []),
                    color=_COLOURS.get(result.solver, f"C{index}"),
                    linestyle=_STYLES[sum(other.solver == result.solver for other in drawn[:index]) % len(_STYLES)],
                    linewidth=2.4 if main else 1.5,
                    zorder=3 if main else 2,
                    label=result.solver if sum(r.solver == result.solver for r in drawn) == 1 else result.name,
                )
            if positive and max(positive) > 10 * min(positive):
                if len(positive) == len(values):
                    axis.set_yscale("log")
                else:
                    # A violation that has reached zero is drawn at the bottom of a logarithmic axis.
                    axis.set_yscale("symlog", linthresh=min(positive))
                    axis.set_ylim(bottom=0)
                if max(positive) < 100 * min(positive):
                    # Powers of ten alone would leave such an axis with one label.
                    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel("optimisation time (s)")
            axis.set_title(name)
            axis.grid(alpha=0.3)
        for axis in axes[len(metrics) :]:
            axis.remove()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.suptitle(title)
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8 if columns > 2 else 4), frameon=False)
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_suffix(suffix), dpi=160)
