"""Few-shot learning: the paper's model, in chunks and with cached features, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import trainer
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, cross_entropy, linear, max_pool2d

from lightning_bilevel import BOME, Chunks, Envelope, FewShot, GlyphEpisodes
from lightning_bilevel.modules.networks import Conv4, EpisodeSets, adapt


def data(**options: Any) -> GlyphEpisodes:
    small = {
        "ways": 3,
        "shots": 2,
        "queries": 2,
        "n_train": 5,
        "n_validation": 4,
        "n_test": 3,
        "image_size": 16,
        "drawings": 5,
    }
    source = GlyphEpisodes(
        **{**small, "train_classes": 8, "validation_classes": 4, "test_classes": 3, **options}
    )
    source.setup()
    return source


def module(seed: int = 0, **options: Any) -> FewShot:
    torch.manual_seed(seed)
    return FewShot(**{"tasks": 5, "ways": 3, "channels": 4, "image_size": 16, **options})


@pytest.mark.parametrize("channels", [1, 3])
def test_the_features_are_those_of_the_usual_layout(channels: int) -> None:
    # Convolution and pooling go over another layout of the images; normalisation is not as accurate
    # there.
    torch.manual_seed(0)
    encoder = Conv4(channels=8, inputs=channels)
    strokes = (torch.rand(50, channels, 28, 28) > 0.95).float()
    value = strokes.double()
    for block in encoder.blocks:
        weight, bias = block.conv.weight.double(), block.conv.bias.double()
        value = max_pool2d(conv2d(value, weight, bias, padding=1).relu(), 2)
        value = batch_norm(
            value, None, None, block.scale.double(), block.bias.double(), training=True
        )
    torch.testing.assert_close(
        encoder(strokes[None])[0].double(), value.flatten(1), rtol=0, atol=2e-5
    )


def test_the_papers_sizes() -> None:
    paper = FewShot()
    assert sum(p.numel() for p in paper.encoder.parameters()) == 111_936
    assert sum(p.numel() for p in paper.heads.parameters()) == 83_200
    assert all(not p.any() for p in paper.heads.parameters())
    sizes = []
    for block in paper.encoder.blocks:
        block.register_forward_hook(
            lambda block, given, result: sizes.append((given[0].shape[-1], result.shape[-1]))
        )
    assert paper.encoder(torch.rand(2, 10, 1, 28, 28)).shape == (2, 10, 64)
    assert sizes == [(28, 14), (14, 7), (7, 3), (3, 1)]


class Reference:
    """The problem as the paper states it: one task at a time, no chunks, no cache."""

    def __init__(self, source: GlyphEpisodes, channels: int, ways: int, features: int) -> None:
        self.source = source
        self.channels = channels
        self.ways = ways
        self.features = features

    def loss(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        images, labels, _ = batch
        tasks = len(images)
        weights, biases = y.split([tasks * self.ways * self.features, tasks * self.ways])
        losses = []
        for i in range(tasks):
            value, rest = images[i].to(x), x
            for block in range(4):
                inputs = 1 if block == 0 else self.channels
                kernel, bias, scale, shift, rest = rest.split(
                    [
                        self.channels * inputs * 9,
                        *[self.channels] * 3,
                        len(rest) - self.channels * (inputs * 9 + 3),
                    ]
                )
                value = max_pool2d(
                    conv2d(value, kernel.view(self.channels, inputs, 3, 3), bias, padding=1).relu(),
                    2,
                )
                value = batch_norm(value, None, None, scale, shift, training=True)
            head = (
                weights.view(tasks, self.ways, self.features)[i],
                biases.view(tasks, self.ways)[i],
            )
            losses.append(cross_entropy(linear(value.flatten(1), *head), labels[i]))
        return torch.stack(losses).mean()


def point(ours: FewShot, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.cat([_in_order(block) for block in ours.encoder.blocks]).to(dtype)
    size = sum(p.numel() for p in ours.heads.parameters())
    return x + 0.1 * torch.randn(x.shape, dtype=dtype), *(
        0.3 * torch.randn(size, dtype=dtype) for _ in range(2)
    )


def _in_order(block: Any) -> Tensor:
    return torch.cat(
        [
            p.detach().reshape(-1)
            for p in (block.conv.weight, block.conv.bias, block.scale, block.bias)
        ]
    )


def as_declared(x: Tensor, ours: FewShot) -> Tensor:
    """Reorder a reference vector (kernel, bias, scale, shift per block) as the module's is."""
    index = torch.arange(len(x))
    order, rest = [], index
    for block in ours.encoder.blocks:
        parts = {
            "conv.weight": block.conv.weight,
            "conv.bias": block.conv.bias,
            "scale": block.scale,
            "bias": block.bias,
        }
        places = {}
        for name, parameter in parts.items():
            places[name], rest = rest[: parameter.numel()], rest[parameter.numel() :]
        order += [places[name] for name, _ in block.named_parameters()]
    return x[torch.cat(order)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("chunk_images", [1, 6, 13, 1000])
def test_values_and_gradients_are_those_of_one_task_at_a_time(
    chunk_images: int, dtype: torch.dtype, tolerance: float
) -> None:
    ours, source = module(chunk_images=chunk_images).to(dtype), data()
    upper, lower = ((batch[0].to(dtype), *batch[1:]) for batch in (source.upper, source.lower))
    problem = ours.bilevel_problem({"upper": upper, "lower": lower})
    assert len(problem.upper_terms) == {1: 5, 6: 5, 13: 3, 1000: 1}[chunk_images]
    assert len(problem.lower_terms) == 1
    plain = Reference(source, 4, 3, 4)
    x, y, z = (v.requires_grad_() for v in point(ours, dtype))
    f = plain.loss(x, y, upper)
    f_x, f_y = torch.autograd.grad(f, (x, y))
    value, grad_x, grad_y = problem.upper(as_declared(x.detach(), ours), y.detach())
    assert value == pytest.approx(float(f.detach()), rel=tolerance)
    assert torch.allclose(grad_x, as_declared(f_x, ours), rtol=tolerance, atol=tolerance)
    assert torch.allclose(grad_y, f_y, rtol=tolerance, atol=tolerance)
    level = problem.at(as_declared(x.detach(), ours))
    g = plain.loss(x, z, lower)
    value, slope = level.value_and_gradient(z.detach())
    assert value == pytest.approx(float(g.detach()), rel=tolerance)
    assert torch.allclose(slope, torch.autograd.grad(g, z)[0], rtol=tolerance, atol=tolerance)
    difference = plain.loss(x, y, lower) - plain.loss(x, z.detach(), lower)
    gap_x, gap_y = torch.autograd.grad(difference, (x, y))
    gap = level.gap(y.detach(), z.detach())
    assert gap.value_y - gap.value_z == pytest.approx(
        float(difference.detach()), rel=tolerance, abs=tolerance
    )
    assert torch.allclose(gap.grad_x, as_declared(gap_x, ours), rtol=tolerance, atol=tolerance)
    assert torch.allclose(gap.grad_y, gap_y, rtol=tolerance, atol=tolerance)


def test_chunks_of_the_user_keep_their_weights() -> None:
    ours, source = module(chunk_images=6), data()
    parts = [tuple(tensor[part] for tensor in source.upper) for part in (slice(0, 2), slice(2, 5))]
    x, y, _ = point(ours, torch.float32)

    def f(batch: Any) -> float:
        return ours.bilevel_problem({"upper": batch, "lower": source.lower}).upper(x, y).value

    assert f(Chunks(parts)) == pytest.approx(f(source.upper), rel=1e-5)
    assert f(Chunks(parts, [0.9, 0.1])) == pytest.approx(
        0.9 * f(parts[0]) + 0.1 * f(parts[1]), rel=1e-5
    )


def test_the_encoder_runs_once_per_x_however_many_inner_iterations() -> None:
    ours, source = module(), data()
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    ours.encoder.register_forward_hook(count)
    problem = ours.bilevel_problem({"upper": source.upper, "lower": source.lower})
    x, y, z = point(ours, torch.float32)
    level = problem.at(as_declared(x, ours))
    for _ in range(10):
        level.gradient(z)
    level.gap(y, z)
    assert runs == 1


def test_the_qualification_holds_and_the_encoder_has_kinks() -> None:
    ours, source = module(), data()
    certificate = ours.certify(
        batch={"upper": source.upper, "lower": source.lower},
        envelope=Envelope(rho=1.0, sigma=0.0, delta=1e-3),
    )
    assert certificate is not None
    assert certificate.qualification == (
        "holds: for each delta > 0, because g is convex in y and constant along its affine "
        "segments (linear softmax heads)"
    )
    assert certificate.theorem == "does not apply: ReLU and max-pooling are not differentiable"


def test_g_is_constant_along_its_affine_segments() -> None:
    """A number added to all biases of a head changes nothing; another direction is curved."""
    ours, source = module().double(), data()
    images, labels, index = source.lower
    batch = (images.double(), labels, index)
    problem = ours.bilevel_problem({"upper": batch, "lower": batch})
    x, y = ours.point
    level = problem.at(x)
    generator = torch.Generator().manual_seed(0)
    same = torch.cat([torch.zeros(ours.heads.weight.numel()), torch.ones(ours.heads.bias.numel())])
    other = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    values = [[level.value(y + t * d) for t in (0.0, 0.5, 1.0)] for d in (same.to(y), other)]
    assert values[0] == pytest.approx([values[0][0]] * 3, rel=1e-12)
    assert values[1][0] + values[1][2] - 2 * values[1][1] > 1e-3


def test_statistics_are_those_of_each_task_alone() -> None:
    torch.manual_seed(0)
    encoder = Conv4(channels=4, image_size=16)
    images = torch.rand(3, 6, 1, 16, 16)
    together = encoder(images)
    alone = torch.cat([encoder(images[i : i + 1]) for i in range(3)])
    assert torch.allclose(together, alone, atol=1e-6)
    assert not torch.allclose(
        together[:1], encoder(torch.cat([images[:1], images[1:2]], dim=1))[:, :6], atol=1e-3
    )


def test_adapted_heads_are_gradient_descent_on_each_task() -> None:
    features = torch.randn(3, 6, 5, dtype=torch.float64)
    labels = torch.arange(3).repeat_interleave(2).expand(3, 6)
    heads = adapt(EpisodeSets(features, labels), 3, steps=7, lr=0.4)
    weight, bias = heads[..., :-1], heads[..., -1]
    for i in range(3):
        w = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
        b = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        for _ in range(7):
            slopes = torch.autograd.grad(
                cross_entropy(linear(features[i], w, b), labels[i]), (w, b)
            )
            w, b = (
                (v - 0.4 * s).detach().requires_grad_() for v, s in zip((w, b), slopes, strict=True)
            )
        assert torch.allclose(weight[i], w, rtol=1e-12)
        assert torch.allclose(bias[i], b, rtol=1e-12)


def test_it_learns(tmp_path: Path) -> None:
    source = data(train_classes=40, n_train=20, n_validation=10, epoch_length=15)
    # Of the first ten seeds all learn, to errors between 0.06 and 0.5; this one to 0.06, which
    # leaves room for rounding.
    ours = module(
        seed=1,
        tasks=20,
        channels=8,
        lower_unit=0.4,
        solver=lambda groups: BOME(groups, xi=1.0, alpha=1.0, eta=0.05, T=5),
    )
    run = trainer(tmp_path, max_epochs=2, log_every_n_steps=15)
    run.fit(ours, datamodule=source)
    metrics = run.callback_metrics
    assert float(metrics["val_error"]) < 0.4  # chance is 0.667
    assert {"val_loss", "val_error", "test_loss", "test_error"} <= metrics.keys()
    run.test(ours, datamodule=source)
    assert float(run.callback_metrics["test_error"]) == pytest.approx(float(metrics["test_error"]))


@pytest.mark.parametrize("given", [{"tasks": 4}, {"ways": 4}])
def test_data_that_do_not_fit_are_refused_before_training(
    given: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"given 5 training episodes .* of 3"):
        trainer(tmp_path, max_epochs=1).fit(module(**given), datamodule=data())
