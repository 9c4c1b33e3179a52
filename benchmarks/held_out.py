"""The other half of the problems: what was chosen on `families.py` is reported here, once.

Five families do not occur there. Five do, with other random numbers, sizes, scales, sets and
starts. g is a mean in three families and a sum in seven, as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.families import (
    Losses,
    Member,
    Normal,
    factorisation,
    representation,
    sines,
    valleys,
    weighting,
)
from benchmarks.random_problems import Drawn
from lightning_bilevel import Ball, Box, Free, Product, Simplex


def mixture(n: int, normal: Normal) -> Losses:
    """y: the four means of a mixture in the plane; x: logits of the weights of n noisy points."""
    means = 2.0 * normal(4, 2)
    points, clean = (means[torch.arange(count) % 4] + 0.5 * normal(count, 2) for count in (n, 80))
    points[::4] = 4.0 * normal(len(points[::4]), 2)

    def losses(points: Tensor, y: Tensor) -> Tensor:
        distances = (points[:, None] - y.view(4, 2)).square().sum(2)
        return -torch.logsumexp(-2.0 * distances, 1) + math.log(4.0)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return losses(clean, y).mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return x.sigmoid() @ losses(points, y) + 0.01 * y.square().sum()

    return Losses(upper, lower, torch.zeros(n, dtype=torch.float64), means.flatten() + normal(8))


def dictionary(n: int, normal: Normal) -> Losses:
    """x: a dictionary of n atoms; y: the codes of eight signals of which half the entries are seen.

    The codes are not negative, so their sum is the L1 norm.
    """
    entries, signals = 2 * n, 8
    codes = normal(n, signals).clamp(min=0.0)
    truth = normal(entries, n) / math.sqrt(n)
    wanted = truth @ codes + 0.05 * normal(entries, signals)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (x.view(entries, n) @ y.view(n, signals) - wanted).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        seen = (x.view(entries, n) @ y.view(n, signals) - wanted)[::2]
        return seen.square().sum() + 0.1 * y.sum()

    x = truth + 0.5 * normal(entries, n) / math.sqrt(n)
    return Losses(upper, lower, x.flatten(), normal(n * signals).abs())


def portfolio(n: int, normal: Normal) -> Losses:
    """x: views on the returns of n assets; y: holdings for the returns as they are seen with them.

    f is the same with the returns and the risk as they turn out, and the cost of the views.
    """
    factors = normal(n, 3)
    seen, real = 0.5 * normal(n), 0.5 * normal(n)
    noises = (0.1 + normal(n).square() for _ in range(2))
    risks = [factors @ factors.T + torch.diag(noise) for noise in noises]

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return 3.0 + 0.5 * y @ risks[1] @ y - real @ y + 0.05 * x.square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return 3.0 + 0.5 * y @ risks[0] @ y - (seen + x) @ y

    return Losses(upper, lower, 0.1 * normal(n), normal(n) / math.sqrt(n))


def curvatures(n: int, normal: Normal) -> Losses:
    """g: fourth powers, kinks that are nearly sharp, and exponentials of combinations of y."""
    combine = normal(2 * n, n) / math.sqrt(n)
    shift, target = normal(2 * n), normal(n)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (y - target).square().mean() + 0.1 * (x - 1.0).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        u = combine @ y - shift - x.repeat(2)
        powers = u[::3] ** 4
        kinks = (u[1::3].square() + 1e-4).sqrt()
        return powers.sum() + kinks.sum() + (u[2::3].exp() - u[2::3]).sum()

    return Losses(upper, lower, normal(n), normal(n))


def transport(n: int, normal: Normal) -> Losses:
    """y: the prices of n places in the plane that points are sent to; x: where the places are.

    g is the dual of optimal transport with an entropy. A constant added to y does not change it.
    """
    points, places, wish = normal(2 * n, 2), normal(n, 2), 0.5 * normal(n)
    entropy = 0.1

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return 0.1 + (y - wish).square().mean() + 0.1 * x.square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        costs = (points[:, None] - places - x.view(n, 2)).square().sum(2)
        return 2.0 + entropy * torch.logsumexp((y - costs) / entropy, 1).mean() - y.mean()

    return Losses(upper, lower, 0.3 * normal(2 * n), 0.3 * normal(n))


MEMBERS: Sequence[Member] = (
    Member(factorisation, 6, 1e-1, 1e2, Free(), Ball(8.0), 200),
    Member(factorisation, 40, 1.0, 1.0, Box(-5.0, 1.0), Free(), 201),
    Member(factorisation, 70, 1e3, 1e-1, Ball(30.0), Box(-3.0, 3.0), 202, 0.1),
    Member(valleys, 5, 1e-2, 1.0, Ball(3.0), Free(), 210),
    Member(valleys, 100, 1.0, 1e-2, Free(), Ball(20.0), 211, 0.0),
    Member(valleys, 1_000, 1.0, 1e2, Box(-1.0, 2.0), Free(), 212, 0.0),
    Member(weighting, 50, 1e2, 1.0, Simplex(), Box(-5.0, 5.0), 220),
    Member(weighting, 200, 1.0, 1.0, Box(0.0, 0.02), Free(), 221, 0.0),
    Member(weighting, 800, 1e-1, 1e-2, Simplex(2.0), Ball(5.0), 222),
    Member(sines, 6, 1e2, 1.0, Ball(4.0), Free(), 230),
    Member(sines, 80, 1e-3, 1.0, Free(), Box(-4.0, 4.0), 231, 3.0),
    Member(sines, 250, 1.0, 1e-3, Box(-3.0, 3.0), Free(), 232),
    Member(representation, 6, 1e2, 1e-1, Box(-2.0, 2.0), Ball(10.0), 270),
    Member(representation, 30, 1.0, 1.0, Free(), Free(), 271),
    Member(representation, 50, 1e-2, 1e-2, Ball(6.0), Box(-4.0, 4.0), 272, 0.0),
    Member(mixture, 12, 1.0, 1.0, Box(-6.0, 6.0), Free(), 300),
    Member(mixture, 150, 1e-2, 1e2, Free(), Box(-8.0, 8.0), 301),
    Member(mixture, 1_200, 1e2, 1.0, Ball(60.0), Ball(15.0), 302),
    Member(dictionary, 2, 1.0, 1.0, Free(), Box(0.0, 5.0), 310),
    Member(dictionary, 12, 1e-1, 1e2, Ball(6.0), Box(0.0, 3.0), 311, 0.0),
    Member(dictionary, 30, 1e2, 1e-2, Box(-1.0, 1.0), Box(0.0, 4.0), 312),
    Member(portfolio, 2, 1.0, 1e2, Box(-1.0, 1.0), Ball(1.0), 320),
    Member(portfolio, 40, 1e3, 1.0, Free(), Simplex(), 321),
    Member(portfolio, 500, 1e-2, 1.0, Ball(10.0), Ball(1.0), 322),
    Member(curvatures, 3, 1.0, 1.0, Free(), Free(), 330),
    Member(curvatures, 50, 1.0, 1e-3, Ball(10.0), Box(-4.0, 4.0), 331),
    Member(curvatures, 400, 1e2, 1.0, Box(-3.0, 3.0), Free(), 332, 0.0),
    Member(transport, 3, 1.0, 1.0, Ball(2.0), Free(), 340),
    Member(transport, 20, 1e-3, 1e2, Box(-1.0, 1.0), Box(-5.0, 5.0), 341, 0.0),
    Member(transport, 80, 1.0, 1e-1, Product([Ball(3.0), Free()], [80, 80]), Free(), 342),
)


def problems() -> list[Drawn]:
    """Return all of them, always the same."""
    return [member.draw() for member in MEMBERS]
