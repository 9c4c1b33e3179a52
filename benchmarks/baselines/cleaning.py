r"""Noisy samples beside trusted ones, without a bilevel problem.

Each method says which noisy samples it keeps and how suspicious each is. The suspicion of a sample
is :math:`-p(\tilde q_i \mid u_i)`, minus the probability of its given label under a classifier.
Where only a hundred samples are trusted, :meth:`TrustedSamples.retrain` trains a fresh network on
what is kept and the trusted samples: all methods are judged by it, bilevel ones too.

Random numbers are torch's global ones: call ``torch.manual_seed`` before a method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.baselines.row import Baseline
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.data.cleaning import CleaningData
from lightning_bilevel.modules.networks import sigmoid_network
from lightning_bilevel.modules.reweighting import detection

ROUNDS = 3
LENIENT = 0.1
FOLDS = 4
# Steep, so that sources which are wrong as often as not count for next to nothing.
_POWER = 8
# The least probability and the least agreement that count.
_NEVER = 1e-4
# So many samples are evaluated at once.
_AT_ONCE = 10_000


class Found(NamedTuple):
    """What a method says of the noisy samples.

    Attributes:
        kept: The mask of the samples that it keeps.
        suspicion: One number per sample, larger where a wrong label is more likely; None if the
            method has none.
        weights: A weight for each sample, at most 1, if those that are kept are not all alike.
        network: The network that is trained on what is kept, if the method has one.
    """

    kept: Tensor
    suspicion: Tensor | None
    weights: Tensor | None = None
    network: nn.Module | None = None


@dataclass(frozen=True)
class TrustedSamples:
    """Noisy samples, trusted samples, and how a classifier is trained: by Adam, from scratch.

    Args:
        inputs: The inputs of the noisy samples.
        labels: Their labels, some of them wrong.
        trusted_inputs: The inputs of the trusted samples.
        trusted_labels: Their labels.
        network: Makes a fresh classifier, from inputs to one logit per class.
        epochs: The number of passes over samples whose labels are held to be right.
        doubtful_epochs: The number over noisy ones, which are learned by heart later.
        fewest_steps: The least number of steps, also on a hundred samples.
        batch_size: The number of samples of a step.
        lr: The rate of Adam.
        weight_decay: Its weight decay.
    """

    inputs: Tensor
    labels: Tensor
    trusted_inputs: Tensor
    trusted_labels: Tensor
    network: Callable[[], nn.Module]
    epochs: int = 8
    doubtful_epochs: int = 8
    fewest_steps: int = 300
    batch_size: int = 256
    lr: float = 1e-3
    weight_decay: float = 1e-4

    def train(
        self,
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        epochs: int | None = None,
    ) -> nn.Module:
        """Train a fresh classifier on the (weighted) mean of the cross-entropy."""
        network = self.network()
        network.train()
        optimizer = torch.optim.Adam(
            network.parameters(), lr=self.lr, weight_decay=self.weight_decay
        )
        done = 0
        left = self.epochs if epochs is None else epochs
        while left > 0 or done < self.fewest_steps:
            for batch in torch.split(torch.randperm(len(inputs)), self.batch_size):
                # Batch normalisation has no statistics of a single sample.
                if len(batch) == 1 < len(inputs):
                    continue
                optimizer.zero_grad()
                logits = network(inputs[batch])
                if weights is None:
                    loss = cross_entropy(logits, labels[batch])
                else:
                    losses = cross_entropy(logits, labels[batch], reduction="none")
                    loss = weights[batch] @ losses / len(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done += 1
            left -= 1
        return network

    def retrain(
        self, kept: Tensor, weights: Tensor | None = None, epochs: int | None = None
    ) -> nn.Module:
        """Train on the noisy samples that are kept and on the trusted ones, whose weight is 1."""
        inputs = torch.cat([self.inputs[kept], self.trusted_inputs])
        labels = torch.cat([self.labels[kept], self.trusted_labels])
        if weights is not None:
            ones = torch.ones(len(self.trusted_labels))
            weights = torch.cat([weights[kept], ones])
            # With a mean of 1 the loss is of the size that weight decay is made for.
            weights = weights / weights.mean()
        return self.train(inputs, labels, weights, epochs)

    def trained_on_trusted(self) -> nn.Module:
        """Train on the trusted samples alone."""
        return self.train(self.trusted_inputs, self.trusted_labels)

    def given(self, p: Tensor) -> Tensor:
        """Return the probability of each noisy sample's given label."""
        return p.gather(1, self.labels.unsqueeze(1)).squeeze(1)

    def given_by(self, network: nn.Module) -> Tensor:
        """Return the probability that a network gives to each noisy sample's label."""
        return self.given(probabilities(network, self.inputs))


@torch.no_grad()
def probabilities(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the probabilities of the classes, in eval mode."""
    network.eval()
    return torch.cat([network(part).softmax(1) for part in torch.split(inputs, _AT_ONCE)])


def error(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of samples that a network takes for another class."""
    return float((probabilities(network, inputs).argmax(1) != labels).float().mean())


def trusted_alone(samples: TrustedSamples) -> Found:
    """Keep no noisy sample."""
    nothing = torch.zeros(len(samples.labels), dtype=torch.bool)
    network = samples.trained_on_trusted()
    return Found(nothing, -samples.given_by(network), network=network)


def all_samples(samples: TrustedSamples) -> Found:
    """Keep all noisy samples."""
    everything = torch.ones(len(samples.labels), dtype=torch.bool)
    network = samples.retrain(everything, epochs=samples.doubtful_epochs)
    return Found(everything, -samples.given_by(network), network=network)


def noisy_alone(samples: TrustedSamples) -> Found:
    """Train on the noisy samples alone."""
    everything = torch.ones(len(samples.labels), dtype=torch.bool)
    network = samples.train(samples.inputs, samples.labels, epochs=samples.doubtful_epochs)
    return Found(everything, -samples.given_by(network), network=network)


def self_training(samples: TrustedSamples, *, strict: bool = False) -> Found:
    r"""Keep what the classifier of the trusted samples believes, and train again, in three rounds.

    The last of the three trainings is that of :meth:`TrustedSamples.retrain`.

    Args:
        samples: The samples.
        strict: Whether to keep a sample only if its label is the likeliest; otherwise it is kept
            with :math:`p(\tilde q_i \mid u_i) > 0.1`.
    """

    def believed(network: nn.Module) -> Found:
        p = probabilities(network, samples.inputs)
        given = samples.given(p)
        return Found(p.argmax(1) == samples.labels if strict else given > LENIENT, -given)

    return _in_rounds(samples, believed)


def cross_validation(samples: TrustedSamples) -> Found:
    """Keep the samples whose label is the likeliest under a classifier of the other three folds.

    No trusted sample is looked at before the last training.
    """
    p = out_of_sample(samples)
    return Found(p.argmax(1) == samples.labels, -samples.given(p))


def cleanlab(samples: TrustedSamples) -> Found:
    """Keep and rank by cleanlab, from the same probabilities as cross-validation."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    given: dict[str, Any] = {"labels": samples.labels.numpy()}
    given["pred_probs"] = out_of_sample(samples).numpy()
    # In one process: it would start as many as there are cores.
    issues = torch.as_tensor(find_label_issues(**given, n_jobs=1))
    return Found(~issues, -torch.as_tensor(get_label_quality_scores(**given)))


def out_of_sample(samples: TrustedSamples) -> Tensor:
    """Return the probabilities of each noisy sample's classes by a classifier of other folds."""
    folds = torch.randperm(len(samples.labels)).tensor_split(FOLDS)
    parts = []
    for fold in folds:
        others = torch.ones(len(samples.labels), dtype=torch.bool)
        others[fold] = False
        network = samples.train(
            samples.inputs[others], samples.labels[others], epochs=samples.doubtful_epochs
        )
        parts.append(probabilities(network, samples.inputs[fold]))
    return torch.cat(parts)[torch.cat(folds).argsort()]


def oracle(samples: TrustedSamples, corrupted: Tensor) -> Found:
    """Keep exactly the samples whose label is right, which nobody knows: the best of all choices.

    Args:
        samples: The samples.
        corrupted: The mask of the samples whose label is wrong.
    """
    return Found(~corrupted, None)


def rated_sources(samples: TrustedSamples, sources: Tensor) -> Found:
    r"""Weight each source of labels, such as an annotator, by what a classifier makes of them.

    With the samples :math:`S_j` of source j and a classifier that starts as that of the trusted
    samples:

    .. math:: a_j = \frac{1}{|S_j|} \sum_{i \in S_j} [\arg\max_q p(q \mid u_i) = \tilde q_i],
        \qquad w_j = (a_j / \max_k a_k)^8

    The classifier is trained again with these weights, in three rounds, of which the last is that
    of :meth:`TrustedSamples.retrain`. The power matters: with 1 most of the weight lies with
    sources that are wrong as often as not.

    Args:
        samples: The samples.
        sources: The number of each noisy sample's source, from 0.
    """
    everything = torch.ones(len(samples.labels), dtype=torch.bool)

    def rated(network: nn.Module) -> Found:
        agreement = _agreement(samples, sources, probabilities(network, samples.inputs))
        weights = (agreement / agreement.max()).pow(_POWER)[sources]
        return Found(everything, -agreement[sources], weights)

    return _in_rounds(samples, rated)


def rated_labels(samples: TrustedSamples, sources: Tensor) -> Found:
    r"""Keep a label if what the classifier says of it and of its source speak for it together.

    With :math:`a_j` as in :func:`rated_sources`, a sample of source j is kept where

    .. math:: \operatorname{logit} p(\tilde q_i \mid u_i) + \operatorname{logit} a_j > 0

    in three rounds as there.

    Args:
        samples: The samples.
        sources: The number of each noisy sample's source, from 0.
    """

    def rated(network: nn.Module) -> Found:
        p = probabilities(network, samples.inputs)
        agreement = _agreement(samples, sources, p)
        score = samples.given(p).logit(_NEVER) + agreement.logit(_NEVER)[sources]
        return Found(score > 0, -score)

    return _in_rounds(samples, rated)


def _in_rounds(samples: TrustedSamples, judged: Callable[[nn.Module], Found]) -> Found:
    found = judged(samples.trained_on_trusted())
    for _ in range(ROUNDS - 1):
        found = judged(samples.retrain(found.kept, found.weights))
    return found


def _agreement(samples: TrustedSamples, sources: Tensor, p: Tensor) -> Tensor:
    """Return for each source how often its label is the likeliest one."""
    agreed = (p.argmax(1) == samples.labels).double()
    counts = torch.bincount(sources).clamp(min=1)
    return (torch.bincount(sources, weights=agreed) / counts).clamp(min=_NEVER).float()


def last_network(samples: TrustedSamples, found: Found) -> Found:
    """Take the suspicion from the network that is trained on what a method keeps."""
    network = samples.retrain(found.kept)
    return found._replace(suspicion=-samples.given_by(network), network=network)


METHODS: dict[str, Callable[[TrustedSamples], Found]] = {
    "clean samples alone": trusted_alone,
    "4-fold cross-validation": cross_validation,
    "cleanlab": cleanlab,
    "self-training, strict": lambda s: last_network(s, self_training(s, strict=True)),
    "self-training, lenient": lambda s: last_network(s, self_training(s)),
    "all noisy samples": noisy_alone,
    "all noisy and clean samples": all_samples,
}


def cleaning_baselines(
    data: CleaningData, seed: int = 0, network: Callable[[], nn.Module] | None = None
) -> list[Baseline]:
    """Run the simple methods on the noisy and the clean (validation) samples of a data module.

    Each trains by Adam (step 1e-2, weight decay 1e-4) on mini-batches of 100, for 20 epochs, or 8
    where labels are doubtful, and for at least 300 steps. *cleanlab* needs the package. The last
    row is an oracle: the true labels of all noisy samples.

    Args:
        data: The data, after ``setup``.
        seed: Decides the start of each network, the order of the samples and the folds.
        network: Makes a fresh classifier; None is that of ``HyperCleaning``, with 32 hidden units.
    """
    inputs, labels = _whole(data.lower)[:2]
    clean_inputs, clean_labels = _whole(data.validation)
    make = network or partial(sigmoid_network, prod(data.image_shape), 32, data.classes)
    samples = TrustedSamples(
        inputs, labels, clean_inputs, clean_labels, make, epochs=20, batch_size=100, lr=1e-2
    )
    truth = torch.cat([data.clean_labels, clean_labels])  # type: ignore[list-item]

    def true_labels(samples: TrustedSamples) -> Found:
        everything = torch.ones(len(labels), dtype=torch.bool)
        both = torch.cat([inputs, clean_inputs])
        return Found(everything, None, network=samples.train(both, truth))

    rows = []
    with torch.random.fork_rng(devices=[]):
        for name, method in {**METHODS, "oracle (true labels)": true_labels}.items():
            if name == "cleanlab" and find_spec(name) is None:
                continue
            # Each anew: no row depends on which others there are.
            torch.manual_seed(seed)
            began = time.perf_counter()
            found = method(samples)
            trained = found.network or samples.retrain(found.kept)
            metrics = {"test_error": error(trained, *_whole(data.test))}
            if found.suspicion is not None:
                metrics |= detection(found.suspicion, data.corrupted)  # type: ignore[arg-type]
            rows.append(Baseline(name, metrics, time.perf_counter() - began))
    return rows


def _whole(batch: Any) -> tuple[Tensor, ...]:
    """Return a batch in one piece, whose chunks the data module may have made."""
    return tuple(torch.cat(parts) for parts in zip(*as_chunks(batch).batches, strict=True))
