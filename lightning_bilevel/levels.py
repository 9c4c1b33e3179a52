"""What a module declares: the parameters and sets of each level, the solver or the method."""

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
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable
from lightning_bilevel.stochastic.step import Method, Options

__all__ = ["Declaration", "Declared", "Level", "Sets", "kinks_of"]

Declared = nn.Module | nn.Parameter | Sequence[nn.Module | nn.Parameter]
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
        unit: The unit that a solver measures the level in.

    Attributes:
        parameters: The parameters that were not frozen at the last :meth:`resolve`.
        feasible: The set of these parameters.
    """

    call: str
    name: str
    declared: Declared
    sets: Sets | None
    unit: float = 1.0
    parameters: list[nn.Parameter] = field(init=False)
    feasible: ConvexSet = field(init=False)

    def __post_init__(self) -> None:
        declared = [p for item in self._items() for p in item]
        if len({id(p) for p in declared}) < len(declared):
            raise ValueError(
                f"`{self.call}({self.name}=...)` has a parameter twice, such as a module and its "
                "weight: name each once."
            )
        if not 0.0 < self.unit < float("inf"):
            raise ValueError(
                f"`{self.call}({self.name}_unit={self.unit})` must be positive and finite."
            )
        self.resolve()

    def _items(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each declared module or parameter, frozen ones included."""
        items = _items_of(self.declared)
        for item in items:
            if not isinstance(item, (nn.Module, nn.Parameter)):
                raise TypeError(
                    f"`{self.call}({self.name}=...)` takes modules and parameters, and was given "
                    f"a {type(item).__name__}."
                )
        return [[i] if isinstance(i, nn.Parameter) else list(i.parameters()) for i in items]

    def resolve(self) -> None:
        """Find the trainable parameters, as at the start of a run; frozen ones do not change."""
        items = [[p for p in item if p.requires_grad] for item in self._items()]
        self.parameters = [p for item in items for p in item]
        if not self.parameters:
            raise ValueError(f"`{self.call}({self.name}=...)` has no trainable parameter.")
        self.feasible = self._set_of(items)

    def has_changed(self) -> bool:
        """Compare which parameters are frozen with the last :meth:`resolve`."""
        now = [p for item in self._items() for p in item if p.requires_grad]
        return list(map(id, now)) != list(map(id, self.parameters))

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
        if self.sets is None:
            return Free()
        if isinstance(self.sets, ConvexSet):
            return self.sets
        if len(self.sets) != len(items):
            raise ValueError(
                f"`{self.call}({self.name}_set=...)` has {len(self.sets)} sets: it must be one "
                f"set, or one for each of the {len(items)} declared items."
            )
        sizes = [sum(p.numel() for p in item) for item in items]
        trained = [(own, size) for own, size in zip(self.sets, sizes, strict=True) if size]
        return Product([own for own, _ in trained], [size for _, size in trained])


@dataclass
class Declaration:
    """The arguments of :meth:`~lightning_bilevel.module.BilevelMixin.declare`.

    Attributes:
        upper: The upper level.
        lower: The lower level.
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
    solver: SolverCallable
    envelope: Envelope | None
    qualification: Qualification
    method: Method | None = None
    options: Options = field(default_factory=Options)
    optimizers: tuple[OptimizerCallable | None, OptimizerCallable | None] = (None, None)
    schedulers: tuple[LRSchedulerCallable | None, LRSchedulerCallable | None] = (None, None)

    def check(self, *, has_solver: bool, has_own_optimizers: bool) -> None:
        """Refuse arguments of the two modes together."""
        call, method = self.upper.call, self.method
        if has_solver and self.on_mini_batches:
            raise ValueError(
                f"`{call}()` was given a solver, for exact runs, and a method or optimisers, for "
                "mini-batches: give one of the two."
            )
        if method is not None and not isinstance(method, Method):
            raise TypeError(
                f"`{call}(method={getattr(method, '__name__', method)!s})` must be an instance of "
                "a method on mini-batches, such as `lightning_bilevel.stochastic.F2SA()`; a solver "
                "for all data is given as `solver=`."
            )
        given = any(self.schedulers) or any(self.options.clip) or self.options.accumulate != 1
        if given and not (self.on_mini_batches or has_own_optimizers):
            raise ValueError(
                f"`{call}()` was given schedulers, `gradient_clip_val` or `accumulate`, which are "
                "for mini-batches: name a method or an optimiser too."
            )
        for level in self.levels:
            if self.on_mini_batches and level.unit != 1.0:
                raise ValueError(
                    f"`{call}({level.name}_unit={level.unit})` is for an exact solver: on "
                    "mini-batches the rate of the level's optimiser takes its place."
                )

    @property
    def on_mini_batches(self) -> bool:
        """Whether a method or an optimiser was declared."""
        return self.method is not None or any(self.optimizers)

    @property
    def levels(self) -> tuple[Level, Level]:
        """Both levels."""
        return self.upper, self.lower

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of both levels that are not frozen."""
        return self.upper.parameters + self.lower.parameters

    def resolve(self) -> None:
        """Find the trainable parameters, as at the start of a run."""
        for level in self.levels:
            level.resolve()

    def norms(self) -> Tensor:
        """Return the norm of each parameter."""
        return torch.stack([p.detach().norm() for p in self.parameters])

    def feasible_point(self) -> tuple[Tensor, Tensor]:
        """Return x and y, each projected onto its set: where a run starts."""
        upper, lower = self.levels
        return upper.feasible.project(upper.read()), lower.feasible.project(lower.read())

    def new_solver(self) -> BilevelOptimizer:
        """Make a solver."""
        return self.solver(self.groups())

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that a solver takes."""
        return [
            {"params": level.parameters, "level": level.name, "unit": level.unit}
            for level in self.levels
        ]

    def kinks(self) -> list[str]:
        """Return the names of what is not differentiable in the declared modules, each once."""
        return kinks_of([item for level in self.levels for item in _items_of(level.declared)])


def _items_of(declared: Declared) -> list[Any]:
    return [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)


def kinks_of(declared: Declared) -> list[str]:
    """Return the names of what is not differentiable in the declared modules, each once.

    A call such as ``torch.relu`` is not seen: a module that makes one says so in an attribute
    ``kinks``, a tuple of names.
    """
    found: list[str] = []
    for item in _items_of(declared):
        for module in item.modules() if isinstance(item, nn.Module) else ():
            found.extend(getattr(module, "kinks", ()))
            # The slopes of an ELU at 0 are 1 and alpha.
            if isinstance(module, _KINKED) or (isinstance(module, nn.ELU) and module.alpha != 1.0):
                found.append(type(module).__name__)
    return list(dict.fromkeys(found))
