"""learn2learn's ANIL on the same episodes as a few-shot config, for comparison.

ANIL trains one head from which all tasks start, and differentiates through ten inner steps. This
library fits one head per task and needs no second derivatives. docs/learn2learn.md says how to
install learn2learn.

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

# All methods of the library are evaluated with these inner steps.
STEPS = 10
INNER_LR = 0.1


def query_logits(
    encoder: nn.Module, head: learn2learn.algorithms.MAML, task: tuple[Tensor, ...]
) -> Tensor:
    support, labels, query, _ = task
    features = encoder(support.unsqueeze(0))[0]
    learner = head.clone()
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
    encoder = module.encoder
    head = learn2learn.algorithms.MAML(nn.Linear(encoder.features, module.ways), lr=INNER_LR)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=given.lr)
    steps = 0
    start = time.perf_counter()
    while time.perf_counter() - start < given.budget:
        optimizer.zero_grad()
        for i in torch.randperm(len(train.support))[: given.tasks].tolist():
            task = tuple(tensor[i] for tensor in train)
            (cross_entropy(query_logits(encoder, head, task), task[3]) / given.tasks).backward()
        optimizer.step()
        steps += 1
    print(f"ANIL, {steps} steps of {given.tasks} tasks in {time.perf_counter() - start:.0f} s")
    report("validation", encoder, head, data.validation)
    report("test", encoder, head, data.test)


if __name__ == "__main__":
    main()
