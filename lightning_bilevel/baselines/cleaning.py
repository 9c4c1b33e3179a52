"""What finds wrong labels, or copes with them, without a bilevel problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel.baselines.row import Baseline
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.data.cleaning import CleaningData
from lightning_bilevel.modules.detection import detection
from lightning_bilevel.modules.networks import sigmoid_network

__all__ = ["check_data", "cleaning_baselines"]

_BATCH = 100
# Epochs on labels that are held to be right, and on noisy ones, which are learned by heart later.
_EPOCHS = 20
_EPOCHS_NOISY = 8
# Of a small set, an epoch has few steps: it is trained for at least so many.
_FEWEST_STEPS = 300
_FOLDS = 4
_ROUNDS = 3
_LENIENT = 0.1

# A trained classifier, and the suspicion of each noisy sample where the method has one.
_Found = tuple[nn.Module, Tensor | None]


def cleaning_baselines(
    data: CleaningData, seed: int = 0, classifier: Callable[[], nn.Module] | None = None
) -> list[Baseline]:
    r"""Run the simple methods on the noisy and the clean samples of a data module.

    Each trains by Adam (step 1e-2, weight decay 1e-4) on mini-batches of 100, for 20 epochs, or 8
    where the labels are not cleaned, and for at least 300 steps. The suspicion of a
    sample is :math:`-p(\tilde q_i \mid u_i)`, minus the probability of its given label under a
    classifier:

    - *clean samples alone*: the classifier of the clean (validation) samples.
    - *4-fold cross-validation*: a classifier that has seen neither the sample nor any clean one.
      Those whose given label is the likeliest are kept, with the clean samples.
    - *cleanlab*, if it is installed: the same probabilities, with its ranking and its choice of
      what to keep.
    - *self-training, strict*: keep the samples whose given label is the likeliest under the
      classifier of the clean samples, train on them and the clean ones, three rounds. *Lenient*
      keeps those with :math:`p(\tilde q_i \mid u_i) > 0.1`.
    - *all noisy samples*, and *all noisy and clean samples*: no label is doubted in training.
    - *oracle*: the true labels of all noisy samples, and the clean ones; nobody has these.

    The rows have ``test_error`` where there is a test set, and ``auroc`` and ``missed_errors``
    where it is known which labels are wrong.

    Args:
        data: Any data module of noisy and clean samples, after ``setup``.
        seed: Decides the start of each network, the order of the samples and the folds. No other
            random number depends on it or changes it.
        classifier: Makes a fresh classifier; None is that of
            :class:`~lightning_bilevel.modules.hypercleaning.HyperCleaning`, with 32 hidden units.
    """
    check_data(data)
    network = classifier or (lambda: sigmoid_network(prod(data.image_shape), 32, data.classes))
    return _Methods(data, network).rows(seed)


def check_data(data: CleaningData) -> None:
    """Refuse what :func:`cleaning_baselines` has nothing to measure on."""
    if not isinstance(data, CleaningData):
        raise TypeError(
            f"`cleaning_baselines(data=...)` was given a {type(data).__name__}: it must be a "
            "`CleaningData`, such as `CleaningData.from_datasets(train, validation, test)`."
        )
    if data.lower is None:
        raise ValueError(
            f"`cleaning_baselines` was given a {type(data).__name__} that has no data yet: call "
            "its `prepare_data()` and `setup()` first."
        )
    if data.test is None and not _tells(data.corrupted):
        raise ValueError(
            f"`cleaning_baselines` was given a {type(data).__name__} without a test set and "
            "without knowing which labels are wrong: there is nothing to measure, so give it "
            "`test` or `corrupted`."
        )


def _tells(corrupted: Tensor | None) -> bool:
    """Whether there are wrong and right labels that are known as such."""
    return corrupted is not None and 0 < int(corrupted.sum()) < len(corrupted)


class _Methods:
    """The methods on one data module."""

    def __init__(self, data: CleaningData, network: Callable[[], nn.Module]) -> None:
        self.data = data
        self.network = network
        self.images, self.noisy = _whole(data.lower)[:2]
        self.clean_images, self.clean_labels = _whole(data.validation)

    def rows(self, seed: int) -> list[Baseline]:
        methods: dict[str, Callable[[], _Found]] = {
            "clean samples alone": self._of_clean,
            "4-fold cross-validation": self._by_folds,
        }
        if find_spec("cleanlab") is not None:
            methods["cleanlab"] = self._by_cleanlab
        methods |= {
            "self-training, strict": lambda: self._self_trained(strict=True),
            "self-training, lenient": lambda: self._self_trained(strict=False),
            "all noisy samples": self._of_noisy,
            "all noisy and clean samples": self._of_all,
        }
        if self.data.clean_labels is not None:
            methods["oracle (true labels)"] = self._of_truth
        with torch.random.fork_rng(devices=[]):
            rows = []
            for name, method in methods.items():
                # Each anew: no row depends on which others there are.
                torch.manual_seed(seed)
                began = time.perf_counter()
                metrics = self._judged(*method())
                rows.append(Baseline(name, metrics, time.perf_counter() - began))
            return rows

    def _judged(self, network: nn.Module, suspicion: Tensor | None) -> dict[str, float]:
        metrics = {}
        if self.data.test is not None:
            images, labels = _whole(self.data.test)
            wrong = _probabilities(network, images).argmax(1) != labels
            metrics["test_error"] = float(wrong.float().mean())
        if suspicion is not None and _tells(self.data.corrupted):
            metrics |= detection(suspicion, cast(Tensor, self.data.corrupted))
        return metrics

    def _of_clean(self) -> _Found:
        network = self._train(self.clean_images, self.clean_labels)
        return network, -self._given(_probabilities(network, self.images))

    def _by_folds(self) -> _Found:
        p = self._out_of_sample()
        return self._train_kept(p.argmax(1) == self.noisy), -self._given(p)

    def _by_cleanlab(self) -> _Found:
        from cleanlab.filter import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            find_label_issues,
        )
        from cleanlab.rank import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            get_label_quality_scores,
        )

        p = self._out_of_sample()
        given: dict[str, Any] = {"labels": self.noisy.numpy(), "pred_probs": p.numpy()}
        # In one process: it would start as many as there are cores.
        issues = torch.as_tensor(find_label_issues(**given, n_jobs=1))
        quality = torch.as_tensor(get_label_quality_scores(**given))
        return self._train_kept(~issues), -quality

    def _self_trained(self, strict: bool) -> _Found:
        network = self._of_clean()[0]
        for _ in range(_ROUNDS):
            p = _probabilities(network, self.images)
            kept = p.argmax(1) == self.noisy if strict else self._given(p) > _LENIENT
            network = self._train_kept(kept)
        return network, -self._given(_probabilities(network, self.images))

    def _of_noisy(self) -> _Found:
        network = self._train(self.images, self.noisy, _EPOCHS_NOISY)
        return network, -self._given(_probabilities(network, self.images))

    def _of_all(self) -> _Found:
        everything = torch.ones(len(self.noisy), dtype=torch.bool)
        network = self._train_kept(everything, _EPOCHS_NOISY)
        return network, -self._given(_probabilities(network, self.images))

    def _of_truth(self) -> _Found:
        truth = cast(Tensor, self.data.clean_labels)
        images = torch.cat([self.images, self.clean_images])
        return self._train(images, torch.cat([truth, self.clean_labels])), None

    def _out_of_sample(self) -> Tensor:
        """Return the probabilities of each noisy sample's classes by a classifier of the other
        folds.
        """
        folds = torch.randperm(len(self.noisy)).tensor_split(_FOLDS)
        parts = []
        for fold in folds:
            others = torch.ones(len(self.noisy), dtype=torch.bool)
            others[fold] = False
            network = self._train(self.images[others], self.noisy[others], _EPOCHS_NOISY)
            parts.append(_probabilities(network, self.images[fold]))
        return torch.cat(parts)[torch.cat(folds).argsort()]

    def _given(self, p: Tensor) -> Tensor:
        return p.gather(1, self.noisy.unsqueeze(1)).squeeze(1)

    def _train_kept(self, kept: Tensor, epochs: int = _EPOCHS) -> nn.Module:
        images = torch.cat([self.images[kept], self.clean_images])
        return self._train(images, torch.cat([self.noisy[kept], self.clean_labels]), epochs)

    def _train(self, images: Tensor, labels: Tensor, epochs: int = _EPOCHS) -> nn.Module:
        network = self.network()
        network.train()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
        done = 0
        while epochs > 0 or done < _FEWEST_STEPS:
            for batch in torch.split(torch.randperm(len(images)), _BATCH):
                optimizer.zero_grad()
                loss = cross_entropy(network(images[batch]), labels[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done += 1
            epochs -= 1
        return network


def _whole(batch: Any) -> tuple[Tensor, ...]:
    """Return a batch in one piece, whose chunks the data module may have made."""
    return tuple(torch.cat(parts) for parts in zip(*as_chunks(batch).batches, strict=True))


def _probabilities(network: nn.Module, images: Tensor) -> Tensor:
    network.eval()
    with torch.no_grad():
        return torch.cat([network(part).softmax(1) for part in torch.split(images, 1000)])
