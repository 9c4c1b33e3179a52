"""The state of a run of IVSP: all that a checkpoint holds, and the evaluated point."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from lightning_bilevel.solvers import base
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants
from lightning_bilevel.solvers.ivsp.point import Point
from lightning_bilevel.solvers.record import evolve
from lightning_bilevel.solvers.theorem import Theorem


@dataclass(frozen=True, kw_only=True)
class State(base.State):
    r"""The state after k iterations.

    Attributes:
        constants: The constants of the run, none of them missing.
        estimated: The names of those that were estimated.
        own_unit: The factor by which the unit of x was multiplied, a power of two.
        gamma: :math:`\gamma_k`, the inverse penalty of the next iteration.
        t: :math:`t_k`, how often gamma fell.
        multiplier: The multiplier at (x, y).
        L_start: :math:`L_{k,0}`, where the next line search starts.
        halvings: How often the step of the inner loop was halved.
        zeta: The accuracy of z; None is the scheduled one.
        z: The approximate proximal point of y; None before the first evaluation.
        f: f(x, y), which tells with the residual whether the data are still the same.
        residual: :math:`\tilde R(x, y)`.
        theorem: The point of the convergence theorem.
        excess: :math:`C_k` minus the merit (``zhang_hager``); 0 with the paper's rules.
        weight: :math:`Q_k` of that average.
        B_R: The largest norm of the gradient of R so far.
        gamma_changes: How often gamma was changed, upwards too.
        stiffness: The mean logarithmic ratio of the curvatures since the last look at the unit.
        shortened: How often the unit of x got shorter.
        point: (x, y) as it was evaluated last; None where it has to be evaluated again.
        resumed: Whether the state was loaded: an equal evaluation of the point is not counted.
        warned: The warnings that are made once a run.
    """

    constants: IVSPConstants
    estimated: tuple[str, ...]
    own_unit: float
    gamma: float
    L_start: float
    t: int = 0
    multiplier: float = 0.0
    halvings: int = 0
    zeta: float | None = None
    z: Tensor | None = None
    f: float = 0.0
    residual: float = 0.0
    theorem: Theorem = field(default_factory=Theorem)
    excess: float = 0.0
    weight: float = 1.0
    B_R: float = 0.0
    gamma_changes: int = 0
    stiffness: float = 0.0
    shortened: int = 0
    point: Point | None = None
    resumed: bool = False
    warned: frozenset[str] = frozenset()

    UNSAVED: ClassVar[tuple[str, ...]] = (*base.State.UNSAVED, "point", "resumed", "warned")

    @property
    def scaled_L_xy(self) -> float:
        """L_xy in the unit that x is measured in."""
        return self.own_unit * self.constants.L_xy

    def moved(self, x: Tensor, y: Tensor) -> State:
        return evolve(self, x=x, y=y, point=None)

    def at(self, point: Point) -> State:
        """Return the state at an accepted point. Halvings of rejected trials do not apply to it."""
        return evolve(
            self,
            x=point.x,
            y=point.y,
            point=point,
            z=point.z,
            f=point.f,
            residual=point.residual,
            halvings=point.halvings,
        )

    def plain(self) -> dict[str, Any]:
        kept = {"constants": self.constants.plain(), "theorem": self.theorem.plain()}
        return {**super().plain(), **kept}

    @classmethod
    def load(cls, saved: dict[str, Any], x: Tensor, y: Tensor) -> State:
        kept = {
            "constants": IVSPConstants(**saved["constants"]),
            "estimated": tuple(saved["estimated"]),
            "theorem": Theorem.load(saved["theorem"]),
        }
        return super().load({**saved, **kept, "resumed": True}, x, y)
