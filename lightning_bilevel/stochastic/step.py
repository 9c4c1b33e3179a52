"""One step on a mini-batch: gradients at y and z, clipping, optimisers, projections."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.passes import Calls
from lightning_bilevel.core.sets import ConvexSet, Free
from lightning_bilevel.solvers.record import Progress, StreamInfo
from lightning_bilevel.stochastic.shadow import Shadow, follow

__all__ = ["Method", "Numbers", "Options", "Step", "wide"]

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
        if len(self.clip) != 2:
            raise ValueError(
                f"`declare(gradient_clip_val={self.clip})` must be one number, or one per level."
            )
        for value in self.clip:
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`declare(gradient_clip_val={value})` must be positive.")


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

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.x_every < 1:
            raise ValueError(
                f"`{type(self).__name__}(warmup={self.warmup}, x_every={self.x_every})` must be at "
                "least 0 and at least 1."
            )

    # Whether the second copy decays as y does.
    decays_shadow: ClassVar[bool] = True

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope that the method goes down, for the certificate."""
        return None

    def moves_x(self, k: int) -> bool:
        """Tell whether x moves in step k, from 0."""
        after = k + 1 - self.warmup
        return after > 0 and after % self.x_every == 0

    def start(self, step: Step) -> None:  # noqa: B027 (most start at y)
        """Set the second copy of the lower level, if it does not start at y."""

    @abstractmethod
    def add_gradients(self, step: Step, lower: Any, upper: Any) -> Numbers:
        """Add the gradients on a batch of both levels to those of x, y and z."""


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
        shadow_optimizers: Those of z: a copy of each of y's.
        k: How many steps were made.
        batches: How many batches belong to the next step so far.
        skipped: How many steps were left out, in all and in a row.
        tracked: What a method tracks.
        seconds: The time in steps.
    """

    module: Any
    method: Method
    options: Options
    upper: list[nn.Parameter]
    shadow: Shadow
    sets: tuple[ConvexSet, ConvexSet]
    upper_optimizers: list[Any]
    lower_optimizers: list[Any]
    shadow_optimizers: list[Optimizer]
    k: int = 0
    batches: int = 0
    skipped: tuple[int, int] = (0, 0)
    tracked: tuple[Tensor, ...] = ()
    seconds: float = 0.0
    weights: Any = None

    def __post_init__(self) -> None:
        model = self.module.trainer.model
        self._shares_buckets: bool = getattr(model, "gradient_as_bucket_view", False)
        self.method.start(self)
        self._project()

    @property
    def first(self) -> bool:
        """Whether the batch is the first one of its step."""
        return self.batches == 0

    @property
    def last(self) -> bool:
        """Whether the batch is the last one of its step; a step does not go on into an epoch."""
        full = self.batches + 1 == self.options.accumulate
        return full or bool(self.module.trainer.is_last_batch)

    def __call__(self, batch: Any) -> tuple[Numbers, bool]:
        """Evaluate a batch; return its numbers, and whether the variables moved."""
        began = time.perf_counter()
        if self.first:
            for parameter in self._parameters():
                parameter.grad = None
            if self.options.skip_nonfinite:
                self._before = [b.clone() for b in self._written()], self.tracked
                self._losses = []
        add_gradients = self.module.batch_gradients or self.method.add_gradients
        numbers: Numbers = add_gradients(self, batch["lower"], batch["upper"])
        if self.options.skip_nonfinite:
            self._losses += [numbers.upper, numbers.lower, numbers.inner]
        last = self.last
        self.batches = 0 if last else self.batches + 1
        moved = last and self._is_finite()
        if moved:
            self._move()
            self.k += 1
        self.seconds += time.perf_counter() - began
        return numbers, moved

    def record(self, numbers: Any) -> StreamInfo:
        """Return the record of a batch; its numbers are tensors until somebody reads them."""
        gap: Any = wide(numbers.lower) - wide(numbers.inner)
        return StreamInfo(
            upper=numbers.upper,
            lower=numbers.lower,
            gap=gap,
            multiplier=numbers.multiplier,
            inner_iterations=self.module.inner_iterations,
            iteration=self.k,
            calls=Calls(upper=1, lower=2),
            passes=3 * self.k * self.options.accumulate,
            optimization_time=self.seconds,
            skipped=self.skipped[0],
        )

    @property
    def name(self) -> str:
        """The name of the method, for reports."""
        return type(self.method).__name__

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        inner = self.k * self.module.inner_iterations
        return Progress(self.k, inner, 3 * self.k * self.options.accumulate, self.seconds)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The constants of the method, for loggers."""
        return {k: v for k, v in vars(self.method).items() if isinstance(v, (int, float))}

    proved = None
    chosen: ClassVar[list[tuple[str, str]]] = []

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

    def take(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """Return the gradients of parameters, which have none afterwards."""
        taken: list[Tensor | None] = []
        for parameter in parameters:
            gradient = parameter.grad
            # With `gradient_as_bucket_view` the next backward pass of DDP writes into it.
            shared = self._shares_buckets and gradient is not None
            taken.append(gradient.clone() if shared else gradient)  # type: ignore[union-attr]
            parameter.grad = None
        return taken

    def add(
        self,
        parameters: Iterable[Tensor],
        terms: Iterable[Tensor | None],
        factor: float | Tensor = 1.0,
    ) -> None:
        """Add multiples of tensors, which are given away, to the gradients of parameters."""
        for parameter, term in zip(parameters, terms, strict=True):
            if term is None:
                continue
            if isinstance(factor, Tensor):
                term, factor_left = term.mul_(factor), 1.0
            else:
                factor_left = factor
            if parameter.grad is not None:
                parameter.grad.add_(term, alpha=factor_left)
            else:
                parameter.grad = term if factor_left == 1.0 else term.mul_(factor_left)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the processes."""
        mean: Tensor = self.module.trainer.strategy.reduce(value, reduce_op="mean")
        return mean

    def state(self) -> dict[str, Any]:
        """Return the state as plain data for a checkpoint."""
        return {
            "shadow": self.shadow.state(),
            "optimizers": [optimizer.state_dict() for optimizer in self.shadow_optimizers],
            "k": self.k,
            "skipped": list(self.skipped),
            "tracked": list(self.tracked),
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.shadow.load(state["shadow"])
        for optimizer, saved in zip(self.shadow_optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.k, self.seconds = state["k"], state["seconds"]
        self.skipped = (state["skipped"][0], state["skipped"][1])
        self.tracked = tuple(value.to(self.module.device) for value in state["tracked"])

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.upper, *self.shadow.parameters, *self.shadow.z]

    def _written(self) -> list[Tensor]:
        return [*self.shadow.buffers, *self.shadow.z_buffers]

    def _is_finite(self) -> bool:
        if not self.options.skip_nonfinite:
            return True
        norms = [p.grad.norm() for p in self._parameters() if p.grad is not None]
        finite = bool(torch.stack([*norms, *self._losses]).isfinite().all())
        if self.module.trainer.strategy.reduce_boolean_decision(finite, all=True):
            self.skipped = self.skipped[0], 0
            return True
        buffers, self.tracked = self._before
        for buffer, kept in zip(self._written(), buffers, strict=True):
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
        if not self.method.moves_x(self.k):
            for parameter in self.upper:
                parameter.grad = None
        lower = [optimizer.optimizer for optimizer in self.lower_optimizers]
        upper = [optimizer.optimizer for optimizer in self.upper_optimizers]
        above, below = self.options.clip
        for bound, optimizers in ((above, upper), (below, lower), (below, self.shadow_optimizers)):
            if bound is not None:
                groups = [group for optimizer in optimizers for group in optimizer.param_groups]
                nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], bound)
        for copied, optimizer in zip(self.shadow_optimizers, lower, strict=True):
            follow(copied, optimizer, decays=self.method.decays_shadow)
            copied.step()
        # Lightning counts the steps of its wrapper: one of them is one step of the run.
        counted, *others = [*self.lower_optimizers, *self.upper_optimizers]
        counted.step()
        for optimizer in others:
            optimizer.optimizer.step()
        self._project()

    @torch.no_grad()
    def _project(self) -> None:
        upper, lower = self.sets
        project(self.upper, upper)
        project(self.shadow.parameters, lower)
        project(self.shadow.z, lower)


def project(parameters: Sequence[Tensor], feasible: ConvexSet) -> None:
    """Project parameters, as one vector, onto a set."""
    if isinstance(feasible, Free):
        return
    whole = torch.cat([p.detach().reshape(-1) for p in parameters])
    parts = torch.split(feasible.project(whole), [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))


def wide(value: Tensor) -> Tensor:
    """Return a number without its graph, in float32 at least."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))
