"""A full batch shared by processes: each evaluates a part, and all get the same sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bilevel.core.chunks import Chunks, as_chunks, map_tensors, samples_in
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import Function, nothing
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import norm

# A batch, and its weights in f and g.
Parts = tuple[dict[str, Any], float, float]


def parts_of(module: nn.Module, batch: dict[str, Any], rank: int, world: int) -> Parts:
    """Return the part of a batch that a process evaluates, and its weights in f and g.

    Batch normalisation looks at whole batches, so each process then evaluates all of it.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if any(layer.training and not isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        return batch, 1 / world, 1 / world
    upper, of_upper = part_of(batch["upper"], rank, world)
    lower, of_lower = part_of(batch["lower"], rank, world)
    return {**batch, "upper": upper, "lower": lower}, of_upper, of_lower


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


def check_same_point(parameters: Iterable[Tensor], iteration: int) -> None:
    """Stop if the processes hold different points, as on machines that round differently."""
    sums = torch.stack([p.detach().double().sum() for p in parameters])
    ends = torch.stack([sums, -sums])
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    if not torch.equal(ends[0], -ends[1]):
        raise BilevelError(
            f"after outer iteration {iteration} the processes do not hold the same point: they "
            "must run on the same kind of hardware with the same versions, and nothing but the "
            "solver may change the parameters."
        )


def check_parts(
    call: str, whole: BilevelProblem, part: BilevelProblem, point: tuple[Tensor, Tensor]
) -> None:
    """Refuse losses that are not the sum of what they are on the parts of the processes.

    Args:
        call: The name of the module whose losses these are.
        whole: f and g on the whole batch, which each process has.
        part: f and g on the part of this process, with its weight.
        point: Where they are compared.
    """
    losses: dict[str, tuple[list[Any], list[Any]]] = {
        "upper_loss": (whole.upper_terms, part.upper_terms),
        "lower_loss": (whole.lower_terms, part.lower_terms),
        "constraints": (whole.residual_terms, part.residual_terms),
    }
    for name, (of_whole, of_part) in losses.items():
        expected, error = _evaluated(of_whole, point), None
        try:
            added = _evaluated(of_part, point)
        except Exception as caught:
            # The other processes wait for the sum.
            added, error = torch.full_like(expected, math.nan), caught
        slopes, parts = expected[1:], total(added)[1:]
        tolerance = torch.finfo(point[1].dtype).eps ** 0.5 * max(norm(slopes), norm(parts))
        if any_of([not norm(slopes - parts) <= tolerance], added.device)[0]:
            raise ValueError(
                f"`{call}.{name}` on the whole batch ({expected[0]:.9g}) is not the mean of what "
                f"it is on the parts of the processes ({error or float(added[0])!r}). Over several "
                "processes all must be given the same batch, by a FullBatchDataModule or "
                "`Trainer(use_distributed_sampler=False)`. A loss must be a mean over whichever "
                "samples it is given, not a sum nor normalised over the batch, and must find what "
                "belongs to a sample by its number, carried in the batch, as in "
                "`self.logits[index]`."
            )


def _evaluated(terms: list[Any], point: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum of functions of x and y, which may be vectors, and then its gradient."""

    def scalar(term: Any) -> Function:
        return lambda x, y: term(x, y).sum()

    functions = [scalar(term) for term in terms] or [nothing]
    value, *gradients = BilevelProblem(functions, None).upper(*point)
    return torch.cat([gradients[0].new_tensor([value]), *gradients]).double()
