"""FewShot on fresh episodes through the Trainer: heads, cost, resume, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import episode_processes
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from places import SUPPORT
from running import same_parameters, trainer
from starting import Forked
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_bilevel import (
    IVSP,
    CertificateMonitor,
    CertificateReport,
    Envelope,
    Episodes,
    FewShot,
    GlyphEpisodes,
    OptimizationBudget,
    SolverMonitor,
    TaskEpisodes,
)
from lightning_bilevel.data.glyphs import draw_glyphs
from lightning_bilevel.stochastic import F2SA, MEHA, SOBA, VPBGD, StreamingIVSP

ADAM = partial(torch.optim.Adam, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.01)
METHODS: dict[str, Any] = {
    "f2sa": F2SA(),
    "meha": MEHA(c=1.0, gamma=10.0),
    "streaming-ivsp": StreamingIVSP(),
}
# a, b and rho of the first step.
FORMULAS: dict[str, Any] = {
    "f2sa": (F2SA(2.0), (1.0, 2.0, None)),
    "vpbgd": (VPBGD(2.0), (1.0, 2.0, None)),
    "meha": (MEHA(c=4.0, gamma=1.0), (0.25, 1.0, 1.0)),
    "streaming-ivsp": (StreamingIVSP(rho=1.0, gamma=0.5), (0.5, 1.0, 1.0)),
}


def data(**options: Any) -> GlyphEpisodes:
    sizes = {"ways": 3, "shots": 1, "queries": 2, "n_train": 2, "n_validation": 4, "n_test": 3}
    images = {"image_size": 16, "drawings": 5, "train_classes": 12, "validation_classes": 4}
    given = {**sizes, **images, "test_classes": 3, "tasks_per_batch": 2, "epoch_length": 4}
    return GlyphEpisodes(**{**given, **options})


def module(method: Any = METHODS["f2sa"], **options: Any) -> FewShot:
    torch.manual_seed(0)
    given = {"tasks": 2, "ways": 3, "channels": 4, "image_size": 16}
    return FewShot(**{**given, "method": method, "upper_optimizer": ADAM, **options})


@pytest.mark.parametrize("name", METHODS)
def test_the_encoder_moves_and_the_heads_stay(name: str, tmp_path: Path) -> None:
    ours = module(METHODS[name])
    before = [p.detach().clone() for p in ours.encoder.parameters()]
    run = trainer(tmp_path, max_steps=6)
    run.fit(ours, datamodule=data())
    assert run.global_step == 6
    assert not any(p.any() for p in ours.heads.parameters())
    after = ours.encoder.parameters()
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    # A normalisation takes away the bias of the convolution only after a nonlinearity: all move.
    assert all(moved)
    assert {"val_error", "test_error"} <= set(run.callback_metrics)


def test_a_step_goes_once_through_the_encoder_and_back(tmp_path: Path) -> None:
    ours = module(chunk_images=1000)
    counts = {"forward": 0, "backward": 0}

    class Count(Callback):
        def on_train_start(self, *_: Any) -> None:
            def forward(layer: Any, given: Any, result: torch.Tensor) -> None:
                if torch.is_grad_enabled():
                    counts["forward"] += 1
                    result.register_hook(backward)

            def backward(grad: torch.Tensor) -> None:
                counts["backward"] += 1

            ours.encoder.register_forward_hook(forward)

    run = trainer(tmp_path, max_steps=3, limit_val_batches=0, callbacks=[Count()])
    run.fit(ours, datamodule=data())
    # Three steps, each with the support sets and the query sets.
    assert counts == {"forward": 6, "backward": 6}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_is_the_same_written_by_hand(name: str, tmp_path: Path) -> None:
    """In float64: closed forms, features, chunks and Trainer against autograd on everything."""
    method, (a, b, rho) = FORMULAS[name]
    # One task at a time goes through the encoder. The heads end at the border of their box.
    options = {"inner_steps": 5, "inner_lr": 50.0, "chunk_images": 3}
    ours = module(method, upper_optimizer=partial(torch.optim.SGD, lr=1e-5), **options)
    twin = module()
    twin.load_state_dict(ours.state_dict())
    twin.double()
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0, precision="64-true")
    run.fit(ours, datamodule=data())
    source = data()
    source.setup()
    support, support_labels, query, query_labels = source.fresh(range(2))
    features = [twin.encoder(images.double()) for images in (query, support)]

    def loss(values: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        """The mean over tasks of the loss of each head."""
        logits = values @ head[0].transpose(1, 2) + head[1].unsqueeze(1)
        losses = [cross_entropy(logits[i], labels[i]) for i in range(2)]
        return torch.stack(losses).mean()

    def slopes(head: Any, weights: tuple[float, float]) -> Any:
        head = [v.detach().requires_grad_() for v in head]
        f = loss(features[0].detach(), query_labels, head)
        g = loss(features[1].detach(), support_labels, head)
        return torch.autograd.grad(weights[0] * f + weights[1] * g, head)

    def moved(head: Any, directions: Any) -> Any:
        # 50 on the loss of a head's own task is 100 on the mean over two.
        return [(v - 100.0 * d).clamp(-20, 20) for v, d in zip(head, directions, strict=True)]

    size = ours.encoder.features
    z = [torch.zeros(2, 3, size).double(), torch.zeros(2, 3).double()]
    for _ in range(5):
        z = moved(z, slopes(z, (0.0, 1.0)))
    y = z
    for _ in range(5):
        pull = [
            torch.zeros_like(v) if rho is None else (u - v) / rho for u, v in zip(z, y, strict=True)
        ]
        d_y = [
            s + b / (a + b) * p
            for s, p in zip(slopes(y, (a / (a + b), b / (a + b))), pull, strict=True)
        ]
        if rho is not None:
            d_z = [s + p for s, p in zip(slopes(z, (0.0, 1.0)), pull, strict=True)]
            z = moved(z, d_z)
        y = moved(y, d_y)
    assert max(float(v.abs().max()) for v in y) == 20.0
    f, g_y = loss(features[0], query_labels, y), loss(features[1], support_labels, y)
    gap = g_y - loss(features[1], support_labels, z)
    parameters = list(twin.encoder.parameters())
    gradients = torch.autograd.grad(a * f + b * gap, parameters)
    for new, old, slope in zip(ours.encoder.parameters(), parameters, gradients, strict=True):
        assert torch.allclose(new, old - 1e-5 * slope, rtol=0, atol=1e-10)
        assert float(slope.abs().max()) > 1e-4
    info = ours.last_step
    found = [float(v) for v in (info.upper, info.lower, info.gap, info.multiplier)]
    assert found == pytest.approx([f.item(), g_y.item(), gap.item(), b / a], abs=1e-10)
    assert info.inner_iterations == 10


def test_streaming_ivsp_weighs_a_batch_by_the_gaps_before(tmp_path: Path) -> None:
    ours = module(StreamingIVSP(rho=10.0, delta=0.25, mu=10.0, gamma=0.5))
    infos = []

    class Keep(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            infos.append(ours.last_step)

    trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[Keep()]).fit(
        ours, datamodule=data()
    )
    assert float(infos[0].multiplier) == 2.0  # the largest phi, at the first batch
    step = ours.mini_batches.step
    first = step.tracked[0]
    assert float(infos[1].multiplier) != 2.0
    # R after two steps is 0.98 of the first and 0.02 of the second.
    assert float(infos[1].multiplier) == pytest.approx(2 * (float(first) / 10 + 0.5), abs=0.02)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_batches_whose_episodes_are_numbered_pair_heads_by_number(tmp_path: Path) -> None:
    found = []
    for order in ([0, 1], [1, 0]):
        source = data()
        source.setup()
        batch = source.fresh(range(2)).levels()
        batch["lower"] = tuple(tensor[torch.tensor(order)] for tensor in batch["lower"])
        ours = module()
        run = trainer(tmp_path, max_steps=1)
        run.fit(ours, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
        found.append(float(ours.last_step.upper))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("stop", [3, 4, 6])
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, stop: int, tmp_path: Path) -> None:
    whole = module(METHODS[name])
    trainer(tmp_path, max_steps=7).fit(whole, datamodule=data())
    first = module(METHODS[name])
    begun = trainer(tmp_path, max_steps=stop)
    begun.fit(first, datamodule=data())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    second = module(METHODS[name])
    resumed = trainer(tmp_path, max_steps=7)
    resumed.fit(second, datamodule=data(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert resumed.global_step == 7
    assert same_parameters(second, whole)
    assert not same_parameters(first, whole)


def test_own_optimisers_make_the_mode(tmp_path: Path) -> None:
    class Own(FewShot):
        def configure_optimizers(self) -> Any:
            # Two optimisers of one level.
            parameters = list(self.encoder.parameters())
            return torch.optim.SGD(parameters[:4], lr=0.01), torch.optim.Adam(parameters[4:])

    torch.manual_seed(0)
    ours = Own(2, ways=3, channels=4, image_size=16)
    before = [p.detach().clone() for p in ours.encoder.parameters()]
    run = trainer(tmp_path, max_steps=3)
    run.fit(ours, datamodule=data())
    assert run.global_step == 3
    pairs = zip(before, ours.encoder.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("half", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_near_the_whole(half: str, tmp_path: Path) -> None:
    infos = []
    for precision in ("32-true", half):
        ours = module()
        run = trainer(tmp_path, max_steps=1, limit_val_batches=0, precision=precision)
        run.fit(ours, datamodule=data())
        infos.append(ours.last_step)
    assert float(infos[1].upper) == pytest.approx(float(infos[0].upper), rel=0.05)
    assert float(infos[1].upper) != float(infos[0].upper)


def test_a_pool_of_tasks_from_elsewhere(tmp_path: Path) -> None:
    images, labels = draw_glyphs(3, 3, size=16).flatten(0, 1), torch.arange(3).repeat_interleave(3)
    pool = Episodes.from_tasks([(images + i, labels) for i in range(5)], count=5, shots=1)
    ours = module()
    run = trainer(tmp_path, max_steps=4)
    run.fit(ours, datamodule=TaskEpisodes(pool, pool, pool, epoch_length=4, tasks_per_batch=2))
    assert run.global_step == 4
    assert not any(p.any() for p in ours.heads.parameters())


def test_there_is_no_certificate_and_nothing_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = module(envelope=Envelope(rho=2.5, sigma=0.0, delta=1e-3))
    report = CertificateReport()
    monitor = SolverMonitor()
    watching = [CertificateMonitor(), report, monitor, OptimizationBudget("1h")]
    run = trainer(tmp_path, max_steps=4, callbacks=watching, log_every_n_steps=2)
    run.fit(ours, datamodule=data())
    assert ours.certify() is None
    assert report.certificate is None
    printed = capsys.readouterr().out
    assert "F2SA on FewShot" in printed
    assert "inner iterations   160" in printed
    assert monitor.tally.iterations == 4
    logged = {"bilevel/upper", "bilevel/lower", "bilevel/gap", "bilevel/multiplier"}
    assert logged <= set(run.callback_metrics)


@pytest.mark.integration
def test_two_processes_are_one_on_the_joined_batches(tmp_path: Path) -> None:
    process = Forked(SUPPORT / "episode_processes.py", tmp_path, cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    first, second = (
        torch.load(tmp_path / f"end-{rank}.pt", weights_only=True) for rank in range(2)
    )
    alone = episode_processes.run(tmp_path, 4)
    for name, value in alone.encoder.state_dict().items():
        assert torch.equal(first[f"encoder.{name}"], second[f"encoder.{name}"])
        torch.testing.assert_close(first[f"encoder.{name}"], value, rtol=0, atol=1e-10)


def test_it_learns(tmp_path: Path) -> None:
    source = data(ways=5, n_validation=20, train_classes=40, validation_classes=10, test_classes=5)
    source.epoch_length = 60
    ours = module(ways=5, channels=8)
    run = trainer(tmp_path, max_steps=60)
    run.validate(ours, datamodule=source, verbose=False)
    before = float(run.callback_metrics["val_error"])
    run.fit(ours, datamodule=source)
    assert float(run.callback_metrics["val_error"]) < before - 0.1


def test_schedule_and_clipping_reach_the_encoder(tmp_path: Path) -> None:
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    ours = module(upper_optimizer=SGD, upper_scheduler=halved, gradient_clip_val=1e-3)
    before = [p.detach().clone() for p in ours.encoder.parameters()]
    run = trainer(tmp_path, max_steps=4)
    run.fit(ours, datamodule=data())
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0025)
    after = [p.detach() for p in ours.encoder.parameters()]
    far = sum(float((b - a).square().sum()) for a, b in zip(before, after, strict=True)) ** 0.5
    assert 0 < far <= 1e-3 * (2 * 0.01 + 2 * 0.005) * (1 + 1e-5)


def test_an_optimiser_alone_is_f2sa_and_a_method_alone_adam(tmp_path: Path) -> None:
    ours = module(None)
    run = trainer(tmp_path, max_steps=1)
    run.fit(ours, datamodule=data())
    assert isinstance(ours.mini_batches.step.method, F2SA)
    assert module(None, upper_optimizer=None, gradient_clip_val=1.0)._fresh
    other = module(upper_optimizer=None)
    run = trainer(tmp_path, max_steps=1)
    run.fit(other, datamodule=data())
    assert isinstance(run.optimizers[0], torch.optim.Adam)


def test_ivsp_refuses_fresh_episodes(tmp_path: Path) -> None:
    exact = module(None, upper_optimizer=None)
    with pytest.raises(MisconfigurationException, match="batch with other values"):
        trainer(tmp_path, max_steps=3).fit(exact, datamodule=data())


def test_a_method_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was given a solver, for exact runs"):
        module(solver=IVSP)
    with pytest.raises(TypeError, match=r"`FewShot\(method=SOBA\(\)\)` solves the heads on each"):
        trainer(tmp_path, max_steps=1).fit(module(SOBA()), datamodule=data())
