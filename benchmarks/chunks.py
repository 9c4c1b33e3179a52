"""Few-shot learning at the paper's width: chunks of episodes against one batch.

Also an inner iteration against the first one, which evaluates the features.

10-way 1-shot with 5 queries, 64 channels, 28 x 28 pixels (random: only their size matters for
time).
"""

from __future__ import annotations

import torch

from benchmarks.memory import peak_bytes
from benchmarks.results import Row, Section
from benchmarks.tasks import Size
from benchmarks.timing import in_turns, ratio
from lightning_bilevel import BilevelProblem, FewShot

CHANNELS = 64


def run(size: Size) -> Section:
    torch.manual_seed(0)
    tasks, labels, index = size.episodes, torch.arange(10), torch.arange(size.episodes)
    upper = torch.rand(tasks, 50, 1, 28, 28), labels.repeat_interleave(5).expand(tasks, 50), index
    lower = torch.rand(tasks, 10, 1, 28, 28), labels.expand(tasks, 10), index

    def problem(**options: int) -> tuple[FewShot, BilevelProblem]:
        module = FewShot(tasks=tasks, channels=CHANNELS if size.channels > 1 else 1, **options)
        return module, module.bilevel_problem({"upper": upper, "lower": lower})

    module, chunked = problem()
    _, whole = problem(chunk_images=10**9)
    x, y = (
        torch.cat([p.detach().reshape(-1) for p in level.parameters()])
        for level in (module.encoder, module.heads)
    )
    parts, batch = in_turns(
        [lambda: chunked.upper(x, y), lambda: whole.upper(x, y)],
        max(1, size.rounds // 2),
        warm_up=1,
    )
    level = chunked.at(x)
    level.gradient(y)
    inner, first = in_turns(
        [lambda: level.gradient(y), lambda: chunked.at(x + 1e-6 * torch.rand(())).gradient(y)],
        size.rounds,
    )
    small, large = (peak_bytes(lambda p=p: p.upper(x, y)) / 2**30 for p in (chunked, whole))
    note = (
        f"{parts[-1]:.3g} s and {small:.3g} GiB in chunks, {batch[-1]:.3g} s and {large:.3g} GiB "
        f"as one batch, {tasks} episodes"
    )
    rows = [Row("gradient of f, chunks / one batch", ratio(parts, batch), at_most=0.4, note=note)]
    note = f"of the first one at an x, which evaluates the features: {1e3 * first[-1]:.3g} ms"
    rows.append(Row("inner iteration", 100 * ratio(inner, first), "%", note=note))
    return Section("Few-shot learning, 64 channels", rows)
