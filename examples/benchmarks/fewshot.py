"""Few-shot learning at the paper's size: chunks against one batch, peak memory, and an inner iteration against the features.

128 episodes, 10-way 1-shot with 5 queries, 64 channels, 28 x 28 pixels (random: only their size matters for time). All in this
process, one after another; the peak memory is read before the large batch is made.

Run: python examples/benchmarks/fewshot.py
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch

from lightning_bilevel import FewShot


def seconds(work: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def gibibytes() -> float:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    tasks, labels, index = given.episodes, torch.arange(10), torch.arange(given.episodes)
    upper = torch.rand(tasks, 50, 1, 28, 28), labels.repeat_interleave(5).expand(tasks, 50), index
    lower = torch.rand(tasks, 10, 1, 28, 28), labels.expand(tasks, 10), index

    def problem(chunk_images: int | None = None) -> tuple[FewShot, object]:
        options = {} if chunk_images is None else {"chunk_images": chunk_images}
        module = FewShot(tasks=tasks, channels=given.channels, **options)
        return module, module.bilevel_problem({"upper": upper, "lower": lower})

    module, chunked = problem()
    x, y = (torch.cat([p.detach().reshape(-1) for p in level.parameters()]) for level in (module.encoder, module.heads))
    chunked.upper(x, y)
    chunks = seconds(lambda: chunked.upper(x, y), given.rounds)
    features = seconds(lambda: chunked.at(x), given.rounds)
    level = chunked.at(x)
    inner = seconds(lambda: level.gradient(y), 20 * given.rounds)
    gap = seconds(lambda: chunked.at(x).gap(y, y + 0.1), given.rounds)
    peak = gibibytes()
    _, whole = problem(10**9)
    batch = seconds(lambda: whole.upper(x, y), 1)
    print(f"gradient of f: {chunks:.2f} s in chunks, {batch:.2f} s as one batch: {chunks / batch:.2f} of the time")
    print(f"peak memory: {peak:.2f} GiB in chunks, {gibibytes():.2f} GiB as one batch")
    print(f"inner iteration: {1e3 * inner:.2f} ms, {100 * inner / features:.2f} % of the support features ({features:.2f} s)")
    print(f"g(x, y) - g(x, z) with its gradients, features included: {gap:.2f} s")


if __name__ == "__main__":
    main()
