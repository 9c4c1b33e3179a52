"""The parameters of two levels, read and written as the flat vectors x and y."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import norm

Groups = list[dict[str, Any]]


def flat(groups: Groups) -> tuple[Tensor, Tensor]:
    """Return x and y."""
    x, y = (torch.cat([p.detach().reshape(-1) for p in group["params"]]) for group in groups)
    return x, y


def read(groups: Groups, problem: BilevelProblem) -> tuple[Tensor, Tensor]:
    """Return x and y, projected onto their sets if they lie outside."""
    x, y = flat(groups)
    return _projected(x, problem.upper_set, "upper"), _projected(y, problem.lower_set, "lower")


def _projected(v: Tensor, feasible: Any, level: str) -> Tensor:
    projected: Tensor = feasible.project(v)
    moved = norm(projected - v)
    # Projecting a projected point again may move it by a rounding error. A resumed run continues
    # exactly where it was, so such a point is left alone.
    if moved <= 1e2 * torch.finfo(v.dtype).eps * norm(v):
        return v
    warnings.warn(
        f"The {level}-level start lies outside {feasible!r}: it was projected, which moved it by "
        f"{moved:.3g}.",
        stacklevel=4,
    )
    return projected


def blocks(groups: Groups, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters, each with its part of x or y."""
    for group, vector in zip(groups, (x, y), strict=True):
        parts = torch.split(vector, [p.numel() for p in group["params"]])
        for parameter, part in zip(group["params"], parts, strict=True):
            yield parameter, part.view_as(parameter)


def by_level(name: str, params: Iterable[dict[str, Any]]) -> Groups:
    """Return the groups of the upper and the lower level, in this order."""
    groups = list(params)
    levels = [group.get("level") if isinstance(group, dict) else None for group in groups]
    if levels not in (["upper", "lower"], ["lower", "upper"]):
        raise ValueError(
            f"`{name}(params)` was given levels {levels}: it needs two groups, "
            '[{"params": [...], "level": "upper"}, {"params": [...], "level": "lower"}].'
        )
    # Lightning's LearningRateMonitor calls a rate by the name of its group.
    ordered = groups if levels[0] == "upper" else groups[::-1]
    return [{"name": group["level"], **group} for group in ordered]


def check_dtypes(name: str, groups: Groups) -> None:
    """Refuse half precision, which does not resolve the gap, a small difference of large values."""
    kinds = {(p.dtype, p.device) for group in groups for p in group["params"]}
    if len(kinds) != 1 or not {torch.float32, torch.float64} & {dtype for dtype, _ in kinds}:
        told = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"`{name}(params)` has parameters of {told}: only float32 and float64 are supported, "
            "in one dtype and on one device."
        )
