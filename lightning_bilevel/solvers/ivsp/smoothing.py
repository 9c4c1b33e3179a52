r"""The smoothed plus function, and the smoothing and accuracy of iteration k."""

from __future__ import annotations

import math
import sys
from typing import Literal, Protocol

SmoothingName = Literal["huber", "softplus"]


class Smoothing(Protocol):
    r"""A convex smoothing :math:`\phi_\mu` of :math:`[t]_+ = \max(t, 0)`.

    Attributes:
        a: :math:`a_\phi = a_1 + a_2`, such that
            :math:`[t]_+ - a_1 \mu \le \phi_\mu(t) \le [t]_+ + a_2 \mu`. The smoothings here are
            never below :math:`[t]_+`, so :math:`a_1 = 0`.
        b: :math:`b_\phi`, such that the slope :math:`\phi_\mu'` is
            :math:`(b_\phi / \mu)`-Lipschitz.
    """

    a: float
    b: float

    def value(self, t: float, mu: float) -> float:
        r"""Return :math:`\phi_\mu(t)`."""
        ...

    def slope(self, t: float, mu: float) -> float:
        r"""Return :math:`\phi_\mu'(t)`, between 0 and 1."""
        ...


class Huber:
    r"""Centered Huber function.

    It is 0 below :math:`-\mu/2`, t above :math:`\mu/2`, and :math:`(t + \mu/2)^2 / (2\mu)` between.
    """

    a = 1 / 8
    b = 1.0

    def value(self, t: float, mu: float) -> float:
        if t <= -mu / 2:
            return 0.0
        if t >= mu / 2:
            return t
        return (t + mu / 2) ** 2 / (2 * mu)

    def slope(self, t: float, mu: float) -> float:
        return min(max((t + mu / 2) / mu, 0.0), 1.0)


class Softplus:
    r"""Softplus: :math:`\mu \log(1 + e^{t/\mu})`."""

    a = math.log(2.0)
    b = 1 / 4

    def value(self, t: float, mu: float) -> float:
        # max(t, 0) + mu log(1 + exp(-|t|/mu)) is the same number without overflow.
        return max(t, 0.0) + mu * math.log1p(math.exp(-abs(t) / mu))

    def slope(self, t: float, mu: float) -> float:
        tail = math.exp(-abs(t) / mu)
        return 1 / (1 + tail) if t >= 0 else tail / (1 + tail)


def smoothing_parameter(k: int, mu0: float, block: int, r: float) -> float:
    r"""Return :math:`\mu_k = \mu_0 (1 + \lfloor k/B \rfloor)^{-r}`, never rounded to 0."""
    return max(float(mu0 * (1 + k // block) ** -r), sys.float_info.min)


def prox_accuracy(mu: float, zeta_bar: float, q: float) -> float:
    r"""Return :math:`\zeta_k = \bar\zeta \mu_k^q`."""
    return float(zeta_bar * mu**q)
