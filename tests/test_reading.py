"""A run in plain words: the sentence for what is well, and one for each thing that is off."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, Problem, make_ivsp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from modules import MILD, PAPER, Weighting, weighting_data
from running import trainer
from torch import Tensor

from lightning_bilevel import (
    BOME,
    F2SA,
    IVSP,
    MEHA,
    SLM,
    VPBGD,
    BilevelProblem,
    Certificate,
    CertificateReport,
    Envelope,
    FullBatchDataModule,
    PNGBiO,
    SineProblem,
    solve,
)
from lightning_bilevel.core.problem import Start
from lightning_bilevel.reading import Tally, advice, reading
from lightning_bilevel.solvers.record import PenaltyInfo

GOOD = Certificate(
    stationarity=1.7e-5,
    residuals=[3e-4],
    multipliers=[0.8],
    own_multiplier=True,
    smallest_kkt=2e-4,
    envelope=Envelope(rho=0.5, sigma=1.0, delta=1e-3),
    upper=1.0,
    lower=2.0,
    prox_distance=7e-3,
    tolerance=1e-9,
    qualification="not known",
    theorem="not known: the constraint qualification",
    upper_gradient=0.5,
    lower_gradient=0.02,
    upper_norm=1.0,
    lower_norm=2.0,
    start=Start(upper_gradient=1.0, lower_gradient=3.0),
)
RUN = Tally(iterations=100, trials=110, inner_iterations=300, penalty_updates=3, last_update=57)


def test_the_sentence() -> None:
    assert reading(GOOD, RUN) == (
        "feasible to 3.0e-04; lower level stationary to 0.014 at z, 0.007 from y (bounds 0.1 and "
        "0.051); upper level stationary to 1.7e-05 and complementary to 2.4e-04; the penalty "
        "settled at update 3 (iteration 57 of 100)."
    )
    assert advice(GOOD, RUN) == []


@pytest.mark.parametrize(
    ("certificate", "run", "words"),
    [
        (replace(GOOD, residuals=[-9e-4]), RUN, "feasible; "),
        (GOOD, replace(RUN, penalty_updates=0, last_update=0), "; the penalty never had to grow."),
        (
            GOOD,
            replace(RUN, last_update=81),
            "; the penalty is still moving: update 3 (iteration 81 of 100).",
        ),
        (
            GOOD,
            replace(RUN, last_update=80),
            "; the penalty settled at update 3 (iteration 80 of 100).",
        ),
        (GOOD, Tally(iterations=100), "complementary to 2.4e-04."),
        (GOOD, None, "complementary to 2.4e-04."),
    ],
)
def test_what_the_sentence_depends_on(
    certificate: Certificate, run: Tally | None, words: str
) -> None:
    text = reading(certificate, run)
    assert text.startswith(words) if words.startswith("feasible") else text.endswith(words)


def test_the_sentence_names_the_point() -> None:
    text = reading(replace(GOOD, point="iteration 7", evaluated_on="a batch"), RUN)
    assert text.startswith("point: iteration 7; evaluated on a batch; feasible to ")


def test_the_sentence_says_if_the_theorem_does_not_apply() -> None:
    """It is about methods that strengthen a penalty, so it is said of their runs only."""
    free = replace(GOOD, theorem="does not apply: Y is unbounded")
    ending = "; the theorem does not apply: Y is unbounded."
    assert reading(free, RUN) == reading(GOOD, RUN)[:-1] + ending
    assert reading(free, Tally(iterations=100)) == reading(GOOD, Tally(iterations=100))
    assert reading(free) == reading(GOOD)


@pytest.mark.parametrize(
    ("certificate", "off", "well", "words"),
    [
        (GOOD, {"capped": 6}, {"capped": 5}, "6 of 100 line searches ended at their cap"),
        (
            GOOD,
            {"inner_iterations": 3410},
            {"inner_iterations": 3300},
            "The inner loop takes 31 iterations per evaluation",
        ),
    ],
)
def test_each_piece_of_advice(
    certificate: Certificate, off: dict[str, Any], well: dict[str, Any], words: str
) -> None:
    found = advice(certificate, replace(RUN, **off))
    assert len(found) == 1
    assert found[0].startswith(words)
    assert advice(certificate, replace(RUN, **well)) == []


class TestNotConverged:
    WORDS = (
        "Not converged: the KKT residuals are 0.011 times the largest gradient of f seen, which a "
        "solution has below 0.01. Run longer; "
    )

    @pytest.mark.parametrize(
        "residuals",
        [
            {"stationarity": 0.011},
            {"multipliers": [0.011 / 3e-4]},
            {"stationarity": 0.022, "upper_gradient": 2.0},
        ],
    )
    def test_residuals_of_more_than_a_hundredth_of_the_gradient(
        self, residuals: dict[str, Any]
    ) -> None:
        off = replace(GOOD, **residuals)
        (found,) = advice(off, RUN)
        assert found.startswith(self.WORDS)
        assert reading(off, RUN).startswith(
            "not converged, the residuals are 0.011 times the gradient of f; feasible to "
        )

    def test_less_than_that_is_well(self) -> None:
        assert advice(replace(GOOD, stationarity=9e-3, multipliers=[30.0]), RUN) == []

    def test_without_a_start_there_is_nothing_to_compare_with(self) -> None:
        assert advice(replace(GOOD, stationarity=7.0, start=None), RUN) == []

    def test_no_gradient_at_all(self) -> None:
        still = {"stationarity": 0.0, "multipliers": [0.0], "upper_gradient": 0.0}
        assert advice(replace(GOOD, start=Start(0.0, 3.0), **still), RUN) == []  # type: ignore[arg-type]

    def test_f_without_a_minimum(self) -> None:
        problem = BilevelProblem(
            lambda x, y: -(x**2).sum() + y.sum(), lambda x, y: ((y - x) ** 2).sum() / 2
        )
        told = solve(problem, torch.zeros(1).double(), torch.ones(1).double(), max_steps=60).reading
        assert "if f falls without end, give the levels a set (`Box`)" in told

    @pytest.mark.parametrize("solver", [PNGBiO, VPBGD, BOME, SLM, F2SA, MEHA])
    def test_every_method_that_stops_early(self, solver: Any) -> None:
        problem = BilevelProblem(f, lambda x, y: ((y - x) ** 2).sum() / 2)
        start = torch.full((1,), 3.0).double()
        found = solve(
            problem, start, start, solver, 50, envelope=Envelope(rho=0.5, sigma=0.0, delta=1e-3)
        )
        assert "not converged" in found.reading


def f(x: Tensor, y: Tensor) -> Tensor:
    """With y = x its minimum is at 0.5, and without a lower level at x = 1, y = 0."""
    return ((x - 1) ** 2).sum() + (y**2).sum()


class TestNotEnforced:
    # With rho = 0.5 the proximal step is as long as the gradient is half: here 0.5, where 1 + |y|
    # is 3.
    SLACK = replace(
        GOOD,
        residuals=[-180.0],
        multipliers=[0.0],
        lower_gradient=1.0,
        envelope=Envelope(rho=0.5, sigma=1.0, delta=200.0),
    )
    WORDS = (
        "The lower level is not enforced: delta and rho allow a gradient of g of 40 at z, and "
        "those seen at y are 3 at the start and 1 at the end. "
    )

    def test_delta_too_large(self) -> None:
        # 0.5 (1 - 0.5) / 2 (1/10)^2
        (found,) = advice(self.SLACK, RUN)
        assert found.startswith(f"{self.WORDS}Make delta smaller, at most 0.001, or scale g up; ")
        assert (
            "(bounds 40 and 20); but not enforced, its gradient is 1 where R is slack; "
            in reading(self.SLACK)
        )

    def test_rho_too_small(self) -> None:
        small = Envelope(rho=1e-9, sigma=0.0, delta=8e-7)
        (found,) = advice(replace(self.SLACK, residuals=[-7e-7], envelope=small), RUN)
        assert found.startswith(self.WORDS)
        assert "smooth it, rescale its variables (`lower_unit`) or give `rho`" in found

    @pytest.mark.parametrize(
        "well",
        [
            {"residuals": [-80.0]},  # the constraint is nearly active
            {"lower_gradient": 0.7},  # the gradient has fallen
            {"start": None},  # there is nothing to compare with
            # A start that solves g was left by a short step.
            {"start": Start(1.0, 0.0), "lower_gradient": 0.05},
            {"lower_gradient": 0.0, "start": Start(1.0, 0.0)},
            # The steps are short, but delta allows long ones: it is not rho.
            {"envelope": Envelope(rho=1e-9, sigma=1.0, delta=200.0)},
        ],
    )
    def test_no_false_alarm(self, well: dict[str, Any]) -> None:
        assert advice(replace(self.SLACK, **well), RUN) == []
        assert "not enforced" not in reading(replace(self.SLACK, **well), RUN)

    @pytest.mark.parametrize("scale", [1e-6, 1e-4])
    @pytest.mark.parametrize("start", [(0.0, 0.0), (2.0, -1.0)])
    def test_g_scaled_down(self, start: tuple[float, float], scale: float) -> None:
        problem = BilevelProblem(f, lambda x, y: scale * ((y - x) ** 2).sum() / 2)
        x0, y0 = (torch.tensor([v], dtype=torch.float64) for v in start)
        wrong = solve(problem, x0, y0, max_steps=100)
        assert wrong.x.item() == pytest.approx(1.0, abs=1e-2)
        assert "The lower level is not enforced" in wrong.reading
        # What it advises helps.
        delta = float(wrong.reading.split("at most ")[1].split(",")[0])
        right = solve(problem, x0, y0, partial(IVSP, delta=delta), max_steps=300)
        assert right.x.item() == pytest.approx(0.5, abs=0.1)
        assert "not enforced" not in right.reading

    def test_g_scaled_down_below_the_tolerance_of_the_certificate(self) -> None:
        zero = torch.zeros(1, dtype=torch.float64)
        told = solve(
            BilevelProblem(f, lambda x, y: 1e-12 * ((y - x) ** 2).sum() / 2),
            zero,
            zero,
            max_steps=100,
        ).reading
        assert "Make delta smaller, at most 9e-16" in told

    def test_a_start_on_a_kink(self) -> None:
        zero = torch.zeros(1, dtype=torch.float64)
        told = solve(
            BilevelProblem(f, lambda x, y: (y - x).abs().sum()), zero, zero, max_steps=60
        ).reading
        assert "where g has kinks" in told

    @pytest.mark.filterwarnings("ignore:IVSP does not move any more")
    def test_curvatures_that_differ(self) -> None:
        zero, c = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 1e8], dtype=torch.float64)
        told = solve(
            BilevelProblem(f, lambda x, y: (c * (y - x) ** 2).sum() / 2), zero, zero, max_steps=500
        ).reading
        assert "Not converged" in told

    @pytest.mark.filterwarnings(
        "ignore:IVSP does not move any more", "ignore:The (upper|lower)-level start lies outside"
    )
    @pytest.mark.parametrize("point", ["start", "solution"])
    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_healthy_runs_are_not_told(self, problem: Problem, point: str) -> None:
        # In turns: each problem and each point meets both.
        constants = (PROBLEMS.index(problem) + (point == "start")) % 2
        make = make_ivsp(problem) if constants else IVSP
        told = solve(problem.build(), *problem.at(point), make, 150).reading
        assert "not enforced" not in told
        assert "not converged" not in told


class TestTally:
    def test_counts_are_the_sums_of_the_history(self) -> None:
        problem = PROBLEMS[0]
        solution = solve(problem.build(), *problem.at(), make_ivsp(problem), 200)
        history: list[Any] = solution.history
        tally = solution.tally
        assert tally.iterations == 200
        assert tally.trials == sum(info.trials for info in history)
        assert tally.inner_iterations == sum(info.inner_iterations for info in history)
        assert tally.calls.passes == sum(info.calls.passes for info in history)
        updates = [info.iteration for info in history if info.penalty_updated]
        assert (tally.penalty_updates, tally.last_update) == (len(updates), updates[-1])
        assert tally.capped == 0

    def test_caps_are_counted(self) -> None:
        problem = PROBLEMS[0]
        x, y = problem.at()
        capped = solve(
            problem.build(), x, y, make_ivsp(problem, L_init=1e-3, L_max=1e-3, L_min=1e-4), 20
        )
        at_cap = [
            info for info in capped.history if isinstance(info, PenaltyInfo) and info.L >= 1e-3
        ]
        assert capped.tally.capped == len(at_cap) > 0

    def test_other_methods_have_no_penalty(self) -> None:
        problem = PROBLEMS[0]
        solution = solve(
            problem.build(), *problem.at(), partial(BOME, T=2), 10, envelope=problem.envelope
        )
        assert solution.tally.penalty_updates is None
        assert solution.tally.inner_iterations == 20
        assert "penalty" not in solution.reading


def test_solution_reads_itself() -> None:
    problem = PROBLEMS[0]
    solution = solve(problem.build(), *problem.at(), make_ivsp(problem), problem.steps)
    assert solution.certificate is not None
    assert solution.reading.startswith(reading(solution.certificate, solution.tally))
    short = solve(problem.build(), *problem.at(), make_ivsp(problem, gamma0=1e3, c2=1e6), 30)
    assert "the penalty is still moving" in short.reading
    blind = solve(problem.build(), *problem.at(), BOME, 2)
    assert blind.reading.startswith("there is no certificate")


class TestReport:
    def test_json_in_the_folder_of_the_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report, module = CertificateReport(), Weighting()
        keep = ModelCheckpoint(tmp_path / "kept")
        logger = TensorBoardLogger(tmp_path)
        options = {"enable_checkpointing": True, "logger": logger, "log_every_n_steps": 10}
        run = trainer(tmp_path, max_epochs=2, callbacks=[report, keep], **options)
        run.fit(module, datamodule=weighting_data())
        saved = json.loads((Path(logger.log_dir) / "certificate.json").read_text())
        assert report.certificate is not None
        assert saved["certificate"] == report.certificate.as_dict() == module.certify().as_dict()
        assert Tally.from_dict(saved["counts"]) == report.tally
        assert saved["reading"] == reading(report.certificate, report.tally)
        assert saved["advice"] == advice(report.certificate, report.tally)
        assert saved["iteration"] == 20
        printed = capsys.readouterr().out
        assert saved["reading"] in " ".join(printed.split())
        assert len(list(tmp_path.rglob("certificate.json"))) == 1

    def test_the_theorem_s_point_has_a_line_and_an_entry(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report, module = CertificateReport(), SineProblem(n=1000, solver=PAPER)
        run = trainer(tmp_path, max_steps=200, precision="64-true", callbacks=[report])
        run.fit(module, datamodule=FullBatchDataModule())
        saved = json.loads((tmp_path / "certificate.json").read_text())
        proved = module.proved
        assert proved is not None
        assert report.proved is not None
        assert report.proved == module.certify(proved=True)
        assert saved["proved"] == report.proved.as_dict()
        assert report.proved.point == str(proved)
        assert report.proved.feasibility <= proved.feasibility_bound
        assert report.proved.complementarity <= proved.complementarity_bound
        assert report.certificate is not None
        assert report.certificate.point == "the last iterate, iteration 200"
        assert reading(report.proved) in " ".join(capsys.readouterr().out.split())

    def test_a_solver_without_such_a_point_has_no_entry(self, tmp_path: Path) -> None:
        envelope = Envelope(rho=0.2, sigma=1.0, delta=0.01)
        report = CertificateReport()
        run = trainer(tmp_path, max_steps=3, callbacks=[report])
        run.fit(Weighting(solver=BOME, envelope=envelope), datamodule=weighting_data())
        assert json.loads((tmp_path / "certificate.json").read_text())["proved"] is None
        assert report.proved is None

    def test_a_trial_run_leaves_nothing(self, tmp_path: Path) -> None:
        trainer(tmp_path, fast_dev_run=3, callbacks=[CertificateReport()]).fit(
            Weighting(), datamodule=weighting_data()
        )
        assert list(tmp_path.iterdir()) == []

    def test_advice_is_printed_and_everything_is_published(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = Weighting(solver=partial(MILD, mu0=1e-4, delta=1e-6, c2=1e6))
        report = CertificateReport()
        run = trainer(tmp_path, max_steps=30, callbacks=[report])
        run.fit(module, datamodule=weighting_data())
        assert report.certificate is not None
        lines = advice(report.certificate, report.tally)
        assert lines
        printed = " ".join(capsys.readouterr().out.split())
        for line in lines:
            assert f"Advice: {line}" in printed
        expected = report.certificate.as_dict()
        metrics = {
            name.removeprefix("bilevel/"): float(value)
            for name, value in run.callback_metrics.items()
        }
        assert metrics["kkt_residual"] == pytest.approx(report.certificate.kkt)
        assert metrics["violation"] == pytest.approx(expected["feasibility"])
        assert metrics["prox_distance"] == pytest.approx(expected["prox_distance"])
        assert metrics["kkt_multiplier"] == pytest.approx(expected["multiplier"])

    def test_without_an_envelope_the_counts_are_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trainer(tmp_path, max_steps=3, callbacks=[CertificateReport()]).fit(
            Weighting(solver=BOME), datamodule=weighting_data()
        )
        printed = capsys.readouterr().out
        assert "outer iterations   3\n" in printed
        assert "KKT" not in printed


def test_ivsp_is_what_is_read() -> None:
    """The counts know IVSP by its record; a subclass of it is read likewise."""
    problem = PROBLEMS[0]
    kind = type("Mine", (IVSP,), {})
    assert solve(problem.build(), *problem.at(), kind, 2).tally.penalty_updates is not None
