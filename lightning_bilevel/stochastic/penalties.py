r"""Penalty methods on mini-batches, all of one form.

With weights a and b, the upper variable x and the lower variable y go down

.. math:: a f(x, y) + b\,\bigl[g(x, y) - g(x, z) - |y - z|^2/(2\rho)\bigr]

on a batch, and z goes down :math:`g(x, z) + |z - y|^2/(2\rho)`; without a :math:`\rho` both squares
are left out. All three move once per batch, from the old point, each by its torch optimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.solvers.constants import Power
from lightning_bilevel.stochastic.step import Method, Numbers, Step, times, wide

Schedule = float | Power


class Weights(NamedTuple):
    r"""The weights of a step.

    Attributes:
        upper: a.
        gap: b.
        rho: :math:`\rho`; None without the squares.
        divisor: What the gradient of y is divided by; None for 1.
    """

    upper: float
    gap: float | Tensor
    rho: float | None = None
    divisor: float | Tensor | None = None


@dataclass(frozen=True)
class Penalty(Method):
    """A method of that form."""

    def weights(self, step: Step) -> Weights:
        """Return the weights, as far as they are known before the batch is evaluated."""
        raise NotImplementedError

    def lagged(self, step: Step) -> Weights:
        """Return the weights by the gaps of earlier steps, where y is solved on each batch."""
        return self.weights(step)

    def observe(
        self, step: Step, g_y: Tensor, g_z: Tensor, distance: Callable[[], Tensor]
    ) -> Weights:
        """Return the weights, after an evaluation.

        Args:
            step: The run, for methods that track a number.
            g_y: g(x, y) on the batch of this process.
            g_z: g(x, z), likewise.
            distance: :math:`|y - z|^2`, likewise.
        """
        return self.weights(step)

    def add_gradients(self, step: Step, lower: object, upper: object) -> Numbers:
        x, y, z = step.variables
        # With b in the backward pass, its part in the gradient of x cancels that of y to the bit as
        # long as z = y. An optimiser may divide by the size of what is left.
        known: Weights = self.weights(step) if step.first else step.weights
        b = 1.0 if isinstance(known.gap, float) and known.gap == 0.0 else known.gap
        with step.same_draws(), step.shadow.exchanged():
            g_z = step.lower_loss(lower)
            step.backward(times(b, g_z))
        from_z = step.take(x)
        step.add(z, step.take(y), 1 / b)
        g_y = step.lower_loss(lower)
        f = step.upper_loss(upper)
        if step.first:
            step.weights = self.observe(step, g_y, g_z, step.shadow.distance)
        w: Weights = step.weights
        step.backward(times(w.upper, f) + times(w.gap, g_y))
        step.add(x, from_z, -w.gap / b)
        if w.rho is not None and step.first:
            step.shadow.add_proximal_pull(w.rho, w.gap)
        if w.divisor is not None:
            for gradient in [p.grad for p in y if p.grad is not None]:
                gradient.div_(w.divisor)
        return Numbers(f.detach(), g_y.detach(), g_z.detach(), w.gap / w.upper)


@dataclass(frozen=True)
class F2SA(Penalty):
    r"""Fully first-order method: :math:`a = 1`, :math:`b = \lambda_k`, no proximal term.

    The gradient of y is about :math:`1 + \lambda` times as long as that of plain training; Adam and
    its like do not see the factor.

    Args:
        multiplier: :math:`\lambda_k`, a number or a
            :class:`~lightning_bilevel.solvers.constants.Power` of the step.

    References:
        Kwon, Kwon, Wright, Nowak: A Fully First-Order Method for Stochastic Bilevel Optimization.
            ICML 2023.
    """

    multiplier: Schedule = 1.0

    def weights(self, step: Step) -> Weights:
        return Weights(1.0, at(self.multiplier, step.k))


@dataclass(frozen=True)
class VPBGD(Penalty):
    r"""Penalty-based bilevel gradient descent: :math:`a = 1`, :math:`b = \gamma_k`.

    Args:
        gamma: The penalty of the value-function gap.

    References:
        Shen, Chen: On Penalty-based Bilevel Gradient Descent Method. ICML 2023.
    """

    gamma: Schedule = 10.0

    def weights(self, step: Step) -> Weights:
        return Weights(1.0, at(self.gamma, step.k))


@dataclass(frozen=True)
class F2BA(Penalty):
    r"""Fully first-order bilevel approximation, forward: :math:`a = 1`, :math:`b = 1/\sigma`.

    Args:
        sigma: The inverse penalty.

    References:
        Chen, Ma, Zhang: Near-Optimal Nonconvex-Strongly-Convex Bilevel Optimization with Fully
            First-Order Oracles. JMLR 2025.
    """

    sigma: float = 0.1

    def weights(self, step: Step) -> Weights:
        return Weights(1.0, 1 / self.sigma)


@dataclass(frozen=True)
class MEHA(Penalty):
    r"""Moreau-envelope Hessian-free algorithm: :math:`a = 1/c_k`, :math:`b = 1`.

    Args:
        c: The penalty :math:`c_k`, which grows.
        gamma: The proximal parameter.

    References:
        Liu, Liu, Yao, Zeng, Zhang: Moreau Envelope for Nonconvex Bi-Level Optimization. ICML 2024.
    """

    c: Schedule = Power(1.0, 0.25)  # noqa: RUF009 (frozen)
    gamma: float = 10.0

    def weights(self, step: Step) -> Weights:
        return Weights(1 / at(self.c, step.k), 1.0, self.gamma)


# How much of the tracked gap and of its variance a step keeps, and how many standard deviations of
# the tracked gap the smoothing is at least.
_DECAY = 0.98
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class StreamingIVSP(Penalty):
    r"""The penalty of IVSP on mini-batches: a multiplier that follows the gap.

    .. math::
        r &= g(x, y) - g(x, z) - |z - y|^2/(2\rho) - \delta, \qquad
          R \leftarrow 0.98\, R + 0.02\, r, \qquad v \leftarrow 0.98\, v + 0.02\, (r - R)^2 \\
        \mu' &= \max\bigl\{\mu,\; 3 \sqrt{v\, (1 - 0.98)/(1 + 0.98)}\bigr\}, \qquad
          b = \operatorname{clip}(R/\mu' + 1/2,\; \text{floor},\; 1), \qquad a = \gamma

    R starts at the first r. The gradient of y is divided by :math:`a + b`, which keeps the rate of
    y that of plain training. With ``accumulate`` the first batch of a step gives b.

    No theorem holds here: IVSP's is about full batches and a line search. The tracked R is no
    certificate: the noise of z makes :math:`|z - y|^2` large, so R is too small.

    Args:
        rho: The proximal parameter.
        delta: The relaxation of the gap.
        mu: The least smoothing.
        gamma: The inverse penalty.
        floor: The least b, at most 1.
    """

    rho: float = 10.0
    delta: float = 1e-3
    mu: float = 0.05
    gamma: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.floor <= 1:
            raise ValueError(f"`StreamingIVSP(floor={self.floor})` must be above 0 and at most 1.")

    @property
    def envelope(self) -> Envelope:
        return Envelope(rho=self.rho, sigma=0.0, delta=self.delta)

    def weights(self, step: Step) -> Weights:
        if step.tracked:
            return Weights(self.gamma, 1.0, self.rho)
        # z = y: R is -delta, whatever the batch.
        phi = min(max(0.5 - self.delta / self.mu, self.floor), 1.0)
        return Weights(self.gamma, phi, self.rho, self.gamma + phi)

    def lagged(self, step: Step) -> Weights:
        return self._tracked(step) if step.tracked else Weights(self.gamma, 1.0, self.rho)

    def observe(
        self, step: Step, g_y: Tensor, g_z: Tensor, distance: Callable[[], Tensor]
    ) -> Weights:
        # Half precision does not resolve the difference of two losses.
        r = step.mean(wide(g_y) - wide(g_z) - distance() / (2 * self.rho)) - self.delta
        if not step.tracked:
            known = self.weights(step)
            step.tracked = r, torch.zeros_like(r)
            return known
        tracked, variance = step.tracked
        tracked = _DECAY * tracked + (1 - _DECAY) * r
        variance = _DECAY * variance + (1 - _DECAY) * (r - tracked) ** 2
        step.tracked = tracked, variance
        return self._tracked(step)

    def _tracked(self, step: Step) -> Weights:
        tracked, variance = step.tracked
        deviation = (variance * (1 - _DECAY) / (1 + _DECAY)).sqrt()
        smoothing = (_DEVIATIONS * deviation).clamp(min=self.mu)
        phi = (tracked / smoothing + 0.5).clamp(self.floor, 1.0)
        return Weights(self.gamma, phi, self.rho, self.gamma + phi)


def at(schedule: Schedule, k: int) -> float:
    """Return the value of a number or schedule at step k."""
    return schedule.at(k) if isinstance(schedule, Power) else float(schedule)
