"""Samples carry their numbers, and their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import Numbered

PAIRS = TensorDataset(torch.arange(4.0), torch.tensor([1, 0, 1, 0]))


def test_a_pair_gets_its_number() -> None:
    data = Numbered(PAIRS)
    assert len(data) == 4
    assert data[2] == (2.0, 1, 2)
    assert data[-1] == data[3] == (3.0, 0, 3)
    assert data.names == []
    seen = list(DataLoader(data, batch_size=3, shuffle=True))
    for inputs, labels, numbers in seen:
        assert torch.equal(inputs, numbers.float())
        assert torch.equal(labels, (numbers + 1) % 2)
    assert sorted(torch.cat([batch[2] for batch in seen]).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("keys", "numbers", "names"),
    [
        ([2, 0, 0, 2], [2, 0, 0, 2], [0, 1, 2]),
        (torch.tensor([1, 0, 1, 0]), [1, 0, 1, 0], [0, 1]),
        (["web", "books", "web", "mail"], [0, 1, 0, 2], ["web", "books", "mail"]),
        ([-1, None, 0.5, -1], [0, 1, 2, 0], [-1, None, 0.5]),
    ],
)
def test_keys_travel_with_the_sample(keys: Any, numbers: list[int], names: list[Any]) -> None:
    data = Numbered(PAIRS, keys)
    assert [data[i][2:] for i in range(4)] == list(enumerate(numbers))
    assert data.names == names


def test_a_dict_gets_both_by_name() -> None:
    samples: Any = [{"text": "a"}, {"text": "b"}]
    assert Numbered(samples)[1] == {"text": "b", "number": 1}
    assert Numbered(samples, ["x", "y"])[1] == {"text": "b", "number": 1, "key": 1}


def test_a_source_for_each_sample() -> None:
    with pytest.raises(ValueError, match="has 2 keys for 4 samples"):
        Numbered(PAIRS, [0, 1])
