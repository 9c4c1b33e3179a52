"""A method's memory against its inner steps, and IVSP's in multiples of the parameters.

Counted are the bytes that torch's allocator hands out while an iteration runs, as its profiler
records them: the data and what was there before are not part of it, and neither does it depend on
what else the process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.results import Curve, Row, Section, installed, skipped
from benchmarks.tasks import Size, Task, cleaning, solver
from lightning_bilevel import ITD, BilevelOptimizer, BilevelProblem, Box

STEPS = (5, 10, 20, 40)
DIFFERENTIATED = "ITD, all steps differentiated"


def peak_bytes(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> int:
    """Return the most that was allocated at once while the work was done.

    What was allocated before does not count, but for what the preparation left.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        prepare()
        with record_function("the work"):
            work()
    events = recorded.profiler.kineto_results.events()
    began = next(event.start_ns() for event in events if event.name() == "the work")
    held = peak = 0
    for event in sorted(
        (event for event in events if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    ):
        held += event.nbytes()
        if event.start_ns() >= began:
            peak = max(peak, held)
    return peak


def ours(size: Size, name: str, steps: int) -> Callable[[], object]:
    """Return an iteration with that many inner steps."""
    method, problem = cleaning(size, chosen=solver(f"mnist/{name}", T=steps)).alone()
    method.step(problem=problem)
    return lambda: method.step(problem=problem)


def ivsp(size: Size, steps: int) -> Callable[[], object]:
    """Return Moreau evaluations of `steps` inner steps: the accuracy is not reached, the cap is."""
    from lightning_bilevel.core.errors import InnerLoopError
    from lightning_bilevel.core.moreau import Envelope, evaluate_gap
    from lightning_bilevel.core.prox import inexact_prox

    task = cleaning(size)
    _, problem = task.alone()
    x = torch.zeros(len(task.data.lower[0]))
    y = torch.cat([p.detach().reshape(-1) for p in task.build().classifier.parameters()])
    envelope, lower = Envelope(rho=0.05, sigma=1.0, delta=1e-3), problem.at(x)

    def work() -> None:
        try:
            inexact_prox(
                lower, y, y + 1.0, 1e-300, envelope, problem.lower_set, L_yy=1.0, max_inner=steps
            )
        except InnerLoopError:
            evaluate_gap(lower, y, y + 1.0, envelope)

    return work


def differentiated(size: Size, steps: int) -> Callable[[], object]:
    """Return an iteration of ITD that differentiates that many steps."""
    chosen = partial(ITD, alpha=1.0, beta=0.1, T=steps)
    method, problem = cleaning(size, chosen=chosen).alone()
    method.step(problem=problem)
    return lambda: method.step(problem=problem)


def lower_vector(size: Size) -> float:
    """Return the MiB of one vector y of the task."""
    module = cleaning(size).build()
    return sum(p.numel() * p.element_size() for p in module.classifier.parameters()) / 2**20


def vectors_per_step(curve: Curve, size: Size) -> float:
    """Return by how many vectors y the peak grows with each differentiated step."""
    return (curve.ys[-1] - curve.ys[0]) / (curve.xs[-1] - curve.xs[0]) / lower_vector(size)


def unrolled(task: Task, library: str, steps: int) -> Callable[[], object]:
    """Return the hypergradient of f after that many differentiated steps on g."""
    module, (images, labels), lower = task.build(), task.data.upper[:2], task.data.lower
    x = torch.zeros(len(lower[0]), requires_grad=True)

    def g(network: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return (x.sigmoid() * cross_entropy(network(lower[0]), lower[1], reduction="none")).mean()

    def by_higher() -> None:
        import higher

        optimizer = torch.optim.SGD(module.classifier.parameters(), lr=0.1)
        with higher.innerloop_ctx(module.classifier, optimizer) as (network, differentiable):
            for _ in range(steps):
                differentiable.step(g(network))
            torch.autograd.grad(cross_entropy(network(images), labels), x)

    def by_torchopt() -> None:
        import torchopt

        optimizer = torchopt.MetaSGD(module.classifier, lr=0.1)
        start = torchopt.extract_state_dict(module.classifier, by="reference")
        for _ in range(steps):
            optimizer.step(g(module.classifier))
        torch.autograd.grad(cross_entropy(module.classifier(images), labels), x)
        torchopt.recover_state_dict(module.classifier, start)

    return by_higher if library == "higher" else by_torchopt


def growth(curve: Curve) -> float:
    return curve.ys[-1] / curve.ys[0]


def curves(size: Size) -> Iterator[tuple[Curve, str | None]]:
    """The peak in MiB against the inner steps, and the package of a rival."""

    def measured(name: str, make: Callable[[int], Callable[[], object]]) -> Curve:
        return Curve(
            name,
            [float(steps) for steps in STEPS],
            [peak_bytes(make(steps)) / 2**20 for steps in STEPS],
        )

    yield measured("IVSP", lambda steps: ivsp(size, steps)), None
    for name, label in (("vpbgd", "V-PBGD"), ("f2sa", "F2SA")):
        yield measured(label, lambda steps, name=name: ours(size, name, steps)), None
    yield measured(DIFFERENTIATED, lambda steps: differentiated(size, steps)), None
    task = cleaning(size)
    for library in ("higher", "torchopt"):
        if installed(library) is None:
            yield Curve(library, [], []), library
        else:
            yield (
                measured(
                    f"unrolled, {library}",
                    lambda steps, library=library: unrolled(task, library, steps),
                ),
                library,
            )


def vectors(n: int, keep_proved: bool = True) -> float:
    """Return the peak of an IVSP iteration in multiples of the vector (x, y).

    All that it keeps counts, the parameters included. The points that are kept for the theorem are
    made two others than the current one, which is the most that there can be.
    """
    problem = BilevelProblem(
        upper=lambda x, y: ((x - 2) ** 2).sum() + ((y - 4) ** 2).sum(),
        lower=lambda x, y: torch.sin(x + y - 2).sum(),
        upper_set=Box(-100, 100),
        lower_set=Box(-100, 100),
    )
    made: list[BilevelOptimizer] = []

    def first_iterations() -> None:
        x, y = (nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (1, n))
        chosen = solver(
            "synthetic/ivsp",
            L_xy=float(n) ** 0.5,
            fixed_L=float(n),
            c2=1e-30,  # no update of the penalty: an iteration with one is not kept
            keep_proved=keep_proved,
        )
        made.append(chosen([{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}]))
        for _ in range(9):
            made[0].step(problem=problem)
        if keep_proved:
            # Both blocks hold a point, and the next step is not better.
            run = made[0].run
            best = replace(run.theorem.now, omega=0.0)
            made[0].run = replace(run, theorem=replace(run.theorem, now=best))
        made[0].step(problem=problem)

    return peak_bytes(lambda: made[0].step(problem=problem), first_iterations) / (8 * (n + 1))


def run(size: Size) -> Section:
    rows, drawn = [], []
    for curve, package in curves(size):
        what = f"{curve.name}: peak with {STEPS[-1]} inner steps / with {STEPS[0]}"
        if not curve.xs:
            rows.append(skipped(f"unrolled, {what}", curve.name))
            continue
        drawn.append(curve)
        note = f"{curve.ys[0]:.3g} to {curve.ys[-1]:.3g} MiB beyond the data"
        bounded = package is None and curve.name != DIFFERENTIATED
        rows.append(Row(what, growth(curve), at_most=1.05 if bounded else None, note=note))
        if package or curve.name == DIFFERENTIATED:
            # ITD keeps a vector y for each step; a graph of all steps keeps each step's graph.
            what = f"{curve.name}: vectors y per inner step"
            most = 1.05 if curve.name == DIFFERENTIATED else None
            rows.append(Row(what, vectors_per_step(curve, size), at_most=most))
    note = "the synthetic problem; the four that f and g themselves need are included"
    rows.append(
        Row(
            "IVSP: peak in parameter vectors",
            vectors(size.most_coordinates // 10),
            at_most=14.0,
            note=f"{note}, and the two points that are kept for the theorem",
        )
    )
    rows.append(
        Row(
            "IVSP(keep_proved=False): the same",
            vectors(size.most_coordinates // 10, keep_proved=False),
            at_most=12.0,
            note=note,
        )
    )
    return Section("Memory", rows, drawn)
