"""Colours and axes of the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["PALETTE", "scale"]

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


def scale(axis: Any, values: Sequence[float]) -> None:
    """Make an axis logarithmic if its values are not negative and span more than a power of ten."""
    finite = [value for value in values if math.isfinite(value)]
    sizes = [value for value in finite if value != 0.0]
    if not sizes or min(sizes) < 0.0 or max(sizes) <= 10 * min(sizes):
        return
    if len(sizes) < len(finite):
        # A violation that has reached zero is drawn at the bottom of a logarithmic axis.
        axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(sizes))))
        axis.set_ylim(bottom=0.0)
    else:
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())
        if max(sizes) < 100 * min(sizes):  # too short for powers of ten alone
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
