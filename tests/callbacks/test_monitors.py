"""The monitors: true for every solver, without effect on the run, and resumed with it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clocks import Clock
from helpers import Problem, exact_residuals
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from modules import PAPER, Weighting, samples, weighting_data
from records import Recorder, same
from running import events, same_parameters
from running import trainer as quiet_trainer
from tables import SOLVERS, Solver, every_weighting_solver
from torch import Tensor
from torch.func import functional_call

from lightning_bilevel import (
    BOME,
    IVSP,
    Box,
    CertificateMonitor,
    CertificateReport,
    Envelope,
    FullBatchDataModule,
    PenaltyMonitor,
    PNGBiO,
    SineProblem,
    SolverMonitor,
)
from lightning_bilevel.solvers.ivsp.penalty import inverse_penalty

ENVELOPE = Envelope(rho=0.1, sigma=1.0, delta=1e-6)
MONITORS = (CertificateMonitor, PenaltyMonitor, SolverMonitor)


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
    monitor = CertificateMonitor(tolerance=tolerance)
    run = trainer(tmp_path, max_steps=15, precision="64-true", callbacks=[monitor])
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
    """A run of 30 iterations that every monitor watches."""

    def __init__(self, solver: Solver, folder: Path) -> None:
        self.module, self.recorder = self.start(solver), Recorder()
        monitors = [
            CertificateMonitor(every_n_steps=3),
            SolverMonitor(),
            PenaltyMonitor(),
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
        monitor = CertificateMonitor(every_n_steps=5, share=0)
        monitors = [monitor, PenaltyMonitor(), SolverMonitor()]
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
        """What the monitors remember."""
        return [copy.deepcopy(callback.state_dict()) for callback in self.callbacks]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Resumable:
    """A run without an interruption, which leaves a checkpoint of each stop."""
    folder = tmp_path_factory.mktemp("whole")
    return Resumable(folder).fit([Saver(stop, folder / f"{stop}.ckpt") for stop in STOPS])


@pytest.mark.integration
@pytest.mark.parametrize("stop", STOPS)
def test_everything_goes_on_after_a_resume(tmp_path: Path, stop: int, whole: Resumable) -> None:
    saved = whole.folder / f"{stop}.ckpt"
    torch.load(saved, weights_only=True)
    resumed = Resumable(tmp_path).fit(ckpt_path=saved, weights_only=True)
    for first, second in zip(whole.states(), resumed.states(), strict=True):
        assert same(first, second)
    assert whole.callbacks[1].events
    assert whole.callbacks[0].best.iteration > 0


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
            assert event["gamma"] == step["gamma"] == inverse_penalty(number, 0.9)
            assert event["gamma_next"] == inverse_penalty(number + 1, 0.9)
            # what the update needs: R > 2 a_phi mu with a_phi = 1/8, and |step| <= c2 mu gamma with
            # c2 = 1
            assert event["residual"] == step["residual"] > event["threshold"] == step["mu"] / 4
            assert event["step"] == step["step"] <= event["step_bound"]
            assert event["step_bound"] == step["mu"] * step["gamma"]
        assert monitor.constant_for == 80 - updates[-1]["iteration"]

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
            assert event["gamma"] == gammas[event["iteration"]]
            assert event["gamma_next"] == gammas[event["iteration"] + 1]

    def test_text_and_marked_series(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path)
        monitor, _ = self.run(tmp_path, logger=logger, log_every_n_steps=10)
        found = events(Path(logger.log_dir))
        marks = found.Scalars("bilevel/penalty_at_update")
        assert [(mark.step, mark.value) for mark in marks] == [
            (event["iteration"], pytest.approx(event["gamma_next"])) for event in monitor.events
        ]
        constant = found.Scalars("bilevel/penalty_constant_for")
        assert (constant[-1].step, constant[-1].value) == (80, monitor.constant_for)
        text = found.Tensors("penalty updates/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert text == monitor.text()
        assert f"Constant for the last {monitor.constant_for} iterations." in text
        assert text.count("\n| ") == len(monitor.events) + 1

    def test_nothing_to_report(self, tmp_path: Path) -> None:
        monitor = PenaltyMonitor()
        run = trainer(tmp_path, max_steps=20, callbacks=[monitor], log_every_n_steps=5)
        run.fit(weighting(SOLVERS["bome"]), datamodule=weighting_data())
        assert monitor.events == []
        assert "bilevel/penalty_constant_for" not in run.callback_metrics


class Points(Callback):
    """Keeps every point."""

    def __init__(self) -> None:
        self.points: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.points.append(pl_module.point)


class TestBestPoint:
    @every_weighting_solver
    def test_best_point_is_kept_and_restored(self, tmp_path: Path, solver: Solver) -> None:
        logger, points = TensorBoardLogger(tmp_path), Points()
        monitor = CertificateMonitor(restore_best=True, every_n_steps=3, tolerance=1e-9)
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
        assert monitor.best is not None
        iteration = monitor.best.iteration
        for step in looks:
            assert best[step] == min(value for other, value in looks.items() if other <= step)
        assert best[30] == pytest.approx(monitor.best.kkt)
        assert looks.get(iteration, best[30]) == pytest.approx(monitor.best.kkt)
        assert torch.equal(module.point[0], points.points[iteration - 1][0])
        assert torch.equal(module.point[1], points.points[iteration - 1][1])
        assert report.certificate is not None
        assert report.certificate.kkt == pytest.approx(monitor.best.kkt, rel=1e-6)

    def test_a_later_point_that_is_worse_is_undone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """PNGBiO's steps do not get shorter: with a long one the run leaves good points again."""
        monitor, points = CertificateMonitor(restore_best=True, every_n_steps=1), Points()
        module = Weighting(solver=partial(PNGBiO, alpha=0.5, beta=0.5), envelope=ENVELOPE)
        with caplog.at_level(logging.INFO):
            trainer(tmp_path, max_steps=40, callbacks=[monitor, points]).fit(
                module, datamodule=weighting_data()
            )
        assert monitor.best is not None
        assert 0 < monitor.best.iteration < 40
        assert not torch.equal(points.points[-1][1], module.point[1])
        words = f"CertificateMonitor restored the point of iteration {monitor.best.iteration}"
        assert words in caplog.text

    def test_early_stopping_ends_the_run_at_small_residuals(self, tmp_path: Path) -> None:
        stop = EarlyStopping("bilevel/kkt_residual", stopping_threshold=1.0, patience=1000)
        module = SineProblem(n=30, solver=PAPER)
        callbacks = [CertificateMonitor(), stop]
        ours = trainer(tmp_path, max_steps=2000, precision="64-true", callbacks=callbacks)
        ours.fit(module, datamodule=FullBatchDataModule(epoch_length=5))
        assert ours.global_step % 5 == 0
        assert ours.global_step < 2000
        assert float(ours.callback_metrics["bilevel/kkt_residual"]) <= 1.0


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
        tally, total = monitor.tally, asdict(monitor.tally.calls)
        for name in total:
            assert total[name] == sum(step["calls"][name] for step in steps)
        doubled = total["gap"] + total["products"]
        whole = total["upper"] + total["lower"] + 2 * doubled
        assert tally.calls.passes == whole + total["values"] // 3
        assert list(series(logger, "calls_products").values())[-1] == total["products"]
        assert monitor.tally.inner_iterations == sum(step["inner_iterations"] for step in steps)
        inner = series(logger, "mean_inner_iterations")
        assert list(inner) == [1, 5, 10, 15, 20, 23]
        for now, mean in inner.items():
            assert mean == pytest.approx(sum(s["inner_iterations"] for s in steps[:now]) / now)
            if solver.is_ivsp:
                trials = sum(step["trials"] for step in steps[:now]) / now
                assert series(logger, "mean_trials")[now] == pytest.approx(trials)
        assert series(logger, "passes")[23] == monitor.tally.calls.passes
        assert bool(series(logger, "mean_trials")) == solver.is_ivsp

    def test_a_second_run_counts_anew(self, tmp_path: Path) -> None:
        monitor = SolverMonitor()
        for steps in (3, 1, 2):
            run = trainer(tmp_path, max_steps=steps, callbacks=[monitor])
            run.fit(Weighting(), datamodule=weighting_data())
            assert monitor.tally.iterations == steps
            assert monitor.tally.calls.upper >= steps
            mean = float(run.callback_metrics["bilevel/mean_inner_iterations"])
            assert 0 < mean <= monitor.tally.inner_iterations


class TestIntervals:
    def looks(self, tmp_path: Path, steps: int = 20, **kwargs: Any) -> list[int]:
        logger = TensorBoardLogger(tmp_path)
        run = trainer(
            tmp_path, max_steps=steps, callbacks=[CertificateMonitor(**kwargs)], logger=logger
        )
        run.fit(Weighting(), datamodule=weighting_data(epoch_length=10))
        return list(series(logger, "violation"))

    def test_every_n_steps_and_the_end(self, tmp_path: Path) -> None:
        assert self.looks(tmp_path, every_n_steps=3, share=0) == [3, 6, 9, 12, 15, 18, 20]

    def test_every_validation_and_each_point_once(self, tmp_path: Path) -> None:
        assert self.looks(tmp_path, share=math.inf) == [10, 20]
        assert self.looks(tmp_path, share=math.inf, every_n_steps=5) == [5, 10, 15, 20]

    def test_validation_looks_stay_within_their_share(self, tmp_path: Path, clock: Clock) -> None:
        class Timed(Weighting):
            def upper_loss(self, batch: Any) -> Tensor:
                clock.now += 1.0
                return super().upper_loss(batch)

        monitors = [CertificateMonitor(share=0.2)]
        module, logger = Timed(), TensorBoardLogger(tmp_path)
        run = trainer(
            tmp_path, max_steps=100, callbacks=monitors, logger=logger, log_every_n_steps=1
        )
        run.fit(module, datamodule=weighting_data(epoch_length=1))
        assert module.last_step is not None
        # more than one look; the last one is the look at the end
        assert 1 < len(series(logger, "violation")) < 100
        assert 0 < module.evaluation_time <= 0.2 * module.last_step.optimization_time + 2

    def test_each_point_is_evaluated_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import lightning_bilevel.run as certifier

        calls = []
        certify = certifier.certify
        monkeypatch.setattr(
            certifier,
            "certify",
            lambda *args, **kwargs: calls.append(1) or certify(*args, **kwargs),
        )
        monitors = [CertificateMonitor(every_n_steps=10, share=math.inf)]
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
        import lightning_bilevel.run as certifier

        certify = certifier.certify

        def slow(*args: Any, **kwargs: Any) -> Any:
            clock.now += 0.5
            return certify(*args, **kwargs)

        monkeypatch.setattr(certifier, "certify", slow)
        module = Weighting()
        trainer(tmp_path, max_steps=5, callbacks=[CertificateMonitor(every_n_steps=1)]).fit(
            module, datamodule=weighting_data()
        )
        assert module.last_step is not None
        assert module.evaluation_time == 5 * 0.5
        assert module.last_step.optimization_time == 0.0


class TestWhatIsLeftAlone:
    def test_without_an_envelope_there_is_nothing_to_look_at(self, tmp_path: Path) -> None:
        monitors: list[Any] = [monitor() for monitor in MONITORS]
        run = trainer(tmp_path, max_steps=10, callbacks=monitors)
        run.fit(Weighting(solver=BOME), datamodule=weighting_data())
        assert monitors[0].latest is None
        assert monitors[0].best is None
        assert "bilevel/violation" not in run.callback_metrics

    def test_validating_by_itself_is_no_part_of_a_run(self, tmp_path: Path) -> None:
        monitor = CertificateMonitor(share=math.inf)
        module, run = Weighting(), trainer(tmp_path, max_steps=10, callbacks=[monitor])
        run.validate(module, datamodule=weighting_data(), verbose=False)
        assert monitor.best is None
        run.fit(module, datamodule=weighting_data())
        run.validate(module, datamodule=weighting_data(), verbose=False)
        assert "bilevel/kkt_residual" not in run.callback_metrics

    def test_fast_dev_run_leaves_nothing_behind(self, tmp_path: Path) -> None:
        run = trainer(
            tmp_path,
            fast_dev_run=True,
            callbacks=[*(monitor() for monitor in MONITORS), CertificateReport()],
        )
        run.fit(Weighting(), datamodule=weighting_data())
        assert list(tmp_path.iterdir()) == []


def test_the_certificate_is_logged_as_text(watched: Callable[[Solver], Watched]) -> None:
    found = watched(next(solver for solver in SOLVERS.values() if solver.is_ivsp)).found
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
    assert start["bilevel/solver"].string_value == "IVSP"
    assert start["bilevel/rho"].number_value == 0.1
    assert "bilevel/level" not in start
    metrics = plugin_data_pb2.HParamsPluginData.FromString(
        content["_hparams_/experiment"]
    ).experiment.metric_infos
    assert {"val_loss", "bilevel/kkt_residual", "bilevel/violation"} <= {
        info.name.tag for info in metrics
    }
    losses = events(Path(logger.log_dir)).Scalars("val_loss")
    # Not at step 0, where the curve would jump.
    assert {event.step for event in losses} <= {9, 10, 19, 20}


def test_records_are_what_the_monitors_see(tmp_path: Path) -> None:
    """Monitors rest on the last record and the solver's constants alone: they are plain values."""
    module = Weighting()
    trainer(tmp_path, max_steps=2).fit(module, datamodule=weighting_data())
    assert module.last_step is not None
    assert all(
        isinstance(value, (bool, int, float, dict, tuple, type(None)))
        for value in asdict(module.last_step).values()
    )
