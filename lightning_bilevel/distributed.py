"""A full batch shared by processes: each evaluates a part, and all get the same sums."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.core.chunks import (
    Chunks,
    as_chunks,
    leaves,
    map_tensors,
    samples_in,
    tensors,
)
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import norm

__all__ = ["any_of", "check_parts", "check_same_point", "part_of", "shared_problem", "total"]

Point = tuple[Tensor, Tensor]


def shared_problem(
    module: nn.Module, problem_on: Callable[[Any], BilevelProblem], trainer: Any, batch: Any
) -> tuple[BilevelProblem, Any]:
    """Return the problem on a batch, shared by all processes, and the part of this process.

    Args:
        module: The module whose losses these are.
        problem_on: Makes the problem on a batch, or on a part of it.
        trainer: Its Trainer, if it has one.
        batch: The batch, which all processes have.
    """
    if trainer is None or trainer.world_size == 1:
        return problem_on(batch), batch
    world = trainer.world_size
    # Distributed samplers repeat or drop samples, so the batches that they split never make up the
    # exact full batch.
    if not _agree(leaves(batch), trainer.strategy.root_device):
        raise MisconfigurationException(
            f"`{type(module).__name__}` was given different batches in different processes: it "
            "splits a batch itself, so that each sample counts once. Use a FullBatchDataModule, or "
            "`Trainer(use_distributed_sampler=False)` with the same seed in all processes."
        )
    if any(
        isinstance(layer, _BatchNorm) and layer.training and not isinstance(layer, nn.SyncBatchNorm)
        for layer in module.modules()
    ):
        rank_zero_warn(
            f"`{type(module).__name__}` has batch normalisation, which looks at a whole batch: "
            f"each of the {world} processes evaluates all of it, which takes as long as one "
            "process. Normalise by group or layer to share the work, or use "
            "`Trainer(sync_batchnorm=True)` on GPUs."
        )
        return problem_on(batch).on_this_rank(1 / world, 1 / world, total), batch
    upper, of_upper = part_of(batch["upper"], trainer.global_rank, world)
    lower, of_lower = part_of(batch["lower"], trainer.global_rank, world)
    part = {**batch, "upper": upper, "lower": lower}
    return problem_on(part).on_this_rank(of_upper, of_lower, total), part


def part_of(batch: Any, rank: int, world: int) -> tuple[Any, float]:
    """Return the part of a level's batch that a process evaluates, and the weight of that part.

    The samples of all chunks are cut into one range for each process. The ranges are equally long
    up to one sample, and each sample is in one of them. Chunks with weights of their own cannot be
    cut, as the weights of their parts are not known: each goes whole to one process. So does a
    batch without samples to cut. A process that gets nothing has the weight 0.

    Example:
        >>> [part_of(torch.arange(5), rank, 2) for rank in range(2)]
        [(tensor([0, 1]), 0.4), (tensor([2, 3, 4]), 0.6)]
    """
    chunks = as_chunks(batch)
    sizes = [samples_in(part) for part in chunks.batches]
    if chunks.weights is not None or not all(sizes):
        mine = range(rank, len(sizes), world)
        if not mine:
            return batch, 0.0
        return Chunks([chunks.batches[i] for i in mine], [chunks.shares[i] for i in mine]), 1.0
    # All chunks are checked, so that all processes refuse a batch that one of them cannot cut.
    for chunk, size in zip(chunks.batches, sizes, strict=True):
        lengths = sorted({len(tensor) for tensor in tensors(chunk) if tensor.ndim})
        if lengths != [size]:
            raise ValueError(
                f"a batch with tensors of lengths {', '.join(map(str, lengths))} cannot be split "
                "over processes: the first dimension of each must count the samples. Keep what is "
                "no sample in the module, or give the parts yourself, as `Chunks` with `weights`."
            )
    first, last = (sum(sizes) * r // world for r in (rank, rank + 1))
    parts, start = [], 0
    for chunk, size in zip(chunks.batches, sizes, strict=True):
        cut = slice(max(first - start, 0), min(last - start, size))
        if cut.start < cut.stop:
            parts.append(map_tensors(partial(_cut, cut), chunk))
        start += size
    if not parts:
        return batch, 0.0
    return (parts[0] if len(parts) == 1 else Chunks(parts)), (last - first) / sum(sizes)


def _cut(samples: slice, tensor: Tensor) -> Tensor:
    return tensor[samples] if tensor.ndim else tensor


def total(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    torch.distributed.all_reduce(tensor)
    return tensor


def any_of(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Return for each flag whether any process has raised it."""
    raised = torch.tensor(flags, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(raised, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def _agree(found: Iterable[Any], device: torch.device) -> bool:
    """Whether all processes hold the same numbers, bit for bit."""
    digest = hashlib.blake2b(digest_size=7)
    for leaf in found:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(
                leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        elif leaf is None or isinstance(leaf, (str, int, float, bool)):
            digest.update(repr(leaf).encode())
    mine = int.from_bytes(digest.digest(), "big")
    # All digests are equal if the largest is the smallest: max(-d) = -min(d).
    extremes = torch.tensor([mine, -mine], device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
    return bool(extremes[0] == -extremes[1])


def check_same_point(trainer: Any, parameters: Iterable[Tensor], iteration: int) -> None:
    """Stop if the processes hold different points, as on machines that round differently."""
    if trainer.world_size > 1 and not _agree(parameters, trainer.strategy.root_device):
        raise BilevelError(
            f"after outer iteration {iteration} the processes do not hold the same point: they "
            "must run on the same kind of hardware with the same versions, and nothing but the "
            "solver may change the parameters."
        )


def check_parts(call: str, whole: BilevelProblem, shared: BilevelProblem, point: Point) -> None:
    """Refuse losses whose parts do not add up to the whole, which each process has too."""
    tolerance, size = torch.finfo(point[1].dtype).eps ** 0.5, math.hypot(*map(norm, point))
    # A copy, whose evaluations are not counted.
    parts = shared.on_this_rank(1.0, 1.0, total)
    for name, level in _LEVELS.items():
        if name == "constraints" and not whole.residual_terms:
            continue
        value, gradient = level(whole, *point)
        cause: Exception | None = None
        try:
            added, other = level(parts, *point)
            slope = max(norm(gradient), norm(other))
            fits = norm(gradient - other) <= tolerance * slope
            fits &= abs(value - added) <= tolerance * (max(abs(value), abs(added)) + slope * size)
            found = f"but {added:.9g}"
        except (RuntimeError, IndexError, ValueError) as error:
            fits, cause, found = False, error, f"which fail here ({type(error).__name__}: {error})"
        if not fits:
            raise ValueError(
                f"`{call}.{name}` on the whole batch ({value:.9g}) is not the mean of what it is "
                f"on the parts of the processes, {found}: over several processes a loss must be a "
                "mean over whichever samples it is given, not a sum nor normalised over the batch, "
                "and must find what belongs to a sample by its number, carried in the batch, as in "
                "`self.logits[index]`."
            ) from cause


def _upper(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    value, grad_x, grad_y = problem.upper(x, y)
    return value, torch.cat([grad_x, grad_y])


def _lower(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return g with both gradients. No method needs both, so g is evaluated as if it were f."""
    terms = problem.lower_terms
    return _upper(BilevelProblem(terms, terms, reduce=problem.reduce), x, y)


def _constraints(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    values, gradients = problem.residuals(x, y)
    return sum(values), torch.cat(gradients)


# Each loss of a module, as one value with all its gradients.
_LEVELS = {"upper_loss": _upper, "lower_loss": _lower, "constraints": _constraints}
