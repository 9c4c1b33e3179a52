"""A run on mini-batches: the problem of each batch, and what the run keeps from step to step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.plugin.batches import check_batch
from lightning_bilevel.plugin.declaration import Declaration
from lightning_bilevel.plugin.functional import ModuleFunctions, Shadow, problem_of
from lightning_bilevel.plugin.processes import total
from lightning_bilevel.plugin.random_numbers import LossNumbers, generators
from lightning_bilevel.plugin.whole_data import (
    Data,
    evaluating,
    gathered,
    kept,
    problem_on_data,
)
from lightning_bilevel.solvers.record import StreamInfo

__all__ = ["Stream", "has_changing_batches"]

# So many of the first batches are kept for monitors.
SAMPLE = 8


def has_changing_batches(trainer: Any) -> bool:
    """Tell whether the training loader may yield another batch in each step."""
    return not getattr(trainer.train_dataloader, "full_batch", False)


class _Twin(Shadow):
    """The buffer that belongs to the inner variable z: z writes to it, and nothing else reads it.

    A buffer that calls do not write to is that of the module, also if the user changes it.
    """

    def fresh(self) -> Tensor:
        """Return the twin; a buffer that the module has renewed is copied once more."""
        now = self.live
        if not self.written and (now is not self.buffer or now._version != self.version):
            self.buffer = now
            self.version = now._version
            self.copy = now.clone()
        return self.copy

    def check_version(self) -> None:
        """Keep what the call that just ended has written, or put in its place."""
        super().check_version()
        self.copy = self.live


class _Losses(ModuleFunctions):
    """The losses on mini-batches; the first one tells whether they are made for them."""

    worked = False

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            result = super()._run(method, args)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
            if self.worked:
                raise
            raise MisconfigurationException(
                f"`{type(self.module).__name__}.{method}` fails on the first mini-batch "
                f"({type(error).__name__}: {error}). A loss must be a mean over whichever samples "
                "it is given, and must find what belongs to a sample by its number, carried in the "
                "batch, as in `self.logits[index]`."
            ) from error
        self.worked = self.worked or method == "lower_loss"
        return result


class Stream:
    """What a run on mini-batches keeps from step to step.

    At y the losses write to the module's own buffers, such as running statistics. At the inner
    variable z they write to twins of these, which are never shown.

    Args:
        module: The bilevel module.
        declared: Its declaration.
        trainer: Its Trainer.
        saved: What :meth:`state` returned in the run that this one goes on from.

    Attributes:
        sample: The first batches, for monitors.
    """

    def __init__(
        self, module: Any, declared: Declaration, trainer: Any, saved: dict[str, Any] | None
    ) -> None:
        self._module = module
        self._declared = declared
        self._trainer = trainer
        mixed = trainer.precision == "bf16-mixed"
        self._device_type: str = trainer.strategy.root_device.type
        context = trainer.precision_plugin.forward_context if mixed else None
        self._mixed = mixed
        levels = declared.upper.parameters, declared.lower.parameters
        self._at_y = _Losses(module, *levels, shadow=None, context=context)
        self._at_z = _Losses(module, *levels, shadow=_Twin, context=context)
        self._examined = False
        saved = saved or {}
        self._numbers = LossNumbers(trainer.strategy.root_device, saved.get("losses"))
        self._load_twins(saved.get("twins", {}))
        watched = any(getattr(c, "looks_at_certificates", False) for c in trainer.callbacks)
        self._kept = SAMPLE if watched else 0
        self.sample: list[dict[str, Any]] = []
        self._sampled: tuple[int, Data] | None = None
        self._whole: tuple[int, Data] | None = None
        self._problem: tuple[Data, BilevelProblem] | None = None

    def problem(self, batch: Any) -> BilevelProblem:
        """Return f and g on a mini-batch; over several processes, on the batches of all."""
        check_batch(type(self._module).__name__, batch)
        if len(self.sample) < self._kept:
            self.sample.append(move_data_to_device(batch, "cpu"))
        sets = self._declared.upper.feasible, self._declared.lower.feasible
        problem = problem_of(self._at_y, batch, *sets)
        at_z = problem_of(self._at_z, batch, *sets)
        problem.inner_upper_terms = at_z.upper_terms
        problem.inner_terms = at_z.lower_terms
        problem.mini_batch = True
        problem.touched = self._touched(batch["lower"])
        world = self._trainer.world_size
        if world > 1:
            problem = problem.on_this_rank(1 / world, 1 / world, total)
        return problem

    def step(self, optimizer: Any, batch: Any) -> StreamInfo:
        """Make one step of the solver.

        The losses draw from their own random numbers, and nothing but them runs in half precision.
        What a step that is not taken has written to buffers is taken back.
        """
        before = self._buffers()
        taken = False
        try:
            with self._numbers.drawn(), self._full_precision():
                info: StreamInfo = optimizer.step(problem=self.problem(batch))
            taken = info.taken
        finally:
            if not taken:
                for twin, own, copy in before:
                    twin.live.copy_(own)
                    twin.copy.copy_(copy)
        if taken and not self._examined:
            # torch's batch normalisation writes to a buffer without a new version of it.
            for twin, _, copy in before:
                twin.written = twin.written or not torch.equal(twin.copy, copy)
            self._examined = True
        return info

    def _buffers(self) -> list[tuple[Shadow, Tensor, Tensor]]:
        """Return copies of the module's buffers and their twins, all or those that are written."""
        return [
            (twin, twin.live.clone(), twin.copy.clone())
            for twin in self._at_z.shadows
            if twin.written or not self._examined
        ]

    def evaluated(self, batch: Any, sample: bool, batches: int) -> tuple[BilevelProblem, str]:
        """Return f and g on the data of a certificate, and what these are.

        Args:
            batch: A batch; None is the sample or all data.
            sample: Whether to take the first few batches of the run.
            batches: The most batches of a level.
        """
        if batch is not None:
            check_batch(type(self._module).__name__, batch)
            data = Data(batch, "the given batch, in eval mode")
        elif sample and self.sample:
            if self._sampled is None or self._sampled[0] != len(self.sample):
                self._sampled = len(self.sample), kept(self._trainer, self.sample)
            data = self._sampled[1]
        else:
            if self._whole is None or self._whole[0] != batches:
                self._whole = batches, gathered(self._trainer, batches)
            data = self._whole[1]
        known = self._problem
        if known is None or known[0] is not data:
            made = problem_on_data(self._module, self._declared, self._trainer, data)
            self._problem = known = data, made
        return known[1], data.name

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for the evaluation of a certificate."""
        return evaluating(self._module)

    def share_buffers(self) -> None:
        """Give all processes the mean of their running statistics, as each has seen its batches."""
        if self._trainer.world_size == 1:
            return
        for twin in self._at_z.shadows:
            if twin.written:
                own = twin.live
                if own.is_floating_point():
                    total(own).div_(self._trainer.world_size)
                else:
                    torch.distributed.broadcast(own, 0)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly, as plain data for a checkpoint."""
        names = {id(buffer): name for name, buffer in self._module.named_buffers()}
        twins = {
            names[id(twin.live)]: twin.copy.clone()
            for twin in self._at_z.shadows
            if twin.written and id(twin.live) in names
        }
        return {"losses": self._numbers.state, "twins": twins, "generators": generators()}

    def _load_twins(self, saved: dict[str, Tensor]) -> None:
        names = {id(buffer): name for name, buffer in self._module.named_buffers()}
        for twin in self._at_z.shadows:
            name = names.get(id(twin.live))
            if name in saved:
                twin.copy = saved[name].to(twin.copy, copy=True)
                twin.written = True

    def _full_precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, enabled=False) if self._mixed else nullcontext()

    def _touched(self, batch: Any) -> Tensor | None:
        """Return the coordinates of x that a lower batch touches, for all processes together."""
        indices_of = self._module.upper_indices
        if indices_of is None:
            return None
        chunks = as_chunks(batch).batches
        indices = torch.cat([indices_of(chunk).reshape(-1) for chunk in chunks]).long()
        touched: Tensor
        if self._trainer.world_size == 1:
            touched = torch.unique(indices)
            return touched
        # All processes move the same coordinates: those that any of them touches.
        count = sum(p.numel() for p in self._declared.upper.parameters)
        mask = torch.zeros(count, dtype=torch.uint8, device=indices.device)
        mask[indices] = 1
        torch.distributed.all_reduce(mask, op=torch.distributed.ReduceOp.MAX)
        touched = mask.nonzero().reshape(-1)
        return touched
