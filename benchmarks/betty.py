"""Hyper-cleaning by betty 0.2.1: implicit gradients by finite differences ("darts"), which is what
it does by default.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from benchmarks.boat import Weights, lower_loss, upper_loss
from benchmarks.tasks import Task


class Betty:
    """An outer iteration of betty's engine: some gradient steps on g, and a step of Adam for x.

    Args:
        task: Hyper-cleaning.
        steps: The inner steps.
        lr: The step sizes of x and of y.
    """

    def __init__(self, task: Task, steps: int, lr: tuple[float, float]) -> None:
        from betty.configs import Config, EngineConfig
        from betty.engine import Engine
        from betty.problems import ImplicitProblem

        class Upper(ImplicitProblem):  # type: ignore[misc]
            def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
                return upper_loss({"images": batch[0], "labels": batch[1]}, self.module, self.lower)

        class Lower(ImplicitProblem):  # type: ignore[misc]
            def training_step(self, batch: tuple[Tensor, ...]) -> Tensor:
                return lower_loss(
                    {"images": batch[0], "labels": batch[1]}, self.upper.module, self.module
                )

        self.network = task.build().classifier
        self.steps = steps
        weights = Weights(len(task.data.lower[0]))
        adam = torch.optim.Adam(weights.parameters(), lr[0])
        descent = torch.optim.SGD(self.network.parameters(), lr[1])
        clean = [task.data.upper[:2]]
        noisy = [task.data.lower[:2]]
        upper = Upper("upper", Config(), weights, adam, train_data_loader=clean)
        lower = Lower(
            "lower",
            Config(unroll_steps=steps),
            self.network,
            descent,
            train_data_loader=noisy,
        )
        dependencies: dict[str, Any] = {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
        logging.disable(logging.INFO)  # betty tells what it has understood
        self.engine = Engine(
            problems=[upper, lower],
            config=EngineConfig(strategy="cpu"),
            dependencies=dependencies,
        )
        logging.disable(logging.NOTSET)
        self.engine.train()

    def step(self) -> None:
        for _ in range(self.steps):
            self.engine.train_step()
