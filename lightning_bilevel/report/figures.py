"""Figures of what a run did."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

__all__ = ["draw"]

# What is drawn, panel by panel: the name of a series, its label, its colour (Okabe and Ito's) and the style of its line.
_PANELS: dict[str, list[tuple[str, str, str, str]]] = {
    "upper level f": [("bilevel/upper", "", "#D55E00", "-")],
    "lower level g": [("bilevel/lower", "", "#0072B2", "-")],
    "Moreau gap R, feasible below 0": [
        ("bilevel/moreau_gap", "as the solver sees it", "#56B4E9", "-"),
        ("residual", "evaluated", "#0072B2", "o-"),
    ],
    "KKT residuals": [
        ("stationarity", "stationarity", "#D55E00", "o-"),
        ("feasibility", "feasibility", "#0072B2", "o-"),
        ("complementarity", "complementarity", "#009E73", "o-"),
    ],
    "penalty and smoothing": [
        ("bilevel/penalty", "inverse penalty gamma", "#CC79A7", "-"),
        ("update", "an update of the penalty", "#D55E00", "v"),
        ("bilevel/smoothing", "smoothing mu", "#000000", "-"),
    ],
    "cost of an iteration": [
        ("bilevel/inner_iterations", "inner iterations", "#E69F00", "-"),
        ("bilevel/trials", "trials", "#000000", "-"),
    ],
}
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw(series: dict[str, list[list[float]]]) -> Any:
    """Draw the series that there are, and return the pixels."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {title: [line for line in lines if line[0] in series] for title, lines in _PANELS.items()}
    logged = [name for name in series if name.startswith("validation/")]
    panels["validation"] = [(name, name.split("/", 1)[1], _COLOURS[i % len(_COLOURS)], "o-") for i, name in enumerate(logged)]
    panels = {title: lines for title, lines in panels.items() if lines}
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.4 * columns, 2.4 * rows), dpi=100)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for name, label, colour, style in lines:
                axis.plot(*series[name], style, color=colour, label=label, markersize=3, linewidth=1.3)
            values = [v for name, *_ in lines for v in series[name][1] if math.isfinite(v)]
            _scale(axis, values)
            # Ticks cost more than curves: few, none between, and without the mathematical setting of powers.
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(lambda value, position: f"{value:.3g}")
            axis.set_title(title, y=1.0)  # a place of its own choice would be found by measuring all ticks
            axis.grid(alpha=0.3)
            if any(label for _, label, *_ in lines):
                axis.legend(frameon=False, fontsize=8)
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis in axes[max(len(panels) - columns, 0) : len(panels)]:
            axis.set_xlabel("outer iteration")
        figure.subplots_adjust(
            left=0.08, right=0.985, top=1 - 0.3 / (2.4 * rows), bottom=0.5 / (2.4 * rows), wspace=0.2, hspace=0.35
        )
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _scale(axis: Any, values: list[float]) -> None:
    """Make an axis logarithmic where its values span more than a power of ten, on either side of 0 if need be."""
    sizes = [abs(v) for v in values if v != 0.0]
    if not sizes or max(values) <= 0.0 or max(sizes) <= 10 * min(sizes):
        return
    if min(values) < 0.0:
        # R falls by powers of ten and then stays about 0: what it is in the second half is about where the powers end.
        axis.set_yscale("symlog", linthresh=median(sizes[len(sizes) // 2 :]))
        axis.axhline(0.0, color="0.6", linewidth=0.8)
    elif len(sizes) < len(values):
        axis.set_yscale("symlog", linthresh=min(sizes))
        axis.set_ylim(bottom=0.0)
    else:
        axis.set_yscale("log")
