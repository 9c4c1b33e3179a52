"""A row of a table of baselines."""

from __future__ import annotations

from typing import NamedTuple


class Baseline(NamedTuple):
    """What a simple method came to.

    Attributes:
        name: The method, in words.
        metrics: Its figures, under the names that the ready modules log: ``test_error``,
            ``auroc``, ``missed_errors``, ``val_error``. A network that was trained also has the
            number of its steps, ``iteration``.
        seconds: How long it took, training and evaluation.
    """

    name: str
    metrics: dict[str, float]
    seconds: float
