"""Few-shot learning on fresh episodes: bilevel methods beside ANIL and the prototypical network.

Four new episodes a step, 10-way 1-shot, 16 channels, Adam 1e-3 on the encoder. The test error is
that of heads fitted afresh on 100 episodes of unseen classes (glyphs: 50). Each method has the same
seconds of optimisation, or with ``--steps`` the same number of steps.

Run: python -m benchmarks.fresh_episodes [--data omniglot glyphs] [--seeds 0 1 2] [--seconds S]
[--steps N] [--methods f2sa ...] [--channels 16]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.optim import Adam

from benchmarks.baselines.few_shot import few_shot_baselines
from lightning_bilevel import (
    FewShot,
    GlyphEpisodes,
    OmniglotEpisodes,
    OptimizationBudget,
)
from lightning_bilevel.stochastic import F2SA, MEHA, Method, StreamingIVSP

DATA: dict[str, Any] = {
    "omniglot": partial(OmniglotEpisodes, n_validation=100, n_test=100),
    "glyphs": partial(GlyphEpisodes, n_validation=50, n_test=50),
}
SECONDS = {"omniglot": 60.0, "glyphs": 40.0}
METHODS: dict[str, Method] = {"f2sa": F2SA(), "ivsp": StreamingIVSP(), "meha": MEHA()}
BASELINES = "baselines"
FOREVER = 10**6


def bilevel(
    dataset: str, method: Any, seed: int, channels: int, seconds: float | None, steps: int | None
) -> dict[str, float]:
    """Train an encoder by a bilevel method and return its errors."""
    seed_everything(seed, verbose=False)
    data = DATA[dataset](n_train=4, tasks_per_batch=4, epoch_length=steps or FOREVER)
    module = FewShot(
        tasks=4,
        channels=channels,
        method=method,
        upper_optimizer=partial(Adam, lr=1e-3),
    )
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps or -1,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[] if seconds is None else [OptimizationBudget(seconds)],
        **quiet,
    )
    trainer.fit(module, datamodule=data)
    step = module.last_step
    assert step is not None
    found = Trainer(accelerator="cpu", **quiet).validate(module, datamodule=data, verbose=False)
    errors = {name: value for row in found for name, value in row.items() if "error" in name}
    return {"steps": step.iteration, "seconds": step.optimization_time, **errors}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    methods = [*METHODS, BASELINES]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--seconds", type=float, help="of optimisation; default 60, glyphs 40")
    parser.add_argument("--steps", type=int, help="instead of seconds")
    parser.add_argument("--channels", type=int, default=16)
    given = parser.parse_args(arguments)
    for dataset in given.data:
        seconds = None if given.steps else given.seconds or SECONDS[dataset]
        for seed in given.seeds:
            what = {"data": dataset, "seed": seed, "threads": torch.get_num_threads()}
            for method in given.methods:
                if method != BASELINES:
                    row = bilevel(
                        dataset, METHODS[method], seed, given.channels, seconds, given.steps
                    )
                    print(json.dumps({**what, "method": method, **row}), flush=True)
                    continue
                data = DATA[dataset](n_train=32)
                data.prepare_data()
                data.setup()
                budget = {"steps": given.steps} if given.steps else {"seconds": seconds}
                for line in few_shot_baselines(data, seed, channels=given.channels, **budget):
                    row = {"seconds": line.seconds, **line.metrics}
                    print(json.dumps({**what, "method": line.name, **row}), flush=True)


if __name__ == "__main__":
    main()
