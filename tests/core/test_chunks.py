"""What counts as a batch: the same for all that take one apart."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from modules import Weighting, samples
from running import same_parameters, trainer
from torch import Tensor

from lightning_bilevel import Chunks, FullBatchDataModule
from lightning_bilevel.core.chunks import leaves, map_tensors, samples_in, tensors
from lightning_bilevel.distributed import part_of


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@dataclass
class Samples:
    inputs: Tensor
    labels: Tensor
    index: Tensor
    name: str = "samples"


@dataclass(frozen=True)
class Frozen:
    inputs: Tensor
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.inputs))


ONE = torch.arange(4.0)
BATCHES = [
    ONE,
    {"a": ONE, "b": 1},
    OrderedDict(a=ONE),
    UserDict(a=ONE),
    [ONE, "b"],
    (ONE, 2),
    deque([ONE]),
    Pair(ONE, ONE),
    Samples(ONE, ONE, ONE),
    Frozen(ONE),
    [{"a": (Samples(ONE, ONE, ONE), [Pair(ONE, ONE)])}],
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
class TestEveryKindOfBatch:
    def test_its_tensors_are_found(self, batch: Any) -> None:
        assert all(tensor is ONE for tensor in tensors(batch))
        assert samples_in(batch) == 4

    def test_its_tensors_are_replaced_and_nothing_else(self, batch: Any) -> None:
        doubled = map_tensors(lambda tensor: 2 * tensor, batch)
        assert type(doubled) is type(batch)
        assert [leaf for leaf in leaves(doubled) if not isinstance(leaf, Tensor)] == [
            leaf for leaf in leaves(batch) if not isinstance(leaf, Tensor)
        ]
        assert len(list(tensors(doubled))) == len(list(tensors(batch)))
        assert all(torch.equal(tensor, 2 * ONE) for tensor in tensors(doubled))
        assert all(tensor is ONE for tensor in tensors(batch))  # the given one is as it was

    def test_it_is_cut(self, batch: Any) -> None:
        part, weight = part_of(batch, 1, 2)
        assert weight == 0.5
        assert [tensor.tolist() for tensor in tensors(part)] == [[2.0, 3.0]] * len(
            list(tensors(batch))
        )


def test_order_and_keys() -> None:
    assert list(leaves({"b": [1, None], "a": Pair(2, 3)})) == ["b", 1, None, "a", 2, 3]  # type: ignore[arg-type]
    assert list(leaves(Samples)) == [Samples]  # a class is no batch


class OfDataclasses(Weighting):
    def upper_loss(self, batch: Samples) -> Tensor:
        return super().upper_loss((batch.inputs, batch.labels, batch.index))

    def lower_loss(self, batch: Samples) -> Tensor:
        return super().lower_loss((batch.inputs, batch.labels, batch.index))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_chunks_of_dataclasses_are_as_chunks_of_tuples(tmp_path: Any, precision: str) -> None:
    upper, lower = samples(20, 1), samples(30, 2)
    parts = [tuple(t[i : i + 12] for t in lower) for i in (0, 12, 24)]
    found = []
    for module, data in (
        (Weighting(), FullBatchDataModule(upper, Chunks(parts), epoch_length=5)),
        (
            OfDataclasses(),
            FullBatchDataModule(
                Samples(*upper), [Samples(*part) for part in parts], epoch_length=5
            ),
        ),
    ):
        trainer(tmp_path, max_epochs=1, precision=precision, limit_val_batches=0).fit(
            module, datamodule=data
        )
        found.append(module)
    assert same_parameters(*found)
    assert found[1].last_step is not None
    # the batch counts as the same one: f at the current point was not evaluated again
    assert found[1].last_step.calls.upper == found[1].last_step.trials  # type: ignore[attr-defined]
