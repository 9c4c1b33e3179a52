"""The axes of the pictures of a run."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from lightning_bilevel.report.figures import scale


@pytest.mark.parametrize("delta", [6.4e-4, 1e-3, 2.5e-5, 40.0])
def test_around_0_an_axis_has_no_tick_but_that_of_0(delta: float) -> None:
    """R falls from 15 delta to -delta; a tick nearer to 0 than that would meet the one of 0."""
    values = [delta * (16 * math.exp(-step / 20) - 1) for step in range(300)]
    axis = Figure().subplots()
    axis.plot(values)
    scale(axis, values)
    assert axis.get_yscale() == "symlog"
    ticks = axis.get_yticks()
    assert 0.0 in ticks
    assert min(abs(tick) for tick in ticks if tick) >= 0.99 * delta


@pytest.mark.parametrize("smallest", [9.2e-5, 5e-7, 3.0])
def test_the_ticks_of_a_residual_that_reaches_0_are_apart(smallest: float) -> None:
    """A tick inside the linear part would meet that of 0."""
    values = [3000 * smallest, smallest, 0.0]
    axis = Figure().subplots()
    axis.plot(values)
    scale(axis, values)
    assert axis.get_yscale() == "symlog"
    assert axis.get_ylim()[0] == 0.0
    ticks = [tick for tick in axis.get_yticks() if tick >= 0.0]
    heights = [float(axis.transData.transform((0.0, tick))[1]) for tick in ticks]
    gaps = [after - before for before, after in pairwise(heights)]
    assert len(gaps) >= 3
    assert min(gaps) > 0.8 * max(gaps)


def test_values_of_one_sign_have_a_logarithmic_axis() -> None:
    axis = Figure().subplots()
    scale(axis, [1.0, 1e-3])
    assert axis.get_yscale() == "log"
    axis = Figure().subplots()
    scale(axis, [2.0, 1.0])
    assert axis.get_yscale() == "linear"
