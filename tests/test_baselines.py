"""Simple methods beside the bilevel ones: their figures are those of an independent computation."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import binary_auroc

from benchmarks.baselines import cleaning, few_shot
from benchmarks.baselines.cleaning import (
    METHODS,
    TrustedSamples,
    all_samples,
    cleaning_baselines,
    cross_validation,
    error,
    oracle,
    out_of_sample,
    probabilities,
    rated_labels,
    rated_sources,
    self_training,
    trusted_alone,
)
from benchmarks.baselines.few_shot import few_shot_baselines
from lightning_bilevel import CleaningData, Episodes, GlyphEpisodes, Splits
from lightning_bilevel.modules.networks import MLP, Conv4, EpisodeSets, adapt
from lightning_bilevel.modules.reweighting import missed_errors

CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def points(count: int) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 4
    return CORNERS[labels] + 0.2 * torch.randn(count, 2), labels


def samples(share: float, shift: int | None = 1) -> tuple[TrustedSamples, Tensor]:
    """400 samples, a share of which is wrong: in the next class, or (None) in any other."""
    torch.manual_seed(0)
    inputs, labels = points(400)
    corrupted = torch.rand(400) < share
    other = torch.randint(1, 4, (400,)) if shift is None else torch.full((400,), shift)
    given = torch.where(corrupted, (labels + other) % 4, labels)
    made = TrustedSamples(inputs, given, *points(16), partial(MLP, 2, 16, 4), batch_size=40)
    # An easy problem: with a long step, a third of the usual steps suffices.
    return replace(made, lr=1e-2, fewest_steps=100), corrupted


class Rows(CleaningData):
    """Three classes that a small network tells apart: a bright row of an image of 3 x 3."""

    classes = 3

    def load(self, generator: torch.Generator) -> Splits:
        return Splits(*(self._rows(n, generator) for n in (self.n_train, self.n_validation, 200)))

    def _rows(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(3, (count,), generator=generator)
        images = 0.3 * torch.rand(count, 1, 3, 3, generator=generator)
        images[torch.arange(count), 0, labels] += 1.0
        return images, labels


def rows_data(**options: int) -> Rows:
    data = Rows(n_train=300, n_validation=60, corruption=0.4, **options)  # type: ignore[arg-type]
    data.setup()
    return data


class TestCleaning:
    def test_each_keeps_what_it_says(self) -> None:
        few, corrupted = samples(0.6)
        assert not trusted_alone(few).kept.any()
        assert all_samples(few).kept.all()
        assert torch.equal(oracle(few, corrupted).kept, ~corrupted)
        assert oracle(few, corrupted).suspicion is None

    @pytest.mark.parametrize("strict", [True, False])
    def test_self_training_finds_what_trusted_samples_contradict(self, strict: bool) -> None:
        few, corrupted = samples(0.6)
        found = self_training(few, strict=strict)
        assert float((found.kept == ~corrupted).float().mean()) > 0.97
        assert found.suspicion is not None
        assert float(found.suspicion[corrupted].min()) > float(found.suspicion[~corrupted].median())
        assert error(few.retrain(found.kept), *points(200)) < 0.05

    def test_cross_validation_believes_the_majority(self) -> None:
        many, corrupted = samples(0.3, None)
        assert float((cross_validation(many).kept == ~corrupted).float().mean()) > 0.9
        # Where most labels are in the next class, it believes them.
        few, corrupted = samples(0.7)
        assert float((cross_validation(few).kept == corrupted).float().mean()) > 0.9

    def test_no_sample_is_judged_by_a_network_that_has_seen_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []

        class Remembers(nn.Module):
            """Says 1 for a sample of its training, and 0 for any other."""

            def __init__(self, inputs: Tensor) -> None:
                super().__init__()
                self.mine = {tuple(point.tolist()) for point in inputs}

            def forward(self, inputs: Tensor) -> Tensor:
                known = [tuple(point.tolist()) in self.mine for point in inputs]
                return 100.0 * torch.tensor(known).float().unsqueeze(1) * torch.eye(4)[0]

        def train(self: TrustedSamples, inputs: Tensor, labels: Tensor, epochs: int) -> nn.Module:
            seen.append(len(inputs))
            return Remembers(inputs)

        monkeypatch.setattr(TrustedSamples, "train", train)
        made, _ = samples(0.3)
        few = replace(made, inputs=made.inputs[:42], labels=made.labels[:42])
        assert torch.allclose(out_of_sample(few), torch.full((42, 4), 1 / 4))
        assert seen == [31, 31, 32, 32]

    def test_an_out_of_sample_probability_belongs_to_its_sample(self) -> None:
        """Folds are put together in the order of the samples: clean labels are all believed."""
        found = cross_validation(samples(0.0)[0])
        assert found.kept.all()
        assert found.suspicion is not None
        assert float(found.suspicion.max()) < -0.5

    def test_sources_are_rated_by_how_right_they_are(self) -> None:
        made, _ = samples(0.0)
        sources = torch.arange(400) // 4 % 4
        # Source 0 is right, 1 is wrong in one of four, 2 in three of four, 3 always.
        rank = torch.arange(400) // 16 % 4
        wrong = rank < torch.tensor([0, 1, 3, 4])[sources]
        made = replace(made, labels=torch.where(wrong, (made.labels + 1) % 4, made.labels))
        found = rated_sources(made, sources)
        assert found.kept.all()
        assert found.suspicion is not None
        assert found.weights is not None
        share = torch.stack([(~wrong[sources == j]).float().mean() for j in range(4)])
        assert torch.allclose(-found.suspicion, share[sources], atol=0.03)
        assert torch.allclose(found.weights, (-found.suspicion / -found.suspicion.min()) ** 8)
        assert error(made.retrain(found.kept, found.weights), *points(200)) < 0.05
        together = rated_labels(made, sources)
        assert together.weights is None
        assert float((together.kept == ~wrong).float().mean()) > 0.97

    def test_weights_of_zero_and_one_are_a_choice(self) -> None:
        """Of 400 samples, two thirds wrong, the weights name the right ones."""
        few, corrupted = samples(0.66)
        everything = torch.ones(400, dtype=torch.bool)
        assert error(few.retrain(everything), *points(200)) > 0.3
        assert error(few.retrain(everything, (~corrupted).float()), *points(200)) < 0.05
        # Equal weights, of whatever size, are no weights: the trusted ones have 1 as well.
        torch.manual_seed(1)
        plain = few.retrain(everything)
        torch.manual_seed(1)
        ones = few.retrain(everything, torch.ones(400))
        for a, b in zip(plain.parameters(), ones.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-3)

    def test_probabilities_are_those_of_eval_mode(self) -> None:
        network = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5))
        inputs = points(30)[0]
        assert torch.equal(probabilities(network, inputs), network[0](inputs).softmax(1))


class TestTheTableOfCleaning:
    @pytest.fixture(autouse=True)
    def _without_cleanlab(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cleaning, "find_spec", lambda name: None)

    @pytest.fixture
    def briefly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Train for a few steps, where it does not matter what is learned."""
        monkeypatch.setattr(cleaning, "TrustedSamples", partial(TrustedSamples, fewest_steps=1))
        monkeypatch.setattr(cleaning, "ROUNDS", 1)

    def test_every_method_has_its_row(self) -> None:
        found = {row.name: row.metrics for row in cleaning_baselines(rows_data())}
        assert list(found) == [n for n in METHODS if n != "cleanlab"] + ["oracle (true labels)"]
        assert found.pop("oracle (true labels)").keys() == {"test_error"}
        # An easy problem: a clean set alone solves it, and so does what filters.
        for name in list(found)[:4]:
            assert found[name]["auroc"] > 0.99
            assert found[name]["missed_errors"] < 0.05
            assert found[name]["test_error"] < 0.02

    def test_clean_samples_alone_is_a_classifier_of_the_validation_set(self) -> None:
        """Trained here by other lines, with the same random numbers."""
        data = rows_data()
        torch.manual_seed(7)
        network = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
        images, labels = data.validation
        for _ in range(300):  # one batch of 60 is an epoch, and there are at least 300 steps
            order = torch.randperm(60)
            loss = cross_entropy(network(images[order]), labels[order])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        noisy_images, noisy, _ = data.lower
        suspicion = -network(noisy_images).softmax(1)[torch.arange(300), noisy].detach()
        test_images, test_labels = data.test
        wrong = data.corrupted
        assert wrong is not None
        rows = cleaning_baselines(data, 7, lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3)))
        assert rows[0].metrics == pytest.approx(
            {
                "test_error": float((network(test_images).argmax(1) != test_labels).float().mean()),
                "auroc": float(binary_auroc(1 + suspicion, wrong.int())),
                "missed_errors": missed_errors(suspicion, wrong),
            },
            abs=1e-6,
        )

    @pytest.mark.usefixtures("briefly")
    def test_rows_depend_on_the_seed_alone(self) -> None:
        data = rows_data()
        before = torch.get_rng_state()
        first = [row.metrics for row in cleaning_baselines(data, 1)]
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        assert [row.metrics for row in cleaning_baselines(data, 1)] == first
        assert [row.metrics for row in cleaning_baselines(data, 2)] != first
        chunked = rows_data(chunk_size=47)
        assert [row.metrics for row in cleaning_baselines(chunked, 1)] == first

    @pytest.mark.usefixtures("briefly")
    def test_cleanlab_ranks_by_the_same_probabilities(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("cleanlab")
        monkeypatch.setattr(cleaning, "find_spec", lambda name: sys.modules.get(name))
        found = {row.name: row.metrics for row in cleaning_baselines(rows_data(), 3)}
        for name in ("auroc", "missed_errors"):
            expected = found["4-fold cross-validation"][name]
            assert found["cleanlab"][name] == pytest.approx(expected, abs=1e-6)


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


class TestFewShot:
    def test_every_method_has_its_row(self, glyphs: GlyphEpisodes) -> None:
        before = torch.get_rng_state()
        found = few_shot_baselines(glyphs, channels=2, seconds=None, steps=2)
        assert torch.equal(torch.get_rng_state(), before)
        assert [row.name for row in found] == [
            "nearest centroid, pixels",
            "nearest centroid, random Conv-4",
            "prototypical network, same episodes",
            "prototypical network, fresh episodes",
            "ANIL, same episodes",
            "ANIL, fresh episodes",
        ]
        for row in found[2:]:
            assert row.metrics["iteration"] == 2
        again = few_shot_baselines(glyphs, channels=2, seconds=None, steps=2)
        assert [row.metrics for row in again] == [row.metrics for row in found]
        timed = few_shot_baselines(glyphs, channels=1, seconds=1e-9)
        assert [row.metrics["iteration"] for row in timed[2:]] == [1, 1, 1, 1]

    def test_nearest_centroid_of_pixels_by_a_loop(self, glyphs: GlyphEpisodes) -> None:
        wrong = []
        for support, labels, query, truth in zip(*glyphs.test, strict=True):
            centroids = [support[labels == k].mean(0) for k in range(3)]
            for image, label in zip(query, truth, strict=True):
                distances = [float((image - centroid).norm()) for centroid in centroids]
                wrong.append(distances.index(min(distances)) != int(label))
        row = few_shot_baselines(glyphs, channels=1, seconds=None, steps=1)[0]
        assert row.metrics["test_error"] == pytest.approx(sum(wrong) / len(wrong))

    def test_a_network_learns_what_it_is_trained_for(self, glyphs: GlyphEpisodes) -> None:
        everything = Episodes(*glyphs.lower[:2], *glyphs.upper[:2])
        for predict in (few_shot._nearest, few_shot._adapted):
            torch.manual_seed(0)
            network = Conv4(8, 16)

            def loss(network: nn.Module = network, predict: few_shot._Predict = predict) -> float:
                with torch.no_grad():
                    logits = predict(network, everything)
                return float(cross_entropy(logits.flatten(0, 1), everything.query_labels.flatten()))

            before = loss()
            drawn = few_shot._same(glyphs, 0)
            assert few_shot._train(network, predict, drawn, None, 40) == 40
            assert loss() < 0.5 * before

    def test_anil_fits_heads_as_the_few_shot_module_does(self, glyphs: GlyphEpisodes) -> None:
        """The gradient goes through the inner steps: it is that of autograd's inner gradients."""
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
        heads = adapt(EpisodeSets(features, one.support_labels), 3)
        assert torch.allclose(heads, torch.cat([weight, bias.unsqueeze(2)], 2))
        logits = network(one.query) @ weight.transpose(1, 2) + bias.unsqueeze(1)
        assert torch.allclose(few_shot._adapted(network, one), logits)
        parameters = list(network.parameters())
        second = torch.autograd.grad(logits.square().sum(), parameters, retain_graph=True)
        slopes_of_ours = torch.autograd.grad(
            few_shot._adapted(network, one).square().sum(), parameters
        )
        assert all(map(torch.allclose, slopes_of_ours, second))

    def test_same_episodes_are_those_of_the_data_each_once_in_a_round(
        self, glyphs: GlyphEpisodes
    ) -> None:
        parts = list(itertools.islice(few_shot._same(glyphs, 0), 2))
        assert [len(part.support) for part in parts] == [4, 1]
        sums = torch.cat([part.query for part in parts]).flatten(1).sum(1)
        assert torch.allclose(sums.sort().values, glyphs.upper[0].flatten(1).sum(1).sort().values)

    def test_fresh_episodes_are_new_ones_of_the_training_classes(
        self, glyphs: GlyphEpisodes
    ) -> None:
        drawn = list(itertools.islice(few_shot._fresh(glyphs, 0), 3))
        images = glyphs._train_images.flatten(0, 1).flatten(1)
        known = {tuple(image.tolist()) for image in images}
        queries = torch.cat([part.query for part in drawn])
        assert len(queries) == 12
        assert all(tuple(image.tolist()) in known for image in queries.flatten(0, 1).flatten(1))
        assert len({tuple(episode.flatten().tolist()) for episode in queries}) == 12
