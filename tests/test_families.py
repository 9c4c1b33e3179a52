"""The problems that IVSP's own choices are judged by, and how the judgement is counted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import defaults, families, held_out, networks, outcomes
from benchmarks.families import Member
from benchmarks.outcomes import Outcome
from benchmarks.random_problems import Drawn
from lightning_bilevel import Ball, BilevelProblem, Box, DigitsCleaning, Free, Product, Simplex

HALVES = {"families": families.MEMBERS, "held_out": held_out.MEMBERS}
ALL = [*families.MEMBERS, *held_out.MEMBERS]


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """The benchmark silences Lightning, for its own process."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


def label(member: Member) -> str:
    return f"{member.family.__name__}-{member.size}-{member.seed}"


def test_the_halves_have_ten_families_of_three_and_share_five_families_and_no_member() -> None:
    of = {half: {member.family for member in members} for half, members in HALVES.items()}
    assert [len(found) for found in of.values()] == [10, 10]
    assert len(of["families"] & of["held_out"]) == 5
    for members in HALVES.values():
        assert all(
            sum(other.family is member.family for other in members) == 3 for member in members
        )
        sizes = [(member.family, member.size) for member in members]
        sets = {type(part) for member in members for part in (member.upper_set, member.lower_set)}
        assert len(set(sizes)) == 30
        assert sets == {Free, Box, Ball, Simplex, Product}
        starts = {member.start for member in members}
        assert {0.0, 1.0} < starts
    seeds = [member.seed for member in ALL]
    assert len(set(seeds)) == len(ALL)
    assert len({(member.family, member.size) for member in ALL}) == len(ALL)
    assert len({member.draw().name for member in ALL}) == len(ALL)


@pytest.mark.parametrize("member", ALL, ids=label)
def test_a_member_is_always_the_same_and_as_declared(member: Member) -> None:
    drawn, again = member.draw(), member.draw()
    for one, other, within in (
        (drawn.x, again.x, member.upper_set),
        (drawn.y, again.y, member.lower_set),
    ):
        assert torch.equal(one, other)
        assert one.dtype == torch.float64
        assert 2 <= one.numel() <= 3000
        torch.testing.assert_close(within.project(one), one)
    assert drawn.problem.upper_set is member.upper_set
    assert drawn.problem.lower_set is member.lower_set
    assert drawn.delta == 1e-3 * member.lower_scale
    assert all(1e-3 <= scale <= 1e3 for scale in (member.upper_scale, member.lower_scale))

    # The library refuses values and gradients that are not finite.
    upper, level = drawn.problem.upper(drawn.x, drawn.y), drawn.problem.at(drawn.x)
    assert upper.value == again.problem.upper(again.x, again.y).value
    assert 0.1 < upper.value / member.upper_scale < 100.0
    assert 0.1 < level.value(drawn.y) / member.lower_scale < 1e6
    assert math.hypot(upper.grad_x.norm(), upper.grad_y.norm()) > 0.0
    assert member.lower_set.normal_cone_distance(drawn.y, level.gradient(drawn.y)) > 0.0


def test_f_and_g_have_the_scales_of_the_member() -> None:
    plain = Member(families.valleys, 3, 1.0, 1.0, Free(), Free(), 7, 2.0)
    scaled = Member(families.valleys, 3, 1e2, 1e-2, Free(), Free(), 7, 2.0)
    one, other = plain.draw(), scaled.draw()
    upper = other.problem.upper(one.x, one.y).value
    assert upper == pytest.approx(1e2 * one.problem.upper(one.x, one.y).value)
    lower = other.problem.at(one.x).value(one.y)
    assert lower == pytest.approx(1e-2 * one.problem.at(one.x).value(one.y))
    assert torch.equal(one.y, torch.tensor([-2.4, 2.0, -2.4], dtype=torch.float32).double())


def test_before_has_each_problem_once() -> None:
    before = outcomes.read()
    for part, problems in defaults.PROBLEMS.items():
        names = [drawn.name for drawn in problems()]
        assert [outcome.name for outcome in before[part]] == names


def test_passes_are_exact_to_a_tenth() -> None:
    looks = list(outcomes.checks(2000))
    assert looks[:3] == [10, 20, 30]
    assert looks[-1] == 2000
    assert all(later - look <= max(10, look / 10) for look, later in pairwise(looks))
    assert list(outcomes.checks(25)) == [10, 20, 25]


def quadratic(lower: Any) -> Drawn:
    problem = BilevelProblem(lambda x, y: ((x - 1) ** 2 + (y - 2) ** 2).sum(), lower)
    start = torch.zeros(2, dtype=torch.float64)
    return Drawn("two", problem, start, start, 1e-3)


def test_an_outcome_says_what_the_run_did() -> None:
    outcome, words = outcomes.solve(quadratic(lambda x, y: 1 + ((y - x - 1) ** 2).sum()))
    assert outcome.solved
    assert outcome.relative <= 1e-2
    assert outcome.iterations % 10 == 0
    assert outcome.passes > 4 * outcome.iterations
    assert outcome.lower < 0.1
    assert outcome.worst == 1.0
    assert (outcome.ending, words) == ("", "")
    short, words = outcomes.solve(
        quadratic(lambda x, y: 1 + ((y - 100 * x - 1) ** 2).sum()), steps=1
    )
    assert not short.solved
    assert (short.iterations, short.ending) == (1, "")


def test_an_outcome_names_the_error_that_ended_the_run() -> None:
    calls = count()

    def lower(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 1 + ((y - x - 1) ** 2).sum() * (math.nan if next(calls) > 60 else 1.0)

    outcome, words = outcomes.solve(quadratic(lower))
    assert (outcome.solved, outcome.relative) == (False, math.inf)
    assert outcome.ending == "NonFiniteError"
    assert words.startswith("stopped: ")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    parts = {
        "families": [Outcome("a; b, c", 1e-3, 20, 300, 0.1, 1.5)],
        "held_out": [Outcome("d", math.inf, 0, 0, 1.0, 1.0, "InnerLoopError")],
    }
    outcomes.write(tmp_path / "x.csv", parts)
    assert outcomes.read(tmp_path / "x.csv") == parts


def test_the_summary_compares_where_both_have_solved_it() -> None:
    before = [
        Outcome("a", 1e-3, 20, 100, 0.1, 1.0),
        Outcome("b", 1e-3, 20, 400, 0.1, 1.0),
        Outcome("c", 1.0, 20, 1, 0.1, 1.0),
    ]
    now = [
        Outcome("a", 1e-3, 20, 50, 0.1, 3.0),
        Outcome("b", 1e-3, 20, 100, 2.0, 1.0),
        Outcome("c", 1e-2, 20, 7, 0.1, 1.0),
        Outcome("d", 2e-2, 20, 7, 9.0, 1.0),
    ]
    assert outcomes.summary("all", now, before) == (
        "all: 3 of 4 solved, 1 of them with y farther from stationary than at the start; worst f / "
        "start 3.00; before 2 of 3; median passes of the 2 solved by both 75, before 250, median "
        "ratio 0.38"
    )
    assert "before" not in outcomes.summary("all", now)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--families"], [["families"]]),
        (["--random", "--held-out"], [["random", "held_out"]]),
        (["--networks", "--seconds", "3"], [[], "networks 3.0"]),
        (["--mnist"], [[], "mnist"]),
        (["--tasks", "digits"], ["digits", []]),
    ],
)
def test_what_is_named_is_run(
    arguments: list[str], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(defaults, "run", lambda name, seconds, constants: ran.append(name))
    monkeypatch.setattr(defaults, "run_problems", lambda parts, out: ran.append(parts))
    monkeypatch.setattr(networks, "run_networks", lambda seconds: ran.append(f"networks {seconds}"))
    monkeypatch.setattr(networks, "run_mnist", lambda: ran.append("mnist"))
    defaults.main(arguments)
    assert ran == expected
    ran.clear()
    defaults.main([])
    assert [entry for entry in ran if not isinstance(entry, str)] == [list(defaults.PROBLEMS)]
    assert {"networks 60.0", "mnist", *defaults.TASKS} <= {str(entry) for entry in ran}


def test_problems_are_run_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = Member(families.deficient, 2, 1.0, 1.0, Free(), Free(), 190)
    monkeypatch.setitem(defaults.PROBLEMS, "families", lambda: [easy.draw()])
    defaults.run_problems(["families"], tmp_path / "now.csv")
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("solved deficient")
    assert "(before " in line
    assert summary.startswith("families: 1 of 1 solved")
    [outcome] = outcomes.read(tmp_path / "now.csv")["families"]
    assert outcome.name == easy.draw().name


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_network_is_cleaned_for_a_time(name: str) -> None:
    data = DigitsCleaning(60, 60)
    data.setup()
    words = networks.clean(data, name, 0.2)
    assert words.startswith("KKT ")
    assert "passes" in words
    kinds = {type(layer).__name__ for layer in networks.network(name, 64)}
    expected = {"ReLU": {"ReLU"}, "tanh": {"Tanh"}, "BatchNorm": {"BatchNorm1d", "ReLU"}}[name]
    assert kinds == {"Flatten", "Linear"} | expected
