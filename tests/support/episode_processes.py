"""Few-shot learning on fresh episodes over two processes, as a script."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from running import trainer

from lightning_bilevel import FewShot, GlyphEpisodes
from lightning_bilevel.stochastic import F2SA


def run(folder: Path, tasks: int, **options: Any) -> FewShot:
    """Six steps on so many episodes per process."""
    torch.manual_seed(0)
    module = FewShot(
        tasks,
        ways=3,
        channels=4,
        image_size=16,
        method=F2SA(2.0),
        upper_optimizer=partial(torch.optim.SGD, lr=0.01),
        gradient_clip_val=0.5,
    )
    sizes = {"n_train": 2, "n_validation": 4, "n_test": 4, "image_size": 16, "drawings": 5}
    classes = {"train_classes": 12, "validation_classes": 4, "test_classes": 3}
    data = GlyphEpisodes(
        ways=3, queries=2, tasks_per_batch=tasks, epoch_length=3, **sizes, **classes
    )
    fit = trainer(folder, max_steps=6, precision="64-true", **options)
    fit.fit(module, datamodule=data)
    assert fit.global_step == 6
    return module


def main(folder: Path) -> None:
    module = run(folder, 2, strategy="ddp", devices=2)
    rank = module.trainer.global_rank
    torch.save(dict(module.state_dict()), folder / f"end-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
