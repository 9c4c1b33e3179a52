"""What a module declares: the parameters and sets of each level, the solver or the method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.qualification import Qualification
from lightning_bilevel.core.sets import ConvexSet, Free, Product
from lightning_bilevel.solvers.base import BilevelOptimizer, SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.stochastic.step import Method, Options

Declared = nn.Module | nn.Parameter | Sequence[nn.Module | nn.Parameter]
Sets = ConvexSet | Sequence[ConvexSet]

# The layers of torch that the convergence theorem excludes: not differentiable everywhere.
_KINKED = re.compile(
    r"(Leaky|P|R)?ReLU6?|SELU|Hard(tanh|sigmoid|swish|shrink)|Softshrink|Threshold"
    r"|(Adaptive|Fractional)?MaxPool[123]d"
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
    sets: Sets | None = None
    unit: float = 1.0
    parameters: list[nn.Parameter] = field(init=False)
    feasible: ConvexSet = field(init=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.unit < float("inf"):
            raise ValueError(
                f"`{self.call}({self.name}_unit={self.unit})` must be positive and finite."
            )
        self.resolve()

    def resolve(self) -> None:
        """Find the trainable parameters, as at the start of a run; frozen ones do not change."""
        items = [
            [p for p in ([i] if isinstance(i, nn.Parameter) else i.parameters()) if p.requires_grad]
            for i in _items(self.declared)
        ]
        self.parameters = [p for item in items for p in item]
        if not self.parameters or len(set(self.parameters)) < len(self.parameters):
            raise ValueError(
                f"`{self.call}({self.name}=...)` has no trainable parameter, or has one twice, as "
                "a module and its weight."
            )
        self.feasible = self._set_of([sum(p.numel() for p in item) for item in items])

    def _set_of(self, sizes: list[int]) -> ConvexSet:
        """Return the set of the items of these sizes; an item that is frozen whole has size 0."""
        if self.sets is None or isinstance(self.sets, ConvexSet):
            return self.sets or Free()
        if len(self.sets) != len(sizes):
            raise ValueError(
                f"`{self.call}({self.name}_set=...)` has {len(self.sets)} sets: it must be one "
                f"set, or one for each of the {len(sizes)} declared items."
            )
        trained = [(own, size) for own, size in zip(self.sets, sizes, strict=True) if size]
        return Product([own for own, _ in trained], [size for _, size in trained])


@dataclass
class Declaration:
    """The arguments of :meth:`~lightning_bilevel.module.BilevelMixin.declare`.

    Attributes:
        upper: The upper level.
        lower: The lower level.
        solver: Makes the solver from parameter groups; None is IVSP.
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
    solver: SolverCallable | None = None
    envelope: Envelope | None = None
    qualification: Qualification = "not known"
    method: Method | None = None
    options: Options = field(default_factory=Options)
    optimizers: tuple[OptimizerCallable | None, OptimizerCallable | None] = (None, None)
    schedulers: tuple[LRSchedulerCallable | None, LRSchedulerCallable | None] = (None, None)

    def __post_init__(self) -> None:
        call, method = self.upper.call, self.method
        if method is not None and not isinstance(method, Method):
            raise TypeError(
                f"`{call}(method={getattr(method, '__name__', method)!s})` must be an instance of "
                "a method on mini-batches, such as `lightning_bilevel.stochastic.F2SA()`; a solver "
                "for all data is given as `solver=`."
            )
        units = {level.unit for level in self.levels} != {1.0}
        if self.on_mini_batches and (units or self.solver is not None):
            raise ValueError(
                f"`{call}()` was given a solver, for exact runs, or a unit, and arguments of a run "
                "on mini-batches: give one of the two. There the rate of the level's optimiser "
                "takes the place of its unit."
            )

    @property
    def on_mini_batches(self) -> bool:
        """Whether anything of a run on mini-batches was declared."""
        given = self.method is not None or self.options != Options()
        return given or any((*self.optimizers, *self.schedulers))

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

    def new_solver(self) -> BilevelOptimizer:
        """Make a solver."""
        return (self.solver or IVSP)(self.groups())

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that a solver takes."""
        return [
            {"params": level.parameters, "level": level.name, "unit": level.unit}
            for level in self.levels
        ]

    def kinks(self) -> list[str]:
        """Return the names of what is not differentiable in the declared modules, each once."""
        return kinks_of([item for level in self.levels for item in _items(level.declared)])


def _items(declared: Declared) -> list[nn.Module | nn.Parameter]:
    return [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)


def kinks_of(declared: Declared) -> list[str]:
    """Return the names of what is not differentiable in the declared modules, each once.

    A call such as ``torch.relu`` is not seen: a module that makes one says so in an attribute
    ``kinks``, a tuple of names.
    """
    found: list[str] = []
    for item in _items(declared):
        for module in item.modules() if isinstance(item, nn.Module) else ():
            found.extend(getattr(module, "kinks", ()))
            name = type(module).__name__
            # The slopes of an ELU at 0 are 1 and alpha.
            if _KINKED.fullmatch(name) or (isinstance(module, nn.ELU) and module.alpha != 1.0):
                found.append(name)
    return list(dict.fromkeys(found))


def check_all_declared(module: nn.Module, declaration: Declaration) -> None:
    """Refuse parameters of another module, and trainable ones that belong to no level."""
    call = f"`{type(module).__name__}.declare`"
    declared, own = set(declaration.parameters), set(module.parameters())
    if not declared <= own:
        raise MisconfigurationException(f"{call} was given a parameter that is not the module's.")
    named = module.named_parameters()
    forgotten = [name for name, p in named if p.requires_grad and p not in declared]
    if forgotten:
        raise MisconfigurationException(
            f"{call} names neither as upper nor as lower: {', '.join(forgotten)}. Each trainable "
            "parameter belongs to one level; a constant has `requires_grad=False`."
        )


def check_batch(call: str, batch: Any) -> None:
    """Refuse a training batch without an upper and a lower level."""
    if not isinstance(batch, dict) or not {"upper", "lower"} <= batch.keys():
        raise MisconfigurationException(
            f"`{call}` was given a {type(batch).__name__} as a training batch: it must be "
            '{"upper": ..., "lower": ...}, as a CombinedLoader over two loaders or a '
            "FullBatchDataModule gives it."
        )
