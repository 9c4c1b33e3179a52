"""The monitors: true for every solver, without effect on the run, and resumed with it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clocks import Clock
from helpers import Problem, exact_residuals
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_bilevel.callbacks.tensorboard import layout
from modules import PAPER, Weighting, samples, weighting_data
from records import Recorder, same
from running import events, same_parameters
from running import trainer as quiet_trainer
from tables import SOLVERS, Solver, every_weighting_solver
from torch import Tensor
from torch.func import functional_call

from lightning_bilevel import (
    BOME,
    F2BA,
    F2SA,
    IVSP,
    SLM,
    VPBGD,
    BilevelProgressBar,
    Box,
    CertificateReport,
    ConvergencePlot,
    Envelope,
    FullBatchDataModule,
    KKTMonitor,
    LuMei,
    MoreauGapMonitor,
    OptimizationBudget,
    PenaltyMonitor,
    PNGBiO,
    SineProblem,
    SolverMonitor,
)
from lightning_bilevel.callbacks import convergence_plot
from lightning_bilevel.report.figures import draw
from lightning_bilevel.solvers.ivsp.penalty import inverse_penalty

ENVELOPE = Envelope(rho=0.1, sigma=1.0, delta=1e-6)
MONITORS = (MoreauGapMonitor, PenaltyMonitor, KKTMonitor, SolverMonitor, ConvergencePlot)
every_monitor = pytest.mark.parametrize("monitor", MONITORS)


def trainer(tmp_path: Path, **kwargs: Any) -> Trainer:
    return quiet_trainer(tmp_path, **{"log_every_n_steps": 10, **kwargs})


def series(logger: TensorBoardLogger, name: str) -> dict[int, float]:
    """What was logged under a tag, by step."""
    found = events(Path(logger.log_dir))
    return (
        {e.step: e.value for e in found.Scalars(f"bilevel/{name}")}
        if f"bilevel/{name}" in found.Tags()["scalars"]
        else {}
    )


def weighting(solver: Solver) -> Weighting:
    """With a delta that is too small to be reached soon."""
    return Weighting(
        solver=solver.make(**({"delta": ENVELOPE.delta} if solver.is_ivsp else {})),
        envelope=ENVELOPE,
    )


def as_problem(module: Weighting, envelope: Envelope) -> Problem:
    """The same f and g on flat vectors in float64, without the library's evaluation of modules."""
    sizes = [6, 3]

    def doubled(part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return part[0].double(), part[1], part[2]

    upper, lower = doubled(samples(20, 1)), doubled(samples(30, 2))

    def logits(y: Tensor, inputs: Tensor) -> Tensor:
        weight, bias = torch.split(y, sizes)
        return functional_call(
            module.classifier, {"weight": weight.view(3, 2), "bias": bias}, (inputs,)
        )

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits(y, upper[0]), upper[1])

    def g(x: Tensor, y: Tensor) -> Tensor:
        losses = torch.nn.functional.cross_entropy(logits(y, lower[0]), lower[1], reduction="none")
        return (x.sigmoid() * losses).mean()

    nowhere = (np.zeros(0), np.zeros(0))
    return Problem("weighting", f, g, Box(-5, 5), Box(-5, 5), nowhere, envelope, nowhere, 0.0)


@every_weighting_solver
@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_monitors_agree_with_an_independent_computation(
    tmp_path: Path, solver: Solver, tolerance: float | None
) -> None:
    module = weighting(solver)
    monitors = [MoreauGapMonitor(tolerance=tolerance), KKTMonitor(tolerance=tolerance)]
    run = trainer(tmp_path, max_steps=15, precision="64-true", callbacks=monitors)
    run.fit(module, datamodule=weighting_data())
    found = {
        name.removeprefix("bilevel/"): float(value) for name, value in run.callback_metrics.items()
    }
    x, y = module.point
    # f = grad f + multiplier * grad R needs z; its error is at most tolerance/m, and R's
    # tolerance^2/(2 m).
    envelope = module.envelope
    assert envelope is not None
    m, t, problem = envelope.modulus, tolerance or 1e-6, as_problem(module, envelope)
    expected = exact_residuals(problem, x, y, found["kkt_multiplier"])
    assert expected[1] > 1e-6  # the constraint is violated: there is something to agree on
    assert found["violation"] == pytest.approx(expected[1], abs=t**2 / (2 * m) + 1e-8)
    assert found["kkt_feasibility"] == found["violation"]
    weight = 1 + found["kkt_multiplier"]
    assert found["kkt_stationarity"] == pytest.approx(
        expected[0], rel=1e-5, abs=weight * 12 * t / m + 1e-6
    )
    assert found["kkt_complementarity"] == pytest.approx(
        expected[2], rel=1e-5, abs=weight * (t**2 / (2 * m) + 1e-8)
    )
    assert found["kkt_residual"] == max(
        found[f"kkt_{name}"] for name in ("stationarity", "feasibility", "complementarity")
    )
    if solver.is_ivsp:
        assert found["kkt_multiplier"] == pytest.approx(module.last_step.multiplier, rel=1e-6)  # type: ignore[union-attr]
    elif tolerance is None:
        # The least-squares multiplier: no other has a smaller stationarity.
        for other in (0.9, 1.1):
            assert (
                expected[0]
                <= exact_residuals(problem, x, y, other * found["kkt_multiplier"])[0] + 1e-6
            )


class Watched:
    """A run of 30 iterations that every monitor watches; a picture is drawn at its end."""

    def __init__(self, solver: Solver, folder: Path) -> None:
        self.module, self.recorder = self.start(solver), Recorder()
        self.plot = ConvergencePlot(share=math.inf)
        monitors = [
            MoreauGapMonitor(every_n_steps=3),
            KKTMonitor(every_n_steps=4),
            SolverMonitor(),
            PenaltyMonitor(),
            self.plot,
        ]
        logger = TensorBoardLogger(folder)
        self.run = trainer(
            folder,
            max_steps=30,
            callbacks=[*monitors, CertificateReport(), self.recorder],
            logger=logger,
            log_every_n_steps=5,
        )
        self.run.fit(self.module, datamodule=weighting_data())
        self.folder = Path(logger.log_dir)
        self.found = events(self.folder)

    @staticmethod
    def start(solver: Solver) -> Weighting:
        """With a c2 and a delta by which the penalty is updated within the run."""
        if solver.is_ivsp:
            return Weighting(solver=solver.make(mu0=1e-4, delta=1e-6, c2=1e6))
        return weighting(solver)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Solver], Watched]:
    """The run of a solver, made once for all that is looked at in it."""
    return cache(lambda solver: Watched(solver, tmp_path_factory.mktemp("watched")))


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that nobody looks at is not drawn."""
    monkeypatch.setattr(convergence_plot, "draw", lambda series: np.zeros((2, 2, 3), np.uint8))


@every_weighting_solver
def test_watching_changes_nothing(
    tmp_path: Path, solver: Solver, watched: Callable[[Solver], Watched]
) -> None:
    plain, recorder = Watched.start(solver), Recorder()
    trainer(tmp_path, max_steps=30, callbacks=[recorder]).fit(plain, datamodule=weighting_data())
    assert same_parameters(plain, watched(solver).module)
    assert recorder.steps == watched(solver).recorder.steps


class Saver(Callback):
    """Saves a checkpoint at a step; listed last, as Lightning lists its own."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


STOPS = (1, 7, 40)


class Resumable:
    """A run of 80 iterations with every monitor."""

    def __init__(self, folder: Path) -> None:
        look: dict[str, Any] = {"every_n_steps": 5, "share": 0}
        monitors = [
            MoreauGapMonitor(**look),
            PenaltyMonitor(),
            KKTMonitor(**look),
            SolverMonitor(),
            ConvergencePlot(**look),
        ]
        self.callbacks: list[Any] = [*monitors, CertificateReport()]
        self.folder = folder

    def fit(self, savers: Sequence[Saver] = (), **kwargs: Any) -> Resumable:
        module = SineProblem(n=30, solver=PAPER)
        ours = trainer(
            self.folder,
            max_steps=80,
            precision="64-true",
            callbacks=[*self.callbacks, *savers],
            limit_val_batches=0,
        )
        ours.fit(module, datamodule=FullBatchDataModule(epoch_length=10), **kwargs)
        return self

    def states(self) -> list[Any]:
        """What the monitors remember, but for the time."""
        states = [copy.deepcopy(callback.state_dict()) for callback in self.callbacks]
        states[4]["series"].pop("bilevel/optimization_time")
        return states


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Resumable:
    """A run without an interruption, which leaves a checkpoint of each stop."""
    folder = tmp_path_factory.mktemp("whole")
    return Resumable(folder).fit([Saver(stop, folder / f"{stop}.ckpt") for stop in STOPS])


@pytest.mark.integration
@pytest.mark.parametrize("stop", STOPS)
def test_everything_goes_on_after_a_resume(
    tmp_path: Path, stop: int, whole: Resumable, blank: None
) -> None:
    saved = whole.folder / f"{stop}.ckpt"
    torch.load(saved, weights_only=True)
    resumed = Resumable(tmp_path).fit(ckpt_path=saved, weights_only=True)
    for first, second in zip(whole.states(), resumed.states(), strict=True):
        assert same(first, second)
    assert whole.callbacks[1].events
    assert whole.callbacks[2].best["iteration"] > 0


class TestPenaltyMonitor:
    def run(
        self, tmp_path: Path, steps: int = 80, **kwargs: Any
    ) -> tuple[PenaltyMonitor, Recorder]:
        monitor, recorder = PenaltyMonitor(), Recorder()
        ours = trainer(
            tmp_path, max_steps=steps, precision="64-true", callbacks=[monitor, recorder], **kwargs
        )
        ours.fit(SineProblem(n=30, solver=PAPER), datamodule=FullBatchDataModule())
        return monitor, recorder

    def test_every_update_is_an_event(self, tmp_path: Path) -> None:
        monitor, recorder = self.run(tmp_path)
        updates = [step for step in recorder.steps if step["penalty_updated"]]
        assert len(monitor.events) == len(updates) > 0
        for number, (event, step) in enumerate(zip(monitor.events, updates, strict=True)):
            assert event["iteration"] == step["iteration"]
            assert event["before"] == step["gamma"] == inverse_penalty(number, 0.9)
            assert event["after"] == inverse_penalty(number + 1, 0.9)
            # what the update needs: R > 2 a_phi mu with a_phi = 1/8, and |step| <= c2 mu gamma with
            # c2 = 1
            assert event["residual"] == step["residual"] > event["threshold"] == step["mu"] / 4
            assert event["step"] == step["step"] <= event["bound"] == step["mu"] * step["gamma"]
        assert monitor.last_update == updates[-1]["iteration"]
        assert monitor.constant_for == 80 - monitor.last_update

    @pytest.mark.parametrize("solver", [PAPER, partial(IVSP, gamma0=2.0, c2=100.0, delta=1e-6)])
    def test_the_penalty_after_an_update_is_that_of_the_next_iteration(
        self, tmp_path: Path, solver: Any
    ) -> None:
        """With the paper's grid and with IVSP's own, which halves."""
        monitor, recorder = PenaltyMonitor(), Recorder()
        ours = trainer(tmp_path, max_steps=120, precision="64-true", callbacks=[monitor, recorder])
        ours.fit(SineProblem(n=30, solver=solver), datamodule=FullBatchDataModule())
        gammas = {step["iteration"]: step["gamma"] for step in recorder.steps}
        events = [event for event in monitor.events if event["iteration"] < 120]
        assert len(events) >= 2
        for event in events:
            assert event["before"] == gammas[event["iteration"]]
            assert event["after"] == gammas[event["iteration"] + 1]

    def test_text_and_marked_series(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path)
        monitor, _ = self.run(tmp_path, logger=logger, log_every_n_steps=10)
        found = events(Path(logger.log_dir))
        marks = found.Scalars("bilevel/penalty_at_update")
        assert [(mark.step, mark.value) for mark in marks] == [
            (event["iteration"], pytest.approx(event["after"])) for event in monitor.events
        ]
        constant = found.Scalars("bilevel/penalty_constant_for")
        assert (constant[-1].step, constant[-1].value) == (80, monitor.constant_for)
        text = found.Tensors("penalty updates/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert text == monitor.text()
        assert (
            f"Constant for the {monitor.constant_for} iterations since update {len(monitor.events)}"
            in text
        )
        assert text.count("\n| ") == len(monitor.events) + 1

    def test_nothing_to_report(self, tmp_path: Path) -> None:
        monitor = PenaltyMonitor()
        run = trainer(tmp_path, max_steps=20, callbacks=[monitor], log_every_n_steps=5)
        run.fit(weighting(SOLVERS["bome"]), datamodule=weighting_data())
        assert monitor.events == []
        assert "bilevel/penalty_constant_for" not in run.callback_metrics
        quiet, _ = self.run(tmp_path, steps=1)
        assert quiet.text() == "The penalty has not been updated in 1 iterations."


class Points(Callback):
    """Keeps every point."""

    def __init__(self) -> None:
        self.points: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.points.append(pl_module.point)


class TestKKTMonitor:
    @every_weighting_solver
    def test_best_point_is_kept_and_restored(self, tmp_path: Path, solver: Solver) -> None:
        logger, points = TensorBoardLogger(tmp_path), Points()
        monitor = KKTMonitor(restore_best=True, every_n_steps=3, tolerance=1e-9)
        report = CertificateReport()
        module = weighting(solver)
        callbacks = [monitor, report, points]
        run = trainer(
            tmp_path,
            max_steps=30,
            precision="64-true",
            callbacks=callbacks,
            logger=logger,
            limit_val_batches=0,
        )
        run.fit(module, datamodule=weighting_data())
        looks, best = series(logger, "kkt_residual"), series(logger, "kkt_best")
        assert list(looks) == list(best) == list(range(3, 31, 3))
        del looks[30]  # the report has written the certificate of the restored point there
        iteration = monitor.best["iteration"]
        for step in looks:
            assert best[step] == min(value for other, value in looks.items() if other <= step)
        assert best[30] == pytest.approx(monitor.best["kkt"])
        assert looks.get(iteration, best[30]) == pytest.approx(monitor.best["kkt"])
        assert torch.equal(module.point[0], points.points[iteration - 1][0])
        assert torch.equal(module.point[1], points.points[iteration - 1][1])
        assert report.certificate is not None
        assert report.certificate.kkt == pytest.approx(monitor.best["kkt"], rel=1e-6)

    def test_a_later_point_that_is_worse_is_undone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """PNGBiO's steps do not get shorter: with a long one the run leaves good points again."""
        monitor, points = KKTMonitor(restore_best=True, every_n_steps=1), Points()
        module = Weighting(solver=partial(PNGBiO, alpha=0.5, beta=0.5), envelope=ENVELOPE)
        with caplog.at_level(logging.INFO):
            trainer(tmp_path, max_steps=40, callbacks=[monitor, points]).fit(
                module, datamodule=weighting_data()
            )
        assert 0 < monitor.best["iteration"] < 40
        assert not torch.equal(points.points[-1][1], module.point[1])
        assert (
            f"KKTMonitor restored the point of iteration {monitor.best['iteration']}" in caplog.text
        )

    def test_stops_at_epsilon_and_says_why(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        logger = TensorBoardLogger(tmp_path)
        monitor = KKTMonitor(epsilon=1.0, every_n_steps=5)
        recorder = Recorder()
        module = SineProblem(n=30, solver=PAPER)
        ours = trainer(
            tmp_path,
            max_steps=2000,
            precision="64-true",
            callbacks=[monitor, recorder],
            logger=logger,
        )
        with caplog.at_level(logging.INFO):
            ours.fit(module, datamodule=FullBatchDataModule())
        iteration = len(recorder.steps)
        assert iteration % 5 == 0
        assert iteration < 2000
        assert float(ours.callback_metrics["bilevel/kkt_residual"]) <= 1.0
        assert monitor.stopped.startswith(
            f"KKTMonitor stopped the run at iteration {iteration}: stationarity "
        )
        assert monitor.stopped.endswith("are all at most epsilon = 1.")
        assert monitor.stopped in caplog.text
        assert "stopped/text_summary" in events(Path(logger.log_dir)).Tags()["tensors"]

    def test_does_not_stop_before(self, tmp_path: Path) -> None:
        monitor = KKTMonitor(epsilon=1e-12)
        run = trainer(tmp_path, max_steps=20, callbacks=[monitor])
        run.fit(Weighting(), datamodule=weighting_data())
        assert run.global_step == 20
        assert monitor.stopped == ""

    def test_the_certificate_must_come_after_the_restoring(self, tmp_path: Path) -> None:
        callbacks = [CertificateReport(), KKTMonitor(restore_best=True)]
        with pytest.raises(
            MisconfigurationException,
            match=r"`KKTMonitor\(restore_best=True\)` comes after `CertificateReport`",
        ):
            trainer(tmp_path, max_steps=1, callbacks=callbacks).fit(
                Weighting(), datamodule=weighting_data()
            )

    def test_refuses_an_epsilon_of_zero(self) -> None:
        with pytest.raises(
            ValueError, match=r"`KKTMonitor\(epsilon=0.0\)` must be positive, or None to never stop"
        ):
            KKTMonitor(epsilon=0.0)


class TestSolverMonitor:
    @every_weighting_solver
    def test_counts_are_the_sums_of_the_records(self, tmp_path: Path, solver: Solver) -> None:
        logger, monitor, recorder = TensorBoardLogger(tmp_path), SolverMonitor(), Recorder()
        run = trainer(
            tmp_path,
            max_steps=23,
            callbacks=[monitor, recorder],
            logger=logger,
            log_every_n_steps=5,
        )
        run.fit(weighting(solver), datamodule=weighting_data())
        steps = recorder.steps
        counts = ("upper", "lower", "gap", "products", "values")
        total = {name: sum(step["calls"][name] for step in steps) for name in counts}
        tally = monitor.tally
        counted = (
            tally.upper_calls,
            tally.lower_calls,
            tally.gap_calls,
            tally.product_calls,
            tally.value_calls,
        )
        assert dict(zip(counts, counted, strict=True)) == total
        doubled = total["gap"] + total["products"]
        whole = total["upper"] + total["lower"] + 2 * doubled
        assert tally.passes == whole + total["values"] // 3
        assert list(series(logger, "calls_products").values())[-1] == total["products"]
        assert monitor.tally.inner_iterations == sum(step["inner_iterations"] for step in steps)
        inner = series(logger, "mean_inner_iterations")
        assert list(inner) == [1, 5, 10, 15, 20, 23]
        for before, now in pairwise(inner):
            between = steps[before:now]
            assert inner[now] == pytest.approx(
                sum(step["inner_iterations"] for step in between) / len(between)
            )
            if solver.is_ivsp:
                trials = sum(step["trials"] for step in between) / len(between)
                assert series(logger, "mean_trials")[now] == pytest.approx(trials)
                for name, attribute in (
                    ("accuracy", "zeta"),
                    ("curvature", "L"),
                    ("curvature_start", "L_start"),
                    ("smoothing", "mu"),
                ):
                    assert series(logger, name)[now] == pytest.approx(steps[now - 1][attribute])
        assert series(logger, "passes")[23] == monitor.tally.passes
        assert bool(series(logger, "mean_trials")) == solver.is_ivsp
        assert 23 in series(logger, "optimization_time")


class TestConvergencePlot:
    @every_weighting_solver
    def test_draws_at_the_end(self, solver: Solver, watched: Callable[[Solver], Watched]) -> None:
        seen = watched(solver)
        assert (seen.folder / "convergence.png").read_bytes().startswith(b"\x89PNG")
        assert not (seen.folder / "convergence.tmp").exists()
        assert [image.step for image in seen.found.Images("convergence")] == [30]
        series = seen.plot.series
        assert series["bilevel/upper"][0] == list(range(1, 31))
        assert series["residual"][0] == [10, 20, 30]
        assert series["validation/val_loss"][0] == [10, 20, 30]
        last = float(seen.run.callback_metrics["val_loss"])
        assert last == series["validation/val_loss"][1][-1]

    def test_draws_every_few_minutes(self, tmp_path: Path, blank: None) -> None:
        logger = TensorBoardLogger(tmp_path)
        plot = ConvergencePlot(every_n_minutes=1e-9)
        trainer(tmp_path, max_steps=3, callbacks=[plot], logger=logger).fit(
            Weighting(), datamodule=weighting_data()
        )
        assert [image.step for image in events(Path(logger.log_dir)).Images("convergence")] == [
            1,
            2,
            3,
            3,
        ]

    def test_a_long_run_is_thinned_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: None
    ) -> None:
        monkeypatch.setattr(convergence_plot, "_POINTS", 100)
        plot = ConvergencePlot()
        trainer(tmp_path, max_steps=210, callbacks=[plot], limit_val_batches=0).fit(
            SineProblem(n=3, solver=PAPER), datamodule=FullBatchDataModule(epoch_length=100)
        )
        iterations = plot.series["bilevel/upper"][0]
        assert 50 <= len(iterations) <= 100
        assert iterations == list(range(plot.stride, 211, plot.stride))
        assert {len(line) for name, line in plot.series.items() if name.startswith("bilevel/")} == {
            2
        }

    def test_values_that_are_not_finite_do_not_stop_it(self) -> None:
        pixels = draw(
            {
                "bilevel/upper": [[1, 2, 3], [1.0, math.inf, math.nan]],
                "feasibility": [[1, 2], [0.0, 100.0]],
            }
        )
        assert pixels.ndim == 3

    def test_refuses_an_interval_of_zero(self) -> None:
        with pytest.raises(
            ValueError, match=r"`ConvergencePlot\(every_n_minutes=0\)` must be positive and finite"
        ):
            ConvergencePlot(every_n_minutes=0)


class TestIntervals:
    def looks(self, tmp_path: Path, steps: int = 20, **kwargs: Any) -> list[int]:
        logger = TensorBoardLogger(tmp_path)
        run = trainer(
            tmp_path, max_steps=steps, callbacks=[MoreauGapMonitor(**kwargs)], logger=logger
        )
        run.fit(Weighting(), datamodule=weighting_data(epoch_length=10))
        return list(series(logger, "violation"))

    def test_every_n_steps_and_the_end(self, tmp_path: Path) -> None:
        assert self.looks(tmp_path, every_n_steps=3, share=0) == [3, 6, 9, 12, 15, 18, 20]

    def test_every_validation_and_each_point_once(self, tmp_path: Path) -> None:
        assert self.looks(tmp_path, share=math.inf) == [10, 20]
        assert self.looks(tmp_path, share=math.inf, every_n_steps=5) == [5, 10, 15, 20]

    def test_every_n_seconds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]

        def monotonic() -> float:
            now[0] += 1.0
            return now[0]

        monkeypatch.setattr("lightning_bilevel.callbacks.monitor.time.monotonic", monotonic)
        # The first validation and the end.
        assert self.looks(tmp_path, every_n_seconds=1e9, share=0) == [10, 20]
        looked = self.looks(tmp_path, every_n_seconds=6.0, share=0)
        assert len(looked) >= 3
        # The clock runs at every step, and no faster.
        assert all(1 < after - before <= 6 for before, after in pairwise(looked))
        assert looked[-1] == 20

    def test_validation_looks_stay_within_their_share(self, tmp_path: Path, clock: Clock) -> None:
        class Timed(Weighting):
            def upper_loss(self, batch: Any) -> Tensor:
                clock.now += 1.0
                return super().upper_loss(batch)

        monitors = [MoreauGapMonitor(share=0.2), KKTMonitor(share=0.2)]
        module = Timed()
        run = trainer(tmp_path, max_steps=100, callbacks=monitors)
        run.fit(module, datamodule=weighting_data(epoch_length=1))
        assert module.last_step is not None
        # more than one look, and one evaluation for both monitors; the last one is the look at the
        # end
        assert 1 < monitors[0].evaluations < 100
        assert 0 < module.evaluation_time <= 0.2 * module.last_step.optimization_time + 2

    def test_one_evaluation_serves_all_monitors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: None
    ) -> None:
        import lightning_bilevel.plugin.certifier as certifier

        calls = []
        certify = certifier.certify
        monkeypatch.setattr(
            certifier,
            "certify",
            lambda *args, **kwargs: calls.append(1) or certify(*args, **kwargs),
        )
        monitors = [
            kind(every_n_steps=10, share=math.inf)
            for kind in (MoreauGapMonitor, KKTMonitor, ConvergencePlot)
        ]
        trainer(tmp_path, max_steps=20, callbacks=monitors).fit(
            Weighting(), datamodule=weighting_data()
        )
        assert len(calls) == 2

    def test_a_known_certificate_is_of_the_same_point_and_tolerance(self, tmp_path: Path) -> None:
        module = Weighting()
        trainer(tmp_path, max_steps=5).fit(module, datamodule=weighting_data())
        first = module.certify()
        assert module.certify() is first
        assert module.certify(tolerance=1e-2) is not first
        with torch.no_grad():
            module.classifier.bias.data[0].add_(0.1)
        moved = module.certify()
        assert moved is not None
        assert first is not None
        assert moved.lower != first.lower

    def test_looking_takes_no_optimisation_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
    ) -> None:
        import lightning_bilevel.plugin.certifier as certifier

        certify = certifier.certify

        def slow(*args: Any, **kwargs: Any) -> Any:
            clock.now += 0.5
            return certify(*args, **kwargs)

        monkeypatch.setattr(certifier, "certify", slow)
        module = Weighting()
        trainer(tmp_path, max_steps=5, callbacks=[KKTMonitor(every_n_steps=1)]).fit(
            module, datamodule=weighting_data()
        )
        assert module.last_step is not None
        assert module.evaluation_time == 5 * 0.5
        assert module.last_step.optimization_time == 0.0


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TestBadInput:
    @every_monitor
    def test_a_module_that_is_not_bilevel(self, tmp_path: Path, monitor: Any) -> None:
        with pytest.raises(
            MisconfigurationException,
            match=f"`{monitor.__name__}` was given a Plain: it needs a bilevel module",
        ):
            trainer(tmp_path, max_steps=1, callbacks=[monitor()]).fit(Plain(), [1])

    @every_monitor
    @pytest.mark.parametrize("name", ["every_n_steps", "every_n_seconds"])
    @pytest.mark.parametrize("value", [0, -1, math.nan])
    def test_an_interval_of_zero(self, monitor: Any, name: str, value: float) -> None:
        with pytest.raises(
            ValueError,
            match=rf"`{monitor.__name__}\({name}={value}\)` must be positive and finite, or None",
        ):
            monitor(**{name: value})

    @pytest.mark.parametrize("monitor", [MoreauGapMonitor, KKTMonitor, ConvergencePlot])
    def test_tolerance_and_share(self, monitor: Any) -> None:
        with pytest.raises(
            ValueError, match=rf"`{monitor.__name__}\(tolerance=0\)` must be positive"
        ):
            monitor(tolerance=0)
        with pytest.raises(
            ValueError, match=rf"`{monitor.__name__}\(share=-1\)` must be at least 0"
        ):
            monitor(share=-1)

    @pytest.mark.parametrize("monitor", [MoreauGapMonitor, KKTMonitor, ConvergencePlot])
    def test_a_prox_problem_that_is_not_convex(self, monitor: Any) -> None:
        with pytest.raises(
            ValueError, match=r"`rho=2.0` must be smaller than 1/sigma = 1: .* not strongly convex"
        ):
            monitor(envelope=Envelope(rho=2.0, sigma=1.0, delta=1e-3))

    def test_no_logger_works_and_says_so_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            run = trainer(tmp_path, max_steps=10, callbacks=[monitor() for monitor in MONITORS])
            run.fit(Weighting(), datamodule=weighting_data())
        assert caplog.text.count("There is no logger") == 1
        assert "bilevel/kkt_residual" in run.callback_metrics
        assert (tmp_path / "convergence.png").exists()

    def test_a_logger_needs_no_word(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            run = trainer(
                tmp_path, max_steps=1, callbacks=[SolverMonitor()], logger=CSVLogger(tmp_path)
            )
            run.fit(Weighting(), datamodule=weighting_data())
        assert "There is no logger" not in caplog.text

    def test_without_an_envelope_there_is_nothing_to_look_at(
        self, tmp_path: Path, blank: None
    ) -> None:
        monitors: list[Any] = [monitor() for monitor in MONITORS]
        run = trainer(tmp_path, max_steps=10, callbacks=monitors)
        run.fit(Weighting(solver=BOME), datamodule=weighting_data())
        assert monitors[0].evaluations == 0
        assert monitors[2].best == {}
        assert "bilevel/violation" not in run.callback_metrics

    def test_validating_by_itself_is_no_part_of_a_run(self, tmp_path: Path, blank: None) -> None:
        monitors: list[Any] = [MoreauGapMonitor(share=math.inf), ConvergencePlot(share=math.inf)]
        module, run = Weighting(), trainer(tmp_path, max_steps=10, callbacks=monitors)
        run.validate(module, datamodule=weighting_data(), verbose=False)
        run.fit(module, datamodule=weighting_data())
        before = [monitor.state_dict() for monitor in monitors]
        lengths = {name: len(line[0]) for name, line in monitors[1].series.items()}
        run.validate(module, datamodule=weighting_data(), verbose=False)
        assert [monitor.state_dict() for monitor in monitors] == before
        assert {name: len(line[0]) for name, line in monitors[1].series.items()} == lengths

    def test_fast_dev_run_leaves_nothing_behind(self, tmp_path: Path) -> None:
        run = trainer(
            tmp_path,
            fast_dev_run=True,
            callbacks=[*(monitor() for monitor in MONITORS), CertificateReport()],
        )
        run.fit(Weighting(), datamodule=weighting_data())
        assert list(tmp_path.iterdir()) == []


@every_weighting_solver
def test_tensorboard_groups_name_what_is_logged(
    solver: Solver, watched: Callable[[Solver], Watched]
) -> None:
    found = watched(solver).found
    scalars = set(found.Tags()["scalars"])
    groups = layout(watched(solver).run.optimizers[0])  # type: ignore[arg-type]
    tags = [tag for charts in groups.values() for _, (_, tags) in charts.items() for tag in tags]
    missing = {tag for tag in tags if tag.strip("^$") not in scalars}
    weighing = (IVSP, SLM, BOME, VPBGD, F2SA, F2BA, LuMei)
    assert missing <= (set() if solver.kind in weighing else {"^bilevel/multiplier$"})
    names = ["objective", "feasibility", "KKT", "penalty", "line search", "cost"]
    assert list(groups) == [
        name for name in names if solver.is_ivsp or name not in ("penalty", "line search")
    ]
    assert "custom_scalars__config__" in found.Tags()["tensors"]
    text = found.Tensors("certificate/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "KKT stationarity" in text
    assert "lower level stationary to" in text


def test_hyperparameters_and_final_metrics(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    logger = TensorBoardLogger(tmp_path)
    run = trainer(tmp_path, max_steps=20, callbacks=[CertificateReport()], logger=logger)
    run.fit(Weighting(), datamodule=weighting_data())
    content = events(Path(logger.log_dir)).PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(
        content["_hparams_/session_start_info"]
    ).session_start_info.hparams
    assert start["(solver)"].string_value == "IVSP"
    assert start["rho"].number_value == 0.1
    assert "level" not in start
    metrics = plugin_data_pb2.HParamsPluginData.FromString(
        content["_hparams_/experiment"]
    ).experiment.metric_infos
    assert {"val_loss", "bilevel/kkt_residual", "bilevel/violation"} <= {
        info.name.tag for info in metrics
    }
    losses = events(Path(logger.log_dir)).Scalars("val_loss")
    # Not at step 0, where the curve would jump.
    assert {event.step for event in losses} <= {9, 10, 19, 20}


def test_progress_bar_shows_the_time_left(tmp_path: Path) -> None:
    bar, module = BilevelProgressBar(), weighting(SOLVERS["bome"])
    budget = OptimizationBudget("1h")
    callbacks = [bar, budget, MoreauGapMonitor(share=math.inf)]
    run = trainer(tmp_path, max_steps=20, callbacks=callbacks, enable_progress_bar=True)
    run.fit(module, datamodule=weighting_data())
    shown = bar.get_metrics(run, module)
    assert module.last_step is not None
    assert shown["left"] == f"{3600 - module.last_step.optimization_time:.1f}s"
    assert shown["gap"] == f"{float(run.callback_metrics['bilevel/violation']):.3g}"
    assert "gamma" not in shown
    budget.budget = 1e-9
    assert bar.get_metrics(run, module)["left"] == "0.0s"


def test_records_are_what_the_monitors_see(tmp_path: Path) -> None:
    """Monitors rest on the last record and the solver's constants alone: they are plain values."""
    module = Weighting()
    trainer(tmp_path, max_steps=2).fit(module, datamodule=weighting_data())
    assert module.last_step is not None
    assert all(
        isinstance(value, (bool, int, float, dict, tuple, type(None)))
        for value in asdict(module.last_step).values()
    )
