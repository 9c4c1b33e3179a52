"""The point that the theorem speaks of: which one is kept, and what is proved there."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import PROBLEMS, exact_residuals, groups, make_ivsp, point_of
from places import CONFIGS

from lightning_bilevel import IVSP, BilevelProblem, certify
from lightning_bilevel.modules import SineProblem
from lightning_bilevel.solvers.record import PenaltyInfo
from lightning_bilevel.solvers.theorem import Theorem, begins_block

by_name = {problem.name: problem for problem in PROBLEMS}


def record(omega: float, updated: bool = False) -> PenaltyInfo:
    """A record with that omega, of a small step."""
    return PenaltyInfo(
        upper=0.0,
        lower=0.0,
        inner_iterations=0,
        step=0.5 * omega,
        residual=0.0,
        mu=0.5,
        zeta=0.125,
        gamma=2.0,
        multiplier=omega,
        penalty_updated=updated,
        penalty_updates=0,
        trials=1,
        L=1.0,
        L_start=1.0,
        gamma_next=2.0,
        threshold=0.25,
        step_bound=1.0,
        halvings=0,
        capped=False,
    )


def blocks(end: int) -> list[int]:
    """The first iterations of the blocks: ceil(2^(j/2)), in whole numbers."""
    starts = {math.isqrt(2**j - 1) + 1 for j in range(2 * end.bit_length())}
    return sorted(start for start in starts if start <= end)


def test_blocks_begin_at_the_powers_of_the_square_root_of_two() -> None:
    assert blocks(64) == [1, 2, 3, 4, 6, 8, 12, 16, 23, 32, 46, 64]
    assert [n for n in range(1, 100_000) if begins_block(n)] == blocks(99_999)


@pytest.mark.parametrize("trend", [-1e-3, 0.0, 1e-3], ids=["falling", "level", "rising"])
def test_the_kept_iteration_is_the_best_of_the_end_of_the_second_half(trend: float) -> None:
    """After every n: in the second half, without an update, and of a share of at least 58 %."""
    draw = random.Random(0)
    theorem = Theorem()
    history: list[PenaltyInfo] = []
    exact = 0
    for n in range(1, 2001):
        history.append(record(math.exp(trend * n) * draw.random(), updated=draw.random() < 0.2))
        x, y = torch.full((2,), float(n)), torch.full((3,), -float(n))
        theorem = theorem.keep(x, y, n, history[-1])
        starts = blocks(n)
        # The blocks {1} and {2} are followed by {3}: after 2 iterations only {2} is of that half.
        first = max(starts[-2] if n > 1 else 1, n // 2 + 1)
        assert first >= n // 2 + 1
        share = (n - first + 1) / (n - n // 2)
        assert share >= 2 - math.sqrt(2) - 2 / n
        candidates = [k for k in range(first, n + 1) if not history[k - 1].penalty_updated]
        kept = theorem.best(n)
        if not candidates:
            assert kept is None
            continue
        assert kept is not None
        assert kept.iteration == min(candidates, key=lambda k: history[k - 1].omega)
        assert kept.iterations == n
        assert torch.equal(kept.x, torch.full((2,), float(kept.iteration)))
        assert torch.equal(kept.y, torch.full((3,), -float(kept.iteration)))
        assert kept.multiplier == kept.omega == history[kept.iteration - 1].omega
        if first == n // 2 + 1:
            # What the proof asks for, with weights mu that are all equal here.
            exact += 1
            squares = [history[k - 1].omega ** 2 for k in candidates]
            assert kept.omega**2 <= sum(squares) / len(squares)
    assert exact >= 15


def test_bounds_of_a_small_step_without_an_update() -> None:
    info = record(1.0)
    assert info.omega == 1.0
    assert info.feasibility_bound == 0.25 + 0.125
    assert info.complementarity_bound == (0.25 + 0.125) / 2.0
    assert record(1.0, updated=True).feasibility_bound == math.inf
    assert record(4.0).complementarity_bound == math.inf


@pytest.mark.parametrize("name", ["sine", "ball", "simplex", "flat"])
def test_the_bounds_hold(name: str) -> None:
    problem = by_name[name]
    optimizer, built = make_ivsp(problem)(groups(*problem.at())), problem.build()
    known = 0
    for _ in range(150):
        info = optimizer.step(problem=built)
        if info.feasibility_bound < math.inf:
            known += 1
            if known % 10 == 1:
                point = point_of(optimizer)
                _, feasibility, complementarity = exact_residuals(problem, *point, info.multiplier)
                assert feasibility <= info.feasibility_bound
                assert complementarity <= info.complementarity_bound
    assert known >= 20


class TestProved:
    """The kept point of IVSP."""

    problem = by_name["ball"]

    def run(self, steps: int, **constants: Any) -> tuple[IVSP, list[Any], list[PenaltyInfo]]:
        optimizer = make_ivsp(self.problem, **constants)(groups(*self.problem.at()))
        built = self.problem.build()
        history, points = [], []
        for _ in range(steps):
            history.append(optimizer.step(problem=built))
            points.append(point_of(optimizer))
        return optimizer, points, history

    @pytest.mark.parametrize("units", [(1.0, 1.0), (2.0, 0.5), (0.3, 0.07)], ids=str)
    def test_it_is_the_point_of_its_iteration(self, units: tuple[float, float]) -> None:
        optimizer = make_ivsp(self.problem)(groups(*self.problem.at(), units))
        built = self.problem.build()
        points = []
        history = []
        for n in range(1, 64):
            history.append(optimizer.step(problem=built))
            points.append(point_of(optimizer))
            proved = optimizer.proved
            assert proved is not None
            assert n // 2 < proved.iteration <= proved.iterations == n
            x, y = points[proved.iteration - 1]
            assert torch.equal(proved.x, x)
            assert torch.equal(proved.y, y)
            info = history[proved.iteration - 1]
            assert not info.penalty_updated
            assert proved.omega == info.step / info.mu
            assert proved.multiplier == info.multiplier
            assert proved.feasibility_bound == info.feasibility_bound
        second_half = [info for info in history[63 // 2 :] if not info.penalty_updated]
        assert proved.omega == min(info.omega for info in second_half)

    def test_it_costs_no_evaluation_and_changes_no_path(self) -> None:
        one, points, history = self.run(40)
        two, others, records = self.run(40, keep_proved=False)
        assert [info.calls for info in history] == [info.calls for info in records]
        assert all(torch.equal(a[1], b[1]) for a, b in zip(points, others, strict=True))
        assert two.proved is None
        assert two.run.theorem == Theorem()
        assert one.proved is not None

    def test_the_audit_of_the_paper(self) -> None:
        """Figures that were found by an implementation of their own: k^ = 187 for K = 300."""
        text = Path(CONFIGS / "synthetic" / "ivsp.yaml").read_text()
        constants = yaml.safe_load(text)["model"]["init_args"]["solver"]["init_args"]
        module = SineProblem(n=1000).double()
        problem = module.bilevel_problem({"upper": None, "lower": None})
        optimizer = IVSP(module.parameter_groups(), **constants)
        for _ in range(300):
            info = optimizer.step(problem=problem)
        proved = optimizer.proved
        assert proved is not None
        assert proved.iteration - 1 == 187
        certificate = certify(
            problem, proved.x, proved.y, optimizer.envelope, multiplier=proved.multiplier
        )
        last = certify(problem, *module.point, optimizer.envelope, multiplier=info.multiplier)
        assert certificate.kkt == pytest.approx(6.8e-4, rel=0.01)
        assert last.kkt == pytest.approx(4.1e-4, rel=0.02)
        assert certificate.feasibility == pytest.approx(2.9e-4, rel=0.02)
        assert proved.feasibility_bound == pytest.approx(3.9e-4, rel=0.02)
        assert certificate.complementarity == pytest.approx(4.5e-4, rel=0.01)
        assert proved.complementarity_bound == pytest.approx(8.7e-4, rel=0.01)
        assert str(proved) == (
            "the theorem's point, iteration 188 of 300 (k^ = 187); bounds there: feasibility "
            "3.9e-04, complementarity 8.7e-04"
        )

    def test_it_says_that_a_step_is_not_small(self) -> None:
        optimizer, _, history = self.run(1)
        assert history[0].step > history[0].step_bound
        assert str(optimizer.proved) == (
            "the theorem's point, iteration 1 of 1 (k^ = 0); its step is not small enough for the "
            "theorem's bounds"
        )

    def test_other_data_in_the_second_half_leave_no_such_point(self) -> None:
        """Nothing is proved for a run on two problems; a later half is of one problem again."""
        optimizer, _, _ = self.run(10)
        f, g = self.problem.f, self.problem.g
        other = BilevelProblem(
            lambda x, y: f(x, y) + 0.1 * x.sum(), g, self.problem.upper_set, self.problem.lower_set
        )
        for n in range(11, 20):
            optimizer.step(problem=other)
            assert optimizer.proved is None
            assert optimizer.unproved == (
                "the theorem is about one problem and a run that was not touched, but f, g or the "
                f"point changed after iteration 10 of {n}: give all iterations the same data, or "
                "run as long again"
            )
        optimizer.step(problem=other)
        proved = optimizer.proved
        assert proved is not None
        assert proved.iteration > 10

    def test_a_point_that_was_moved_is_noticed(self) -> None:
        optimizer, _, _ = self.run(10)
        with torch.no_grad():
            optimizer.param_groups[1]["params"][0].mul_(0.9)
        optimizer.step(problem=self.problem.build())
        assert "changed after iteration 10 of 11" in optimizer.unproved
        assert optimizer.proved is None

    def test_a_resumed_run_and_the_same_data_again_are_no_change(self) -> None:
        one, _, _ = self.run(10)
        two = make_ivsp(self.problem)(groups(*point_of(one)))
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        assert two.proved is not None
        for optimizer in (one, two):
            for _ in range(5):
                optimizer.step(problem=self.problem.build())
        assert one.proved is not None
        assert two.proved is not None
        assert two.proved.iteration == one.proved.iteration
        assert torch.equal(two.proved.x, one.proved.x)

    def test_sentences(self) -> None:
        optimizer = make_ivsp(self.problem)(groups(*self.problem.at()))
        assert optimizer.proved is None
        assert optimizer.unproved == (
            "no recent iteration was on all data and left the penalty alone: run longer"
        )
        without, _, _ = self.run(3, keep_proved=False)
        assert (
            without.unproved == "`IVSP(keep_proved=False)` does not keep the point of its theorem"
        )

    def test_iterations_that_all_update_the_penalty(self) -> None:
        """c2 is so large that every step is small, and delta that small that R stays above."""
        optimizer, _, history = self.run(3, c2=1e9, delta=1e-9, mu0=1e-9)
        assert all(info.penalty_updated for info in history)
        assert optimizer.proved is None
        assert "left the penalty alone: run longer" in optimizer.unproved
