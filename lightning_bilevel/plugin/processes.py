"""A run over several processes: each evaluates its part of the data, and the sums are the same in
all of them.
"""

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

__all__ = [
    "agree",
    "any_of",
    "check_parts",
    "check_same_point",
    "part_of",
    "shared_problem",
    "total",
]

_Level = Callable[[BilevelProblem, Tensor, Tensor], tuple[float, Tensor]]


def shared_problem(
    module: nn.Module,
    problem_on: Callable[[Any], BilevelProblem],
    trainer: Any,
    batch: Any,
    *,
    point: tuple[Tensor, Tensor] | None,
    split: bool,
) -> tuple[BilevelProblem, Any]:
    """Return the problem on a batch, shared by all processes of a Trainer, and what this process
    evaluates of the batch.

    Args:
        module: The module whose losses these are.
        problem_on: Makes the problem on a batch, or on a part of it.
        trainer: Its Trainer, if it has one.
        batch: The batch, which all processes have.
        point: The point to check at that the parts add up to the whole; None checks nothing.
        split: Whether each process evaluates a part of the batch. Where the parts do not add up
            because of batch normalisation, each one evaluates the whole batch instead.
    """
    whole = problem_on(batch)
    if trainer is None or trainer.world_size == 1:
        return whole, batch
    name, world = type(module).__name__, trainer.world_size
    # Loaders with distributed samplers repeat or drop samples, so a batch that came split is never
    # the exact full batch.
    if not agree(leaves(batch), trainer.strategy.root_device):
        raise MisconfigurationException(
            f"`{name}` was given different batches in different processes: it splits a batch "
            "itself, so that each sample counts once. Use a FullBatchDataModule, or "
            "`Trainer(use_distributed_sampler=False)` with the same seed in all processes."
        )
    if split:
        upper, of_upper = part_of(batch["upper"], trainer.global_rank, world)
        lower, of_lower = part_of(batch["lower"], trainer.global_rank, world)
        part = {**batch, "upper": upper, "lower": lower}
        spread = problem_on(part).on_this_rank(of_upper, of_lower, total)
        try:
            if point is not None:
                check_parts(name, whole, spread, *point, batch, part)
            return spread, part
        except ValueError:
            if not any(
                isinstance(layer, _BatchNorm) and layer.training for layer in module.modules()
            ):
                raise
            rank_zero_warn(
                f"`{name}` has batch normalisation, which looks at a whole batch: each of the "
                f"{world} processes evaluates all of it, which takes as long as one process. "
                "Normalise by group or layer to share the work, or synchronise on GPUs with "
                "`Trainer(sync_batchnorm=True)`."
            )
    return problem_on(batch).on_this_rank(1 / world, 1 / world, total), batch


def part_of(batch: Any, rank: int, world: int) -> tuple[Any, float]:
    """Return the part of a level's batch that a process evaluates, and the weight of that part in
    the whole.

    Samples are counted through all chunks and cut into as many ranges as there are processes,
    equally long up to one sample:
    each sample is in one of them. Chunks with weights of their own, of which no part is known, go
    whole to one process each, and so does a batch in which there is nothing to cut. A process that
    gets nothing has the weight 0.

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
    for chunk, size in zip(chunks.batches, sizes, strict=True):
        _check_lengths(
            chunk, size
        )  # of all chunks, so that all processes refuse what one of them cannot cut
    count = sum(sizes)
    first, last = count * rank // world, count * (rank + 1) // world
    if first == last:
        return batch, 0.0
    parts, start = [], 0
    for chunk, size in zip(chunks.batches, sizes, strict=True):
        a, b = max(first - start, 0), min(last - start, size)
        if a < b:
            parts.append(
                map_tensors(lambda tensor, a=a, b=b: tensor[a:b] if tensor.ndim else tensor, chunk)
            )  # type: ignore[misc]
        start += size
    return (parts[0] if len(parts) == 1 else Chunks(parts)), (last - first) / count


def _check_lengths(chunk: Any, size: int) -> None:
    lengths = sorted({len(tensor) for tensor in tensors(chunk) if tensor.ndim})
    if lengths != [size]:
        raise ValueError(
            f"a batch with tensors of lengths {', '.join(map(str, lengths))} cannot be split over "
            "processes: the first dimension of each must count the samples. Keep what is no sample "
            "in the module, or give the parts yourself, as `Chunks` with `weights`."
        )


def total(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    torch.distributed.all_reduce(tensor)
    return tensor


def any_of(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Tell of each flag whether any process has raised it."""
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
    # The largest of all digests is the smallest, in one collective: max(-d) = -min(d).
    extremes = torch.tensor([mine, -mine], device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
    return bool(extremes[0] == -extremes[1])


def check_same_point(trainer: Any, parameters: Iterable[Tensor], iteration: int) -> None:
    """Stop where processes have come apart, such as on machines that round differently."""
    if trainer.world_size > 1 and not agree(parameters, trainer.strategy.root_device):
        raise BilevelError(
            f"after outer iteration {iteration} the processes do not hold the same point: they "
            "must run on the same kind of hardware with the same versions, and nothing but the "
            "solver may change the parameters."
        )


def check_parts(
    call: str,
    whole: BilevelProblem,
    spread: BilevelProblem,
    x: Tensor,
    y: Tensor,
    batch: dict[str, Any],
    mine: dict[str, Any],
) -> None:
    """Refuse losses whose parts do not add up to the whole: each process has the whole batch, so
    that can be seen.

    Args:
        call: The name of the module whose losses these are.
        whole: The problem on the whole batch.
        spread: The problem on this process's part, summed over the processes.
        x: The point to compare them at.
        y: Likewise.
        batch: The whole batch, ``{"upper": ..., "lower": ...}``, for the message.
        mine: This process's part of it, likewise.
    """
    tolerance, size = torch.finfo(y.dtype).eps ** 0.5, math.hypot(norm(x), norm(y))
    for key, level in (("upper", _upper), ("lower", _lower)):
        name = f"{call}.{key}_loss"
        one, one_slope = level(whole, x, y)
        try:
            added, added_slope = _together(level, spread, x, y)
        except _PartError as error:
            count, own = (sum(map(samples_in, as_chunks(of[key]).batches)) for of in (batch, mine))
            cause = error.__cause__
            fails = (
                "the part of another process" if cause is None else f"this process's part of {own}"
            )
            why = (
                ""
                if cause is None
                else f" ({type(cause).__name__}: {(str(cause) or 'no message').splitlines()[0]})"
            )
            raise ValueError(
                f"`{name}` works on the whole batch of {count} samples and fails on {fails}{why}: "
                "over several processes a loss must be a mean over whichever samples it is given, "
                "and must find what belongs to a sample by its number, carried in the batch, as in "
                "`self.logits[index]`."
            ) from cause
        slope = max(norm(one_slope), norm(added_slope))
        scale = max(abs(one), abs(added)) + slope * size
        if (
            abs(one - added) > tolerance * scale
            or norm(one_slope - added_slope) > tolerance * slope
        ):
            raise ValueError(
                f"`{name}` on the whole batch ({one:.9g}) is not the mean of what it is on the "
                f"parts of {world_size()} processes ({added:.9g}), in value or gradient: over "
                "several processes a loss must be a mean over samples, not a sum nor normalised "
                "over the batch, and must find what belongs to a sample by its number, carried in "
                "the batch."
            )


class _PartError(Exception):
    """A loss has failed on the part of a process; its error is the cause in that process, and there
    is none in the others.
    """


def _together(level: _Level, spread: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Evaluate a level such that all processes fail where one does: the others would wait for its
    part of the sum for ever.
    """
    met = False

    def meet(tensor: Tensor) -> Tensor:
        nonlocal met
        met = True
        if any_of([False], tensor.device)[0]:
            raise _PartError
        return total(tensor)

    try:
        return level(spread.on_this_rank(1.0, 1.0, meet), x, y)
    except Exception as error:
        if met:
            raise
        any_of([True], y.device)
        raise _PartError from error


def world_size() -> int:
    """The number of processes."""
    return torch.distributed.get_world_size()


def _upper(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    value, grad_x, grad_y = problem.upper(x, y)
    return value, torch.cat([grad_x, grad_y])


def _lower(problem: BilevelProblem, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return g with both gradients, which no method needs: it is evaluated as if it were f."""
    return _upper(
        BilevelProblem(problem.lower_terms, problem.lower_terms, reduce=problem.reduce), x, y
    )
