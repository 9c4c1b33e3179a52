"""The certificate of a run on mini-batches: which data it is of, its cost, what it leaves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import samples
from running import same_parameters, trainer
from streaming import Endless, Streamed, loader, loaders
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bilevel import (
    CertificateMonitor,
    CertificateReport,
    Envelope,
    SolverMonitor,
)
from lightning_bilevel.stochastic import StreamingIVSP

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")


def fitted(tmp_path: Path, module: Any, data: Any, **options: Any) -> Any:
    run = trainer(tmp_path, **{"max_epochs": 3, **options})
    run.fit(module, data, loader(20, 3, 20))
    return module


class Once:
    """A loader that can be gone through only once."""

    def __init__(self, batches: list[Any]) -> None:
        self.iterator = iter(batches)

    def __iter__(self) -> Any:
        return self.iterator


class TestCertificate:
    ENVELOPE = Envelope(0.1, 1.0, 1e-3)

    def test_it_is_on_all_data_in_eval_mode(self, tmp_path: Path) -> None:
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders())
        state = torch.get_rng_state()
        certificate = module.certify()
        assert torch.equal(torch.get_rng_state(), state)
        assert module.training
        # By hand: one whole batch of each level, in eval mode.
        module.eval()
        with torch.no_grad():
            f = float(module.upper_loss(samples(20, 1)))
            g = float(module.lower_loss(samples(30, 2)))
        assert certificate.upper == pytest.approx(f, rel=1e-5)
        assert certificate.lower == pytest.approx(g, rel=1e-5)
        assert certificate.evaluated_on == (
            "all data (20 upper and 30 lower samples), in eval mode"
        )
        assert module.evaluation_time > 0.0

    def test_a_part_of_the_data_is_named(self, tmp_path: Path) -> None:
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders())
        certificate = module.certify(batches=2)
        assert certificate.evaluated_on == (
            "a sample, the first 2 batches or 1 GiB of a level (10 upper and 20 lower samples), in "
            "eval mode"
        )
        assert module.certify(batches=4).evaluated_on.startswith("all data (20 upper and 30")

    def test_a_given_batch(self, tmp_path: Path) -> None:
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders())
        whole = {"upper": samples(20, 1), "lower": samples(30, 2)}
        given = module.certify(batch=whole)
        assert given.evaluated_on == (
            "the given batch (20 upper and 30 lower samples), in eval mode"
        )
        assert given.upper == pytest.approx(module.certify().upper, rel=1e-5)

    def test_no_trace_is_left_in_the_run(self, tmp_path: Path) -> None:
        """A run with a certificate at each step is the run without one."""

        class Looks(Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                pl_module.certify(batch={"upper": samples(20, 1), "lower": samples(30, 2)})

        runs = []
        for callbacks in ([], [Looks()]):
            torch.manual_seed(1)
            module = Streamed(envelope=self.ENVELOPE)
            fitted(tmp_path, module, loaders(), callbacks=callbacks)
            runs.append(module)
        assert same_parameters(*runs)
        for a, b in zip(runs[0].buffers(), runs[1].buffers(), strict=True):
            assert torch.equal(a, b)

    def test_the_own_envelope_of_streaming_ivsp(self, tmp_path: Path) -> None:
        module = Streamed(method=StreamingIVSP(rho=0.1))
        fitted(tmp_path, module, loaders())
        certificate = module.certify()
        assert certificate.rho == 0.1
        assert certificate.own_multiplier
        assert certificate.multiplier == module.last_step.multiplier

    def test_a_rho_that_is_out_of_reach_gives_way(self, tmp_path: Path, capsys: Any) -> None:
        """To one from the curvature of g, which the certificate says; its multiplier is its own."""
        module = Streamed(method=StreamingIVSP())
        report = CertificateReport()
        fitted(tmp_path, module, loaders(), callbacks=[report])
        certificate = module.certify()
        assert certificate is report.certificate
        assert certificate.rho < 10.0
        assert certificate.rho * certificate.sigma == pytest.approx(0.25)
        # z to 1e-3, or R to a hundredth of delta: psi is within t^2/(2m) of its minimum.
        modulus = 1 / certificate.rho - certificate.sigma
        error = certificate.tolerance**2 / (2 * modulus)
        assert certificate.tolerance == 1e-3 or error <= 1.0001e-2 * certificate.delta
        assert not certificate.own_multiplier
        words = f"; rho = {certificate.rho:.2g} from the curvature of g and delta ="
        assert words in certificate.evaluated_on
        cost = f"The certificate took {certificate.passes} passes over these data"
        assert cost in " ".join(capsys.readouterr().out.split())
        # At most 6 for the curvature, 20 for z with its start, and f, accuracy, y and the gap.
        assert certificate.passes <= 6 + 21 + 5

    def test_the_method_s_own_can_be_insisted_on(self, tmp_path: Path) -> None:
        module = Streamed(method=StreamingIVSP())
        fitted(tmp_path, module, loaders())
        for envelope in (Envelope(10.0, 0.0, 1e-3), module.envelope):
            own = module.certify(envelope=envelope)
            assert (own.rho, own.sigma) == (10.0, 0.0)
            assert own.own_multiplier
        assert module.certify(sample=True).rho == 10.0

    def test_one_loader_may_yield_both_levels(self, tmp_path: Path) -> None:
        batches = [{"upper": samples(5, s), "lower": samples(10, s)} for s in range(4)]
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        found = module.certify()
        assert found.evaluated_on == "all data (20 upper and 40 lower samples), in eval mode"

    def test_iterable_data_without_a_length(self, tmp_path: Path) -> None:
        data = {"upper": DataLoader(Endless(20, 1), 5), "lower": DataLoader(Endless(30, 2), 10)}
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, data)
        found = module.certify()
        assert found.evaluated_on == "all data (20 upper and 30 lower samples), in eval mode"

    def test_the_same_question_is_answered_once(self, tmp_path: Path) -> None:
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders(), callbacks=[CertificateMonitor()])
        assert module.certify() is module.certify()
        assert module.certify(sample=True) is module.certify(sample=True)


class TestMonitors:
    ENVELOPE = Envelope(0.1, 1.0, 1e-3)

    def monitors(self) -> list[Any]:
        return [
            CertificateMonitor(every_n_steps=2),
            SolverMonitor(),
            CertificateReport(),
        ]

    def test_they_look_at_a_fixed_sample(self, tmp_path: Path, capsys: Any) -> None:
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders(), callbacks=self.monitors())
        sample = "a fixed sample, the first 8 batches of this run (40 upper and 80 lower samples)"
        seen = module.certify(sample=True)
        assert seen.evaluated_on == f"{sample}, in eval mode"
        printed = capsys.readouterr()
        assert "all data (20 upper and 30 lower samples), in eval mode" in printed.out

    def test_they_leave_the_run_alone(self, tmp_path: Path) -> None:
        ends = []
        for callbacks in ([], self.monitors()):
            torch.manual_seed(1)
            module = Streamed(envelope=self.ENVELOPE)
            fitted(tmp_path, module, loaders(), callbacks=callbacks)
            ends.append(module)
        assert same_parameters(*ends)

    def test_too_few_passes_make_a_less_accurate_certificate(self, tmp_path: Path) -> None:
        """An envelope so wide that the proximal point is not found in the allowed passes."""
        module = Streamed(envelope=Envelope(1e3, 0.0, 1e-9))
        fitted(tmp_path, module, loaders(), callbacks=[CertificateMonitor(tolerance=1e-4)])
        found = module.certify(tolerance=1e-4, passes=5)
        assert found.tolerance > 1e-4
        words = f"z to {found.tolerance:.1e} after 5 passes, so R may be larger by"
        assert words in found.evaluated_on
        # More passes find a lower point of the envelope, and so a larger gap.
        better = module.certify(tolerance=1e-4, passes=50)
        assert better.tolerance < found.tolerance
        assert better.residual > found.residual

    def test_they_never_end_it(self, tmp_path: Path) -> None:
        """A loss that fails in eval mode."""

        class Fragile(Streamed):
            def lower_loss(self, batch: Any) -> Tensor:
                value = super().lower_loss(batch)
                return value if self.training else value * float("nan")

        module = Fragile(envelope=self.ENVELOPE)
        callbacks = [CertificateMonitor(), CertificateReport()]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fitted(tmp_path, module, loaders(), callbacks=callbacks)
        assert module.last_step is not None
        assert module.last_step.iteration == 12
        words = [str(warning.message) for warning in said]
        assert any("CertificateMonitor has no certificate to look at" in text for text in words)
        assert any("There is no certificate: The lower-level function g" in text for text in words)

    def test_the_certificate_can_be_left_out(self, tmp_path: Path) -> None:
        report = CertificateReport(batches=0)
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders(), callbacks=[report])
        assert report.certificate is None
        assert module.evaluation_time == 0.0

    def test_loaders_that_cannot_be_gone_through_again(self, tmp_path: Path) -> None:
        batches = [{"upper": samples(5, s), "lower": samples(10, s)} for s in range(4)]
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, Once(batches), max_epochs=1)
        with pytest.raises(MisconfigurationException, match="yields nothing when it is gone"):
            module.certify()


def test_units_are_rates_on_mini_batches() -> None:
    with pytest.raises(
        ValueError, match="the rate of the level's optimiser takes the place of its unit"
    ):
        Streamed(upper_unit=10.0)
