"""What IVSP says of an outer iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_bilevel.solvers.record import StepInfo

__all__ = ["IVSPInfo"]


@dataclass(frozen=True, kw_only=True)
class IVSPInfo(StepInfo):
    r"""What one outer iteration of IVSP did.

    Attributes:
        residual: :math:`\tilde R^{k+1}`, the relaxed Moreau gap at the new point.
        mu: :math:`\mu_k`, the smoothing.
        zeta: :math:`\zeta_{k+1}`, the accuracy of the Moreau evaluation at the new point.
        gamma: :math:`\gamma_k`, the inverse penalty.
        multiplier: :math:`\tilde\lambda_{k+1} = \phi'_{\mu_k}(\tilde R^{k+1}) / \gamma_k`.
        penalty_updated: Whether this iteration strengthened the penalty.
        penalty_updates: How often that has happened, :math:`t_{k+1}`.
        trials: Trials of the line search.
        L: The accepted :math:`L_k`.
        L_start: The first trial's :math:`L_{k,0}`.
        gamma_next: :math:`\gamma_{k+1}`, the inverse penalty of the next iteration.
        threshold: :math:`2 a_\phi \mu_k`, above which a residual strengthens the penalty,
        step_bound: :math:`c_2 \mu_k \gamma_k`, if the step is at most that.
        halvings: How often the step of the inner loop has been halved.
        capped: Whether the line search used up its trials or ended at L_max.
    """

    residual: float
    mu: float
    zeta: float
    gamma: float
    multiplier: float
    penalty_updated: bool
    penalty_updates: int
    trials: int
    L: float
    L_start: float
    gamma_next: float
    threshold: float
    step_bound: float
    halvings: int
    capped: bool

    LOGGED: ClassVar[tuple[str, ...]] = (
        *StepInfo.LOGGED,
        "residual",
        "mu",
        "gamma",
        "penalty_updates",
        "multiplier",
        "trials",
    )
    SHOWN: ClassVar[tuple[str, ...]] = ("upper", "residual", "gamma")

    @property
    def violation(self) -> float:
        """How far the relaxed gap constraint is violated, as the solver sees it."""
        return max(self.residual, 0.0)
