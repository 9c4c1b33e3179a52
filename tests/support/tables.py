"""The table of solvers: each entry is held to the contract of all solvers.

An entry gives constants with which the method gets somewhere, and does not diverge, on every
problem of `helpers.PROBLEMS` and of `parallel.problem`. IVSP stands here twice: as in the paper
with all constants given, and with what it chooses itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, Problem, paper_constants

from lightning_bilevel import (
    AID,
    BOME,
    DARTS,
    F2BA,
    F2SA,
    ITD,
    IVSP,
    MEHA,
    SLM,
    SOBA,
    VPBGD,
    BilevelOptimizer,
    HJFBiO,
    LuMei,
    PBGDFree,
    PNGBiO,
    Solution,
    SolverCallable,
    solve,
)


@dataclass(frozen=True, eq=False)
class Solver:
    """A method with constants.

    Attributes:
        kind: Its class.
        constants: What it is made with, as a config would give it.
        passes: The passes of an iteration, as the docstring of the class states them, where they do
            not vary.
        kept: The inner variable in the state of its run.
        also: Other tensors there, which need not be in the lower set.
        needs_x: Whether it refuses an f that does not depend on x.
        given: What a problem of the table gives besides.
        steps: What it needs for a KKT point of every problem of the table, if that is not the
            problem's own number.
    """

    name: str
    kind: type[BilevelOptimizer]
    constants: dict[str, Any] = field(default_factory=dict)
    passes: int | None = None
    kept: str | None = None
    given: Callable[[Problem], dict[str, Any]] = lambda problem: {}
    steps: int = 0
    also: tuple[str, ...] = ()
    needs_x: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def is_ivsp(self) -> bool:
        return self.kind is IVSP

    def make(self, problem: Problem | None = None, **more: Any) -> SolverCallable:
        """What makes it: for a problem of the table, or for any."""
        given = {} if problem is None else self.given(problem)
        return partial(self.kind, **{**self.constants, **given, **more})


PAPER = {
    "mu0": 0.02,
    "block": 20,
    "gamma0": 10.0,
    "zeta_bar": 9.0,
    "rho": 0.05,
    "sigma": 1.0,
    "L_init": 1.0,
    "L_xy": 1.0,
    "L_yy": 1.0,
}
LONG = {"alpha": 0.02, "beta": 0.02, "eta": 0.02, "gamma": 0.5}

SOLVERS = {
    solver.name: solver
    for solver in (
        Solver("paper", IVSP, PAPER, kept="z", given=paper_constants),
        Solver(
            "own",
            IVSP,
            kept="z",
            given=lambda problem: {"delta": problem.envelope.delta},
            steps=200,
        ),
        Solver("meha", MEHA, LONG, passes=6, kept="theta"),
        Solver("pngbio", PNGBiO, LONG, passes=6, kept="theta"),
        Solver(
            "slm",
            SLM,
            {"eta": 0.01, "alpha": 0.01, "gamma": 0.05, "tau": 0.1, "T": 3, "restart": False},
            3 + 3,
            "z",
        ),
        Solver("f2sa", F2SA, {"alpha": 0.01, "gamma": 0.02, "T": 2}, 3 * 2 + 3, kept="z"),
        Solver(
            "vpbgd",
            VPBGD,
            {"alpha": 0.005, "beta": 0.05, "T": 3, "restart": False},
            3 + 3,
            kept="w",
        ),
        Solver("bome", BOME, {"xi": 0.02, "alpha": 0.05, "T": 3}, 3 + 3),
        # The damping is for the nonconvex problems and for the one with a plane of minimisers.
        Solver(
            "aid",
            AID,
            {"alpha": 0.02, "beta": 0.1, "T": 3, "N": 3, "damping": 2.0},
            also=("v",),
        ),
        Solver(
            "aid-fixed-point",
            AID,
            {
                "alpha": 0.02,
                "beta": 0.1,
                "T": 3,
                "N": 2,
                "linear_solver": "fixed_point",
                "damping": 2.0,
            },
            3 + 1 + 2 * 3,
            also=("v",),
        ),
        Solver("itd", ITD, {"alpha": 0.02, "beta": 0.1, "T": 4, "K": 3}, 4 + 1 + 2 * 3),
        Solver("soba", SOBA, {"alpha": 0.02, "beta": 0.1, "damping": 2.0}, 3, also=("v",)),
        Solver("darts", DARTS, {"alpha": 0.02, "beta": 0.1, "xi": 0.1}, 5),
        Solver(
            "f2ba",
            F2BA,
            {"eta": 0.05, "tau": 0.1, "sigma": 0.3, "K": 3},
            3 * 3 + 3,
            kept="z",
        ),
        Solver(
            "hjfbio", HJFBiO, {"gamma": 0.04, "lam": 0.15, "tau": 0.03, "r": 50.0}, 4, also=("v",)
        ),
        Solver(
            "pbgd_free",
            PBGDFree,
            {"eta": 0.05, "alpha": 0.1, "K": 2},
            2 * 2 + 1,
            needs_x=True,
        ),
        # Two inner steps are too few for its accuracy, and enough for a quick test.
        Solver(
            "lumei",
            LuMei,
            {"eps": 1.0, "L_f": 1.0, "L_g": 1.0, "D": 1.0, "max_inner": 2},
            kept="z",
            also=("z_first",),
        ),
    )
}

_CAPPED = pytest.mark.filterwarnings("ignore:LuMei ended outer iteration")


def each(solvers: Iterable[Solver]) -> pytest.MarkDecorator:
    """Parametrize by solvers; one that is capped on purpose may say so."""
    return pytest.mark.parametrize(
        "solver",
        [
            pytest.param(solver, marks=_CAPPED if solver.kind is LuMei else (), id=solver.name)
            for solver in solvers
        ],
    )


every_solver = each(SOLVERS.values())
# Those that run where f does not depend on x, as in the weighting of samples.
every_weighting_solver = each(solver for solver in SOLVERS.values() if not solver.needs_x)
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


# IVSP meets every problem, the others one with active bounds, one on a simplex and one with a
# nonconvex lower level.
every_pair = pytest.mark.parametrize(
    ("solver", "problem"),
    [
        pytest.param(
            solver,
            problem,
            marks=_CAPPED if solver.kind is LuMei else (),
            id=f"{solver.name}-{problem.name}",
        )
        for solver in SOLVERS.values()
        for problem in PROBLEMS
        if solver.is_ivsp or problem.name in ("active_box", "simplex", "sine")
    ],
)


def place_of(solver: Solver, problem: Problem) -> int:
    """A number by which settings alternate: every solver and every problem meets all."""
    return list(SOLVERS.values()).index(solver) + PROBLEMS.index(problem)


def dtype_of(solver: Solver, problem: Problem) -> torch.dtype:
    return (torch.float32, torch.float64)[place_of(solver, problem) % 2]


@cache
def solved(solver: Solver, problem: Problem) -> Solution:
    """The run of a solver on a problem, made once."""
    return solve(
        problem.build(), *problem.at(), solver.make(problem), solver.steps or problem.steps
    )
