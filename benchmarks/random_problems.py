"""Thirty random bilevel problems: quadratic, logistic and small networks.

They have many sizes, scales and constraint sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from lightning_bilevel import Ball, BilevelProblem, Box, ConvexSet, Free, Simplex
from lightning_bilevel.core.lower import Function

KINDS = ("quadratic", "logistic", "network")
SIZES = (2, 5, 20, 60, 200, 600, 1_000, 2_000, 5_000, 10_000)
SCALES = (
    (1.0, 1.0),
    (1e-4, 1.0),
    (1e4, 1.0),
    (1.0, 1e-4),
    (1.0, 1e4),
    (1e-4, 1e4),
    (1e4, 1e-4),
    (1e-2, 1e2),
    (1e2, 1e-2),
    (1e4, 1e4),
)


@dataclass(frozen=True)
class Drawn:
    """A problem with its start, and the relaxation in the unit of its g."""

    name: str
    problem: BilevelProblem
    x: Tensor
    y: Tensor
    delta: float


def draw(number: int) -> Drawn:
    """Return problem 0 to 29: each kind in ten sizes.

    Each size has another pair of scales of f and g and another set.
    """
    kind, index = KINDS[number % 3], number // 3
    size, (f_scale, g_scale) = SIZES[index], SCALES[(index + number % 3) % len(SCALES)]
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    make = {"quadratic": _quadratic, "logistic": _logistic, "network": _network}[kind]
    upper, lower, x, y, X, Y = make(size, index, normal)
    name = f"{kind:<9} {x.numel():>6} + {y.numel():<6}"
    return scaled(name, (upper, lower), (f_scale, g_scale), (x, y), (X, Y))


def scaled(
    name: str,
    losses: tuple[Function, Function],
    scales: tuple[float, float],
    start: tuple[Tensor, Tensor],
    sets: tuple[ConvexSet, ConvexSet],
) -> Drawn:
    """Return f and g times their scales, on their sets. Each pair is the upper level's first."""
    (upper, lower), (f_scale, g_scale), (X, Y) = losses, scales, sets
    problem = BilevelProblem(
        lambda x, y: f_scale * upper(x, y),
        lambda x, y: g_scale * lower(x, y),
        upper_set=X,
        lower_set=Y,
    )
    of = f"f x {f_scale:g}, g x {g_scale:g}; x in {type(X).__name__}, y in {type(Y).__name__}"
    x, y = start
    return Drawn(f"{name} {of}", problem, X.project(x), Y.project(y), 1e-3 * g_scale)


def _quadratic(n, index, normal):  # type: ignore[no-untyped-def]
    """f pulls both levels away; g has curvatures from 0.05 to 1.

    Where y is in a box or a ball, the curvatures begin at -0.2.
    """
    X: ConvexSet = (Box(-1.0, 1.0), Ball(math.sqrt(n)), Free(), Simplex())[index % 4]
    Y: ConvexSet = (Ball(2 * math.sqrt(n)), Free(), Box(-3.0, 3.0))[index % 3]
    curvature = torch.linspace(0.05 if isinstance(Y, Free) else -0.2, 1.0, n, dtype=torch.float64)
    shift, target, wish = normal(n), normal(n), normal(n)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (0.5 * (x - wish) ** 2 + 0.5 * (y - target) ** 2).mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return (0.5 * curvature * y**2 - y * (x + 0.5 * x.roll(1) + shift)).mean()

    return upper, lower, normal(n), normal(n), X, Y


def _logistic(n, index, normal):  # type: ignore[no-untyped-def]
    """x: logarithms of the L2 coefficients of n features; y: weights of a logistic regression."""
    X: ConvexSet = (Box(-6.0, 3.0), Ball(3 * math.sqrt(n)), Free())[index % 3]
    Y: ConvexSet = (Free(), Box(-10.0, 10.0), Ball(5 * math.sqrt(n)))[index % 3]
    samples = min(200, 10 * n)
    truth = normal(n) * (torch.arange(n) % 2)
    parts = []
    for _ in range(2):
        inputs = normal(samples, n) / math.sqrt(n)
        parts.append((inputs, (inputs @ truth + 0.3 * normal(samples) > 0).double()))
    (train, train_labels), (clean, clean_labels) = parts

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(clean @ y, clean_labels)

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return (
            binary_cross_entropy_with_logits(train @ y, train_labels)
            + 0.5 * (x.exp() * y**2).mean()
        )

    return upper, lower, torch.zeros(n, dtype=torch.float64) - 2.0, 0.1 * normal(n), X, Y


def _network(n, index, normal):  # type: ignore[no-untyped-def]
    """x: weights of samples, a fifth of them wrong; y: a network with one hidden layer.

    g is nonconvex in y.
    """
    samples, hidden, features = max(n, 4), 4, 3
    X: ConvexSet = (Simplex(), Box(-8.0, 8.0))[index % 2]
    Y: ConvexSet = (Box(-20.0, 20.0), Ball(50.0))[index // 2 % 2]
    truth, inputs = normal(features), normal(samples, features)
    values = (inputs @ truth).tanh()
    noisy = torch.where(torch.arange(samples) % 5 == 0, -values, values)
    clean = normal(50, features)
    wanted = (clean @ truth).tanh()
    on_simplex = isinstance(X, Simplex)

    def network(y: Tensor, inputs: Tensor) -> Tensor:
        first, second = y[: features * hidden].view(features, hidden), y[features * hidden :]
        return torch.tanh(inputs @ first) @ second

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return ((network(y, clean) - wanted) ** 2).mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        weights = x if on_simplex else softplus(x) / samples
        return (weights * (network(y, inputs) - noisy) ** 2).sum() + 1e-3 * (y**2).sum()

    return (
        upper,
        lower,
        torch.zeros(samples, dtype=torch.float64),
        0.5 * normal(hidden * (features + 1)),
        X,
        Y,
    )
