"""The declaration of a module: the parameters and sets of each level, and the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.qualification import Qualification
from lightning_bilevel.core.sets import ConvexSet, Free, Product
from lightning_bilevel.exact import Declared, parameters_of
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable
from lightning_bilevel.stochastic.step import Method, Options

__all__ = ["Declaration", "Level", "Sets", "kinks_of"]

Sets = ConvexSet | Sequence[ConvexSet]

# Layers that are not differentiable everywhere, which the convergence theorem excludes.
_KINKED = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.SELU,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Threshold,
    _MaxPoolNd,
    _AdaptiveMaxPoolNd,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


@dataclass
class Level:
    """A level as it was declared, and the part of it that a run trains.

    Args:
        call: The call that declared it, for messages.
        name: ``"upper"`` or ``"lower"``.
        declared: Its modules and parameters.
        sets: The set of the level, or one set for each of these; None is the whole space.

    Attributes:
        parameters: The parameters that were not frozen at the last :meth:`resolve`.
        feasible: The set of these parameters.
    """

    call: str
    name: str
    declared: Declared
    sets: Sets | None
    parameters: list[nn.Parameter] = field(init=False)
    feasible: ConvexSet = field(init=False)
    _trainable: list[tuple[nn.Parameter, bool]] = field(init=False)

    def __post_init__(self) -> None:
        declared = [p for item in parameters_of(self.declared) for p in item]
        if len({id(p) for p in declared}) < len(declared):
            raise ValueError(
                f"`{self.call}({self.name}=...)` has a parameter twice, such as a module and its "
                "weight: name each once."
            )
        self.resolve()

    def resolve(self) -> None:
        """Find the trainable parameters, as at the start of a run; frozen ones do not change."""
        declared = parameters_of(self.declared)
        self._trainable = [(p, p.requires_grad) for item in declared for p in item]
        items = [[p for p in item if p.requires_grad] for item in declared]
        self.parameters = [p for item in items for p in item]
        if not self.parameters:
            raise ValueError(f"`{self.call}({self.name}=...)` has no trainable parameter.")
        self.feasible = self._set_of(items)

    def has_changed(self) -> bool:
        """Compare which parameters are frozen with the last :meth:`resolve`."""
        return any(p.requires_grad is not trainable for p, trainable in self._trainable)

    def read(self) -> Tensor:
        """Return the parameters as one new flat vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Write a flat vector into the parameters."""
        blocks = torch.split(vector, [p.numel() for p in self.parameters])
        for parameter, block in zip(self.parameters, blocks, strict=True):
            parameter.copy_(block.view_as(parameter))

    def _set_of(self, items: list[list[nn.Parameter]]) -> ConvexSet:
        sets = self.sets
        if sets is None:
            return Free()
        if isinstance(sets, ConvexSet):
            return sets
        if len(sets) != len(items):
            raise ValueError(
                f"`{self.call}({self.name}_set=...)` has {len(sets)} sets: it must be one set, or "
                f"one for each of the {len(items)} declared items."
            )
        sizes = [sum(p.numel() for p in item) for item in items]
        trained = [(convex_set, size) for convex_set, size in zip(sets, sizes, strict=True) if size]
        return Product([convex_set for convex_set, _ in trained], [size for _, size in trained])


@dataclass
class Declaration:
    """The arguments of :meth:`BilevelMixin.declare`.

    Attributes:
        upper: The upper level.
        lower: The lower level.
        units: The units that the solver measures x and y in.
        solver: Makes the solver from parameter groups.
        envelope: The Moreau envelope of the certificate, for solvers that have none.
        qualification: What is known about the constraint qualification.
        method: The method of a run by torch optimisers.
        options: How its steps are made.
        optimizers: What makes the optimisers of x and y, if the module has no
            ``configure_optimizers`` of its own.
        schedulers: What makes the schedulers of these.
    """

    upper: Level
    lower: Level
    units: tuple[float, float]
    solver: SolverCallable
    envelope: Envelope | None
    qualification: Qualification
    method: Method | None = None
    options: Options = field(default_factory=Options)
    optimizers: tuple[OptimizerCallable | None, OptimizerCallable | None] = (None, None)
    schedulers: tuple[LRSchedulerCallable | None, LRSchedulerCallable | None] = (None, None)

    def __post_init__(self) -> None:
        for name, unit in zip(("upper_unit", "lower_unit"), self.units, strict=True):
            if not 0.0 < unit < float("inf"):
                raise ValueError(f"`{self.upper.call}({name}={unit})` must be positive and finite.")
            if unit != 1.0 and (self.method is not None or any(self.optimizers)):
                raise ValueError(
                    f"`{self.upper.call}({name}={unit})` is for an exact solver: on mini-batches "
                    "the rate of the level's optimiser takes its place."
                )

    @property
    def levels(self) -> tuple[Level, Level]:
        """Both levels."""
        return self.upper, self.lower

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of both levels that are not frozen."""
        return self.upper.parameters + self.lower.parameters

    def kinks(self) -> list[str]:
        """Return the names of what is not differentiable in the declared modules, each once."""
        return list(
            dict.fromkeys(name for level in self.levels for name in kinks_of(level.declared))
        )

    def resolve(self) -> None:
        """Find the trainable parameters, as at the start of a run."""
        for level in self.levels:
            level.resolve()

    def has_changed(self) -> bool:
        """Compare which parameters are frozen with the last :meth:`resolve`."""
        return self.upper.has_changed() or self.lower.has_changed()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return x and y, each as a new flat vector."""
        return self.upper.read(), self.lower.read()

    def write(self, x: Tensor, y: Tensor) -> None:
        """Write x and y into the parameters."""
        self.upper.write(x)
        self.lower.write(y)

    def norms(self) -> Tensor:
        """Return the norm of each parameter."""
        return torch.stack([p.detach().norm() for p in self.parameters])

    def feasible_point(self) -> tuple[Tensor, Tensor]:
        """Return x and y, each projected onto its set: where a run starts."""
        x, y = self.read()
        return self.upper.feasible.project(x), self.lower.feasible.project(y)

    def new_solver(self) -> BilevelOptimizer:
        """Make a solver."""
        return self.solver(self.groups())

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that a solver takes."""
        named = zip(self.levels, self.units, strict=True)
        return [
            {"params": level.parameters, "level": level.name, "unit": unit} for level, unit in named
        ]


def kinks_of(declared: Declared) -> list[str]:
    """Return the names of what is not differentiable in the declared modules, each once.

    A call such as ``torch.relu`` is not seen: a module that makes one says so in an attribute
    ``kinks``, a tuple of names.
    """
    items = [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)
    found: list[str] = []
    for item in items:
        for module in item.modules() if isinstance(item, nn.Module) else ():
            found.extend(getattr(module, "kinks", ()))
            # The slopes of an ELU at 0 are 1 and alpha.
            if isinstance(module, _KINKED) or (isinstance(module, nn.ELU) and module.alpha != 1.0):
                found.append(type(module).__name__)
    return list(dict.fromkeys(found))
