r"""One step on a mini-batch, the same for every method that may run on changing batches.

A method says only in which directions the upper variable x, the lower variable y and its inner
variable z go. All of them come from one :class:`~lightning_bilevel.core.sample.Sample` at the old
point, and all three variables move from there.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sample import Sample
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.record import StreamInfo

__all__ = ["Directions", "Streamed", "Streaming", "Variable", "skip_batch", "stream", "x_moves"]

Variable = Literal["upper", "lower", "inner"]


class Directions(NamedTuple):
    """Where the variables go: each moves against its direction.

    Attributes:
        upper: The direction of x.
        lower: The direction of y.
        inner: The direction of z.
        multiplier: The weight of the gap g(x, y) - g(x, z) against f.
        rates: The paper's rates of x, y and z, for a variable without a torch optimiser.
    """

    upper: Tensor
    lower: Tensor
    inner: Tensor
    multiplier: float
    rates: tuple[float, float, float]


class Streamed(NamedTuple):
    """The end of a mini-batch step.

    Attributes:
        x: The new x.
        y: The new y.
        info: The record.
        rates: The paper's rates of x and y; None if the step was not taken.
        seconds: The mean of the seconds over the processes.
    """

    x: Tensor
    y: Tensor
    info: StreamInfo
    rates: tuple[float, float] | None
    seconds: float


class Streaming(Protocol):
    """What a mini-batch step needs of a solver."""

    patience: ClassVar[int]
    inner_name: ClassVar[str]
    measures_distance: ClassVar[bool]

    @property
    def memory(self) -> dict[str, Any]:
        """The state of the run."""

    @property
    def constants(self) -> dict[str, Any]:
        """The hyper-parameters."""

    @property
    def samples_upper_at_z(self) -> bool:
        """Whether `directions` needs f at z."""

    def directions(self, sample: Sample, x: Tensor, y: Tensor, z: Tensor) -> Directions:
        """Say where the variables go."""

    def move_(
        self,
        variable: Variable,
        v: Tensor,
        direction: Tensor,
        rate: float,
        feasible: ConvexSet,
        touched: Tensor | None = None,
    ) -> Tensor:
        """Step a variable; v may be changed in place."""


def stream(
    solver: Streaming, problem: BilevelProblem, x: Tensor, y: Tensor, seconds: float = 0.0
) -> Streamed:
    r"""Do one step on a mini-batch.

    The vectors x and y are changed in place where a torch optimiser moves them, so they must be
    copies of the parameters. Nothing is written before all numbers of the batch are known to be
    finite. A batch with a number that is not finite is left out; after ``patience`` of them in a
    row the run ends. What interrupts the moves, such as a set that cannot project, leaves
    the parameters where they were, but the states of torch optimisers may be a step ahead.

    Args:
        solver: The method.
        problem: f and g on the mini-batch.
        x: A copy of the upper-level variables.
        y: A copy of the lower-level variables.
        seconds: A time that this process has measured.
    """
    memory = solver.memory
    z = memory.get(solver.inner_name)
    z = y.clone() if z is None else z
    try:
        sample = problem.sample(
            x,
            y,
            z,
            upper_at_z=solver.samples_upper_at_z,
            distance=solver.measures_distance,
            seconds=seconds,
        )
    except NonFiniteError as error:
        # The times of the processes are lost with the batch.
        return Streamed(x, y, skip_batch(solver, error), None, 0.0)
    k = memory["iteration"]
    to = solver.directions(sample, x, y, z)
    at_x, at_y, at_z = to.rates
    if x_moves(solver.constants, k):
        x = solver.move_("upper", x, to.upper, at_x, problem.upper_set, problem.touched)
    y = solver.move_("lower", y, to.lower, at_y, problem.lower_set)
    memory[solver.inner_name] = solver.move_("inner", z, to.inner, at_z, problem.lower_set)
    memory["skipped_in_a_row"] = 0
    memory.setdefault("skipped", 0)
    info = StreamInfo(
        upper=sample.upper,
        lower=sample.lower,
        gap=sample.gap,
        multiplier=to.multiplier,
        inner_iterations=1,
        lr=at_x,
        skipped=memory["skipped"],
    )
    return Streamed(x, y, info, (at_x, at_y), sample.seconds)


def x_moves(constants: dict[str, Any], k: int) -> bool:
    """Tell whether x moves in iteration k: every so many iterations, after the warm-up."""
    after: int = k + 1 - constants["warmup"]
    return after > 0 and after % constants["x_every"] == 0


def skip_batch(solver: Streaming, error: NonFiniteError) -> StreamInfo:
    """Count a batch that is left out, and return its record; too many in a row end the run."""
    memory = solver.memory
    memory["skipped"] = memory.get("skipped", 0) + 1
    memory["skipped_in_a_row"] = memory.get("skipped_in_a_row", 0) + 1
    if memory["skipped_in_a_row"] >= solver.patience:
        raise BilevelError(
            f"{solver.patience} mini-batches in a row were not finite; the parameters are at the "
            f"last point that was written. Make the steps shorter, or clip the directions with "
            f"`upper_clip` and `lower_clip`. The last of them: {error}"
        ) from error
    return StreamInfo(
        upper=math.nan,
        lower=math.nan,
        inner_iterations=0,
        skipped=memory["skipped"],
        taken=False,
    )
