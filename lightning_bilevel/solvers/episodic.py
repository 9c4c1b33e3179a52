r"""One step on a mini-batch whose lower level belongs to it, such as the heads of fresh episodes.

Nothing of y and z is kept between two batches: both are solved anew on the features of the batch,
and then x moves once.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_bilevel.core.episode import Adaptation, Episode
from lightning_bilevel.core.errors import NonFiniteError
from lightning_bilevel.core.passes import check_finite
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import projected_step
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.record import StreamInfo
from lightning_bilevel.solvers.streaming import Streamed, Streaming, skip_batch, x_moves

__all__ = ["Episodic", "Weights", "stream_episode"]


class Weights(NamedTuple):
    r"""What a method goes down on one batch: :math:`a f + b\, [g(x, y) - g(x, z) - \dots]`.

    Attributes:
        upper: a, the weight of f.
        gap: b, the weight of the gap.
        rho: The proximal parameter of z, :math:`|z - y|^2/(2\rho)`; None without such a term.
        multiplier: The multiplier of the record.
        rate: The paper's rate of x, if it has no torch optimiser.
    """

    upper: float
    gap: float
    rho: float | None
    multiplier: float
    rate: float


class Episodic(Streaming, Protocol):
    """What such a step needs of a solver, besides what any step on a mini-batch needs."""

    def weights(self) -> Weights:
        """Say what the method goes down in this iteration."""

    def observe(self, gap: float, distance: float) -> None:
        """Take note of the gap, and of the squared distance of y and z, after a step."""


def stream_episode(
    solver: Episodic,
    problem: BilevelProblem,
    adaptation: Adaptation,
    x: Tensor,
    y: Tensor,
    seconds: float = 0.0,
) -> Streamed:
    r"""Do one step on a mini-batch whose lower level belongs to it.

    With the weights a of f and b of the gap, n steps of length s, and the features of the batch
    computed once:

    .. math::
        z &\leftarrow P_Y(z - s \nabla_y g(x, z)), \quad n \text{ times from the start of } y \\
        y &\leftarrow P_Y\Bigl(y - s \frac{a \nabla_y f(x, y) + b\, [\nabla_y g(x, y)
          + (z - y)/\rho]}{a + b}\Bigr), \quad n \text{ times from } z \\
        d_x &= a \nabla_x f(x, y) + b\, [\nabla_x g(x, y) - \nabla_x g(x, z)]

    A method with a proximal term moves z along with y, by
    :math:`z \leftarrow P_Y(z - s [\nabla_y g(x, z) + (z - y)/\rho])`; the others leave out
    :math:`(z - y)/\rho`. The direction of x takes one backward pass through the features. One
    transfer of numbers from the device ends the step, and over several processes one sum.

    Args:
        solver: The method.
        problem: f and g on the mini-batch.
        adaptation: How z and y are solved.
        x: A copy of the upper-level variables; a torch optimiser changes it in place.
        y: The start of y and z. It is returned as it is.
        seconds: A time that this process has measured.
    """
    memory = solver.memory
    weights = solver.weights()
    episode = problem.episode(x)
    y_end, z = _adapt(episode, weights, adaptation, y, problem.lower_set)
    slope = episode.slope(y_end, z, weights.upper, weights.gap)
    offset = y_end - z
    values = [slope.upper, slope.lower, slope.inner, torch.dot(offset, offset)]
    numbers = torch.stack([value.to(x.dtype) for value in values])
    d_x = slope.grad_x
    if problem.reduce is not None:
        times = x.new_tensor([seconds, 1.0])
        sums = problem.reduce(torch.cat([numbers, times, d_x]))
        # Each process has its own batch, and the mean over them counts.
        means = sums / sums[len(values) + 1]
        numbers, d_x = torch.split(means, [len(values) + 2, len(x)])
    *known, total = torch.cat([numbers, d_x.sum().unsqueeze(0)]).tolist()
    upper, lower, inner, distance = known[:4]
    try:
        check_finite("f", [upper], [total], [d_x], (x, y_end))
        check_finite("g", [lower, inner, distance], [], [], (x, y_end))
    except NonFiniteError as error:
        return Streamed(x, y, skip_batch(solver, error), None, 0.0)
    if x_moves(solver.constants, memory["iteration"]):
        x = solver.move_("upper", x, d_x, weights.rate, problem.upper_set, problem.touched)
    solver.observe(lower - inner, distance)
    memory["skipped_in_a_row"] = 0
    memory.setdefault("skipped", 0)
    info = StreamInfo(
        upper=upper,
        lower=lower,
        gap=lower - inner,
        multiplier=weights.multiplier,
        inner_iterations=2 * adaptation.steps,
        lr=weights.rate,
        skipped=memory["skipped"],
    )
    shared = known[4] if problem.reduce is not None else 0.0
    return Streamed(x, y, info, (weights.rate, adaptation.lr), shared)


def _adapt(
    episode: Episode, weights: Weights, adaptation: Adaptation, start: Tensor, feasible: ConvexSet
) -> tuple[Tensor, Tensor]:
    """Return y and z."""
    lr = adaptation.lr
    rho = weights.rho
    a = weights.upper / (weights.upper + weights.gap)
    b = weights.gap / (weights.upper + weights.gap)
    z = start
    for _ in range(adaptation.steps):
        z = projected_step(z, episode.inner_gradient(z), lr, feasible)
    y = z
    for _ in range(adaptation.steps):
        d_y = episode.gradient(y, a, b)
        if rho is not None:
            pull = torch.sub(z, y).div_(rho)
            d_y = d_y.add_(pull, alpha=b)
            z = projected_step(z, pull.add_(episode.inner_gradient(z)), lr, feasible)
        y = projected_step(y, d_y, lr, feasible)
    return y, z
