r"""What the convergence theorem asks for, as far as it can be seen.

The theorem is that of IVSP, for a fixed delta. It asks for compact convex sets X and Y, for f and g
with Lipschitz gradients on them, and for the constraint qualification ENNAMCQ:

.. math:: 0 \notin \nabla R(w) + N_C(w) \quad\text{for every } w \in C \text{ with } R(w) \ge 0

If it holds, no point that violates the constraint is stationary for the violation, so a strong
enough penalty always leads back. It is a property of the problem, not of a point: a program cannot
test it, but each condition here implies it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.sets import Box, ConvexSet, Product, is_bounded


class Condition(Protocol):
    """A sufficient condition whose numbers are checked, or any other function of the same kind."""

    def __call__(self, envelope: Envelope, lower_set: ConvexSet, upper_set: ConvexSet) -> str:
        """Return what follows for an envelope, Y and X.

        The words start with "holds" or "fails", or else leave the qualification open.
        """


# What is known: the words, or what yields them.
Qualification = str | Condition


def theorem(
    qualification: str,
    upper_set: ConvexSet,
    lower_set: ConvexSet,
    kinks: Sequence[str] = (),
    beyond: str = "",
) -> str:
    """Say whether the theorem covers a problem.

    Args:
        qualification: What is known about the constraint qualification, in words.
        upper_set: X.
        lower_set: Y.
        kinks: The parts of f or g that are not differentiable, such as "ReLU".
        beyond: What the problem is that the theorem does not know, in words; empty for nothing.
    """
    sets = {"X": is_bounded(upper_set), "Y": is_bounded(lower_set)}
    unbounded = [name for name, bounded in sets.items() if bounded is False]
    against = [beyond] if beyond else []
    for names, fault in ((unbounded, "unbounded"), (kinks, "not differentiable")):
        if names:
            against.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {fault}")
    if qualification.startswith("fails"):
        against.append("the constraint qualification fails")
    if against:
        return f"does not apply: {', '.join(against)}"
    unknown = [f"whether {name} is bounded" for name, bounded in sets.items() if bounded is None]
    if not qualification.startswith("holds"):
        unknown.append("the constraint qualification")
    if unknown:
        return f"not known: {', '.join(unknown)}"
    return "applies, if the gradients of f and g are Lipschitz"


class StrictlyConvex(Condition):
    r"""g(x, .) is strictly convex on Y for every x: ENNAMCQ holds for each delta > 0.

    Convexity alone is not enough: :math:`g(x, y) = y` on [-1, 1] with :math:`\rho = 0.5` has
    :math:`\nabla R = 0` and :math:`R = 0.25 - \delta` at :math:`y = 0.5`.
    """

    def __call__(self, envelope: Envelope, lower_set: ConvexSet, upper_set: ConvexSet) -> str:
        return "holds: for each delta > 0, because g is strictly convex in y"


@dataclass(frozen=True)
class ConstantAffineSegments(Condition):
    r"""g(x, .) is convex, and constant on each segment on which it is affine.

    Then ENNAMCQ holds for each delta > 0. For if R is stationary at w, then
    :math:`p = (y - z)/\rho` is a subgradient of g(x, .) over Y both at y and at z. So g is affine
    between them, so constant, so :math:`\langle p, y - z \rangle = 0`, and y = z has no gap:
    R < 0. An example is the mean cross-entropy of linear softmax heads. Its Hessian vanishes only
    along directions that add one number to all logits, which do not change it.

    Attributes:
        reason: Why g is so, in words, such as "linear softmax heads".
    """

    reason: str

    def __call__(self, envelope: Envelope, lower_set: ConvexSet, upper_set: ConvexSet) -> str:
        return (
            "holds: for each delta > 0, because g is convex in y and constant along its affine "
            f"segments ({self.reason})"
        )


@dataclass(frozen=True)
class Reweighted(Condition):
    r"""g is a mean of losses that x weights by a sigmoid, as in data hyper-cleaning.

    .. math::
        g(x, y) = \frac{1}{n} \sum_{i=1}^n \omega(x_i) \, \ell_i(y), \qquad
        \omega(t) = \frac{1}{1 + e^{-t}}, \qquad X = [-M, M]^n

    The classifier may be any with continuous losses on a compact Y. With
    :math:`D_\ell = \max_i (\max_Y \ell_i - \min_Y \ell_i)`, ENNAMCQ holds if
    :math:`\delta > \omega(-M) \, D_\ell`. For where R is stationary, only samples with
    :math:`x_i = -M` have a larger loss at y than at z, so
    :math:`g(x, y) - g(x, z) \le \omega(-M) \, D_\ell < \delta`, and R < 0.

    Attributes:
        spread: A bound on :math:`D_\ell`, such as :func:`cross_entropy_bound` returns; None says
            how large it may be.
    """

    spread: float | None = None

    def __call__(self, envelope: Envelope, lower_set: ConvexSet, upper_set: ConvexSet) -> str:
        if is_bounded(lower_set) is not True:
            return f"not known: the losses must be bounded on Y, which {lower_set!r} does not tell"
        boxes = _boxes(upper_set)
        if not boxes:
            return f"not known: x must lie in a bounded box, and lies in {upper_set!r}"
        # -M. If the bounds differ, the largest lower one leaves the largest weight.
        lowest = torch.stack([box.lower.max() for box in boxes]).max()
        weight = float(lowest.sigmoid())
        if self.spread is None:
            most = envelope.delta / weight if weight > 0.0 else math.inf
            return (
                "not known: it holds if the loss of each sample varies over Y by less than "
                f"{most:.2g} = delta / omega({lowest:g})"
            )
        holds = envelope.delta > weight * self.spread
        return (
            f"{'holds' if holds else 'not known'}: delta = {envelope.delta:g} "
            f"{'>' if holds else '<='} {weight * self.spread:.2g} = omega({lowest:g}) D, where the "
            f"losses vary over Y by at most D = {self.spread:.4g}"
        )


@dataclass(frozen=True)
class ReweightedSigmoidNetwork(Condition):
    r""":class:`Reweighted` for a two-layer sigmoid network and the cross-entropy.

    With :math:`|y_j| \le B` the features are between 0 and 1, so ENNAMCQ holds if

    .. math:: \delta > \frac{2 B (d_h + 1) + \log m}{1 + e^M}

    Attributes:
        hidden: :math:`d_h`, the number of hidden units.
        classes: m, the number of classes.
    """

    hidden: int
    classes: int

    def __call__(self, envelope: Envelope, lower_set: ConvexSet, upper_set: ConvexSet) -> str:
        boxes = _boxes(lower_set)
        if not boxes:
            return f"not known: y must lie in a bounded box, and lies in {lower_set!r}"
        size = max(float(bound.abs().max()) for box in boxes for bound in (box.lower, box.upper))
        spread = cross_entropy_bound(classes=self.classes, features=self.hidden, weight=size)
        return Reweighted(spread)(envelope, lower_set, upper_set)


def cross_entropy_bound(
    *, classes: int, features: int, weight: float, feature: float = 1.0
) -> float:
    r"""Bound the cross-entropy of a classifier whose last layer is linear.

    A logit :math:`\sum_j V_j h_j + b` is at most :math:`S = B (d F + 1)` in size if the weights and
    biases are at most B and the d features at most F, so

    .. math:: 0 \le \ell = \log \sum_j e^{s_j - s_q} \le 2 S + \log m

    It is assumed that the features are bounded for every y in Y. Those of a sigmoid or tanh layer
    are (F = 1). The inputs of a single linear layer are, by their largest value. Those of a ReLU
    layer are not by themselves: multiply the bounds of the layers before it.

    Args:
        classes: m, the number of classes.
        features: d, the number of features that the last layer reads.
        weight: B, a bound on the size of its weights and biases.
        feature: F, a bound on the size of a feature.
    """
    return 2 * weight * (features * feature + 1) + math.log(classes)


def _boxes(convex_set: ConvexSet) -> list[Box]:
    """Return the bounded boxes that a set is made of; an empty list if it is another set."""
    parts = convex_set.sets if isinstance(convex_set, Product) else [convex_set]
    boxes = [part for part in parts if isinstance(part, Box) and part.bounded]
    return boxes if len(boxes) == len(parts) else []
