"""A third set of problems, which nobody who tunes the solver has seen.

Five families occur neither in `families.py` nor in `held_out.py`. Five do, with other random
numbers, sizes, scales, sets and starts. g is a mean in three families and a sum in seven, as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from benchmarks.families import (
    Losses,
    Member,
    Normal,
    denoising,
    per_commodity,
    robust,
    tolls,
)
from benchmarks.held_out import dictionary, mixture
from benchmarks.random_problems import Drawn
from lightning_bilevel import Ball, Box, Free, Product, Simplex


def distillation(n: int, normal: Normal) -> Losses:
    """x: six learned points of n features; y: a softmax regression of three classes on them.

    f is the loss of the regression on 200 real points.
    """
    centres = 2.0 * normal(3, n) / math.sqrt(n)
    classes = torch.arange(200) % 3
    real = centres[classes] + normal(200, n)
    labels = torch.arange(6) % 3

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(real @ y.view(n, 3), classes)

    def lower(x: Tensor, y: Tensor) -> Tensor:
        fit = cross_entropy(x.view(6, n) @ y.view(n, 3), labels, reduction="sum")
        return fit + 0.05 * y.square().sum()

    return Losses(upper, lower, 0.5 * normal(6 * n), 0.3 * normal(3 * n))


def springs(n: int, normal: Normal) -> Losses:
    """y: where n joints in the plane come to rest; x: the lengths of the springs between them.

    Each joint has springs to the nearest three, of stiffness 0.3 to 30, and a weak one to the
    ground. g is not convex, as joints can flip over.
    """
    springs_each = min(3, n - 1)
    places = 0.5 * math.sqrt(n) * normal(n, 2)
    near = torch.cdist(places, places).topk(springs_each + 1, largest=False).indices[:, 1:]
    stiffness = torch.logspace(math.log10(0.3), math.log10(30.0), n * springs_each).double()
    loads = 0.1 * normal(n, 2)
    stretch = torch.tensor([[1.2, 0.3], [-0.2, 0.8]], dtype=torch.float64)
    wish = places @ stretch + 0.3 * normal(n, 2)

    def lengths(y: Tensor) -> Tensor:
        joints = y.view(n, 2)
        return ((joints[:, None] - joints[near]).square().sum(2) + 1e-4).sqrt().flatten()

    natural = lengths(places)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (y.view(n, 2) - wish).square().mean() + 0.05 * (x - natural).square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        energy = stiffness @ (lengths(y) - x).square()
        ground = 0.05 * (y.view(n, 2) - places).square().sum()
        return energy + ground - (loads * y.view(n, 2)).sum()

    return Losses(upper, lower, natural, places.flatten() + 0.5 * normal(2 * n))


SEGMENTS = 10


def prices(n: int, normal: Normal) -> Losses:
    """x: a leader's prices of n products; y: those of a rival, who sees the leader's.

    Ten segments of buyers choose among all products, or none, by a logit. The rival's profit is
    not concave, and flat where its prices are high.
    """
    tastes = normal(SEGMENTS, 2 * n) + 0.5 - math.log(n)
    sensitivities = 0.7 + 0.5 * normal(SEGMENTS, 1).abs()
    costs = 0.3 * normal(2 * n).abs()
    none = torch.zeros(SEGMENTS, 1, dtype=torch.float64)

    def profits(x: Tensor, y: Tensor) -> Tensor:
        paid = torch.cat([x, y])
        utilities = torch.cat([tastes - sensitivities * paid, none], 1)
        return (paid - costs) * utilities.softmax(1)[:, :-1].mean(0)

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return 3.0 - profits(x, y)[:n].sum()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return 3.0 - profits(x, y)[n:].sum()

    return Losses(upper, lower, torch.ones(n, dtype=torch.float64), 1.0 + 0.3 * normal(n))


def kernels(n: int, normal: Normal) -> Losses:
    """y: a machine on n samples with a Gaussian kernel and a squared hinge; x: its parameters.

    The first coordinate of x is the logarithm of the penalty, the others those of the features'
    inverse widths. Only two features matter. The kernel is ill-conditioned.
    """
    features = max(2, n // 10)
    train, test = normal(n, features), normal(100, features)
    wanted, fresh = (
        (part[:, 0] * part[:, 1] + 0.1 * normal(len(part))).sign() for part in (train, test)
    )

    def kernel(points: Tensor, x: Tensor) -> Tensor:
        left, right = points * x[1:].exp(), train * x[1:].exp()
        squares = left.square().sum(1)[:, None] + right.square().sum(1)
        return torch.exp(left @ right.T - 0.5 * squares)

    def hinge(margins: Tensor) -> Tensor:
        return (1.0 - margins).clamp(min=0.0).square().mean()

    def upper(x: Tensor, y: Tensor) -> Tensor:
        return hinge(fresh * (kernel(test, x) @ y)) + 1e-3 * x.square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        values = kernel(train, x) @ y
        return hinge(wanted * values) + x[0].exp() * (y @ values) / n

    x = torch.full((features + 1,), -0.5 * math.log(features), dtype=torch.float64)
    x[0] = -3.0
    return Losses(upper, lower, x, 0.3 * normal(n))


def adversary(n: int, normal: Normal) -> Losses:
    """x: a network with four hidden units; y: how n samples are moved to make it fail.

    Moving them has a cost. f is the loss on the moved samples and on the samples as they are.
    """
    features, hidden = min(2 + n // 20, 9), 4
    inputs, truth = normal(n, features), normal(features)
    signs = (inputs @ truth + 0.5 * inputs[:, 0] * inputs[:, 1]).sign()

    def losses(points: Tensor, x: Tensor) -> Tensor:
        first, second = x[: features * hidden].view(features, hidden), x[features * hidden :]
        return softplus(-signs * (torch.tanh(points @ first) @ second))

    def upper(x: Tensor, y: Tensor) -> Tensor:
        moved = losses(inputs + y.view(n, features), x)
        return moved.mean() + 0.5 * losses(inputs, x).mean() + 0.01 * x.square().mean()

    def lower(x: Tensor, y: Tensor) -> Tensor:
        return 0.3 * y.square().sum() - losses(inputs + y.view(n, features), x).sum()

    x = 0.7 * normal(features * hidden + hidden)
    return Losses(upper, lower, x, 0.3 * normal(n * features))


MEMBERS: Sequence[Member] = (
    Member(tolls, 2, 1e2, 1e-1, Box(0.0, 4.0), per_commodity(2), 400, 3.0),
    Member(tolls, 60, 1.0, 1e2, Simplex(40.0), per_commodity(60), 401),
    Member(tolls, 350, 1e-1, 1.0, Box(0.0, 6.0), per_commodity(350), 402, 0.0),
    Member(denoising, 25, 1e-2, 1e2, Ball(20.0), Box(-2.0, 2.0), 410),
    Member(denoising, 400, 1.0, 1.0, Free(), Ball(30.0), 411, 0.0),
    Member(denoising, 1_500, 1e3, 1e-1, Box(-6.0, 3.0), Free(), 412, 3.0),
    Member(robust, 5, 1e-1, 1.0, Free(), Ball(8.0), 420, 3.0),
    Member(robust, 80, 1e2, 1e-2, Box(-5.0, 1.0), Free(), 421),
    Member(robust, 400, 1.0, 1e2, Product([Box(-2.0, 1.0), Ball(70.0)], [1, 400]), Free(), 422),
    Member(mixture, 30, 1e2, 1e-2, Free(), Ball(12.0), 430),
    Member(mixture, 400, 1.0, 1.0, Box(-4.0, 4.0), Free(), 431),
    Member(mixture, 1_500, 1e-1, 1e3, Ball(80.0), Box(-6.0, 6.0), 432),
    Member(dictionary, 4, 1e2, 1.0, Box(-2.0, 2.0), Box(0.0, 4.0), 440),
    Member(dictionary, 16, 1.0, 1e-1, Free(), Box(0.0, 6.0), 441, 3.0),
    Member(dictionary, 26, 1e-3, 1e1, Ball(9.0), Box(0.0, 3.0), 442, 0.0),
    Member(distillation, 2, 1.0, 1.0, Free(), Free(), 450),
    Member(distillation, 40, 1e-2, 1e2, Box(-2.0, 2.0), Ball(15.0), 451, 0.0),
    Member(distillation, 240, 1e2, 1e-1, Ball(25.0), Free(), 452),
    Member(springs, 2, 1.0, 1e-1, Box(0.1, 4.0), Free(), 460),
    Member(springs, 40, 1e-1, 1.0, Free(), Box(-15.0, 15.0), 461, 3.0),
    Member(springs, 450, 1e2, 1e-2, Box(0.0, 10.0), Free(), 462),
    Member(prices, 2, 1.0, 1.0, Box(0.0, 5.0), Free(), 470),
    Member(prices, 50, 1e3, 1e2, Free(), Box(0.0, 6.0), 471, 0.0),
    Member(prices, 600, 1e-1, 1.0, Ball(60.0), Ball(80.0), 472, 3.0),
    Member(kernels, 20, 1.0, 1e2, Box(-5.0, 2.0), Free(), 480),
    Member(kernels, 150, 1e-2, 1.0, Free(), Ball(40.0), 481, 0.0),
    Member(kernels, 300, 1e1, 1e-3, Ball(15.0), Box(-5.0, 5.0), 482),
    Member(adversary, 6, 1.0, 1.0, Ball(6.0), Free(), 490),
    Member(adversary, 60, 1e1, 1e-2, Box(-2.0, 2.0), Box(-0.5, 0.5), 491),
    Member(adversary, 150, 1e-2, 1e1, Ball(10.0), Ball(10.0), 492, 0.0),
)


def problems() -> list[Drawn]:
    """Return all of them, always the same."""
    return [member.draw() for member in MEMBERS]
