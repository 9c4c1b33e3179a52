"""Solve a problem of two plain functions, without Lightning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.reading import Tally, advice, reading
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.record import StepInfo

# What the certificates of `solve(epsilon=...)` may add to the optimisation time.
_SHARE = 0.1


@dataclass(frozen=True)
class Proved:
    """The point that the convergence theorem of the method speaks of.

    Attributes:
        x: The upper-level variables.
        y: The lower-level variables.
        certificate: The KKT residuals there, of the method's own relaxation.
        iteration: The number of the iteration that led there, from 1.
    """

    x: Tensor
    y: Tensor
    certificate: Certificate
    iteration: int


@dataclass(frozen=True)
class Solution:
    """The end of a run.

    Attributes:
        x: The upper-level variables of the last iterate.
        y: The lower-level variables of the last iterate.
        certificate: The KKT residuals at (x, y); None if neither the solver nor the call named an
            envelope.
        history: The record of every outer iteration.
        tally: The counts over all iterations.
        proved: The point that the theorem speaks of, which is another one than the last iterate;
            None if the method does not keep it.
        reached: Whether the KKT residual is at most the ``epsilon`` of the call; None without one.
    """

    x: Tensor
    y: Tensor
    certificate: Certificate | None
    history: list[StepInfo]
    tally: Tally
    proved: Proved | None = None
    reached: bool | None = None

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
    y0: Tensor | None = None,
    solver: SolverCallable = IVSP,
    max_steps: int = 1000,
    *,
    envelope: Envelope | None = None,
    tolerance: float | None = None,
    epsilon: float | None = None,
) -> Solution:
    """Run a solver on a problem.

    Args:
        problem: f, g and the sets.
        x0: The start of the upper level, a flat vector.
        y0: The start of the lower level, a flat vector. None for a problem without a
            lower level whose functions do not use y: it is then a number that stays 0.
        solver: A class or function that makes the solver from parameter groups, such as
            ``functools.partial(IVSP, rho=0.5)``.
        max_steps: The number of outer iterations; with ``epsilon`` the most.
        envelope: The Moreau envelope of the certificate; None takes the solver's own.
        tolerance: The accuracy of the certificate's proximal point.
        epsilon: End the run when all three KKT residuals are at most that; None makes all
            iterations. The residuals are evaluated whenever that has taken less than a tenth of
            the optimisation time so far, so the run may make a few iterations too many, and their
            number may differ from one run to the next.

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
    for name, value in (("max_steps", max_steps), ("tolerance", tolerance), ("epsilon", epsilon)):
        if value is not None and not value > 0:
            raise ValueError(f"`solve({name}={value})` must be positive.")
    x = _parameter(x0)
    if y0 is None:
        if not problem.single_level:
            raise TypeError("`solve(y0=None)`: the lower level needs a start, a flat vector.")
        y0 = torch.zeros_like(x[:1])
    y = _parameter(y0)
    optimizer = solver([{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}])
    # The solver projects its start onto the sets, so the check does too.
    start = problem.check(
        problem.upper_set.project(x.detach()), problem.lower_set.project(y.detach())
    )
    evaluate = partial(certify, problem, tolerance=tolerance, start=start)
    history: list[StepInfo] = []
    tally, seconds, certificate = Tally(), 0.0, None
    for number in range(1, max_steps + 1):
        history.append(optimizer.step(problem=problem))
        tally.add(history[-1])
        looks = epsilon is not None and seconds <= _SHARE * history[-1].optimization_time
        asked = envelope or optimizer.envelope
        if not looks and number < max_steps:
            continue
        if asked is None:
            if epsilon is None:
                break
            raise ValueError(
                f"`solve(epsilon={epsilon})` needs the Moreau envelope of the KKT residuals, and "
                f"{type(optimizer).__name__} has none of its own: give `envelope=...` too."
            )
        began = time.perf_counter()
        point = f"the last iterate, iteration {optimizer.progress.iterations}"
        certificate = evaluate(x, y, asked, multiplier=optimizer.multiplier, point=point)
        seconds += time.perf_counter() - began
        if epsilon is not None and certificate.kkt <= epsilon:
            break
    reached = None if epsilon is None or certificate is None else certificate.kkt <= epsilon
    proved, kept = None, optimizer.proved
    if kept is not None and optimizer.envelope is not None:
        multiplier = kept.multiplier
        found = evaluate(kept.x, kept.y, optimizer.envelope, multiplier=multiplier, point=str(kept))
        proved = Proved(kept.x, kept.y, found, kept.iteration)
    return Solution(x.detach(), y.detach(), certificate, history, tally, proved, reached)


def _parameter(start: Any) -> Tensor:
    given = start if isinstance(start, Tensor) else torch.as_tensor(start)
    return given.detach().reshape(-1).clone().requires_grad_()
