"""Runs on mini-batches: any loaders, one batch and one set of random numbers for y and z."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from modules import Weighting, samples, weighting_data
from records import Recorder
from running import same_parameters, trainer
from streaming import ADAMW, SGD, STREAMED, Endless, Streamed, Touching, loader, loaders
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_bilevel import (
    AID,
    DARTS,
    F2SA,
    SOBA,
    CertificateReport,
    Envelope,
    HJFBiO,
    StreamInfo,
    StreamingIVSP,
    TableRMS,
)

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")


def fitted(tmp_path: Path, module: Any, data: Any, **options: Any) -> Any:
    run = trainer(tmp_path, **{"max_epochs": 3, **options})
    run.fit(module, data, loader(20, 3, 20))
    return run


class Batches(Callback):
    """Keeps the batches of a run."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.seen.append(batch)


class TestLoaders:
    def test_levels_of_different_length_cycle_to_the_longer_one(self, tmp_path: Path) -> None:
        module = Streamed()
        seen = Batches()
        fitted(tmp_path, module, loaders(), callbacks=[seen])
        assert isinstance(module.last_step, StreamInfo)
        assert module.last_step.iteration == 12
        assert module.last_step.calls.passes == 3
        # Each epoch goes through all of the longer level, whose order changes.
        for epoch in range(3):
            part = torch.cat([b["upper"][2] for b in seen.seen[4 * epoch : 4 * epoch + 4]])
            assert sorted(part.tolist()) == list(range(20))

    def test_a_combined_loader_decides_itself(self, tmp_path: Path) -> None:
        module = Streamed()
        fitted(tmp_path, module, CombinedLoader(loaders(), "min_size"))
        assert module.last_step.iteration == 9

    def test_workers_give_the_same_run(self, tmp_path: Path) -> None:
        """The masks of dropout are drawn in the first process."""
        runs = []
        for workers in (0, 2):
            torch.manual_seed(1)
            module = Streamed()
            fitted(tmp_path, module, loaders(num_workers=workers, shuffle=False), max_epochs=2)
            runs.append(module)
        assert same_parameters(*runs)

    def test_iterable_data_without_a_length(self, tmp_path: Path) -> None:
        module = Streamed()
        data = {
            "upper": DataLoader(Endless(20, 1), 5),
            "lower": DataLoader(Endless(30, 2), 10),
        }
        fitted(tmp_path, module, data)
        assert module.last_step.iteration == 12

    def test_a_loader_may_yield_both_levels_itself(self, tmp_path: Path) -> None:
        batches = [{"upper": samples(5, s), "lower": samples(10, s)} for s in range(4)]
        module = Streamed(envelope=Envelope(0.1, 1.0, 1e-3))
        fitted(tmp_path, module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        assert module.last_step.iteration == 12
        assert "20 upper and 40 lower samples" in module.certify().evaluated_on

    @pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
    def test_a_batch_may_be_any_of_these(self, tmp_path: Path, kind: str) -> None:
        @dataclass
        class Samples:
            inputs: Tensor
            labels: Tensor
            index: Tensor

        def collated(rows: list[Any]) -> Any:
            columns = [torch.stack(column) for column in zip(*rows, strict=True)]
            if kind == "tuple":
                return tuple(columns)
            if kind == "dataclass":
                return Samples(*columns)
            return dict(zip(("inputs", "labels", "index"), columns, strict=True))

        def read(batch: Any) -> Any:
            if isinstance(batch, dict):
                return batch["inputs"], batch["labels"], batch["index"]
            if isinstance(batch, Samples):
                return batch.inputs, batch.labels, batch.index
            return batch

        class Any_(Touching):
            def upper_loss(self, batch: Any) -> Tensor:
                return super().upper_loss(read(batch))

            def lower_loss(self, batch: Any) -> Tensor:
                return super().lower_loss(read(batch))

            def upper_indices(self, batch: Any) -> Tensor:
                return super().upper_indices(read(batch))

        runs = []
        for module, options in ((Any_(), {"collate_fn": collated}), (Touching(), {})):
            torch.manual_seed(1)
            fitted(tmp_path, module, loaders(**options), max_epochs=2)
            runs.append(module)
        assert same_parameters(*runs)

    def test_full_batches_are_the_exact_iteration(self, tmp_path: Path) -> None:
        """A FullBatchDataModule is all data, so the stochastic solver runs as its paper has it."""
        module = Weighting(solver=partial(F2SA, T=3))
        trainer(tmp_path, max_steps=4).fit(module, datamodule=weighting_data())
        assert not isinstance(module.last_step, StreamInfo)
        assert module.last_step is not None
        assert module.last_step.inner_iterations == 3


class TestStep:
    def test_it_is_the_step_written_by_hand(self, tmp_path: Path) -> None:
        """One step of streaming F2SA, with an ordinary module for y and one for z."""
        torch.manual_seed(3)
        module = Streamed(dropout=0.0, solver=partial(F2SA, alpha=0.1, gamma=0.2, xi=0.5))
        by_hand = Streamed(dropout=0.0)
        at_z = Streamed(dropout=0.0)
        seen = Batches()
        fitted(tmp_path, module, loaders(), max_epochs=-1, max_steps=2, callbacks=[seen])
        for batch in seen.seen:
            x, y, z = by_hand.logits, [*by_hand.network.parameters()], [*at_z.network.parameters()]
            at_z.logits.data = x.data
            f = torch.autograd.grad(by_hand.upper_loss(batch["upper"]), y)
            g_x, *g = torch.autograd.grad(by_hand.lower_loss(batch["lower"]), [x, *y])
            h_x, *h = torch.autograd.grad(at_z.lower_loss(batch["lower"]), [at_z.logits, *z])
            with torch.no_grad():
                x.sub_(0.5 * 0.1 * (g_x - h_x)).clamp_(-8, 8)
                for p, df, dg in zip(y, f, g, strict=True):
                    p.sub_(0.1 * (df + dg))
                for p, dh in zip(z, h, strict=True):
                    p.sub_(0.2 * dh)
        for p, q in zip(module.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        # The running statistics are those of y on upper and lower batches, and not of z.
        for p, q in zip(module.buffers(), by_hand.buffers(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    def test_the_gap_is_zero_where_z_is_y(self, tmp_path: Path) -> None:
        """With dropout and batch normalisation: y and z see the same batch and masks."""
        module = Streamed(dropout=0.5)
        history = Recorder()
        fitted(tmp_path, module, loaders(), max_steps=2, callbacks=[history])
        assert history.steps[0]["gap"] == 0.0
        assert history.steps[1]["gap"] != 0.0

    def test_a_buffer_that_the_user_changes_reaches_z(self, tmp_path: Path) -> None:
        class Warm(Streamed):
            def __init__(self) -> None:
                super().__init__(dropout=0.0)
                self.register_buffer("temperature", torch.ones(()))
                self.seen: list[float] = []

            def on_train_epoch_start(self) -> None:
                self.temperature.fill_(float(self.current_epoch + 1))

            def lower_loss(self, batch: Any) -> Tensor:
                self.seen.append(float(self.temperature))
                return super().lower_loss(batch) / self.temperature

        module = Warm()
        fitted(tmp_path, module, loaders(), max_epochs=2, num_sanity_val_steps=0)
        assert module.seen == [1.0] * 8 + [2.0] * 8

    @pytest.mark.parametrize(
        "solver",
        [SOBA, partial(SOBA, products="difference"), HJFBiO, DARTS],
        ids=["soba", "soba-difference", "hjfbio", "darts"],
    )
    def test_further_points_leave_the_running_statistics_alone(
        self, tmp_path: Path, solver: Any
    ) -> None:
        """A method may evaluate g at several points: one batch of each level counts once."""
        module = Streamed(dropout=0.5, solver=partial(solver, lower_optimizer=ADAMW))
        fitted(tmp_path, module, loaders(), max_epochs=-1, max_steps=3, limit_val_batches=0)
        assert module.network[1].num_batches_tracked == 2 * 3
        assert module.last_step.upper > 0
        # The gap is that of an inner variable, which these methods do not have.
        assert "bilevel/gap" not in module.last_step.metrics()
        assert (module.logits != 0).any()

    def test_a_step_that_does_not_know_f_is_logged_without_it(self, tmp_path: Path) -> None:
        """AID takes several batches for an iteration; logs take what there is."""
        solver = partial(AID, T=2, N=1, linear_solver="neumann")
        module = Streamed(solver=solver, envelope=Envelope(0.1, 1.0, 1e-3))
        steps = Recorder()
        fitted(
            tmp_path,
            module,
            loaders(),
            callbacks=[steps, CertificateReport()],
            logger=CSVLogger(tmp_path),
            log_every_n_steps=1,
            max_epochs=2,
        )
        known = [(not isnan(s["upper"]), not isnan(s["lower"])) for s in steps.steps]
        assert known == 2 * [(False, True), (False, True), (True, False), (False, False)]

    def test_untouched_weights_stay(self, tmp_path: Path) -> None:
        module = Touching(
            solver=partial(F2SA, upper_optimizer=TableRMS, lower_optimizer=ADAMW), dropout=0.0
        )
        # One weight off zero, so that it would show a projection or a decay.
        module.logits.data[:] = 0.123
        data = {"upper": loader(20, 1, 5), "lower": loader(30, 2, 10)}
        fitted(tmp_path, module, data, max_steps=2)
        moved = module.logits.detach() != 0.123
        # z starts at y, so x moves from the second batch on: samples 10 to 19.
        assert moved.tolist() == [False] * 10 + [True] * 10 + [False] * 10

    def test_losses_in_bfloat16_and_the_solver_in_float32(self, tmp_path: Path) -> None:
        kinds: list[Any] = []

        class Watched(Streamed):
            def upper_loss(self, batch: Any) -> Tensor:
                outputs = self.network(batch[0])
                kinds.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
                return cross_entropy(outputs, batch[1])

            def lower_loss(self, batch: Any) -> Tensor:
                # A loss that autocast leaves in bfloat16.
                return super().lower_loss(batch) + 0 * self.network(batch[0]).mean()

        class Solver(F2SA):
            def directions(self, sample: Any, x: Any, y: Any, z: Any) -> Any:
                kinds.append((sample.lower_y.dtype, torch.is_autocast_enabled("cpu")))
                return super().directions(sample, x, y, z)

        low = Watched(solver=partial(Solver, upper_optimizer=SGD, lower_optimizer=ADAMW))
        torch.manual_seed(1)
        fitted(tmp_path, low, loaders(), precision="bf16-mixed", limit_val_batches=0)
        assert set(kinds) == {(torch.bfloat16, True), (torch.float32, False)}
        assert all(p.dtype == torch.float32 for p in low.parameters())
        torch.manual_seed(1)
        full = Watched()
        fitted(tmp_path, full, loaders(), limit_val_batches=0)
        assert not same_parameters(low, full)
        # Rounding to 8 bits moves the weights a little, and AdamW enlarges small gradients.
        inputs, labels, _ = samples(200, 3)
        losses = [cross_entropy(m.eval().network(inputs), labels).item() for m in (low, full)]
        assert losses[0] == pytest.approx(losses[1], rel=0.03)

    def test_products_on_losses_in_bfloat16(self, tmp_path: Path) -> None:
        """Double differentiation under autocast: the run ends near that in float32."""
        ends = []
        for precision in ("bf16-mixed", "32-true"):
            torch.manual_seed(1)
            module = Streamed(dropout=0.0, solver=partial(SOBA, alpha=5.0, beta=0.3))
            fitted(tmp_path, module, loaders(), precision=precision, limit_val_batches=0)
            assert all(p.dtype == torch.float32 for p in module.parameters())
            ends.append(module.logits.detach())
        assert not torch.equal(*ends)
        assert ends[1].abs().max() > 0.01
        assert (ends[0] - ends[1]).norm() < 0.2 * ends[1].norm()

    def test_lower_parts_are_used(self, tmp_path: Path) -> None:
        class Whole(Streamed):
            def __init__(self) -> None:
                super().__init__(dropout=0.0)
                self.encoder = nn.Linear(2, 2)
                self.encoded = 0
                self.declare(upper=self.encoder, lower=self.network, solver=STREAMED)
                self.logits.requires_grad_(False)

            def upper_loss(self, batch: Any) -> Tensor:
                return cross_entropy(self.network(self.encoder(batch[0])), batch[1])

            def lower_loss(self, batch: Any) -> Tensor:
                return self.upper_loss(batch)

        class Once(Whole):
            def lower_features(self, batch: Any) -> Tensor:  # type: ignore[override]
                self.encoded += 1
                return self.encoder(batch[0])

            def lower_loss(self, batch: Any, features: Tensor) -> Tensor:  # type: ignore[override]
                return cross_entropy(self.network(features), batch[1])

        runs = []
        for module in (Whole(), Once()):
            torch.manual_seed(1)
            fitted(tmp_path, module, loaders(), max_steps=5, limit_val_batches=0)
            runs.append(module)
        assert runs[1].encoded == 5
        for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class TestSchedulers:
    @pytest.mark.parametrize(("interval", "expected"), [("step", 6), ("epoch", 2)])
    def test_a_scheduler_drives_both_levels(
        self, tmp_path: Path, interval: str, expected: int
    ) -> None:
        plan = {"scheduler": partial(CosineAnnealingLR, T_max=12), "interval": interval}
        module = Streamed(scheduler={**plan, "frequency": 2})
        run = fitted(tmp_path, module, loaders(), max_epochs=4 if interval == "epoch" else 3)
        rates = [group["lr"] for group in run.optimizers[0].param_groups]
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        reference = CosineAnnealingLR(optimizer, T_max=12)
        for _ in range(expected):
            optimizer.step()
            reference.step()
        factor = reference.get_last_lr()[0]
        assert rates == pytest.approx([0.5 * factor, 1e-2 * factor], rel=1e-6)

    def test_the_learning_rate_monitor_shows_both_levels(self, tmp_path: Path) -> None:
        module = Streamed(
            scheduler={"scheduler": partial(CosineAnnealingLR, T_max=12), "interval": "step"}
        )
        logger = CSVLogger(tmp_path)
        fitted(
            tmp_path,
            module,
            loaders(),
            logger=logger,
            log_every_n_steps=1,
            callbacks=[LearningRateMonitor("step")],
        )
        logger.save()
        text = (Path(logger.log_dir) / "metrics.csv").read_text()
        header = text.splitlines()[0].split(",")
        assert {"lr-F2SA/upper", "lr-F2SA/lower"} <= set(header)

    def test_a_plateau_is_looked_for_in_the_named_quantity(self, tmp_path: Path) -> None:
        class Constant(Streamed):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val_loss", 1.0, batch_size=1)

        make = partial(ReduceLROnPlateau, factor=0.1, patience=0)
        module = Constant(scheduler={"scheduler": make, "monitor": "val_loss"})
        run = fitted(tmp_path, module, loaders(), max_epochs=3)
        rates = [group["lr"] for group in run.optimizers[0].param_groups]
        assert rates == pytest.approx([0.5e-2, 1e-4])


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
        assert given.evaluated_on == "the given batch, in eval mode"
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
        solver = partial(StreamingIVSP, rho=0.1, upper_optimizer=SGD, lower_optimizer=ADAMW)
        module = Streamed(solver=solver)
        fitted(tmp_path, module, loaders())
        certificate = module.certify()
        assert certificate.rho == 0.1
        assert certificate.own_multiplier
        assert certificate.multiplier == module.last_step.multiplier

    def test_a_rho_that_is_out_of_reach_gives_way(self, tmp_path: Path, capsys: Any) -> None:
        """To one from the curvature of g, which the certificate says; its multiplier is its own."""
        solver = partial(StreamingIVSP, upper_optimizer=SGD, lower_optimizer=ADAMW)
        module = Streamed(solver=solver)
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

    def test_the_solver_s_own_can_be_insisted_on(self, tmp_path: Path) -> None:
        solver = partial(StreamingIVSP, upper_optimizer=SGD, lower_optimizer=ADAMW)
        module = Streamed(solver=solver)
        report = CertificateReport(envelope=Envelope(10.0, 0.0, 1e-3))
        fitted(tmp_path, module, loaders(), callbacks=[report])
        for own in (report.certificate, module.certify(envelope=module.envelope)):
            assert own is not None
            assert (own.rho, own.sigma) == (10.0, 0.0)
            assert own.own_multiplier
        assert module.certify(sample=True).rho == 10.0
