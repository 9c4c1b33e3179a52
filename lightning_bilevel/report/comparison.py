"""The figure of several methods over the same time, with baselines as horizontal lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_bilevel.report.figures import BARE, PALETTE, scale

__all__ = ["Curve", "Level", "draw_comparison"]

# A solver has the same colour in every figure.
_SOLVERS = dict(
    zip(("IVSP", "PNGBiO", "MEHA", "SLM", "F2SA", "VPBGD", "BOME"), PALETTE.values(), strict=True)
)
# Of Tol's muted palette, for the methods beyond the seven that the first has colours for.
_SOLVERS |= {
    "AID": "#882255",
    "ITD": "#44AA99",
    "SOBA": "#999933",
    "DARTS": "#888888",
    "F2BA": "#332288",
    "HJFBiO": "#AA4499",
    "PBGDFree": "#117733",
    "LuMei": "#661100",
}
_STYLES = ("-", "--", ":", "-.")
# The smallest distance of two labels of levels, as a share of the height of a panel.
_LABEL_HEIGHT = 0.065


class Curve(NamedTuple):
    """One method in a panel of a comparison: its solver's name, its label, and its points."""

    solver: str
    label: str
    times: Sequence[float]
    values: Sequence[float]


class Level(NamedTuple):
    """One baseline in a panel of a comparison: its label and its value."""

    label: str
    value: float


def draw_comparison(
    panels: Mapping[str, Sequence[Curve]],
    title: str,
    levels: Mapping[str, Sequence[Level]] | None = None,
) -> Any:
    """Draw several methods against optimisation time, and return the figure.

    Args:
        panels: The curves of each metric, by its title; all metrics have the same methods in the
            same order.
        title: The title of the figure.
        levels: The baselines of a metric, by the same title; each is a horizontal line.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    levels = levels or {}
    columns = len(panels) if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    # The labels of the levels stand to the right of a panel.
    width, height = (5.0, 3.2) if any(levels.values()) else (3.4, 2.8)
    with mpl.rc_context({"font.size": 10, **BARE}):
        figure = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
        axes: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (name, curves) in zip(axes, panels.items(), strict=False):
            for index, curve in enumerate(curves):
                same_before = sum(other.solver == curve.solver for other in curves[:index])
                ours = curve.solver == "IVSP"
                axis.plot(
                    curve.times,
                    curve.values,
                    color=_SOLVERS.get(curve.solver, f"C{index}"),
                    linestyle=_STYLES[same_before % len(_STYLES)],
                    linewidth=2.4 if ours else 1.5,
                    zorder=3 if ours else 2,
                    label=curve.label,
                )
            mine = levels.get(name, ())
            for level in mine:
                axis.axhline(level.value, color="0.45", linewidth=0.9, linestyle=(0, (6, 3)))
            values = [value for curve in curves for value in curve.values]
            values += [level.value for level in mine]
            scale(axis, values)
            _label_ticks(axis, values)
            _label_levels(axis, mine)
            axis.set_xlim(left=0.0)
            axis.set_xlabel("optimisation time (s)")
            axis.set_title(name)
            axis.grid(alpha=0.3)
        for axis in axes[len(panels) :]:
            axis.remove()
        handles, labels = axes[0].get_legend_handles_labels()
        across = min(len(labels), 8 if columns > 2 else 4)
        figure.suptitle(title)
        figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False)
    return figure


def _label_levels(axis: Any, levels: Sequence[Level]) -> None:
    """Write the labels of the levels beside the panel, moved apart where they would overlap."""
    placed = sorted(levels, key=lambda level: level.value)
    heights = [_share_of_height(axis, level.value) for level in placed]
    for level, height, place in zip(placed, heights, spread(heights, _LABEL_HEIGHT), strict=True):
        axis.annotate(
            f"{level.label}: {level.value:.3g}",
            xy=(1.0, height),
            xytext=(1.05, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=7,
            color="0.3",
            verticalalignment="center",
            arrowprops={
                "arrowstyle": "-",
                "color": "0.6",
                "linewidth": 0.6,
                "relpos": (0.0, 0.5),
                "shrinkA": 0.0,
                "shrinkB": 0.0,
            },
        )


def _share_of_height(axis: Any, value: float) -> float:
    axis.get_ylim()  # matplotlib finds the limits when they are asked for; the transform does not
    pixel = axis.transData.transform((0.0, value))
    return float(axis.transAxes.inverted().transform(pixel)[1])


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Move sorted places apart, to a distance of each other, and keep them between 0 and 1.

    Places that are too close become a block around their mean; blocks that meet become one.

    Example:
        >>> [round(place, 2) for place in spread([0.1, 0.5, 0.5, 1.0, 1.0], 0.2)]
        [0.1, 0.4, 0.6, 0.8, 1.0]
    """
    blocks: list[list[float]] = []
    for place in places:
        blocks.append([place])
        while len(blocks) > 1:
            before = blocks[-2]
            end = _bottom(before, distance) + len(before) * distance
            # Rounding must not make a block of two places that are just far enough apart.
            if end <= _bottom(blocks[-1], distance) + 1e-9:
                break
            before += blocks.pop()
    return [_bottom(block, distance) + i * distance for block in blocks for i in range(len(block))]


def _bottom(block: Sequence[float], distance: float) -> float:
    """Return where a block begins, as close around its mean as the panel allows."""
    height = distance * (len(block) - 1)
    return max(min(sum(block) / len(block) - height / 2, 1.0 - height), 0.0)


def _label_ticks(axis: Any, values: Sequence[float]) -> None:
    """Add labels to a logarithmic axis that is too short for powers of ten alone."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if axis.get_yscale() == "linear":
        return
    sizes = [abs(value) for value in values if math.isfinite(value) and value != 0.0]
    if max(sizes) < 100 * min(sizes):
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
