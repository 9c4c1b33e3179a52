"""The figure of a comparison: where labels of baselines stand, and what metrics are called."""

from __future__ import annotations

from itertools import pairwise

from lightning_bilevel.report.comparison import Curve, Level, draw_comparison, spread
from lightning_bilevel.report.labels import label


def test_labels_keep_their_distance_order_and_place() -> None:
    assert spread([], 0.1) == []
    assert spread([0.2, 0.5], 0.1) == [0.2, 0.5]  # far enough apart: they stay
    for places in ([0.5] * 4, [0.0, 0.01, 0.5], [0.97, 0.98, 1.0], [0.1, 0.12, 0.19, 0.27, 0.9]):
        moved = spread(places, 0.1)
        assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(moved))
        assert moved[0] >= 0.0
        assert moved[-1] <= 1.0 + 1e-9


def test_baselines_are_horizontal_lines_in_the_panel_that_they_have() -> None:
    curves = [Curve("IVSP", "IVSP", [0.0, 1.0], [0.9, 0.2])]
    levels = {"test error": [Level("simple", 0.05), Level("simpler", 0.05)]}
    figure = draw_comparison({"test error": curves, "loss": curves}, "title", levels)
    error, loss = figure.axes
    horizontal = [line for line in error.lines if list(line.get_ydata()) == [0.05, 0.05]]
    assert len(horizontal) == 2
    assert {text.get_text() for text in error.texts} == {"simple: 0.05", "simpler: 0.05"}
    low, high = error.get_ylim()
    assert low < 0.05 < 0.9 < high
    assert len(loss.lines) == 1
    assert error.get_xlim()[0] == 0.0  # the start is in the picture


def test_metrics_are_called_by_words() -> None:
    names = ("kkt_residual", "violation", "auroc", "missed_errors", "own_score")
    assert list(map(label, names)) == [
        "KKT residual",
        "violation of the lower level",
        "AUROC of the weights",
        "share of wrong labels missed",
        "own score",
    ]
