"""Ten families of bilevel problems, three members each: the half on which settings are chosen.

The other half is `held_out.py`. A family is a function of a size and of random numbers; a member
adds the scales of f and g and the sets. Each g is bounded below on its set, and before they are
scaled f and g are between 0.1 and 100 at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.random_problems import Drawn
from lightning_bilevel import Ball, BilevelProblem, Box, ConvexSet, Free, Product, Simplex

Loss = Callable[[Tensor, Tensor], Tensor]
Normal = Callable[..., Tensor]


class Losses(NamedTuple):
    """f and g before they are scaled, with a start."""

    upper: Loss
    lower: Loss
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Member:
    """A family at a size, with scales and sets. ``seed`` is that of its random numbers."""

    family: Callable[[int, Normal], Losses]
    size: int
    upper_scale: float
    lower_scale: float
    upper_set: ConvexSet
    lower_set: ConvexSet
    seed: int

    def draw(self) -> Drawn:
        """Return the problem with its start, and the relaxation in the unit of its g."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        upper, lower, x, y = self.family(self.size, normal)
        f_scale, g_scale = self.upper_scale, self.lower_scale
        X, Y = self.upper_set, self.lower_set
        problem = BilevelProblem(
            lambda x, y: f_scale * upper(x, y),
            lambda x, y: g_scale * lower(x, y),
            upper_set=X,
            lower_set=Y,
        )
        sets = f"x in {type(X).__name__}, y in {type(Y).__name__}"
        sizes = f"{x.numel():>5} + {y.numel():<5}"
        name = f"{self.family.__name__:<15} {sizes} f x {f_scale:g}, g x {g_scale:g}; {sets}"
        return Drawn(name, problem, X.project(x), Y.project(y), 1e-3 * g_scale)


def factorisation(n: int, normal: Normal) -> Losses:
    """y: two factors of a matrix of which half is seen; x: logarithms of an L2 weight per row."""
    rank = min(n - 1, 5)
    truth = normal(n, rank) @ normal(rank, n) / math.sqrt(rank)
    matrix = truth + 0.3 * normal(n, n)
    seen = (normal(n, n) > 0.0).double()

    def product(y: Tensor) -> Tensor:
        left, right = y.view(2, n, rank)
        return left @ right.T

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return ((1.0 - seen) * (product(y) - matrix) ** 2).mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        weights = x.exp()[:, None] * y.view(2 * n, rank) ** 2
        return (seen * (product(y) - matrix) ** 2).mean() + weights.mean()

    x = torch.full((2 * n,), -2.0, dtype=torch.float64)
    return Losses(upper, lower, x, 0.5 * normal(2 * n * rank))


def valleys(n: int, normal: Normal) -> Losses:
    """y: a chain of curved valleys, as in Rosenbrock's function; x: where each of them ends."""
    target = 1.0 + 0.3 * normal(n)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (y - target).square().mean() + 0.1 * x.square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        chain = 20.0 * (y.roll(-1)[:-1] - y[:-1] ** 2).square().sum()
        return (chain + (y - x).square().sum()) / n

    return Losses(upper, lower, 0.5 * normal(n), torch.tensor([-1.2, 1.0]).double().repeat(n)[:n])


def weighting(n: int, normal: Normal) -> Losses:
    """x: a weight for each of n samples, a fifth of them wrong; y: a logistic regression."""
    features = max(2, n // 10)
    truth = normal(features)
    inputs, clean = normal(n, features), normal(100, features)
    labels = (inputs @ truth > 0.0).double()
    wrong = torch.arange(n) % 5 == 0
    labels[wrong] = 1.0 - labels[wrong]
    wanted = (clean @ truth > 0.0).double()

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(clean @ y, wanted)

    def lower(x: Tensor, y: Tensor) -> Tensor:
        losses = binary_cross_entropy_with_logits(inputs @ y, labels, reduction="none")
        return (x * losses).sum() + 0.01 * y.square().sum()

    return Losses(
        upper, lower, torch.full((n,), 1.0 / n, dtype=torch.float64), 0.1 * normal(features)
    )


def sines(n: int, normal: Normal) -> Losses:
    """g: three times n waves of frequencies from 0.3 to 6 over random directions of y and x."""
    waves = 3 * n
    frequencies = torch.logspace(math.log10(0.3), math.log10(6.0), waves).double()[:, None]
    of_y, of_x = (frequencies * normal(waves, n) / math.sqrt(n) for _ in range(2))
    phases, target, wish = 3.0 * normal(waves), normal(n), normal(n)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (y - target).square().mean() + 0.5 * (x - wish).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return (1.0 + torch.sin(of_y @ y + of_x @ x + phases)).mean() + 0.02 * y.square().mean()

    return Losses(upper, lower, normal(n), normal(n))


def scaling(n: int, normal: Normal) -> Losses:
    """x: logarithms of the scales of n features; y: a ridge regression on the scaled features."""
    spread = torch.logspace(-1.0, 1.0, n).double()
    truth = normal(n) * (torch.arange(n) % 3 == 0) / spread
    train, test = (normal(max(20, n), n) * spread for _ in range(2))
    wanted, fresh = (part @ truth + 0.3 * normal(len(part)) for part in (train, test))
    unit = wanted.square().mean()

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (test @ (x.exp() * y) - fresh).square().mean() / unit + 1e-3 * x.square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        fit = (train @ (x.exp() * y) - wanted).square().mean() / unit
        return fit + 0.1 * y.square().mean()

    return Losses(upper, lower, -spread.log(), 0.1 * normal(n))


COMMODITIES = 4


def tolls(n: int, normal: Normal) -> Losses:
    """x: tolls on n routes; y: how each of four commodities splits over the routes.

    The routes get slower with their flow. f falls with what is earned, and with less congestion.
    """
    lengths = 1.0 + normal(COMMODITIES, n).abs()
    slowness = n * (0.2 + normal(n).square())

    def upper(x: Tensor, y: Tensor) -> Tensor:
        flow = y.view(COMMODITIES, n).mean(0)
        return 5.0 - x @ flow + 0.1 * slowness @ flow**2

    def lower(x: Tensor, y: Tensor) -> Tensor:
        split = y.view(COMMODITIES, n)
        paid = ((lengths + x) * split).sum(1).mean()
        return paid + 0.5 * slowness @ split.mean(0) ** 2

    return Losses(upper, lower, torch.ones(n, dtype=torch.float64), normal(COMMODITIES * n))


def per_commodity(n: int) -> Product:
    """The set of the flows of :func:`tolls`: a simplex for each commodity."""
    return Product([Simplex()] * COMMODITIES, [n] * COMMODITIES)


def denoising(n: int, normal: Normal) -> Losses:
    """y: a signal of n points; x: logarithms of the weights of its smoothed total variation."""
    clean = torch.where(torch.arange(n) * 5 // n % 2 == 0, 1.0, -1.0).double()
    noisy = clean + 0.4 * normal(n)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (y - clean).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        variation = (y.diff().square() + 0.05**2).sqrt()
        return (y - noisy).square().mean() + (x.exp() * variation).mean()

    return Losses(upper, lower, torch.full((n - 1,), -2.0, dtype=torch.float64), 0.5 * normal(n))


def representation(n: int, normal: Normal) -> Losses:
    """x: a linear map of n features to a few, shared by n tasks; y: the head of each task."""
    few, shots = max(1, min(n // 2, 4)), 6
    truth = torch.linalg.qr(normal(n, few)).Q
    heads = normal(n, few)
    parts = []
    for _ in range(2):
        inputs = normal(n, shots, n)
        values = torch.einsum("tsn,nf,tf->ts", inputs, truth, heads) + 0.2 * normal(n, shots)
        parts.append((inputs, values))
    (train, wanted), (query, asked) = parts

    def predict(inputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return ((inputs @ x.view(n, few)) @ y.view(n, few, 1)).squeeze(2)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (predict(query, x, y) - asked).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return (predict(train, x, y) - wanted).square().mean() + 0.1 * y.square().mean()

    return Losses(upper, lower, normal(n * few) / math.sqrt(n), 0.1 * normal(n * few))


def robust(n: int, normal: Normal) -> Losses:
    """y: a regression with Cauchy's loss, which is not convex; x: its width and L2 weights.

    The first coordinate of x is the logarithm of the width, the others those of the weights.
    """
    truth = normal(n) * (torch.arange(n) % 2 == 0)
    train, test = (normal(4 * n, n) / math.sqrt(n) for _ in range(2))
    wanted, fresh = (part @ truth + 0.1 * normal(4 * n) for part in (train, test))
    outliers = torch.arange(4 * n) % 5 == 0
    wanted[outliers] += 5.0 * normal(int(outliers.sum())) + 3.0

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (test @ y - fresh).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        residuals = (train @ y - wanted) * (-x[0]).exp()
        return residuals.square().log1p().mean() + (x[1:].exp() * y.square()).mean()

    x = torch.full((n + 1,), -3.0, dtype=torch.float64)
    x[0] = 0.0
    return Losses(upper, lower, x, normal(n))


def deficient(n: int, normal: Normal) -> Losses:
    """y: n unknowns of about n / 2 equations, so that f chooses among many solutions."""
    rows = (n + 1) // 2
    of_y, of_x = normal(rows, n) / math.sqrt(n), normal(rows, n) / math.sqrt(n)
    right, wish = 1.0 + normal(rows), 2.0 * normal(n)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (y - wish).square().mean() + 0.3 * (x + 1.0).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (of_y @ y - right - of_x @ x).square().mean()

    return Losses(upper, lower, normal(n), normal(n))


MEMBERS: Sequence[Member] = (
    Member(factorisation, 4, 1.0, 1.0, Box(-6.0, 2.0), Free(), 100),
    Member(factorisation, 25, 1e2, 1e-2, Ball(20.0), Ball(40.0), 101),
    Member(factorisation, 100, 1e-3, 1.0, Free(), Box(-5.0, 5.0), 102),
    Member(valleys, 2, 1.0, 1e2, Free(), Free(), 110),
    Member(valleys, 30, 1.0, 1.0, Box(-2.0, 2.0), Free(), 111),
    Member(valleys, 500, 1e3, 1e-2, Ball(30.0), Box(-2.0, 2.0), 112),
    Member(weighting, 20, 1.0, 1.0, Simplex(), Free(), 120),
    Member(weighting, 300, 1e-2, 1e2, Simplex(), Ball(10.0), 121),
    Member(weighting, 1_500, 1e2, 1e-3, Simplex(), Box(-3.0, 3.0), 122),
    Member(sines, 2, 1.0, 1e-2, Free(), Box(-5.0, 5.0), 130),
    Member(sines, 40, 1.0, 1.0, Box(-2.0, 2.0), Free(), 131),
    Member(sines, 300, 1e-2, 1e2, Ball(17.0), Ball(20.0), 132),
    Member(scaling, 3, 1.0, 1.0, Box(-3.0, 3.0), Free(), 140),
    Member(scaling, 30, 1e-3, 1.0, Free(), Ball(30.0), 141),
    Member(scaling, 400, 1.0, 1e3, Ball(30.0), Free(), 142),
    Member(tolls, 3, 1.0, 1.0, Box(0.0, 5.0), per_commodity(3), 150),
    Member(tolls, 40, 1e-2, 1e-2, Box(0.0, 3.0), per_commodity(40), 151),
    Member(tolls, 500, 1e3, 1.0, Ball(30.0, 1.0), per_commodity(500), 152),
    Member(denoising, 10, 1.0, 1.0, Free(), Free(), 160),
    Member(denoising, 200, 1e2, 1.0, Box(-8.0, 2.0), Free(), 161),
    Member(denoising, 3_000, 1.0, 1e-3, Ball(150.0), Box(-3.0, 3.0), 162),
    Member(representation, 4, 1.0, 1.0, Free(), Free(), 170),
    Member(representation, 20, 1e-2, 1e2, Ball(4.0), Free(), 171),
    Member(representation, 60, 1e3, 1.0, Box(-1.0, 1.0), Box(-5.0, 5.0), 172),
    Member(robust, 2, 1.0, 1e3, Box(-4.0, 2.0), Box(-10.0, 10.0), 180),
    Member(robust, 30, 1.0, 1.0, Ball(25.0), Free(), 181),
    Member(robust, 300, 1e-1, 1e-2, Product([Box(-1.0, 1.0), Free()], [1, 300]), Ball(50.0), 182),
    Member(deficient, 2, 1.0, 1.0, Free(), Free(), 190),
    Member(deficient, 50, 1e3, 1e-3, Ball(7.0), Free(), 191),
    Member(deficient, 1_000, 1e-2, 1.0, Simplex(10.0), Box(-3.0, 3.0), 192),
)


def problems() -> list[Drawn]:
    """Return all of them, always the same."""
    return [member.draw() for member in MEMBERS]
