"""FewShot on fresh episodes through the Trainer: heads, cost, resume, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from running import same_parameters, trainer
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    F2SA,
    IVSP,
    MEHA,
    Adaptation,
    CertificateReport,
    Envelope,
    Episodes,
    FewShot,
    GlyphEpisodes,
    MoreauGapMonitor,
    StreamingIVSP,
    TaskEpisodes,
    draw_glyphs,
)
from lightning_bilevel.modules.networks import TaskHeads, nearest_centroid

ADAM = partial(torch.optim.Adam, lr=1e-2)
SOLVERS: dict[str, Any] = {
    "f2sa": partial(F2SA, upper_optimizer=ADAM),
    "meha": partial(MEHA, gamma=10.0, c=1.0, upper_optimizer=ADAM),
    "streaming-ivsp": partial(StreamingIVSP, upper_optimizer=ADAM),
}


def data(**options: Any) -> GlyphEpisodes:
    sizes = {"ways": 3, "shots": 1, "queries": 2, "n_train": 2, "n_validation": 4, "n_test": 3}
    images = {"image_size": 16, "drawings": 5, "train_classes": 12, "validation_classes": 4}
    given = {**sizes, **images, "test_classes": 3, "tasks_per_batch": 2, "epoch_length": 4}
    return GlyphEpisodes(**{**given, **options})


def module(solver: Any = SOLVERS["f2sa"], **options: Any) -> FewShot:
    torch.manual_seed(0)
    given = {"tasks": 2, "ways": 3, "channels": 4, "image_size": 16}
    return FewShot(**{**given, "solver": solver, **options})


@pytest.mark.parametrize("name", SOLVERS)
def test_the_encoder_moves_and_the_heads_stay(name: str, tmp_path: Path) -> None:
    ours = module(SOLVERS[name])
    before = [p.detach().clone() for p in ours.encoder.parameters()]
    run = trainer(tmp_path, max_steps=6)
    run.fit(ours, datamodule=data())
    assert run.global_step == 6
    assert not any(p.any() for p in ours.heads.parameters())
    after = ours.encoder.parameters()
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    # A normalisation takes away the bias of the convolution only after a nonlinearity: all move.
    assert all(moved)
    assert {"val_error", "val_centroid_error", "test_centroid_error"} <= set(run.callback_metrics)


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


def test_a_step_is_the_same_written_by_hand(tmp_path: Path) -> None:
    """In float64: closed forms, features, chunks and Trainer against autograd on everything."""
    sgd = partial(torch.optim.SGD, lr=0.01)
    ours = module(partial(F2SA, lambda0=2.0, upper_optimizer=sgd), adaptation=Adaptation(5, 0.4))
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

    def moved(head: Any, weights: tuple[float, float]) -> Any:
        head = [v.detach().requires_grad_() for v in head]
        f = loss(features[0].detach(), query_labels, head)
        g = loss(features[1].detach(), support_labels, head)
        # 0.4 on the loss of a head's own task is 0.8 on the mean over two.
        slopes = torch.autograd.grad(weights[0] * f + weights[1] * g, head)
        return [v.detach() - 0.8 * s for v, s in zip(head, slopes, strict=True)]

    size = ours.encoder.features
    z = [torch.zeros(2, 3, size).double(), torch.zeros(2, 3).double()]
    for _ in range(5):
        z = moved(z, (0.0, 1.0))
    y = z
    for _ in range(5):
        y = moved(y, (1 / 3, 2 / 3))
    gap = loss(features[1], support_labels, y) - loss(features[1], support_labels, z)
    value = loss(features[0], query_labels, y) + 2.0 * gap
    parameters = list(twin.encoder.parameters())
    slopes = torch.autograd.grad(value, parameters)
    for new, old, slope in zip(ours.encoder.parameters(), parameters, slopes, strict=True):
        assert torch.allclose(new, old - 0.01 * slope, rtol=0, atol=1e-10)


@pytest.mark.parametrize("stop", [3, 4, 6])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, stop: int, tmp_path: Path) -> None:
    whole = module(SOLVERS[name])
    trainer(tmp_path, max_steps=7).fit(whole, datamodule=data())
    first = module(SOLVERS[name])
    begun = trainer(tmp_path, max_steps=stop)
    begun.fit(first, datamodule=data())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    second = module(SOLVERS[name])
    resumed = trainer(tmp_path, max_steps=7)
    resumed.fit(second, datamodule=data(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert resumed.global_step == 7
    assert same_parameters(second, whole)
    assert not same_parameters(first, whole)


def test_half_precision_is_near_the_whole(tmp_path: Path) -> None:
    infos = []
    for precision in ("32-true", "bf16-mixed"):
        ours = module()
        run = trainer(tmp_path, max_steps=1, limit_val_batches=0, precision=precision)
        run.fit(ours, datamodule=data())
        assert all(p.dtype == torch.float32 for p in ours.parameters())
        infos.append(ours.last_step)
    assert infos[1].upper == pytest.approx(infos[0].upper, rel=0.05)
    assert infos[1].upper != infos[0].upper


def test_a_pool_of_tasks_from_elsewhere(tmp_path: Path) -> None:
    images, labels = draw_glyphs(3, 3, size=16).flatten(0, 1), torch.arange(3).repeat_interleave(3)
    pool = Episodes.from_tasks([(images + i, labels) for i in range(5)], count=5, shots=1)
    ours = module()
    run = trainer(tmp_path, max_steps=4)
    run.fit(ours, datamodule=TaskEpisodes(pool, pool, pool, epoch_length=4, tasks_per_batch=2))
    assert run.global_step == 4
    assert not any(p.any() for p in ours.heads.parameters())


@pytest.mark.parametrize("indexed", [False, True])
def test_the_closed_form_is_the_gradient(indexed: bool) -> None:
    torch.manual_seed(1)
    heads = TaskHeads(3, 4, 5).double()
    for p in heads.parameters():
        torch.nn.init.normal_(p)
    features = torch.randn(2 if indexed else 3, 6, 5, dtype=torch.float64)
    labels = torch.randint(4, features.shape[:2])
    index = torch.tensor([2, 0]) if indexed else None
    loss = cross_entropy(heads(features, index).flatten(0, 1), labels.flatten())
    for ours, theirs in zip(
        heads.gradient(features, labels, index),
        torch.autograd.grad(loss, [heads.weight, heads.bias]),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)


def test_the_nearest_centroid_is_that_of_a_loop() -> None:
    torch.manual_seed(2)
    support, query = torch.randn(2, 6, 5), torch.randn(2, 7, 5)
    labels = torch.tensor([[0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0]])
    found = nearest_centroid(support, labels, query, 3)
    for e in range(2):
        centroids = [support[e][labels[e] == c].mean(0) for c in range(3)]
        for q in range(7):
            distances = [float((query[e, q] - c).norm()) for c in centroids]
            assert int(found[e, q]) == distances.index(min(distances))


def test_there_is_no_certificate_and_nothing_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = module(envelope=Envelope(rho=2.5, sigma=0.0, delta=1e-3))
    report = CertificateReport()
    watching = [MoreauGapMonitor(), report]
    trainer(tmp_path, max_steps=4, callbacks=watching).fit(ours, datamodule=data())
    assert ours.certify() is None
    assert report.certificate is None
    assert "F2SA on FewShot" in capsys.readouterr().out


def test_it_learns(tmp_path: Path) -> None:
    source = data(ways=5, n_validation=20, train_classes=40, validation_classes=10, test_classes=5)
    source.epoch_length = 60
    ours = module(ways=5, channels=8)
    run = trainer(tmp_path, max_steps=60)
    run.validate(ours, datamodule=source, verbose=False)
    before = float(run.callback_metrics["val_error"])
    run.fit(ours, datamodule=source)
    assert float(run.callback_metrics["val_error"]) < before - 0.1


def test_ivsp_refuses_fresh_episodes(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="Use `StreamingIVSP`"):
        trainer(tmp_path, max_steps=3).fit(module(IVSP), datamodule=data())
