"""Fresh episodes: from seed and number alone, resumed where a run stopped, own ones per process."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bilevel import EpisodeData, Episodes, TaskEpisodes


class Numbered(EpisodeData):
    """The pixels of an image are the numbers of its class and example."""

    def load(self) -> torch.Tensor:
        classes = torch.arange(40).view(-1, 1, 1, 1, 1)
        examples = torch.arange(6).view(1, -1, 1, 1, 1)
        return (100 * classes + examples).expand(40, 6, 1, 2, 2).float()


SIZES = {"ways": 4, "shots": 2, "queries": 3, "n_train": 9, "n_validation": 5, "n_test": 6}


def numbered(**options: Any) -> Numbered:
    given = {**SIZES, "train_classes": 20, "validation_classes": 10, "tasks_per_batch": 3}
    data = Numbered(**{**given, "epoch_length": 4, **options})
    data.setup()
    return data


def codes(batch: dict[str, Any]) -> list[list[int]]:
    """What each task of a batch shows: its supports and its queries."""
    images = torch.cat([batch["lower"][0], batch["upper"][0]], 1)
    return [[int(code) for code in row] for row in images[..., 0, 0, 0].tolist()]


def test_a_batch_has_episodes_of_the_training_classes() -> None:
    data = numbered()
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataloader()) == 4
    seen: set[int] = set()
    for batch in batches:
        support, support_labels, index = batch["lower"]
        query, query_labels, _ = batch["upper"]
        assert support.shape == (3, 8, 1, 2, 2)
        assert query.shape == (3, 12, 1, 2, 2)
        assert index.tolist() == [0, 1, 2]
        for row, *labels in zip(codes(batch), support_labels, query_labels, strict=True):
            assert len(set(row)) == 20
            of = set(zip([code // 100 for code in row], torch.cat(labels).tolist(), strict=True))
            assert len(of) == 4  # one class, one label
            seen |= {code // 100 for code in row}
    known = torch.cat([data.validation.support, data.test.support])[..., 0, 0, 0] // 100
    assert seen.isdisjoint(known.int().flatten().tolist())


def test_no_batch_comes_twice_and_the_seed_decides() -> None:
    data = numbered()
    loader = data.train_dataloader()
    two_epochs = [codes(batch) for _ in range(2) for batch in loader]
    assert len({str(row) for batch in two_epochs for row in batch}) == 24
    again = numbered().train_dataloader()
    assert [codes(batch) for _ in range(2) for batch in again] == two_epochs
    assert [codes(batch) for batch in numbered(seed=1).train_dataloader()] != two_epochs[:4]
    # The fixed episodes of the same seed are others.
    fixed = torch.cat([data.lower[0], data.upper[0]], 1)[..., 0, 0, 0].int().tolist()
    assert not {str(row) for row in fixed} & {str(row) for batch in two_epochs for row in batch}


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_it_goes_on_from_its_state(stop: int) -> None:
    whole = numbered().train_dataloader()
    expected = [codes(batch) for _ in range(2) for batch in whole]
    first = numbered().train_dataloader()
    seen = 0
    while seen < stop:
        for _ in first:
            seen += 1
            if seen == stop:
                break
    second = numbered().train_dataloader()
    second.load_state_dict(first.state_dict())
    rest = [codes(batch) for batch in second]
    # The rest of the epoch, or the next one.
    assert rest == expected[stop : 4 * (stop // 4 + 1)]


def test_each_process_has_its_own() -> None:
    def of(rank: int, processes: int) -> list[list[list[int]]]:
        data = numbered()
        data.trainer = SimpleNamespace(global_rank=rank, world_size=processes)  # type: ignore[assignment]
        return [codes(batch) for batch in data.train_dataloader()]

    alone, first, second = of(0, 1), of(0, 2), of(1, 2)
    assert [first[0], second[0], first[1], second[1]] == alone


def tasks(count: int) -> Episodes:
    data = numbered(n_train=count, tasks_per_batch=None)
    return Episodes(*data.lower[:2], *data.upper[:2])


def test_ready_episodes_come_in_turns() -> None:
    train = tasks(5)
    data = TaskEpisodes(train, train, train, epoch_length=5, tasks_per_batch=2)
    data.setup()
    every = torch.cat([train.support, train.query], 1)[..., 0, 0, 0].int().tolist()
    loader = data.train_dataloader()
    shown = [row for _ in range(2) for batch in loader for row in codes(batch)]
    order = [every.index(row) for row in shown]
    turns = [order[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(turn) == [0, 1, 2, 3, 4] for turn in turns)
    assert len({str(turn) for turn in turns}) > 1
    again = TaskEpisodes(train, train, train, epoch_length=5, tasks_per_batch=2).train_dataloader()
    assert [row for batch in again for row in codes(batch)] == shown[:10]


def test_wrong_numbers_are_refused() -> None:
    message = re.escape("`Numbered(tasks_per_batch=0)` must be at least 1.")
    with pytest.raises(ValueError, match=f"^{message}$"):
        numbered(tasks_per_batch=0)
