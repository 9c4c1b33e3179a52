"""learn2learn's tasks are our episodes: `-m learn2learn`, where it is installed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from running import trainer
from torch.utils.data import TensorDataset

from lightning_bilevel import (
    BOME,
    Episodes,
    FewShot,
    TaskEpisodes,
)
from lightning_bilevel.data.glyphs import draw_glyphs
from lightning_bilevel.stochastic import F2SA

# learn2learn is unmaintained and warns at its import.
pytestmark = [pytest.mark.learn2learn, pytest.mark.filterwarnings("ignore")]


def taskset(images: torch.Tensor, ways: int, examples: int) -> object:
    import learn2learn as l2l
    from learn2learn.data.transforms import ConsecutiveLabels, KShots, LoadData, NWays, RemapLabels

    labels = torch.arange(len(images)).repeat_interleave(images.shape[1])
    source = l2l.data.MetaDataset(TensorDataset(images.flatten(0, 1), labels))
    transforms = [
        NWays(source, ways),
        KShots(source, examples),
        LoadData(source),
        RemapLabels(source),
        ConsecutiveLabels(source),
    ]
    return l2l.data.Taskset(source, task_transforms=transforms, num_tasks=6)


def test_a_taskset_is_a_source_of_episodes(tmp_path: Path) -> None:
    images = draw_glyphs(12, 6, size=16)
    episodes = Episodes.from_tasks(taskset(images, ways=3, examples=4), count=5, shots=1)
    assert episodes.support.shape == (5, 3, 1, 16, 16)
    assert episodes.query.shape == (5, 9, 1, 16, 16)
    known = images.flatten(0, 1).flatten(1)
    for support, labels, query, query_labels in zip(*episodes, strict=True):
        drawn = torch.cat([support, query]).flatten(1)
        place = (drawn.unsqueeze(1) == known).all(-1).float().argmax(1)
        of = dict(zip(labels.tolist(), (place[:3] // 6).tolist(), strict=True))
        assert len(set(of.values())) == 3
        assert [of[label] for label in query_labels.tolist()] == (place[3:] // 6).tolist()
    torch.manual_seed(0)
    module = FewShot(
        tasks=5,
        ways=3,
        channels=4,
        image_size=16,
        solver=lambda groups: BOME(groups, xi=0.5, alpha=0.5, eta=0.1),
    )
    run = trainer(tmp_path, max_steps=5)
    run.fit(module, datamodule=TaskEpisodes(episodes, episodes, episodes, epoch_length=5))
    assert run.global_step == 5
    assert "val_error" in run.callback_metrics


def test_a_taskset_is_a_source_of_fresh_episodes(tmp_path: Path) -> None:
    images = draw_glyphs(12, 6, size=16)
    pool = Episodes.from_tasks(taskset(images, ways=3, examples=4), count=6, shots=1)
    torch.manual_seed(0)
    adam = partial(torch.optim.Adam, lr=1e-2)
    module = FewShot(
        tasks=2, ways=3, channels=4, image_size=16, method=F2SA(), upper_optimizer=adam
    )
    run = trainer(tmp_path, max_steps=5)
    data = TaskEpisodes(pool, pool, pool, epoch_length=5, tasks_per_batch=2)
    run.fit(module, datamodule=data)
    assert run.global_step == 5
    assert "val_error" in run.callback_metrics
