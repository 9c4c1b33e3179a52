"""What tells unseen classes apart from a few examples, without a bilevel problem."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.baselines.row import Baseline
from lightning_bilevel.data.episodes import EpisodeData, Episodes
from lightning_bilevel.modules.networks import Conv4, EpisodeSets, adapt

# Logits (E, N, ways) of the queries of episodes, by features (E, N, d) of an encoder.
_Predict = Callable[[Callable[[Tensor], Tensor], Episodes], Tensor]
_EPISODES_AT_ONCE = 4


def few_shot_baselines(
    data: EpisodeData,
    seed: int = 0,
    channels: int = 64,
    seconds: float | None = 60.0,
    steps: int | None = None,
) -> list[Baseline]:
    r"""Run the simple methods on the episodes of a data module.

    With :math:`c_k` the mean of the support features of class k, and the features
    :math:`\phi(u)` of a query u:

    - *nearest centroid*: the class of smallest :math:`\|\phi(u) - c_k\|`, with the raw pixels as
      features, and with those of a random Conv-4.
    - *prototypical network* (Snell et al., 2017): a Conv-4 such that the cross-entropy of the
      logits :math:`-\|\phi(u) - c_k\|^2` on the queries is small.
    - *ANIL* (Raghu et al., 2020): a Conv-4 such that heads that are fitted to the support by 10
      gradient steps of 0.1, from zero, have a small cross-entropy on the queries. The gradient
      goes through these steps (second order), and unseen classes are told by heads that are
      fitted in the same way, which is what
      :class:`~lightning_bilevel.modules.fewshot.FewShot` does.

    Networks are trained by Adam (step 1e-3) on four episodes at a time: *same episodes* are the
    training episodes of the data module, which is all that a full-batch bilevel method sees;
    *fresh episodes* are drawn anew from the same training classes at each step. The network at the
    end is the one that counts; none is chosen by validation.

    The rows have ``val_error`` and ``test_error``, the share of queries that are taken for another
    class.

    Args:
        data: Any data module of episodes, after ``setup``.
        seed: Decides the start of each network and the order of the episodes. No other random
            number depends on it or changes it.
        channels: Channels of each convolution.
        seconds: How long each network is trained; None for a number of steps alone.
        steps: The largest number of steps; None for a time alone.
    """
    size = data.image_shape[-1]
    pixels = nn.Flatten(2)
    rows = [_row("nearest centroid, pixels", data, _nearest, pixels)]

    def fresh_network() -> Conv4:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Conv4(channels, size, data.image_shape[0])

    rows.append(_row("nearest centroid, random Conv-4", data, _nearest, fresh_network()))
    sources = {"same episodes": _same, "fresh episodes": _fresh}
    for name, predict in (("prototypical network", _nearest), ("ANIL", _adapted)):
        for source, episodes in sources.items():
            drawn = episodes(data, seed)
            began = time.perf_counter()
            network = fresh_network()
            done = _train(network, predict, drawn, seconds, steps)
            spent = time.perf_counter() - began
            rows.append(_row(f"{name}, {source}", data, predict, network, done, spent))
    return rows


def _row(
    name: str,
    data: EpisodeData,
    predict: _Predict,
    features: nn.Module,
    done: int | None = None,
    spent: float = 0.0,
) -> Baseline:
    began = time.perf_counter()
    metrics: dict[str, float] = {} if done is None else {"iteration": done}
    for split, episodes in (("val", data.validation), ("test", data.test)):
        with torch.no_grad():
            wrong = [
                predict(features, part).argmax(-1) != part.query_labels
                for part in _few_at_once(episodes)
            ]
        metrics[f"{split}_error"] = float(torch.cat(wrong).float().mean())
    return Baseline(name, metrics, spent + time.perf_counter() - began)


def _train(
    network: nn.Module,
    predict: _Predict,
    drawn: Iterator[Episodes],
    seconds: float | None,
    steps: int | None,
) -> int:
    """Train a network until the time or the steps are over, and return the number of steps."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    began = time.perf_counter()
    for done in itertools.count(1):
        episodes = next(drawn)
        logits = predict(network, episodes)
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), episodes.query_labels.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        late = seconds is not None and time.perf_counter() - began >= seconds
        if late or done == steps:
            return done
    raise AssertionError


def _nearest(features: Callable[[Tensor], Tensor], episodes: Episodes) -> Tensor:
    support = features(episodes.support)
    truth = nn.functional.one_hot(episodes.support_labels).to(support)
    centroids = truth.transpose(1, 2) @ support / truth.sum(1).unsqueeze(2)
    return -(features(episodes.query).unsqueeze(2) - centroids.unsqueeze(1)).square().sum(3)


def _adapted(features: Callable[[Tensor], Tensor], episodes: Episodes) -> Tensor:
    ways = int(episodes.support_labels.max()) + 1
    support, support_labels, query, query_labels = episodes
    heads = adapt(EpisodeSets(features(support), support_labels), ways)
    return EpisodeSets(features(query), query_labels).logits(heads)


def _same(data: EpisodeData, seed: int) -> Iterator[Episodes]:
    query, query_labels, _ = data.upper
    support, support_labels, _ = data.lower
    everything = Episodes(support, support_labels, query, query_labels)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(support), generator=generator)
        for index in torch.split(order, _EPISODES_AT_ONCE):
            yield Episodes(*(tensor[index] for tensor in everything))


def _fresh(data: EpisodeData, seed: int) -> Iterator[Episodes]:
    for first in itertools.count(step=_EPISODES_AT_ONCE):
        yield data.fresh([f"{seed}/{first + i}" for i in range(_EPISODES_AT_ONCE)])


def _few_at_once(episodes: Episodes) -> Iterator[Episodes]:
    for part in zip(*(torch.split(tensor, _EPISODES_AT_ONCE) for tensor in episodes), strict=True):
        yield Episodes(*part)
