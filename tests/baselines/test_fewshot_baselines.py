"""Simple ways to tell unseen classes apart."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    Episodes,
    FullBatchDataModule,
    GlyphEpisodes,
    TaskEpisodes,
    few_shot_baselines,
)
from lightning_bilevel.baselines import fewshot
from lightning_bilevel.modules.networks import Conv4, adapt

NAMES = [
    "nearest centroid, pixels",
    "nearest centroid, random Conv-4",
    "prototypical network, same episodes",
    "prototypical network, fresh episodes",
    "ANIL, same episodes",
    "ANIL, fresh episodes",
]


@pytest.fixture(scope="module")
def glyphs() -> GlyphEpisodes:
    data = GlyphEpisodes(
        image_size=16,
        drawings=6,
        ways=3,
        shots=2,
        queries=2,
        n_train=5,
        n_validation=3,
        n_test=6,
        train_classes=8,
        validation_classes=4,
        test_classes=4,
    )
    data.setup()
    return data


def test_every_method_has_its_row(glyphs: GlyphEpisodes) -> None:
    before = torch.get_rng_state()
    found = few_shot_baselines(glyphs, channels=2, seconds=None, steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [row.name for row in found] == NAMES
    for row in found[:2]:
        assert list(row.metrics) == ["val_error", "test_error"]
    for row in found[2:]:
        assert row.metrics["iteration"] == 2
        assert 0 <= row.metrics["test_error"] <= 1
    again = few_shot_baselines(glyphs, channels=2, seconds=None, steps=2)
    assert [row.metrics for row in again] == [row.metrics for row in found]


def test_nearest_centroid_of_pixels_by_a_loop(glyphs: GlyphEpisodes) -> None:
    wrong = []
    for support, labels, query, truth in zip(*glyphs.test, strict=True):
        centroids = [support[labels == k].mean(0) for k in range(3)]
        for image, label in zip(query, truth, strict=True):
            distances = [float((image - centroid).norm()) for centroid in centroids]
            wrong.append(distances.index(min(distances)) != int(label))
    row = few_shot_baselines(glyphs, channels=1, seconds=None, steps=1)[0]
    assert row.metrics["test_error"] == pytest.approx(sum(wrong) / len(wrong))


def test_a_network_learns_what_it_is_trained_for(glyphs: GlyphEpisodes) -> None:
    everything = Episodes(*glyphs.lower[:2], *glyphs.upper[:2])
    for predict in (fewshot._nearest, fewshot._adapted):
        torch.manual_seed(0)
        network = Conv4(8, 16)

        def loss(network: nn.Module = network, predict: fewshot._Predict = predict) -> float:
            with torch.no_grad():
                logits = predict(network, everything)
            return float(cross_entropy(logits.flatten(0, 1), everything.query_labels.flatten()))

        before = loss()
        drawn = fewshot._same(glyphs, 0)
        assert fewshot._train(network, predict, drawn, None, 40) == 40
        assert loss() < 0.5 * before


def test_anil_fits_heads_as_the_few_shot_module_does(glyphs: GlyphEpisodes) -> None:
    """The gradient goes through the inner steps: it is that of autograd's own inner gradients."""
    torch.manual_seed(0)
    network = Conv4(2, 16).double()
    one = Episodes(*(t[:1].double() if t.is_floating_point() else t[:1] for t in glyphs.test))
    features = network(one.support)
    weight, bias = (torch.zeros(shape, dtype=torch.float64) for shape in ((1, 3, 2), (1, 3)))
    weight.requires_grad_()
    bias.requires_grad_()
    for _ in range(10):
        logits = features @ weight.transpose(1, 2) + bias.unsqueeze(1)
        inner = cross_entropy(logits.flatten(0, 1), one.support_labels.flatten())
        slopes = torch.autograd.grad(inner, (weight, bias), create_graph=True)
        weight, bias = weight - 0.1 * slopes[0], bias - 0.1 * slopes[1]
    for ours, theirs in zip(adapt(features, one.support_labels, 3), (weight, bias), strict=True):
        assert torch.allclose(ours, theirs)
    logits = network(one.query) @ weight.transpose(1, 2) + bias.unsqueeze(1)
    assert torch.allclose(fewshot._adapted(network, one), logits)
    parameters = list(network.parameters())
    second = torch.autograd.grad(logits.square().sum(), parameters, retain_graph=True)
    ours = torch.autograd.grad(fewshot._adapted(network, one).square().sum(), parameters)
    assert all(map(torch.allclose, ours, second))


def test_same_episodes_are_those_of_the_data_each_once_in_a_round(glyphs: GlyphEpisodes) -> None:
    parts = list(itertools.islice(fewshot._same(glyphs, 0), 2))
    assert [len(part.support) for part in parts] == [4, 1]
    sums = torch.cat([part.query for part in parts]).flatten(1).sum(1)
    assert torch.allclose(sums.sort().values, glyphs.upper[0].flatten(1).sum(1).sort().values)


def test_fresh_episodes_are_new_ones_of_the_training_classes(glyphs: GlyphEpisodes) -> None:
    drawn = list(itertools.islice(fewshot._fresh(glyphs, 0), 3))
    images = glyphs._train_images.flatten(0, 1).flatten(1)
    known = {tuple(image.tolist()) for image in images}
    queries = torch.cat([part.query for part in drawn])
    assert len(queries) == 12
    assert all(tuple(image.tolist()) in known for image in queries.flatten(0, 1).flatten(1))
    assert len({tuple(episode.flatten().tolist()) for episode in queries}) == 12


def test_episodes_that_come_as_they_are_have_no_fresh_ones(glyphs: GlyphEpisodes) -> None:
    data = TaskEpisodes(
        Episodes(*glyphs.lower[:2], *glyphs.upper[:2]), glyphs.validation, glyphs.test
    )
    data.setup()
    found = few_shot_baselines(data, channels=1, seconds=None, steps=1)
    assert [row.name for row in found] == [name for name in NAMES if "fresh" not in name]


def test_time_ends_training(glyphs: GlyphEpisodes) -> None:
    found = few_shot_baselines(glyphs, channels=1, seconds=1e-9)
    assert [row.metrics["iteration"] for row in found[2:]] == [1, 1, 1, 1]


def test_bad_calls(glyphs: GlyphEpisodes) -> None:
    with pytest.raises(TypeError, match=r"was given a FullBatchDataModule: it must be an `Episode"):
        few_shot_baselines(FullBatchDataModule())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a GlyphEpisodes that has no episodes yet: call its"):
        few_shot_baselines(GlyphEpisodes())
    for options, words in (
        ({"channels": 0}, r"`few_shot_baselines\(channels=0\)` must be at least 1"),
        ({"seconds": None}, r"`few_shot_baselines\(seconds=None, steps=None\)` would train for"),
        ({"seconds": 0.0}, r"`few_shot_baselines\(seconds=0.0\)` must be positive, or None"),
        ({"steps": 0}, r"`few_shot_baselines\(steps=0\)` must be at least 1, or None"),
    ):
        with pytest.raises(ValueError, match=words):
            few_shot_baselines(glyphs, **options)  # type: ignore[arg-type]
