"""A run over several processes: each evaluates a part of the data, and all get the same sums."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.core.chunks import Chunks, as_chunks, samples_in
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.leaves import leaves, map_tensors, tensors
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import norm

__all__ = ["agree", "any_of", "check_same_point", "part_of", "shared_problem", "total"]


def shared_problem(
    module: nn.Module,
    problem_on: Callable[[Any], BilevelProblem],
    trainer: Any,
    batch: Any,
    *,
    point: tuple[Tensor, Tensor] | None,
    split: bool,
) -> tuple[BilevelProblem, Any]:
    """Return the problem on a batch, shared by all processes, and the part of this process.

    Args:
        module: The module whose losses these are.
        problem_on: Makes the problem on a batch, or on a part of it.
        trainer: Its Trainer, if it has one.
        batch: The batch, which all processes have.
        point: The point at which the parts are checked to add up to the whole; None checks nothing.
        split: Whether each process evaluates a part of the batch. With batch normalisation each
            process evaluates the whole batch instead.
    """
    whole = problem_on(batch)
    if trainer is None or trainer.world_size == 1:
        return whole, batch
    name, world = type(module).__name__, trainer.world_size
    # Distributed samplers repeat or drop samples, so the batches that they split never make up the
    # exact full batch.
    if not agree(leaves(batch), trainer.strategy.root_device):
        raise MisconfigurationException(
            f"`{name}` was given different batches in different processes: it splits a batch "
            "itself, so that each sample counts once. Use a FullBatchDataModule, or "
            "`Trainer(use_distributed_sampler=False)` with the same seed in all processes."
        )
    if split and _has_batch_norm(module):
        split = False
        rank_zero_warn(
            f"`{name}` has batch normalisation, which looks at a whole batch: each of the {world} "
            "processes evaluates all of it, which takes as long as one process. Normalise by "
            "group or layer to share the work, or use `Trainer(sync_batchnorm=True)` on GPUs."
        )
    if not split:
        return whole.on_this_rank(1 / world, 1 / world, total), batch
    upper, of_upper = part_of(batch["upper"], trainer.global_rank, world)
    lower, of_lower = part_of(batch["lower"], trainer.global_rank, world)
    part = {**batch, "upper": upper, "lower": lower}
    spread = problem_on(part).on_this_rank(of_upper, of_lower, total)
    if point is not None:
        _check_parts(name, whole, spread.on_this_rank(1.0, 1.0, total), *point)
    return spread, part


def _has_batch_norm(module: nn.Module) -> bool:
    return any(
        isinstance(layer, _BatchNorm) and layer.training and not isinstance(layer, nn.SyncBatchNorm)
        for layer in module.modules()
    )


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
    count = sum(sizes)
    first = count * rank // world
    last = count * (rank + 1) // world
    if first == last:
        return batch, 0.0
    parts = []
    start = 0
    for chunk, size in zip(chunks.batches, sizes, strict=True):
        begin = max(first - start, 0)
        end = min(last - start, size)
        if begin < end:
            parts.append(_cut(chunk, begin, end))
        start += size
    return (parts[0] if len(parts) == 1 else Chunks(parts)), (last - first) / count


def _cut(chunk: Any, begin: int, end: int) -> Any:
    """Return some samples of a chunk; tensors without dimensions stay as they are."""
    return map_tensors(lambda tensor: tensor[begin:end] if tensor.ndim else tensor, chunk)


def total(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    torch.distributed.all_reduce(tensor)
    return tensor


def any_of(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Tell for each flag whether any process has raised it."""
    raised = torch.tensor(flags, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(raised, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def agree(tensors: Iterable[Any], device: torch.device) -> bool:
    """Tell whether all processes hold the same numbers, bit for bit."""
    digest = hashlib.blake2b(digest_size=7)
    for leaf in tensors:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(
                leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        elif leaf is None or isinstance(leaf, (str, int, float, bool)):
            digest.update(repr(leaf).encode())
    mine = int.from_bytes(digest.digest(), "big")
    # All digests are equal if the largest is the smallest. One collective finds both, as
    # max(-d) = -min(d).
    extremes = torch.tensor([mine, -mine], device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
    return bool(extremes[0] == -extremes[1])


def check_same_point(trainer: Any, parameters: Iterable[Tensor], iteration: int) -> None:
    """Stop if the processes hold different points, as on machines that round differently."""
    if trainer.world_size > 1 and not agree(parameters, trainer.strategy.root_device):
        raise BilevelError(
            f"after outer iteration {iteration} the processes do not hold the same point: they "
            "must run on the same kind of hardware with the same versions, and nothing but the "
            "solver may change the parameters."
        )


def _check_parts(
    call: str, whole: BilevelProblem, spread: BilevelProblem, x: Tensor, y: Tensor
) -> None:
    """Refuse losses whose parts do not add up to the whole, which each process has too."""
    tolerance = torch.finfo(y.dtype).eps ** 0.5
    size = math.hypot(norm(x), norm(y))
    levels = [("upper_loss", _upper), ("lower_loss", _lower)]
    if whole.residual_terms:
        levels.append(("constraints", _further))
    for method, level in levels:
        value, gradient = level(whole, x, y)
        cause: Exception | None = None
        try:
            added, added_gradient = level(spread, x, y)
            slope = max(norm(gradient), norm(added_gradient))
            scale = max(abs(value), abs(added)) + slope * size
            fits = (
                abs(value - added) <= tolerance * scale
                and norm(gradient - added_gradient) <= tolerance * slope
            )
            found = f"but {added:.9g}"
        except (RuntimeError, IndexError, ValueError) as error:
            fits, cause, found = False, error, f"which fail here ({type(error).__name__}: {error})"
        if not fits:
            raise ValueError(
                f"`{call}.{method}` on the whole batch ({value:.9g}) is not the mean of what it is "
                f"on the parts of the processes, {found}: over several processes a loss must be a "
                "mean over whichever samples it is given, not a sum nor normalised over the batch, "
                "and must find what belongs to a sample by its number, carried in the batch, as in "
                "`self.logits[index]`."
            ) from cause


def _upper(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    value, grad_x, grad_y = problem.upper(x, y)
    return value, torch.cat([grad_x, grad_y])


def _further(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return the sum of the further residuals, and all their gradients as one vector."""
    values, gradients = problem.residuals(x, y)
    return sum(values), torch.cat(gradients)


def _lower(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return g with both gradients. No method needs both, so g is evaluated as if it were f."""
    return _upper(
        BilevelProblem(problem.lower_terms, problem.lower_terms, reduce=problem.reduce), x, y
    )
