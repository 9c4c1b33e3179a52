"""What a step on mini-batches costs: Trainer.fit, the loop by hand, plain training, others.

One weight per sample above and a network below, batches of 256 at both levels, AdamW for all
(betty and BOAT: Adam). All sides of a network take turns, one step each, in processor time of one
thread. Each fit has a thread of its own, which waits while the others have their turn. Memory is
the peak of a whole run of three steps, in copies of the network, on one of 38M parameters.

Run: OMP_NUM_THREADS=1 python -m benchmarks step_cost
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.memory import peak_bytes
from benchmarks.results import Row, Section, installed, skipped
from benchmarks.reweighting import (
    METHODS,
    PACKAGES,
    QUIET,
    RIVALS,
    Batch,
    Ours,
    Rates,
    weighted,
)
from benchmarks.tasks import QUICK, Size
from benchmarks.timing import ratio
from lightning_bilevel.stochastic import F2SA, Method, StreamingIVSP

SAMPLES = 4096
BATCH = 256
WARM_UP = 10
# For each of a size's steps, so many rounds.
ROUNDS = 5
# The width of three hidden layers: 38,629,210 parameters.
WIDTH = 4200
UPPER, LOWER = partial(AdamW, lr=1e-2), partial(AdamW, lr=1e-4)
RATES = Rates(1e-2, 1e-4)
PLAIN, PLAIN_FIT = "plain training", "plain training, Trainer.fit"


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    pooled = [nn.MaxPool2d(2), *layer(16, 32), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*layer(1, 16), *pooled, nn.Linear(512, 10))


# The networks, and how long a fit takes at most, in loops by hand and in fits of plain training.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "MLP 784-16-10": (partial(network, 784, 16, 10), 1.3, 2.5),
    "MLP 784-1024-1024-10": (partial(network, 784, 1024, 1024, 10), 1.05, 3.1),
    "CNN with BatchNorm": (cnn, 1.05, 3.1),
}


def pairs(count: int = 8) -> list[dict[str, Batch]]:
    generator = torch.Generator().manual_seed(0)

    def batch() -> Batch:
        index = torch.randperm(SAMPLES, generator=generator)[:BATCH].sort().values
        images = torch.randn(BATCH, 1, 28, 28, generator=generator)
        return images, torch.randint(10, (BATCH,), generator=generator), index

    return [{"upper": batch(), "lower": batch()} for _ in range(count)]


class Endless(IterableDataset[Any]):
    """The same few batches again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return cycle(self.batches)


class Plain(LightningModule):
    """Plain training of the network on the lower batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)

    def training_step(self, batch: dict[str, Batch], batch_idx: int = 0) -> Tensor:
        return cross_entropy(self.net(batch["lower"][0]), batch["lower"][1])

    def configure_optimizers(self) -> Optimizer:
        return LOWER(self.net.parameters())


class Bare:
    """The same without a Trainer."""

    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net)
        self.optimizer = LOWER(self.net.parameters())

    def step(self, upper: Batch, lower: Batch) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.net(lower[0]), lower[1]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


class ByHand:
    """F2SA or StreamingIVSP in a loop over two separate networks, without this package."""

    def __init__(self, net: nn.Module, method: Method) -> None:
        self.y, self.z = copy.deepcopy(net), copy.deepcopy(net)
        self.x = nn.Parameter(torch.zeros(SAMPLES))
        self.ys, self.zs = list(self.y.parameters()), list(self.z.parameters())
        self.optimizers = [LOWER(self.ys), LOWER(self.zs), UPPER([self.x])]
        self.method = method
        self.tracked: tuple[Tensor, Tensor] | None = None

    def step(self, upper: Batch, lower: Batch) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        images, labels, index = lower
        g_z = weighted(self.x[index], self.z(images), labels)
        g_z.backward()  # type: ignore[no-untyped-call]
        from_z, self.x.grad = self.x.grad, None
        g_y = weighted(self.x[index], self.y(images), labels)
        f = cross_entropy(self.y(upper[0]), upper[1])
        if isinstance(self.method, StreamingIVSP):
            self._add_ivsp(self.method, f, g_y, g_z)
            assert self.x.grad is not None
            self.x.grad.sub_(self.weight * from_z)
        else:
            assert isinstance(self.method, F2SA)
            (f + g_y).backward()
            assert self.x.grad is not None
            self.x.grad.sub_(from_z)
        for optimizer in self.optimizers:
            optimizer.step()

    def _add_ivsp(self, method: StreamingIVSP, f: Tensor, g_y: Tensor, g_z: Tensor) -> None:
        with torch.no_grad():
            pulls = torch._foreach_sub(self.zs, self.ys)
            square = torch.stack([p.square().sum() for p in pulls]).sum()
            r = g_y - g_z - square / (2 * method.rho) - method.delta
            mean, variance = self.tracked or (r, torch.zeros(()))
            mean = 0.98 * mean + 0.02 * r
            variance = 0.98 * variance + 0.02 * (r - mean) ** 2
            self.tracked = mean, variance
            smoothing = (3 * (variance * 0.02 / 1.98).sqrt()).clamp(min=method.mu)
            self.weight = (mean / smoothing + 0.5).clamp(method.floor, 1.0)
        (method.gamma * f + self.weight * g_y).backward()
        torch._foreach_div_(pulls, method.rho)
        at_y, at_z = ([p.grad for p in part] for part in (self.ys, self.zs))
        torch._foreach_add_(at_z, pulls)
        torch._foreach_mul_(pulls, self.weight)
        torch._foreach_add_(at_y, pulls)
        torch._foreach_div_(at_y, method.gamma + self.weight)


class Fit(Callback):
    """A fit in a thread of its own; a turn is the time from the end of a batch to the next one's.

    Args:
        module: The module.
        batches: Its training batches.
    """

    def __init__(self, module: LightningModule, batches: list[Any]) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._began = self._took = 0.0
        self._ends = False
        self._error: BaseException | None = None
        self._work = module, DataLoader(Endless(batches), batch_size=None)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._done.acquire()

    def turn(self) -> float:
        """Make a step; return its seconds of processor time."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._took

    def end(self) -> None:
        self._ends = True
        self._go.release()
        self._thread.join()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._took = time.process_time() - self._began
        self._wait()
        trainer.should_stop = trainer.should_stop or self._ends

    def _wait(self) -> None:
        self._done.release()
        self._go.acquire()
        self._began = time.process_time()

    def _run(self) -> None:
        # The number of threads is one of each thread.
        torch.set_num_threads(1)
        try:
            trainer = Trainer(max_steps=-1, callbacks=[self], **QUIET)
            trainer.fit(*self._work)
        except BaseException as error:
            self._error = error
            self._done.release()


def turns_of(step: Callable[..., object], batches: list[dict[str, Batch]]) -> Callable[[], float]:
    """Return a function that makes a step and returns its seconds of processor time."""
    given = cycle(batches)

    def turn() -> float:
        batch = next(given)
        began = time.process_time()
        step(batch["upper"], batch["lower"])
        return time.process_time() - began

    return turn


def there() -> list[str]:
    return [name for name in RIVALS if installed(PACKAGES[name])]


def times(net: nn.Module, rounds: int) -> dict[str, list[float]]:
    """Return the processor time of each side's step in each round."""
    batches = pairs()
    fits = {
        fit_of(name): Fit(Ours(net, SAMPLES, method, UPPER, LOWER), batches)
        for name, method in METHODS.items()
    }
    fits[PLAIN_FIT] = Fit(Plain(net), batches)
    steps: dict[str, Any] = {by_hand(name): ByHand(net, METHODS[name]) for name in METHODS}
    steps |= {name: RIVALS[name](net, SAMPLES, RATES) for name in there()}
    steps[PLAIN] = Bare(net)
    turns = {name: fit.turn for name, fit in fits.items()}
    turns |= {name: turns_of(side.step, batches) for name, side in steps.items()}
    took = []
    order = random.Random(0)
    for _ in range(WARM_UP + rounds):
        # A side finds the caches as the one before has left them.
        names = order.sample(list(turns), len(turns))
        took.append({name: turns[name]() for name in names})
    for fit in fits.values():
        fit.end()
    return {name: [row[name] for row in took[WARM_UP:]] for name in turns}


def fit_of(name: str) -> str:
    return f"{name}, Trainer.fit"


def by_hand(name: str) -> str:
    return f"{name}, by hand"


def time_rows(name: str, took: dict[str, list[float]], hand: float, plain: float) -> list[Row]:
    """Return the rows of a network, with its targets."""
    rows = []
    milliseconds = {side: 1e3 * statistics.median(values) for side, values in took.items()}
    for method in METHODS:
        fitted = took[fit_of(method)]
        label = f"{name}, {fit_of(method)}"
        note = f"{milliseconds[fit_of(method)]:.2f} ms a step, {milliseconds[PLAIN]:.2f} plain"
        by = ratio(fitted, took[by_hand(method)])
        rows.append(Row(f"{label} / by hand", by, at_most=hand, note=note))
        rows.append(Row(f"{label} / {PLAIN_FIT}", ratio(fitted, took[PLAIN_FIT]), at_most=plain))
        rows += [
            Row(f"{name}, {side} / {PLAIN}", ratio(took[side], took[PLAIN]))
            for side in (fit_of(method), by_hand(method))
        ]
    for rival in RIVALS:
        what = f"{name}, {rival} / {PLAIN}"
        known = rival in took
        rows.append(
            Row(what, ratio(took[rival], took[PLAIN])) if known else skipped(what, PACKAGES[rival])
        )
    return rows


def peak(make: Callable[[], Callable[[], object]], net: nn.Module) -> float:
    """Return the peak of a run, with what it was made from, in copies of the network."""
    made: list[Callable[[], object]] = []
    # What an earlier side has left in cycles must not be freed on the account of this one.
    gc.collect()
    most = peak_bytes(lambda: made[0](), lambda: made.append(make()))
    return most / sum(p.numel() * p.element_size() for p in net.parameters())


def memory_rows(width: int) -> list[Row]:
    net = network(784, width, width, width, 10)
    # Small batches: what is held is weights.
    batches = [
        {level: tuple(part[:16] for part in batch) for level, batch in pair.items()}
        for pair in pairs(3)
    ]

    def fit(module: LightningModule) -> Callable[[], object]:
        loader = DataLoader(Endless(batches), batch_size=None)
        return lambda: Trainer(max_steps=3, **QUIET).fit(module, loader)

    def loop(side: Any) -> Callable[[], object]:
        return lambda: [side.step(pair["upper"], pair["lower"]) for pair in batches]

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        PLAIN: lambda: loop(Bare(net)),
        PLAIN_FIT: lambda: fit(Plain(net)),
    }
    for name, method in METHODS.items():
        makers[by_hand(name)] = lambda method=method: loop(ByHand(net, method))
        makers[fit_of(name)] = lambda method=method: fit(Ours(net, SAMPLES, method, UPPER, LOWER))
    for name in RIVALS:
        makers[name] = lambda name=name: loop(RIVALS[name](net, SAMPLES, RATES))
    rows = []
    count = sum(p.numel() for p in net.parameters())
    for name, make in makers.items():
        what = f"{count:,} parameters, {name}: peak memory in networks"
        if name in RIVALS and name not in there():
            rows.append(skipped(what, PACKAGES[name]))
        else:
            target = 9.6 if name in map(fit_of, METHODS) else None
            rows.append(Row(what, peak(make, net), at_most=target))
    return rows


def run(size: Size) -> Section:
    rows: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (make, hand, plain) in NETWORKS.items():
            torch.manual_seed(0)
            rounds = ROUNDS * size.steps * (4 if name == "MLP 784-16-10" else 1)
            rows += time_rows(name, times(make(), rounds), hand, plain)
        rows += memory_rows(WIDTH // 4 if size.steps <= QUICK.steps else WIDTH)
    torch.set_num_threads(threads)
    return Section("Steps on mini-batches", rows)
