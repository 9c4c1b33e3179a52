"""Nested samples: each beginning of the order is drawn and stratified; stages by a schedule."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from modules import samples

from lightning_bilevel import Chunks, DigitsCleaning, Growing
from lightning_bilevel.data.fullbatch import NestedSample, stratified_permutation

CLASSES = torch.tensor([0] * 60 + [1] * 30 + [7] * 10)


@pytest.mark.parametrize("classes", [torch.zeros(100), CLASSES])
def test_each_sample_comes_once_and_the_seed_alone_decides(classes: torch.Tensor) -> None:
    state = torch.get_rng_state()
    first = stratified_permutation(classes, 3)
    torch.rand(5)
    assert torch.equal(first, stratified_permutation(classes, 3))
    assert first.sort().values.tolist() == list(range(100))
    assert not torch.equal(first, stratified_permutation(classes, 4))
    torch.set_rng_state(state)
    stratified_permutation(classes, 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", range(5))
def test_every_beginning_has_each_class_by_its_share(seed: int) -> None:
    order = stratified_permutation(CLASSES, seed)
    for size in range(1, 101):
        taken = CLASSES[order[:size]]
        for label, share in ((0, 0.6), (1, 0.3), (7, 0.1)):
            assert abs(int((taken == label).sum()) - share * size) < 2, (size, label)


def test_within_a_class_every_sample_may_come_first() -> None:
    first = {int(stratified_permutation(CLASSES, seed)[0]) for seed in range(200)}
    assert len(first) > 40


class TestNestedSample:
    """The batches of the stages."""

    def test_stages_are_nested_and_the_last_is_the_batch_itself(self) -> None:
        batch = {"upper": samples(20, 1), "lower": samples(60, 2)}
        sample = NestedSample(Growing(start=8, factor=2, every=3), batch)
        assert sample.sizes == [8, 16, 32, 60]
        seen, begins, shares = [], [], []
        for iteration in range(14):
            seen.append(sample.at(iteration))
            begins.append(sample.begins)
            shares.append(sample.share)
        assert [len(batch["lower"][0]) for batch in seen] == [8] * 3 + [16] * 3 + [32] * 3 + [
            60
        ] * 5
        assert [i for i, new in enumerate(begins) if new] == [3, 6, 9]
        assert all((a is b) != new for (a, b), new in zip(pairwise(seen), begins[1:], strict=True))
        indices = [set(seen[i]["lower"][2].tolist()) for i in (0, 3, 6, 9)]
        assert all(a < b for a, b in pairwise(indices))
        assert len(seen[3]["upper"][0]) == 16
        assert seen[6]["upper"] is batch["upper"]
        assert seen[9] is batch
        assert shares[3:10:3] == [(16 / 20, 16 / 60), (1.0, 32 / 60), None]
        # The tensors of a sample belong together.
        inputs, labels, index = seen[0]["lower"]
        assert torch.equal(inputs, batch["lower"][0][index])
        assert torch.equal(labels, batch["lower"][1][index])
        # Any iteration may be the first one that is asked for: a run resumes there.
        other = NestedSample(Growing(start=8, factor=2, every=3), batch)
        assert torch.equal(other.at(4)["lower"][2], seen[4]["lower"][2])
        assert not other.begins
        other.at(6)
        assert other.begins

    def test_a_sample_of_chunks_is_that_of_the_whole(self) -> None:
        whole = samples(60, 2)
        chunks = [tuple(t[i : i + 25] for t in whole) for i in (0, 25, 50)]
        growing = Growing(start=30, factor=1.5)
        split, single = (
            NestedSample(growing, {"upper": samples(9, 1), "lower": lower}).at(0)["lower"]
            for lower in (chunks, whole)
        )
        assert isinstance(split, Chunks)
        assert len(split.batches) == 3
        for i in range(3):
            assert torch.equal(torch.cat([part[i] for part in split.batches]), single[i])

    @pytest.mark.parametrize("start", [60, 61, None])
    def test_a_start_as_large_as_the_data_is_the_only_stage(self, start: int | None) -> None:
        batch = {"upper": samples(20, 1), "lower": samples(60, 2)}
        sample = NestedSample(Growing(start=start), batch)
        assert sample.at(0) is sample.at(100) is batch
        assert sample.share is None
        assert not sample.begins

    def test_data_without_samples_are_one_stage(self) -> None:
        batch = {"upper": {}, "lower": torch.tensor(1.0)}
        assert NestedSample(Growing(), batch).at(100) is batch


class TestRefusals:
    """Each a sentence."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"factor": 1.0}, r"`Growing\(factor=1.0\)` must be above 1 and finite"),
            ({"factor": math.nan}, r"`Growing\(factor=nan\)` must be above 1"),
            ({"start": 0}, r"`Growing\(start=0\)` must be at least 1"),
            ({"every": 0}, r"`Growing\(every=0\)` must be at least 1"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Growing(**arguments)

    @pytest.mark.parametrize(
        "lower",
        [
            Chunks([samples(9, 1), samples(9, 2)], [0.7, 0.3]),
            (torch.ones(9), torch.ones(3)),
        ],
    )
    def test_data(self, lower: Any) -> None:
        with pytest.raises(ValueError, match="a lower batch that it cannot draw from: the first"):
            NestedSample(Growing(), {"upper": samples(9, 1), "lower": lower})

    def test_mini_batches(self) -> None:
        with pytest.raises(ValueError, match="`growing` for full batches"):
            DigitsCleaning(growing=Growing(), batch_size=8)
