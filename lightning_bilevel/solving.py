"""Solve a problem of two plain functions, without Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.report.reading import advice, reading
from lightning_bilevel.report.tally import Tally
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["Solution", "solve"]


@dataclass(frozen=True)
class Solution:
    """The end of a run.

    Attributes:
        x: The upper-level variables.
        y: The lower-level variables.
        certificate: The KKT residuals at (x, y); None if neither the solver nor the call named an
            envelope.
        history: The record of every outer iteration.
        tally: The counts over all iterations.
    """

    x: Tensor
    y: Tensor
    certificate: Certificate | None
    history: list[StepInfo]
    tally: Tally

    @property
    def reading(self) -> str:
        """The certificate and the run in plain words, with advice where something is off."""
        if self.certificate is None:
            return "there is no certificate: neither the solver nor the call named an envelope."
        return " ".join(
            [reading(self.certificate, self.tally), *advice(self.certificate, self.tally)]
        )


def solve(
    problem: BilevelProblem,
    x0: Tensor,
    y0: Tensor,
    solver: SolverCallable = IVSP,
    max_steps: int = 1000,
    *,
    envelope: Envelope | None = None,
    tolerance: float | None = None,
) -> Solution:
    """Run a solver on a problem.

    Args:
        problem: f, g and the sets.
        x0: The start of the upper level, a flat vector.
        y0: The start of the lower level, a flat vector.
        solver: A class or function that makes the solver from parameter groups, such as
            ``functools.partial(IVSP, rho=0.5)``.
        max_steps: The number of outer iterations.
        envelope: The Moreau envelope of the certificate; None takes the solver's own.
        tolerance: The accuracy of the certificate's proximal point.

    Example:
        >>> from functools import partial
        >>> from lightning_bilevel.core.sets import Box
        >>> problem = BilevelProblem(
        ...     upper=lambda x, y: ((x - 1) ** 2).sum() + (y**2).sum(),
        ...     lower=lambda x, y: 0.5 * ((y - x) ** 2).sum(),
        ...     upper_set=Box(-2, 2),
        ...     lower_set=Box(-2, 2),
        ... )
        >>> start = torch.zeros(1, dtype=torch.float64)
        >>> ivsp = partial(IVSP, sigma=0.0, gamma0=0.01)
        >>> solution = solve(problem, start, start, ivsp, max_steps=200)
        >>> bool(abs(solution.x - 0.5) < 0.05), bool(abs(solution.y - 0.5) < 0.05)
        (True, True)
    """
    if not isinstance(max_steps, int):
        raise TypeError(f"`solve(max_steps={max_steps!r})` must be a whole number.")
    if max_steps < 1:
        raise ValueError(f"`solve(max_steps={max_steps})` must be at least 1.")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(
            f"`solve(tolerance={tolerance})` must be positive, or None for what the dtype allows "
            "comfortably."
        )
    x, y = _start("x0", x0), _start("y0", y0)
    groups = [{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}]
    optimizer = _build_solver(solver, groups)
    # The solver projects its start onto the sets, so the check does too.
    start = problem.check(
        problem.upper_set.project(x.detach()), problem.lower_set.project(y.detach())
    )
    history: list[StepInfo] = []
    tally = Tally()
    for _ in range(max_steps):
        info = optimizer.step(problem=problem)
        history.append(info)
        tally.add(info)
    x, y = x.detach(), y.detach()
    envelope = envelope or optimizer.envelope
    certificate = None
    if envelope is not None:
        certificate = certify(
            problem,
            x,
            y,
            envelope,
            multiplier=optimizer.multiplier,
            tolerance=tolerance,
            start=start,
        )
    return Solution(x, y, certificate, history, tally)


def _build_solver(solver: Any, params: list[dict[str, Any]]) -> BilevelOptimizer:
    rule = (
        "it must be a class of the library such as `IVSP`, or what makes a solver, such as "
        "`functools.partial(IVSP, rho=0.5)`."
    )
    if not callable(solver):
        kind = repr(solver) if isinstance(solver, str) else f"{type(solver).__name__}(...)"
        raise TypeError(f"`solve(solver={kind})` cannot be called with parameters: {rule}")
    made = solver(params)
    if not isinstance(made, BilevelOptimizer):
        name = getattr(solver, "__name__", type(solver).__name__)
        raise TypeError(
            f"`solve(solver={name})` made a {type(made).__name__}, which is no `BilevelOptimizer`: "
            f"{rule}"
        )
    return made


def _start(name: str, value: Any) -> Tensor:
    start = torch.as_tensor(value)
    if start.ndim > 1 or not start.is_floating_point():
        kind = f"shape {tuple(start.shape)}" if start.ndim > 1 else f"dtype {start.dtype}"
        raise ValueError(
            f"`solve({name})` has {kind}: it must be a flat vector of floating-point numbers."
        )
    return start.detach().reshape(-1).clone().requires_grad_()
