"""A bilevel problem that is a mean over samples, whose penalised solutions are those of linear
systems.

f_i = |y - b_i|^2/2 + |x - a_i|^2/2 and g_i = (y - C x - e_i)' H (y - C x - e_i)/2. The samples lie
symmetrically about their means, so that also a normalised step is on average the right one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bilevel import BilevelProblem, Box

Vector = np.ndarray[Any, Any]
SAMPLES = 12
C = np.array([[1.0, 0.5], [-0.5, 1.0], [0.3, 0.2]])
H = np.diag([1.0, 0.6, 1.5])
MEANS = (np.array([0.5, -0.5]), np.array([1.0, 0.0, -1.0]), np.array([0.2, -0.3, 0.1]))
BOX = Box(-5.0, 5.0)


def _scattered(mean: Vector, seed: int) -> Tensor:
    half = np.random.default_rng(seed).normal(size=(SAMPLES // 2, len(mean)))
    return torch.tensor(mean + np.concatenate([half, -half]))


A, B, E = (_scattered(mean, seed) for seed, mean in enumerate(MEANS))
_C, _H = torch.tensor(C), torch.tensor(H)


def upper(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    near_y = (y - B[rows].to(y)).square().sum()
    near_x = (x - A[rows].to(x)).square().sum()
    return (near_y + near_x) / (2 * len(rows))


def lower(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    offset = y - _C.to(x) @ x - E[rows].to(y)
    return (offset @ _H.to(x) * offset).sum() / (2 * len(rows))


def on(rows: Tensor, lower_rows: Tensor | None = None, **more: Any) -> BilevelProblem:
    """The problem on a mini-batch."""
    others = rows if lower_rows is None else lower_rows
    return BilevelProblem(
        lambda x, y: upper(x, y, rows),
        lambda x, y: lower(x, y, others),
        BOX,
        BOX,
        **{"mini_batch": True, **more},
    )


def batches(count: int, seed: int = 0, size: int = 4) -> list[BilevelProblem]:
    """Problems on random mini-batches."""
    generator = torch.Generator().manual_seed(seed)

    def rows() -> Tensor:
        return torch.randperm(SAMPLES, generator=generator)[:size]

    return [on(rows(), rows()) for _ in range(count)]


def start(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.tensor([1.5, 1.0], dtype=dtype), torch.tensor([-1.0, 1.0, 0.5], dtype=dtype)


def solution(weight: float, pull: float = 0.0) -> tuple[Vector, Vector, Vector]:
    """The (x, y, z) with f_x + weight (g_x(y) - g_x(z)) = 0, f_y + weight (g_y(y) + pull (z - y)) =
    0 and g_y(z) + pull (z - y) = 0, on all samples.
    """
    a, b, e = MEANS
    n, m = len(a), len(b)
    eye = np.eye(m)
    rows = [
        # x - a - weight C' H (y - C x - e) + weight C' H (z - C x - e) = 0
        np.hstack([np.eye(n), -weight * C.T @ H, weight * C.T @ H]),
        # y - b + weight H (y - C x - e) + weight pull (z - y) = 0
        np.hstack([-weight * H @ C, (1 - weight * pull) * eye + weight * H, weight * pull * eye]),
        # H (z - C x - e) + pull (z - y) = 0
        np.hstack([-H @ C, -pull * eye, H + pull * eye]),
    ]
    right = np.concatenate([a, b + weight * H @ e, H @ e])
    x, y, z = np.split(np.linalg.solve(np.vstack(rows), right), [n, n + m])
    return x, y, z
