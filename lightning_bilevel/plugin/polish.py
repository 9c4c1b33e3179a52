"""Exact iterations on all data from the point of a run on mini-batches."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.plugin.certifier import MINI_BATCH_TOLERANCE
from lightning_bilevel.plugin.declaration import Declaration
from lightning_bilevel.plugin.streaming import Stream
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solving import Background, Solution, solve_with

__all__ = ["polished"]


def polished(
    call: str,
    stream: Stream | None,
    declared: Declaration,
    point: tuple[Tensor, Tensor],
    solver: SolverCallable,
    max_steps: int,
    *,
    batches: int,
    **options: Any,
) -> Solution:
    """Go on from a point with all data of its run, in chunks and in eval mode.

    Args:
        call: The name of the module, for messages.
        stream: The run on mini-batches.
        declared: What the module declared.
        point: x and y, which stay as they are.
        solver: Makes the solver.
        max_steps: The number of outer iterations.
        batches: The most batches of a level.
        options: Those of :func:`~lightning_bilevel.solving.solve`.
    """
    if stream is None:
        raise MisconfigurationException(
            f"`{call}.polish()` goes on from a run on mini-batches, and there was none in this "
            "process: call it after `Trainer.fit` with a solver that is `stochastic` and with "
            "loaders. A run on full batches is exact already; make it longer."
        )
    if declared.adaptation is not None:
        raise MisconfigurationException(
            f"`{call}.polish()` has no y to go on from: the lower level belongs to the batch "
            "(`adaptation`), and no y belongs to all data. Leave it out."
        )
    problem, data = stream.evaluated(None, False, batches)
    background = Background(declared.qualification, declared.kinks(), data)
    if options.get("tolerance") is None:
        options["tolerance"] = MINI_BATCH_TOLERANCE
    with stream.evaluating():
        return solve_with(
            f"{call}.polish", background, problem, point, solver, max_steps, **options
        )
