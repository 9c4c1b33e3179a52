"""What each way to learn from doubtful labels comes to, and which one to recommend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.baselines.trusted import (
    Found,
    TrustedSamples,
    all_samples,
    probabilities,
    self_training,
    trusted_alone,
)
from lightning_bilevel.cli.clean_weights import Plan, learn_weights
from lightning_bilevel.data.samples import Samples

__all__ = ["LENIENT", "OURS", "Cleaned", "Methods", "Recommendation", "recommend", "standard_error"]

OURS = "learned weights"
LENIENT = "self-training, lenient"
_SIMPLE: dict[str, Callable[[TrustedSamples], Found]] = {
    "trusted samples alone": trusted_alone,
    "all samples": all_samples,
    "self-training, strict": partial(self_training, strict=True),
    LENIENT: self_training,
}
# The simplest first. Those of one group are equally simple.
_GROUPS = (tuple(_SIMPLE)[:2], tuple(_SIMPLE)[2:], (OURS,))
_FOLDS = 4
# A step of the streaming solver has so many forward and backward passes.
_PASSES = 3


class Cleaned(NamedTuple):
    r"""What a method says of the training samples.

    Attributes:
        kept: The mask of the samples whose label it believes.
        suspicion: :math:`1 - p(\tilde q_i \mid u_i)`, with the probability of the given label by
            the network that was trained on what is kept.
        proposed: The label that this network gives.
        used: How many training samples this network was trained on.
        wrong: The mask of the test samples that it takes for another class, if there are any.
    """

    kept: Tensor
    suspicion: Tensor
    proposed: Tensor
    used: int
    wrong: Tensor | None


@dataclass
class Methods:
    """The ways to learn from trusted and doubtful samples, the simplest first.

    Args:
        plan: How the weights are learned.
        seed: Decides the start of each network and the order of the samples.
        passed: Called with the number of passes that were done, for a progress bar.
    """

    plan: Plan
    seed: int
    passed: Callable[[float], object]
    weights: Tensor | None = None

    def run(self, samples: TrustedSamples, test: Samples | None) -> dict[str, Cleaned]:
        """Run all methods; the learned weights of the last call are in ``weights``."""
        rows = {}
        for name, method in _SIMPLE.items():
            torch.manual_seed(self.seed)
            rows[name] = _cleaned(samples, method(samples), test)
            self.passed(self._simple_cost(samples) / len(_SIMPLE))
        torch.manual_seed(self.seed)
        self.weights = learn_weights(samples, self.plan, lambda: self.passed(_PASSES))
        found = Found(self.weights > 0.5, -self.weights)
        rows[OURS] = _cleaned(samples, found, test)
        return rows

    def cross_validated(self, samples: TrustedSamples) -> dict[str, Tensor]:
        """Return which trusted samples each method gets wrong when it has not seen them.

        The trusted samples are dealt out to four folds, class by class. Each fold is held out once
        from everything: from the weights as from the networks.
        """
        labels = samples.trusted_labels
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(labels), generator=generator)
        order = order[labels[order].argsort(stable=True)]
        wrong = {name: torch.zeros(len(labels), dtype=torch.bool) for name in (*_SIMPLE, OURS)}
        folds = min(_FOLDS, len(labels))
        for number in range(folds):
            held_out = order[number::folds]
            others = torch.ones(len(labels), dtype=torch.bool)
            others[held_out] = False
            rest = replace(
                samples,
                trusted_inputs=samples.trusted_inputs[others],
                trusted_labels=labels[others],
            )
            rows = self.run(rest, (samples.trusted_inputs[held_out], labels[held_out]))
            for name, row in rows.items():
                assert row.wrong is not None
                wrong[name][held_out] = row.wrong
        return wrong

    def cost(self, samples: TrustedSamples, folds: bool) -> float:
        """Return about how many passes all methods need, with or without cross-validation."""
        once = self._simple_cost(samples) + _PASSES * self.plan.steps
        return once * (_FOLDS + 1 if folds else 1)

    def _simple_cost(self, samples: TrustedSamples) -> float:
        def training(count: int) -> int:
            steps = samples.epochs * ceil(count / samples.batch_size)
            return max(steps, samples.fewest_steps)

        # Trainings on trusted samples, and on all of them at most.
        return 4 * training(len(samples.trusted_labels)) + 9 * training(len(samples.labels))


def _cleaned(samples: TrustedSamples, found: Found, test: Samples | None) -> Cleaned:
    """Train on what is kept, and let this network say what it makes of all labels."""
    network = samples.retrain(found.kept)
    p = probabilities(network, samples.inputs)
    proposed = p.argmax(1)
    # To train on none or on all of them says nothing of a single label.
    decided = bool(found.kept.any()) and not bool(found.kept.all())
    kept = found.kept if decided else proposed == samples.labels
    wrong = None
    if test is not None:
        wrong = probabilities(network, test[0]).argmax(1) != test[1]
    return Cleaned(kept, 1 - samples.given(p), proposed, int(found.kept.sum()), wrong)


def standard_error(values: Tensor) -> float:
    """Return the standard error of a mean."""
    return float(values.double().std(correction=0)) / sqrt(len(values))


class Recommendation(NamedTuple):
    """The simplest method that is as good as the best one.

    Attributes:
        name: The method.
        best: The method of least error.
        difference: By how much its error is above that of the best one.
        deviation: The standard error of this difference.
    """

    name: str
    best: str
    difference: float
    deviation: float


def recommend(wrong: Mapping[str, Tensor]) -> Recommendation:
    r"""Recommend the simplest method that is no worse than the best within the standard error.

    Methods are compared sample by sample. With :math:`d_i \in \{-1, 0, 1\}`, the difference of the
    mistakes of a method and of the best one on sample i, it is as good if

    .. math:: \sum_i d_i \le \sqrt{\sum_i d_i^2},

    the standard deviation of the sum if either of the two were as likely to be wrong where they
    differ (McNemar). Of equally simple methods the one of fewer mistakes is taken.

    Args:
        wrong: For each method, the simplest first, which samples it takes for another class.
    """
    best = min(wrong, key=lambda name: int(wrong[name].sum()))
    for group in _GROUPS:
        named: Sequence[str] = sorted(
            (name for name in group if name in wrong), key=lambda name: int(wrong[name].sum())
        )
        for name in named:
            n = len(wrong[name])
            more = int(wrong[name].sum()) - int(wrong[best].sum())
            deviation = sqrt(int((wrong[name] != wrong[best]).sum()))
            if more <= deviation:
                return Recommendation(name, best, more / n, deviation / n)
    raise AssertionError("the best is as good as itself")
