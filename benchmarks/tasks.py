"""The four tasks that are timed, with the settings of the configs, and how large they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml

import lightning_bilevel
from lightning_bilevel import (
    BilevelModule,
    BilevelOptimizer,
    BilevelProblem,
    FashionMNISTCleaning,
    FewShot,
    FullBatchDataModule,
    GlyphEpisodes,
    HyperCleaning,
    MNISTCleaning,
    Power,
    SineProblem,
    SolverCallable,
)

CONFIGS = Path(__file__).parents[1] / "configs"
DATA: dict[str, Any] = {"mnist": MNISTCleaning, "fashion_mnist": FashionMNISTCleaning}


@dataclass(frozen=True)
class Size:
    """How large the tasks are, and how long they are run.

    Attributes:
        n: Coordinates of the synthetic problem.
        samples: Training samples, and as many validation samples.
        episodes: Training episodes of few-shot learning.
        channels: Channels of its convolutions.
        steps: Outer iterations of one turn; twenty times as many of the synthetic problem.
        rounds: Turns of each side of a comparison.
        seconds: The processor time of each method whose test error is looked at.
        passes: The passes of each method whose KKT residual is looked at.
        most_coordinates: The upper end of the synthetic problem's growth.
        most_samples: The upper end of hyper-cleaning's.
        most_episodes: The upper end of few-shot learning's.
    """

    n: int = 1000
    samples: int = 5000
    episodes: int = 32
    channels: int = 16
    steps: int = 20
    rounds: int = 7
    seconds: float = 30.0
    passes: int = 2000
    most_coordinates: int = 10**7
    most_samples: int = 60_000
    most_episodes: int = 128


QUICK = Size(
    samples=1000,
    episodes=8,
    steps=10,
    rounds=3,
    seconds=4.0,
    passes=400,
    most_coordinates=10**6,
    most_samples=10_000,
    most_episodes=32,
)


@dataclass(frozen=True)
class Task:
    """A module with its data, of which every call of `build` makes the same anew."""

    name: str
    build: Callable[[], BilevelModule]
    data: FullBatchDataModule
    double: bool = False
    steps: int = 20

    def problem(self, module: BilevelModule) -> BilevelProblem:
        return module.bilevel_problem({"upper": self.data.upper, "lower": self.data.lower})

    def begin(self) -> tuple[BilevelModule, BilevelOptimizer, BilevelProblem]:
        """Return module, solver and problem as they are without a Trainer."""
        module = self.build().double() if self.double else self.build()
        declared = module._declaration
        return module, declared.new_solver(), self.problem(module)

    def alone(self) -> tuple[BilevelOptimizer, BilevelProblem]:
        """Return solver and problem of :meth:`begin`."""
        return self.begin()[1:]


def solver(config: str, **changes: Any) -> SolverCallable:
    """Return the solver of a config, `mnist/ivsp`, with some of its arguments changed."""
    chosen = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["model"]["init_args"][
        "solver"
    ]
    return partial(
        getattr(lightning_bilevel, chosen["class_path"]),
        **schedules({**chosen["init_args"], **changes}),
    )


def schedules(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Power(**value) if isinstance(value, dict) else value
        for name, value in settings.items()
    }


def synthetic(size: Size, chosen: SolverCallable | None = None) -> Task:
    chosen = chosen or solver("synthetic/ivsp")
    build = partial(SineProblem, n=size.n, solver=chosen)
    return Task(
        "synthetic",
        build,
        FullBatchDataModule(epoch_length=20 * size.steps),
        double=True,
        steps=20 * size.steps,
    )


def cleaning(
    size: Size, dataset: str = "mnist", chosen: SolverCallable | None = None, **options: Any
) -> Task:
    data = DATA[dataset](
        n_train=size.samples, n_validation=size.samples, epoch_length=size.steps, **options
    )
    data.setup()

    def build() -> HyperCleaning:
        torch.manual_seed(1)
        return HyperCleaning(
            len(data.corrupted), prod(data.image_shape), solver=chosen or solver(f"{dataset}/ivsp")
        )

    return Task(dataset, build, data, steps=size.steps)


def few_shot(size: Size, chosen: SolverCallable | None = None) -> Task:
    data = GlyphEpisodes(n_train=size.episodes, n_validation=2, n_test=2, epoch_length=size.steps)
    data.setup()

    def build() -> FewShot:
        torch.manual_seed(43)
        return FewShot(
            size.episodes,
            channels=size.channels,
            lower_unit=0.5,
            solver=chosen or solver("glyphs/ivsp"),
        )

    return Task("few-shot", build, data, steps=max(2, size.steps // 2))


def four(size: Size) -> list[Task]:
    return [synthetic(size), cleaning(size), cleaning(size, "fashion_mnist"), few_shot(size)]
