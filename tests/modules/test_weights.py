"""Weights as upper levels: their values, sets and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bilevel import ClassWeights, SampleWeights, SourceWeights, WeightNet
from lightning_bilevel.core.problem import BilevelProblem


def filled(weights: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.normal_()
    return weights


def test_a_samples_weight_is_the_sigmoid_of_its_logit() -> None:
    weights = filled(SampleWeights(5))
    index = torch.tensor([4, 0, 4])
    logits = weights.logits.tolist()
    expected = [1 / (1 + 2.718281828459045 ** -logits[i]) for i in index.tolist()]
    assert weights(index).tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(SampleWeights(3).values(), torch.full((3,), 0.5))


@pytest.mark.parametrize("kind", [SourceWeights, ClassWeights])
def test_shares_are_in_the_simplex_and_weights_have_mean_one(kind: Any) -> None:
    weights = filled(kind(7))
    shares = weights.shares()
    assert float(shares.min()) > 0
    assert float(shares.sum()) == pytest.approx(1.0, abs=1e-6)
    assert torch.allclose(weights.values(), 7 * shares)
    index = torch.tensor([6, 1])
    assert torch.equal(weights(index).detach(), weights.values()[index])
    assert torch.equal(kind(7)(index).detach(), torch.ones(2))


def test_a_weight_net_is_one_half_at_first_and_a_curve_of_the_loss() -> None:
    net = WeightNet(4)
    assert torch.equal(net(torch.linspace(0, 10, 101)), torch.full((101,), 0.5))
    filled(net)
    losses = torch.rand(6, requires_grad=True)
    weights = net(losses)
    first, _, last = net.layers
    hidden = (losses.detach().unsqueeze(1) * first.weight.reshape(-1) + first.bias).clamp(min=0)
    logit = hidden @ last.weight.reshape(-1) + last.bias
    assert torch.allclose(weights, torch.sigmoid(8 * torch.tanh(logit / 8)))
    weights.sum().backward()
    # The loss is a number to it: no gradient reaches the model through a weight.
    assert losses.grad is None
    assert float(last.bias.grad) != 0.0


def test_a_weight_net_never_gives_exactly_nothing() -> None:
    net = filled(WeightNet())
    with torch.no_grad():
        net.layers[2].bias.fill_(-1e6)
    assert (net(torch.linspace(0, 10, 101)) > 3e-4).all()


def test_the_natural_sets_and_optimisers() -> None:
    for weights in (SampleWeights(3), SourceWeights(3), ClassWeights(3)):
        far = torch.tensor([-20.0, 0.0, 20.0])
        assert weights.feasible.project(far).tolist() == [-8.0, 0.0, 8.0]
    assert SampleWeights(2, bound=1.0).feasible.project(far).tolist() == [-1.0, 0.0, 1.0]
    made = SampleWeights(3).optimizer([torch.zeros(3, requires_grad=True)])
    assert (type(made).__name__, made.defaults["lr"]) == ("TableRMS", 3.0)
    for weights in (SourceWeights(3), ClassWeights(3), WeightNet()):  # type: ignore[assignment]
        made = weights.optimizer([torch.zeros(3, requires_grad=True)])
        settings = made.defaults
        assert (type(made).__name__, settings["lr"]) == ("AdamW", 1e-2)
        assert settings["weight_decay"] == 0.0


def one_step(n: int, index: Tensor, losses: Tensor) -> Tensor:
    """The weights after one TableRMS step down the weighted mean of these losses."""
    weights = SampleWeights(n)
    optimizer = weights.optimizer(weights.parameters())
    w = weights(index)
    (w @ losses / w.sum()).backward()
    optimizer.step()
    return weights.logits.detach()


def test_the_step_of_a_weight_depends_neither_on_n_nor_on_the_size_of_the_batch() -> None:
    torch.manual_seed(0)
    losses = torch.rand(8)
    index = torch.arange(8)
    small = one_step(8, index, losses)
    assert float(small.abs().min()) > 0.01
    large = one_step(5_000, index + 700, losses)
    assert torch.equal(large[700:708], small)
    others = torch.ones(5_000, dtype=torch.bool)
    others[700:708] = False
    assert torch.equal(large[others], torch.zeros(4_992))
    # A batch of four times as many samples, with the same losses again and again.
    wide = one_step(32, torch.arange(32), losses.repeat(4))
    assert torch.allclose(wide.view(4, 8), small.expand(4, 8), rtol=1e-4)


def test_the_weighted_mean_is_a_problem_of_two_functions_too() -> None:
    """Without Lightning: the weights are plain torch modules."""
    weights = SampleWeights(3)
    targets = torch.tensor([0.0, 0.0, 5.0])

    def lower(x: Tensor, y: Tensor) -> Tensor:
        w = torch.func.functional_call(weights, {"logits": x}, (torch.arange(3),))
        return w @ (y - targets).square() / w.sum()

    problem = BilevelProblem(lambda x, y: y.square().sum(), lower, upper_set=weights.feasible)
    assert problem.at(torch.zeros(3)).value(torch.zeros(1)) == pytest.approx(25 / 3)
