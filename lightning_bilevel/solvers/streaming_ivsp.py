"""StreamingIVSP, the penalty of IVSP on mini-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sample import Sample
from lightning_bilevel.core.vectors import by_pieces
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.schedule import Power, value_at
from lightning_bilevel.solvers.streaming import Directions, stream
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

__all__ = ["StreamingIVSP"]

# How much of the tracked gap and of its variance a step keeps.
_DECAY = 0.98
# The smoothing is at least so many standard deviations of the tracked gap.
_DEVIATIONS = 3.0


class StreamingIVSP(BilevelOptimizer):
    r"""The penalty of IVSP on mini-batches: no line search, one step of each variable per batch.

    It goes down :math:`f + \phi_\mu(R)/\gamma` with the relaxed Moreau gap R of IVSP, whose
    proximal point z is followed by one step per batch, from :math:`z^0 = y^0`. On a batch, with
    all values at the old point:

    .. math::
        r &= g(x, y) - g(x, z) - \tfrac{1}{2\rho}\|z - y\|^2 - \delta \\
        R &\leftarrow 0.98\, R + 0.02\, r, \qquad
          v \leftarrow 0.98\, v + 0.02\, (r - R)^2, \qquad
          \mu' = \max\bigl\{\mu,\; 3 \sqrt{v\, (1 - 0.98)/(1 + 0.98)}\bigr\} \\
        \phi &= \operatorname{clip}(R/\mu' + 1/2,\; \text{floor},\; 1), \qquad
          \lambda = \phi/\gamma \\
        d_z &= \nabla_y g(x, z) + (z - y)/\rho, \qquad
          d_y = \frac{\nabla_y f + \lambda [\nabla_y g(x, y) + (z - y)/\rho]}{1 + \lambda} \\
        d_x &= \gamma \nabla_x f + \phi\, [\nabla_x g(x, y) - \nabla_x g(x, z)]

    R starts at the first r. The division by :math:`1 + \lambda` keeps the rate of y that of plain
    training. Cost of a step: 3 passes. The record is a
    :class:`~lightning_bilevel.solvers.record.StreamInfo`, with the multiplier :math:`\lambda`.

    There is no theorem for this method: IVSP's is about full batches and a line search. The tracked
    R is no certificate either: the noise of z makes :math:`\|z - y\|^2/(2\rho)` large, so R is
    too small, and :math:`\lambda` with it. What was measured, with AdamW below: the weights that it
    learns on a data set with 60 % of the labels flipped pairwise find the wrong labels about as
    well as those of :class:`~lightning_bilevel.solvers.f2sa.F2SA` with a constant multiplier of
    0.2, and on a mixture of clean and noisy sources it is slower than F2SA. A tenth of the rate of
    plain training was best for y and z. With the full rate y memorises a small trusted set, and the
    weights get worse. Only the certificate, evaluated on all data at the end, says what was
    reached.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: The rate of x, if it has no optimiser; a number or a schedule
            (:class:`~lightning_bilevel.solvers.schedule.Power`).
        beta: That of y, likewise.
        eta: That of z, likewise.
        rho: :math:`\rho`, the proximal parameter.
        sigma: The weak-convexity modulus of g(x, .), with :math:`\rho\sigma < 1`; the certificate
            alone uses it.
        delta: :math:`\delta`, the relaxation of the gap.
        mu: :math:`\mu`, the least smoothing of the penalty.
        gamma: :math:`\gamma`, the inverse penalty.
        floor: The least :math:`\phi`, between 0 and 1: the lower level never goes unheeded.
        upper_optimizer: What makes the torch optimiser of x, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-2)`` for a few weights or
            :class:`~lightning_bilevel.solvers.table_rms.TableRMS` for one weight per sample; None
            steps by alpha.
        lower_optimizer: That of y; None steps by beta.
        inner_optimizer: That of z; None takes one as y has.
        upper_clip: The largest norm of the direction of x; None for no bound.
        lower_clip: That of the directions of y and z.
        x_every: x moves in every so many steps.
        warmup: x stays for so many steps at first.
    """

    stochastic = True
    measures_distance = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        alpha: float | Power = 0.01,
        beta: float | Power = 0.01,
        eta: float | Power = 0.01,
        rho: float = 10.0,
        sigma: float = 0.0,
        delta: float = 1e-3,
        mu: float = 0.05,
        gamma: float = 1.0,
        floor: float = 0.1,
        upper_optimizer: OptimizerCallable | None = None,
        lower_optimizer: OptimizerCallable | None = None,
        inner_optimizer: OptimizerCallable | None = None,
        upper_clip: float | None = None,
        lower_clip: float | None = None,
        x_every: int = 1,
        warmup: int = 0,
    ) -> None:
        constants, optimizers = constants_of(
            locals(),
            lr="alpha",
            schedules=("alpha", "beta", "eta"),
            positive=("rho", "delta", "mu", "gamma"),
            nonnegative=("sigma", "floor"),
        )
        if floor > 1:
            raise ValueError(
                f"`StreamingIVSP(floor={floor!r})` must be at most 1: it is the least phi, and phi "
                "is at most 1."
            )
        Envelope(rho=rho, sigma=sigma, delta=delta)
        super().__init__(params, constants, optimizers)

    @property
    def envelope(self) -> Envelope:
        """The Moreau envelope of the relaxation, for the certificate."""
        c = self.constants
        return Envelope(rho=c["rho"], sigma=c["sigma"], delta=c["delta"])

    @property
    def multiplier(self) -> float | None:
        r""":math:`\lambda` of the last step; None before the first."""
        return self.memory.get("multiplier")

    def directions(self, sample: Sample, x: Tensor, y: Tensor, z: Tensor) -> Directions:
        c = self.constants
        phi = self._weight(sample.gap, sample.distance)
        multiplier = phi / c["gamma"]
        self.memory["multiplier"] = multiplier
        d_y = self.room("lower direction", [y])
        d_z = self.room("inner direction", [y])
        rho = c["rho"]
        for f_y, g_y, g_z, y_part, z_part, to_y, to_z in by_pieces(
            sample.upper_y, sample.lower_y, sample.inner_y, y, z, d_y, d_z
        ):
            pull = torch.sub(z_part, y_part, out=to_z).div_(rho)
            torch.add(g_y, pull, out=to_y).mul_(multiplier).add_(f_y).div_(1 + multiplier)
            to_z.add_(g_z)
        d_x = torch.sub(sample.lower_x, sample.inner_x).mul_(phi)
        k = self.memory["iteration"]
        alpha, beta, eta = (value_at(c[name], k) for name in ("alpha", "beta", "eta"))
        return Directions(
            upper=d_x.add_(sample.upper_x, alpha=c["gamma"]),
            lower=d_y,
            inner=d_z,
            multiplier=multiplier,
            rates=(alpha, beta, eta),
        )

    def _weight(self, gap: float, distance: float) -> float:
        """Track the gap and return phi."""
        c = self.constants
        memory = self.memory
        relaxed = gap - distance / (2 * c["rho"]) - c["delta"]
        tracked = _DECAY * memory.get("gap", relaxed) + (1 - _DECAY) * relaxed
        variance = _DECAY * memory.get("variance", 0.0) + (1 - _DECAY) * (relaxed - tracked) ** 2
        memory["gap"] = tracked
        memory["variance"] = variance
        deviation = math.sqrt(variance * (1 - _DECAY) / (1 + _DECAY))
        smoothing = max(c["mu"], _DEVIATIONS * deviation)
        phi: float = min(max(tracked / smoothing + 0.5, c["floor"]), 1.0)
        return phi

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        """Do the same step on all data."""
        done = stream(self, problem, x.clone(), y.clone())
        return done.x, done.y, done.info
