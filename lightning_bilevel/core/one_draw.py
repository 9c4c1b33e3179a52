"""A mini-batch problem whose evaluations all see the same random numbers.

On such a problem f and g are fixed functions, so an iteration of a method may evaluate them at
several points: differences of gradients compare the same masks of dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_bilevel.core.lower import LowerTerm
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sample import RandomNumbers

__all__ = ["with_one_draw"]


def with_one_draw(problem: BilevelProblem, device: torch.device) -> BilevelProblem:
    """Return the problem with one draw of random numbers for f, and one for g.

    The first evaluation of g is by ``lower``, and all others are by ``inner``, and those of f
    likewise: a batch counts once in running statistics, whatever the number of points.

    Args:
        problem: f and g on a mini-batch.
        device: Where random numbers are drawn besides the host.

    Example:
        >>> noisy = BilevelProblem(lambda x, y: (y * torch.rand(())).sum(), lambda x, y: y.sum())
        >>> fixed = with_one_draw(noisy, torch.device("cpu"))
        >>> x = y = torch.ones(1)
        >>> fixed.upper(x, y).value == fixed.upper(x, y).value
        True
    """
    fixed = copy.copy(problem)
    fixed.upper_terms = _fixed(problem.upper_terms, problem.inner_upper_terms, device)
    fixed.lower_terms = _fixed(problem.lower_terms, problem.inner_terms, device)
    return fixed


def _fixed(
    first: Sequence[LowerTerm], later: Sequence[LowerTerm], device: torch.device
) -> list[LowerTerm]:
    return [_fixed_term(*pair, device) for pair in zip(first, later, strict=True)]


def _fixed_term(first: LowerTerm, later: LowerTerm, device: torch.device) -> LowerTerm:
    def part(name: str) -> _OneDraw | None:
        function = getattr(first, name)
        return None if function is None else _OneDraw(function, getattr(later, name), device)

    return LowerTerm(
        _OneDraw(first.loss, later.loss, device), features=part("features"), outputs=part("outputs")
    )


class _OneDraw:
    """A function that sees the random numbers of its first call in all calls.

    Later calls leave the numbers that others draw where they are.
    """

    def __init__(
        self, first: Callable[..., Any], later: Callable[..., Any], device: torch.device
    ) -> None:
        self._first = first
        self._later = later
        self._device = device
        self._numbers: RandomNumbers | None = None

    def __call__(self, *args: Any) -> Any:
        if self._numbers is None:
            self._numbers = RandomNumbers(self._device)
            return self._first(*args)
        others = RandomNumbers(self._device)
        self._numbers.restore()
        try:
            return self._later(*args)
        finally:
            others.restore()
