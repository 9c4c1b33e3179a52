"""The files of a comparison: a table of all evaluations, a summary, and a figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_bilevel.baselines.row import Baseline
from lightning_bilevel.report.comparison import Curve, Level, draw_comparison
from lightning_bilevel.report.labels import AIM, label

__all__ = ["MethodResult", "write_csv", "write_figure", "write_summary"]


@dataclass
class MethodResult:
    """One method of a comparison.

    Attributes:
        name: The name of its config.
        solver: The name of its solver class.
        rows: One record per evaluation: iteration, optimization_time, passes, and every metric.
        error: The error that ended the run early, if there was one.
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


def write_summary(
    path: Path, results: Sequence[MethodResult], title: str, baselines: Sequence[Baseline] = ()
) -> None:
    """Write a table of the final metrics, and a ranking for each metric, in Markdown.

    Args:
        path: The file.
        results: The methods.
        title: The title.
        baselines: What simple methods came to; they stand below the others and are not ranked.
    """
    metrics = [
        name for name in _metrics(results) if any(r.rows and name in r.rows[-1] for r in results)
    ]
    finals = {r.name: r.rows[-1] if r.rows and not r.error else {} for r in results}
    best = {}
    for name in metrics:
        best_of = max if _rises(name) else min
        best[name] = best_of((f[name] for f in finals.values() if name in f), default=math.nan)
    head = ["method", *map(_marked, metrics), "iterations", "passes", "time (s)", "note"]
    lines = [f"# {title}", "", _row(head), _row(["---"] * len(head))]
    for result in results:
        final = finals[result.name] or (result.rows[-1] if result.rows else {})
        cells = [
            _number(final.get(name), bold=not result.error and final.get(name) == best[name])
            for name in metrics
        ]
        counts = [str(int(final[k])) if k in final else "" for k in ("iteration", "passes")]
        spent = f"{final['optimization_time']:.2f}" if final else ""
        lines.append(
            _row([result.name, *cells, *counts, spent, (result.error or "").replace("|", "/")])
        )
    lines += [_baseline_row(baseline, metrics) for baseline in baselines]
    for name in metrics:
        if name in AIM:
            lines += ["", f"\\* {AIM[name][1]}"]
    lines += ["", "Ranking (best first; runs that ended early are left out):", ""]
    for name in metrics:
        pairs = [(f[name], method) for method, f in finals.items() if name in f]
        ranked = [method for _, method in sorted(pairs)]
        if _rises(name):
            ranked.reverse()
        lines.append(f"- **{label(name)}**: {', '.join(ranked)}")
    path.write_text("\n".join(lines) + "\n")


def _marked(metric: str) -> str:
    """Return a metric in words, with a mark if there is a footnote about it."""
    return f"{label(metric)}\\*" if metric in AIM else label(metric)


def _baseline_row(baseline: Baseline, metrics: Sequence[str]) -> str:
    cells = [_number(baseline.metrics.get(name), bold=False) for name in metrics]
    steps = baseline.metrics.get("iteration")
    count = "" if steps is None else str(int(steps))
    return _row([f"*{baseline.name}*", *cells, count, "", f"{baseline.seconds:.2f}", "baseline"])


def _rises(name: str) -> bool:
    """Whether a metric is better when larger."""
    return any(word in name.lower() for word in ("auroc", "accuracy"))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, bold: bool) -> str:
    text = "" if value is None else f"{value:.3g}"
    return f"**{text}**" if bold and text else text


def write_figure(
    path: Path, results: Sequence[MethodResult], title: str, baselines: Sequence[Baseline] = ()
) -> None:
    """Draw each metric against optimisation time, one panel per metric, as PNG and SVG.

    Args:
        path: The file, without its ending.
        results: The methods.
        title: The title.
        baselines: What simple methods came to, as horizontal lines where they have the metric.
    """
    drawn = sorted((result for result in results if result.rows), key=lambda r: r.solver != "IVSP")
    metrics = _metrics(drawn)
    if not metrics:
        return
    panels = {}
    levels = {}
    for name in metrics:
        heading = f"{label(name)}\n({AIM[name][0]})" if name in AIM else label(name)
        panels[heading] = _curves(drawn, name)
        levels[heading] = [Level(b.name, b.metrics[name]) for b in baselines if name in b.metrics]
    figure = draw_comparison(panels, title, levels)
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_suffix(suffix), dpi=160)


def _curves(results: Sequence[MethodResult], metric: str) -> list[Curve]:
    solvers = [result.solver for result in results]
    curves = []
    for result in results:
        rows = [row for row in result.rows if metric in row]
        name = result.solver if solvers.count(result.solver) == 1 else result.name
        times = [row["optimization_time"] for row in rows]
        curves.append(Curve(result.solver, name, times, [row[metric] for row in rows]))
    return curves
