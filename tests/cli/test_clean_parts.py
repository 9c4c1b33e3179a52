"""The parts of ``clean``: the network, the plan, the folds, the recommendation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_data import blobs
from torch import Tensor, nn

from lightning_bilevel.baselines.trusted import TrustedSamples
from lightning_bilevel.cli.clean_network import network_for
from lightning_bilevel.cli.clean_report import advice
from lightning_bilevel.cli.clean_rows import (
    LENIENT,
    OURS,
    Cleaned,
    Methods,
    recommend,
    standard_error,
)
from lightning_bilevel.cli.clean_weights import learn_weights, plan_for
from lightning_bilevel.data.samples import Samples
from lightning_bilevel.modules.detection import detection
from lightning_bilevel.modules.networks import MLP, SmallCNN

FEATURES = torch.rand(5, 7)


def mask(*wrong: int, n: int = 20) -> Tensor:
    found = torch.zeros(n, dtype=torch.bool)
    found[list(wrong)] = True
    return found


def test_the_default_network_follows_from_the_data() -> None:
    features = network_for(FEATURES, 3)()
    assert isinstance(features, MLP)
    assert features(FEATURES).shape == (5, 3)
    assert isinstance(network_for(torch.rand(4, 3, 16, 16), 4)(), MLP)
    for side in (17, 28, 64):
        images = torch.rand(4, 3, side, side)
        network = network_for(images, 4)()
        assert isinstance(network, SmallCNN)
        assert network(images).shape == (4, 4)


def test_each_network_is_fresh() -> None:
    make = network_for(FEATURES, 3)
    one, two = make(), make()
    assert not torch.equal(next(one.parameters()), next(two.parameters()))


class ByName(nn.Linear):
    """Takes the names that torchvision uses as well."""

    def __init__(self, num_classes: int, inputs: int = 0, width: int = 1) -> None:
        super().__init__(inputs, num_classes)
        self.width = width


class Handing(nn.Linear):
    """Hands its options on, as torchvision's functions do."""

    def __init__(self, **options: Any) -> None:
        assert options == {"num_classes": 3}
        super().__init__(7, 3)


class Needy(nn.Linear):
    def __init__(self, depth: int) -> None:
        super().__init__(7, 3)


class Frozen(nn.Flatten):
    pass


def no_module(classes: int) -> str:
    return "text"


def two(inputs: int) -> nn.Module:
    return nn.Linear(inputs, 2)


def for_images() -> nn.Module:
    return nn.Conv2d(1, 3, 3)


A_NUMBER = 3


@pytest.mark.parametrize("name", ["ByName", "Handing"])
def test_a_class_is_given_what_it_asks_for(name: str) -> None:
    network = network_for(FEATURES, 3, f"{__name__}.{name}")()
    assert network(FEATURES).shape == (5, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", "cannot be imported (AttributeError: "),
        ("A_NUMBER", "is a int: it must be a class of a network, or a function that makes one"),
        ("Needy", "could not be made (TypeError: "),
        ("no_module", "makes a str: it must be a torch module"),
        ("Frozen", "has no parameters to train: there must be at least one"),
        ("for_images", "does not take inputs of shape (2, 7) (RuntimeError: "),
        ("two", "gives (2, 2) for 2 samples: with 3 classes it must be (2, 3), one logit per"),
    ],
)
def test_a_class_that_will_not_do(name: str, message: str) -> None:
    path = f"{__name__}.{name}"
    with pytest.raises(ValueError, match=re.escape(f"`clean --model {path}` {message}")):
        network_for(FEATURES, 3, path)


def test_a_path_without_a_dot() -> None:
    with pytest.raises(ValueError, match=r"`clean --model Net` cannot be imported .* dotted path"):
        network_for(FEATURES, 3, "Net")


def test_the_plan_follows_from_the_number_of_samples() -> None:
    assert plan_for(59_000)[:2] == (1614, 256)
    assert plan_for(1_000_000)[:2] == (27_344, 256)
    assert plan_for(1_000)[:2] == (1600, 250)
    assert plan_for(20)[:2] == (1600, 8)
    assert plan_for(5)[:2] == (1600, 5)
    assert plan_for(1_000, steps=7)[:2] == (7, 250)


def test_rates_follow_from_the_number_of_passes() -> None:
    """What a weight can move in all is the same; few samples have 400 passes, many have 7."""
    large = plan_for(256 * 1000)
    assert (large.rate, large.table) == pytest.approx((1e-4, 3.0))
    small = plan_for(1_000)
    assert small.table * 400 == pytest.approx(large.table * 7)
    assert small.rate == pytest.approx(1e-4 * (400 / 7) ** 0.5)
    # Asked for fewer steps, the rates stay.
    assert plan_for(1_000, steps=7)[2:] == small[2:]


def samples(n: int = 90) -> tuple[TrustedSamples, Tensor]:
    """Blobs with every fifth label wrong, and which ones are."""
    truth = [i % 3 for i in range(n)]
    wrong = torch.arange(n) % 5 == 0
    labels = torch.where(wrong, (torch.tensor(truth) + 1) % 3, torch.tensor(truth))
    scale = torch.tensor([20.0, 2.0, 100.0])
    trusted = [i % 3 for i in range(18)]
    network = network_for(FEATURES[:, :3], 3)
    return TrustedSamples(
        blobs(truth, 1) / scale, labels, blobs(trusted, 2) / scale, torch.tensor(trusted), network
    ), wrong


def test_weights_find_the_wrong_labels() -> None:
    data, wrong = samples()
    steps = []
    torch.manual_seed(0)
    weights = learn_weights(data, plan_for(90, steps=150), lambda: steps.append(1))
    assert len(steps) == 150
    assert detection(-weights, wrong)["auroc"] > 0.9


class Watched(Methods):
    """Runs nothing, and remembers what it was given."""

    def run(self, samples: TrustedSamples, test: Samples | None) -> dict[str, Cleaned]:
        assert test is not None
        self.__dict__.setdefault("seen", []).append((samples, test))
        # Whoever is in the first class is taken for another.
        row = Cleaned(mask(), mask().float(), mask().long(), 0, test[1] == 0)
        names = [name for group in (["trusted samples alone"], [OURS]) for name in group]
        return dict.fromkeys(names, row)


def test_each_fold_is_held_out_from_everything_and_has_all_classes() -> None:
    data, _ = samples()
    methods = Watched(plan_for(90), 0, lambda passes: None)
    wrong = methods.cross_validated(data)
    seen = methods.__dict__["seen"]
    assert len(seen) == 4
    held_out = []
    for part, (inputs, labels) in seen:
        assert len(part.trusted_labels) + len(labels) == 18
        rows = {tuple(row) for row in inputs.tolist()}
        assert rows.isdisjoint(tuple(row) for row in part.trusted_inputs.tolist())
        assert set(labels.tolist()) == {0, 1, 2}
        assert part.inputs is data.inputs
        held_out += sorted(rows)
    assert sorted(held_out) == sorted(tuple(row) for row in data.trusted_inputs.tolist())
    # Each result is at the place of its sample.
    for name in ("trusted samples alone", OURS):
        assert torch.equal(wrong[name], data.trusted_labels == 0)


def test_fewer_trusted_samples_than_folds() -> None:
    data, _ = samples()
    few = TrustedSamples(
        data.inputs, data.labels, data.trusted_inputs[:3], data.trusted_labels[:3], data.network
    )
    methods = Watched(plan_for(90), 0, lambda passes: None)
    methods.cross_validated(few)
    assert [len(test[1]) for _, test in methods.__dict__["seen"]] == [1, 1, 1]


def test_the_bar_ends_about_where_it_should() -> None:
    data, _ = samples()
    data = replace(data, epochs=2, fewest_steps=5)
    passed: list[float] = []
    methods = Methods(plan_for(90, steps=10), 0, passed.append)
    methods.run(data, None)
    assert sum(passed) == pytest.approx(methods.cost(data, folds=False))
    assert methods.cost(data, folds=True) == 5 * methods.cost(data, folds=False)


def test_standard_error_of_a_share() -> None:
    found = mask(1, 2, 3, 4)
    assert standard_error(found) == pytest.approx((0.2 * 0.8 / 20) ** 0.5)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        # As good as the best: the simplest.
        ({"all samples": mask(1), "self-training, strict": mask(1), OURS: mask(1)}, "all samples"),
        # One mistake more, and they differ on three samples: 1 < sqrt(3).
        ({"trusted samples alone": mask(1, 2), OURS: mask(3)}, "trusted samples alone"),
        # Five more, and they differ on five samples: 5 > sqrt(5).
        ({"trusted samples alone": mask(1, 2, 3, 4, 5, 6), OURS: mask(1)}, OURS),
        # Of two equally simple ones that with fewer mistakes.
        (
            {"trusted samples alone": mask(1, 2), "all samples": mask(1), OURS: mask()},
            "all samples",
        ),
        (
            {
                "trusted samples alone": mask(*range(9)),
                "self-training, strict": mask(1, 2),
                "self-training, lenient": mask(3),
                OURS: mask(),
            },
            "self-training, lenient",
        ),
    ],
)
def test_the_simplest_that_is_as_good_is_recommended(
    wrong: dict[str, Tensor], expected: str
) -> None:
    assert recommend(wrong).name == expected


def test_the_sentence_says_why_and_what_the_table_has() -> None:
    out = Path("list.csv")
    text = advice(recommend({"all samples": mask(1, 2), OURS: mask(3)}), out)
    assert "Recommended: all samples. It is simpler than learned weights, and as good" in text
    assert "(difference 0.050 ± 0.087)" in text
    assert "\nlist.csv ranks by the network of that row: suspicion is one minus its" in text
    assert "kept: the label is the likeliest." in text
    text = advice(recommend({"all samples": mask(1, 2, 3, 4, 5, 6), OURS: mask(1)}), out)
    assert text.startswith("Recommended: learned weights, with the fewest mistakes.\n")
    assert "kept: the weight is above 1/2." in text
    text = advice(recommend({LENIENT: mask(1), OURS: mask(2, 3)}), out)
    assert "nothing more complicated is better." in text
    assert "kept: the network before gave the label more than 0.1." in text
