"""The figure of one run.

The drawing functions import matplotlib and numpy, so that nobody else waits for these imports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["BARE", "PALETTE", "draw", "scale"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = {
    "vermillion": "#D55E00",
    "blue": "#0072B2",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
}
BARE: Any = {"axes.spines.top": False, "axes.spines.right": False}
# The panels of a run. Each line has the name of its series, a label, a colour and a style.
_PANELS: dict[str, list[tuple[str, str, str, str]]] = {
    "upper level f": [("bilevel/upper", "", "vermillion", "-")],
    "lower level g": [("bilevel/lower", "", "blue", "-")],
    "relaxed residual R, feasible below 0": [
        ("bilevel/moreau_gap", "as the solver sees it", "sky", "-"),
        ("residual", "evaluated", "blue", "o-"),
    ],
    "KKT residuals": [
        ("stationarity", "stationarity", "vermillion", "o-"),
        ("feasibility", "feasibility", "blue", "o-"),
        ("complementarity", "complementarity", "green", "o-"),
    ],
    "penalty and smoothing": [
        ("bilevel/penalty", "inverse penalty gamma", "purple", "-"),
        ("update", "an update of the penalty", "vermillion", "v"),
        ("bilevel/smoothing", "smoothing mu", "black", "-"),
    ],
    "cost of an iteration": [
        ("bilevel/inner_iterations", "inner iterations", "orange", "-"),
        ("bilevel/trials", "trials", "black", "-"),
    ],
}


def draw(series: Mapping[str, Sequence[Sequence[float]]]) -> Any:
    """Draw the available series of a run, and return the pixels.

    Args:
        series: The iterations and the values of each series, by its name.
    """
    import matplotlib as mpl
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(series)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with mpl.rc_context({"font.size": 9, **BARE}):
        figure = Figure(figsize=(4.4 * columns, 2.4 * rows), dpi=100)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for name, label, colour, style in lines:
                drawn = {"color": PALETTE[colour], "markersize": 3, "linewidth": 1.3}
                axis.plot(*series[name], style, label=label, **drawn)
            scale(axis, [value for name, *_ in lines for value in series[name][1]])
            # Ticks take longer to draw than curves, so there are no minor ticks and no powers in
            # mathematical type.
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(lambda value, position: f"{value:.3g}")
            # Without `y`, matplotlib measures all ticks to find a place for the title.
            axis.set_title(title, y=1.0)
            axis.grid(alpha=0.3)
            if any(label for _, label, *_ in lines):
                axis.legend(frameon=False, fontsize=8)
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis in axes[max(len(panels) - columns, 0) : len(panels)]:
            axis.set_xlabel("outer iteration")
        top = 1 - 0.3 / (2.4 * rows)
        bottom = 0.5 / (2.4 * rows)
        figure.subplots_adjust(
            left=0.08, right=0.985, top=top, bottom=bottom, wspace=0.2, hspace=0.35
        )
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _panels(series: Mapping[str, Any]) -> dict[str, list[tuple[str, str, str, str]]]:
    panels = {
        title: [line for line in lines if line[0] in series] for title, lines in _PANELS.items()
    }
    logged = [name for name in series if name.startswith("validation/")]
    colours = list(PALETTE)
    panels["validation"] = [
        (name, name.split("/", 1)[1], colours[i % len(colours)], "o-")
        for i, name in enumerate(logged)
    ]
    return {title: lines for title, lines in panels.items() if lines}


def scale(axis: Any, values: Sequence[float]) -> None:
    """Make an axis logarithmic if its values span more than a power of ten.

    If there are values on both sides of 0, the axis is logarithmic on both sides.
    """
    finite = [value for value in values if math.isfinite(value)]
    sizes = [abs(value) for value in finite if value != 0.0]
    if not sizes or max(finite) <= 0.0 or max(sizes) <= 10 * min(sizes):
        return
    if min(finite) < 0.0:
        # R falls by powers of ten and then stays near 0. The axis becomes linear below the typical
        # size of R in the second half, up to a power of ten: a tick below it would meet that of 0.
        typical = median(sizes[len(sizes) // 2 :])
        axis.set_yscale("symlog", linthresh=10.0 ** math.ceil(math.log10(typical)))
        axis.axhline(0.0, color="0.6", linewidth=0.8)
    elif len(sizes) < len(finite):
        # A violation that has reached zero is drawn at the bottom of a logarithmic axis.
        axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(sizes))))
        axis.set_ylim(bottom=0.0)
    else:
        axis.set_yscale("log")
