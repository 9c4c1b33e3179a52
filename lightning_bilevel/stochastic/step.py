"""One step on a mini-batch: gradients at y and z, clipping, optimisers, projections."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.sets import ConvexSet, Free
from lightning_bilevel.stochastic.shadow import Shadow

# A run ends after so many batches in a row that are not finite.
PATIENCE = 10


class Numbers(NamedTuple):
    """What a step evaluates, on its batch.

    Attributes:
        upper: f.
        lower: g at y.
        inner: g at z, or at y where a method has no z.
        multiplier: The weight of the gap against f.
    """

    upper: Tensor
    lower: Tensor
    inner: Tensor
    multiplier: float | Tensor


@dataclass(frozen=True, kw_only=True)
class Options:
    """How steps are made, whatever the method.

    Attributes:
        clip: The largest gradient norm of the upper and of the lower level; None for no bound.
        accumulate: The batches of a step.
        skip_nonfinite: Whether a batch that is not finite makes no step. It costs a device sync.
    """

    clip: tuple[float | None, float | None] = (None, None)
    accumulate: int = 1
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"`declare(accumulate={self.accumulate})` must be at least 1.")
        if len(self.clip) != 2 or not all(b is None or 0 < b < math.inf for b in self.clip):
            raise ValueError(
                f"`declare(gradient_clip_val={self.clip})` must be a positive number, or one for "
                "each level."
            )


# In YAML a class path names a method: jsonargparse allows no subclass of a mere dataclass.
@dataclass(frozen=True)
class Method(ABC):
    """A method on mini-batches: constants, and the gradients of a step.

    Args:
        warmup: x stays for so many steps at first.
        x_every: x moves in every so many steps.
    """

    warmup: int = field(default=0, kw_only=True)
    x_every: int = field(default=1, kw_only=True)

    # Whether the second copy decays as y does.
    decays_shadow: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.x_every < 1:
            raise ValueError(
                f"`{type(self).__name__}(warmup={self.warmup}, x_every={self.x_every})` must be at "
                "least 0 and at least 1."
            )

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope that the method goes down, for the certificate."""
        return None

    def start(self, step: Step) -> None:  # noqa: B027 (most start at y)
        """Set the second copy of the lower level, if it does not start at y."""

    @abstractmethod
    def add_gradients(self, step: Step, lower: Any, upper: Any) -> Numbers:
        """Put the gradients on a batch into ``.grad`` of x, y and z, which is None before."""


@dataclass
class Step:
    """The state of a run on mini-batches, and its step.

    Attributes:
        module: The bilevel module.
        method: The method.
        options: How steps are made.
        upper: The parameters of the upper level, x.
        shadow: y and z.
        sets: The sets of x and y.
        upper_optimizers: Those of x, as Lightning wraps them.
        lower_optimizers: Those of y, likewise; none if y is solved on each batch.
        k: How many steps were made.
        batches: How many batches belong to the next step so far.
        skipped: How many steps were left out, in all and in a row.
        tracked: What a method tracks.
        seconds: The time in steps.
        weights: What a method decides at the first batch of a step.
        shadow_optimizers: Those of z: a copy of each of y's.
    """

    module: Any
    method: Method
    options: Options
    upper: list[nn.Parameter]
    shadow: Shadow
    sets: tuple[ConvexSet, ConvexSet]
    upper_optimizers: list[Any]
    lower_optimizers: list[Any]
    k: int = 0
    batches: int = 0
    skipped: tuple[int, int] = (0, 0)
    tracked: tuple[Tensor, ...] = ()
    seconds: float = 0.0
    weights: Any = None

    def __post_init__(self) -> None:
        copied = self.shadow.copy_optimizer
        self.shadow_optimizers = [copied(wrapped.optimizer) for wrapped in self.lower_optimizers]
        # That of DDP.
        self._shares_buckets = getattr(self.module.trainer.model, "gradient_as_bucket_view", False)
        self.method.start(self)
        self._project()

    @property
    def variables(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of x, y and z."""
        return self.upper, self.shadow.parameters, self.shadow.z

    @property
    def first(self) -> bool:
        """Whether the batch is the first one of its step."""
        return self.batches == 0

    def __call__(self, batch: Any) -> tuple[Numbers, bool]:
        """Evaluate a batch; return its numbers, and whether the variables moved."""
        began = time.perf_counter()
        variables = [*chain(*self.variables)]
        if self.first:
            for parameter in variables:
                parameter.grad = None
            self._losses: list[Tensor] = []
            if self.options.skip_nonfinite:
                buffers = chain(self.shadow.buffers, self.shadow.z_buffers)
                self._before = [(buffer, buffer.clone()) for buffer in buffers], self.tracked
        before = [] if self.first else self.take(variables)
        add_gradients = self.module.batch_gradients or self.method.add_gradients
        numbers: Numbers = add_gradients(self, batch["lower"], batch["upper"])
        if before:
            self.add(variables, before)
        self._losses += numbers[:3]
        # A step does not go on into another epoch.
        last = self.batches + 1 == self.options.accumulate or self.module.trainer.is_last_batch
        self.batches = 0 if last else self.batches + 1
        moved = last and self._is_finite()
        if moved:
            self._move()
        self.seconds += time.perf_counter() - began
        return numbers, moved

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, as Lightning's strategy and precision do."""
        n = self.options.accumulate
        self.module.manual_backward(loss if n == 1 else loss / n)

    def lower_loss(self, batch: Any) -> Tensor:
        """Return g at the module's parameters."""
        split = self.module.lower_features or self.module.lower_outputs
        loss: Tensor = self.module.lower_loss(batch, *(() if split is None else (split(batch),)))
        return loss

    def upper_loss(self, batch: Any) -> Tensor:
        """Return f at the module's parameters."""
        loss: Tensor = self.module.upper_loss(batch)
        return loss

    def same_draws(self) -> AbstractContextManager[None]:
        """Draw random numbers that the next evaluation draws again: the same dropout at y and z."""
        device = self.module.device
        others = [] if device.type == "cpu" else [device]
        return torch.random.fork_rng(devices=others, device_type=device.type)

    def take(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of parameters, which have none afterwards."""
        taken = [parameter.grad for parameter in parameters]
        if self._shares_buckets:
            # The next backward pass of DDP writes into them.
            taken = [None if gradient is None else gradient.clone() for gradient in taken]
        for parameter in parameters:
            parameter.grad = None
        return taken

    def add(
        self,
        parameters: Sequence[Tensor],
        terms: Sequence[Tensor | None],
        factor: float | Tensor = 1.0,
    ) -> None:
        """Add multiples of tensors, which are given away, to the gradients of parameters."""
        for parameter, term in zip(parameters, terms, strict=True):
            if term is not None:
                own, scaled = parameter.grad, term if _is_one(factor) else term.mul_(factor)
                parameter.grad = scaled if own is None else own.add_(scaled)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the processes."""
        mean: Tensor = self.module.trainer.strategy.reduce(value, reduce_op="mean")
        return mean

    def state(self) -> dict[str, Any]:
        """Return the state as plain data for a checkpoint."""
        return {
            "z": [t.detach().clone() for t in chain(self.shadow.z, self.shadow.z_buffers)],
            "optimizers": [optimizer.state_dict() for optimizer in self.shadow_optimizers],
            "k": self.k,
            "skipped": self.skipped,
            "tracked": self.tracked,
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for own, value in zip(chain(self.shadow.z, self.shadow.z_buffers), state["z"], strict=True):
            own.data.copy_(value)
        for optimizer, saved in zip(self.shadow_optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.k, self.skipped, self.seconds = state["k"], state["skipped"], state["seconds"]
        self.tracked = tuple(value.to(self.module.device) for value in state["tracked"])

    def _is_finite(self) -> bool:
        if not self.options.skip_nonfinite:
            return True
        norms = [p.grad.norm() for p in chain(*self.variables) if p.grad is not None]
        finite = bool(torch.stack([*norms, *self._losses]).isfinite().all())
        if self.module.trainer.strategy.reduce_boolean_decision(finite, all=True):
            self.skipped = self.skipped[0], 0
            return True
        buffers, self.tracked = self._before
        for buffer, kept in buffers:
            buffer.copy_(kept)
        self.skipped = self.skipped[0] + 1, self.skipped[1] + 1
        if self.skipped[1] >= PATIENCE:
            raise BilevelError(
                f"{PATIENCE} mini-batches in a row had a loss or gradient that is not finite; the "
                "parameters are at the last good point. Lower the rates, or clip the gradients by "
                "`declare(gradient_clip_val=...)`."
            )
        return False

    def _move(self) -> None:
        after = self.k + 1 - self.method.warmup
        if after <= 0 or after % self.method.x_every:
            self.take(self.upper)
        above, below = self.options.clip
        for bound, variable in zip((above, below, below), self.variables, strict=True):
            if bound is not None:
                nn.utils.clip_grad_norm_(variable, bound)
        for copied, wrapped in zip(self.shadow_optimizers, self.lower_optimizers, strict=True):
            # A scheduler may have changed rates, momenta and weight decay.
            for mine, group in zip(copied.param_groups, wrapped.param_groups, strict=True):
                mine.update({name: value for name, value in group.items() if name != "params"})
                if "weight_decay" in mine and not self.method.decays_shadow:
                    mine["weight_decay"] = 0.0
            copied.step()
        # Lightning counts the steps of its wrapper: one of them is one step of the run.
        counted, *others = [*self.lower_optimizers, *self.upper_optimizers]
        counted.step()
        for wrapped in others:
            wrapped.optimizer.step()
        self._project()
        self.k += 1

    @torch.no_grad()
    def _project(self) -> None:
        upper, lower = self.sets
        for variable, feasible in zip(self.variables, (upper, lower, lower), strict=True):
            if not isinstance(feasible, Free):
                whole = feasible.project(torch.cat([p.reshape(-1) for p in variable]))
                parts = torch.split(whole, [p.numel() for p in variable])
                for parameter, part in zip(variable, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))


def times(weight: float | Tensor, value: Tensor) -> Tensor:
    """Return the product; nothing is computed for 1."""
    return value if _is_one(weight) else weight * value


def wide(value: Tensor) -> Tensor:
    """Return a number without its graph, in float32 at least."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _is_one(weight: float | Tensor) -> bool:
    # A tensor is not asked: that would be a device sync.
    return isinstance(weight, float) and weight == 1.0
