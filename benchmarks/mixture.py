"""A mixture of text sources: what the learned shares are worth to a model that is trained on them.

The shares are learned as in ``examples/mixture.py``. Then a transformer is trained from scratch by
plain AdamW (rate 1e-3, batches of 16, 400 steps), each batch drawn by the shares, and its loss on
512 further rows of code counts. A bilevel step costs about three plain ones, so training on a
uniform mixture and on the code alone is also shown with the steps of both parts together.

Run: python -m benchmarks.mixture [--sources 2 4 8] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from examples.mixture import SOURCES, TextSources, Transformer, learned, row_losses
from lightning_bilevel.stochastic import F2SA, StreamingIVSP

STEPS = 400
PASSES = 3


def loss_after(rows: Tensor, weights: Tensor, steps: int, test: Tensor) -> float:
    """Train a fresh transformer on rows drawn by their weights; return its mean test loss."""
    sampler = WeightedRandomSampler(weights.tolist(), 16 * steps)
    data = TensorDataset(rows[:, :-1], rows[:, 1:])
    network = Transformer()
    optimizer = AdamW(network.parameters(), lr=1e-3)
    for inputs, following in DataLoader(data, 16, sampler=sampler):
        optimizer.zero_grad()
        row_losses(network(inputs), following).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    network.eval()
    with torch.no_grad():
        return float(row_losses(network(test[:, :-1]), test[:, 1:]).mean())


def measure(count: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each way to mix."""
    text = TextSources(SOURCES[count], seed=seed)
    code = (text.source == 0).float()
    even = torch.ones(len(text.rows))
    names = SOURCES[count]
    rows = []
    for method, fewest in ((F2SA(), 200), (StreamingIVSP(), 250)):
        steps = fewest * (2 if count == 8 else 1)
        torch.manual_seed(seed)
        path = torch.tensor(learned(method, text, steps))
        shares = path[-1]
        noise = path[:, [i for i, name in enumerate(names) if name in ("shuffled", "random")]]
        below = (noise.sum(1) < 0.05).nonzero()
        rows.append(
            {
                "mixture": type(method).__name__,
                "loss": loss_after(text.rows, shares[text.source], STEPS, text.test),
                "plain_steps": STEPS + PASSES * steps,
                "shares": {n: round(float(s), 4) for n, s in zip(names, shares, strict=True)},
                "noise_below_0.05_at": int(below[0]) + 1 if len(below) else None,
            }
        )
    most = rows[0]["plain_steps"]
    plain = {
        "uniform": (text.rows, even, STEPS),
        "uniform, as long as F2SA": (text.rows, even, most),
        "code alone": (text.rows, code, STEPS),
        "code alone, as long as F2SA": (text.rows, code, most),
        "trusted rows alone": (text.trusted, torch.ones(len(text.trusted)), STEPS),
    }
    for name, (some, weights, steps) in plain.items():
        torch.manual_seed(seed)
        loss = loss_after(some, weights, steps, text.test)
        rows.append({"mixture": name, "loss": loss, "plain_steps": steps})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", nargs="+", type=int, choices=list(SOURCES), default=[2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args(arguments)
    for count in given.sources:
        for seed in given.seeds:
            for row in measure(count, seed):
                print(json.dumps({"sources": count, "seed": seed, **row}), flush=True)


if __name__ == "__main__":
    main()
