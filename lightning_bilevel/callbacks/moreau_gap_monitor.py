"""The Moreau gap, evaluated independently of the solver."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_bilevel.callbacks.monitor import CertificateMonitor
from lightning_bilevel.core.certificate import Certificate

__all__ = ["MoreauGapMonitor"]


class MoreauGapMonitor(CertificateMonitor):
    r"""Logs how far the lower level is violated, for every solver alike.

    The proximal point z is computed anew, by projected gradient with monotone backtracking from z =
    y, so the numbers do not depend on what the solver believes:

    - ``bilevel/violation``: :math:`[R(x, y)]_+`;
    - ``bilevel/prox_distance``: :math:`\|y - z\|`;
    - ``bilevel/prox_distance_bound``: :math:`\sqrt{2\rho\delta/(1 - \rho\sigma)}`, which bounds
      that distance where :math:`R \le 0`.

    When it looks is said by its arguments, see
    :class:`~lightning_bilevel.callbacks.monitor.CertificateMonitor`.

    Attributes:
        evaluations: How often it has looked, over all parts of a run that was resumed.
        smallest: The smallest violation so far.
        latest: The violation that it saw last.
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
        self.smallest = min(
            certificate.feasibility,
            self.smallest if self.smallest is not None else certificate.feasibility,
        )
        self.latest = certificate.feasibility
        numbers = (certificate.feasibility, certificate.prox_distance, certificate.distance_bound)
        self.publish(trainer, dict(zip(self.names, numbers, strict=True)), iteration)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations, "smallest": self.smallest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluations, self.smallest = state_dict["evaluations"], state_dict["smallest"]
