"""The Moreau gap, evaluated independently of the solver."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import CertificateMonitor
from lightning_bilevel.core.certificate import Certificate

__all__ = ["MoreauGapMonitor"]


class MoreauGapMonitor(CertificateMonitor):
    r"""Logs how far the lower level is violated, in the same way for every solver.

    The proximal point z is computed independently of the solver, by projected gradient with
    backtracking from z = y:

    - ``bilevel/violation``: :math:`[R(x, y)]_+`, with :math:`R = H - \delta` of the Moreau gap H;
    - ``bilevel/prox_distance``: :math:`\|y - z\|`;
    - ``bilevel/prox_distance_bound``: :math:`\sqrt{2\rho(\delta + [R]_+)/(1 - \rho\sigma)}`, which
      bounds that distance.

    Its arguments say when it looks, see
    :class:`~lightning_bilevel.callbacks.monitor.CertificateMonitor`.

    Attributes:
        evaluations: How often it has looked, also before the run was resumed.
        smallest: The smallest violation so far.
        latest: The latest violation.
    """

    names = ("bilevel/violation", "bilevel/prox_distance", "bilevel/prox_distance_bound")
    evaluations = 0
    smallest: float | None = None
    latest: float | None = None

    @override
    def observe(
        self, trainer: Trainer, pl_module: Any, certificate: Certificate, iteration: int
    ) -> None:
        self.evaluations += 1
        violation = certificate.feasibility
        self.smallest = violation if self.smallest is None else min(violation, self.smallest)
        self.latest = violation
        numbers = (violation, certificate.prox_distance, certificate.distance_bound)
        self.publish(trainer, dict(zip(self.names, numbers, strict=True)), iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "smallest": self.smallest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations = state_dict["evaluations"]
        self.smallest = state_dict["smallest"]
