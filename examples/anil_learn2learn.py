"""learn2learn's ANIL on the very episodes of a few-shot config, as a yardstick.

ANIL differentiates through ten inner steps of one head that all tasks start from; this library fits
a head per task and needs no second derivatives. learn2learn installs as docs/learn2learn.md says.

Run: python examples/anil_learn2learn.py configs/glyphs/ivsp.yaml --budget 60
"""

from __future__ import annotations

import argparse
import time

import learn2learn
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import Episodes, FewShot
from lightning_bilevel.cli.app import BilevelCLI

STEPS, INNER_LR = 10, 0.1  # as every method here is evaluated


def query_logits(
    encoder: nn.Module, head: learn2learn.algorithms.MAML, task: tuple[Tensor, ...]
) -> Tensor:
    support, labels, query, _ = task
    features, learner = encoder(support.unsqueeze(0))[0], head.clone()
    for _ in range(STEPS):
        learner.adapt(cross_entropy(learner(features), labels))
    return learner(encoder(query.unsqueeze(0))[0])


def report(
    name: str, encoder: nn.Module, head: learn2learn.algorithms.MAML, episodes: Episodes
) -> None:
    logits = torch.stack(
        [query_logits(encoder, head, task).detach() for task in zip(*episodes, strict=True)]
    )
    loss = cross_entropy(logits.flatten(0, 1), episodes.query_labels.flatten())
    wrong = (logits.argmax(-1) != episodes.query_labels).float().mean()
    print(f"{name}: query loss {loss:.4f}, query error {wrong:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of training")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step")
    given = parser.parse_args()
    cli = BilevelCLI(["--config", given.config, "--trainer.logger=false"], run=False)
    module, data = cli.model, cli.datamodule
    assert isinstance(module, FewShot)
    data.prepare_data()
    data.setup()
    train = Episodes(*data.lower[:2], *data.upper[:2])
    encoder, head = (
        module.encoder,
        learn2learn.algorithms.MAML(nn.Linear(module.encoder.features, module.ways), lr=INNER_LR),
    )
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=given.lr)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < given.budget:
        optimizer.zero_grad()
        for i in torch.randperm(len(train.support))[: given.tasks].tolist():
            task = tuple(tensor[i] for tensor in train)
            (cross_entropy(query_logits(encoder, head, task), task[3]) / given.tasks).backward()
        optimizer.step()
        steps += 1
    print(f"ANIL, {steps} steps of {given.tasks} tasks in {time.perf_counter() - began:.0f} s")
    report("validation", encoder, head, data.validation)
    report("test", encoder, head, data.test)


if __name__ == "__main__":
    main()
