"""f and g on a batch that owns its lower level: features once, gradients by both ways."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bilevel import Adaptation, BilevelProblem, Calls
from lightning_bilevel.core.lower import LowerTerm

LABELS = torch.tensor([0, 1, 2, 0])
torch.manual_seed(3)
QUERY, SUPPORT = (torch.randn(4, 5, dtype=torch.float64) for _ in range(2))


def features(inputs: Tensor) -> Any:
    return lambda x: torch.tanh(inputs @ x.view(5, 2))


def loss(values: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(values @ y.view(2, 3), LABELS)


def problem(**options: Any) -> BilevelProblem:
    parts = {"upper_features": features(QUERY), "features": features(SUPPORT), **options}
    return BilevelProblem(loss, loss, **parts)


def point() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(n, dtype=torch.float64) for n in (10, 6, 6))  # type: ignore[return-value]


def test_f_with_features_is_f() -> None:
    x, y, _ = point()
    plain = BilevelProblem(
        lambda x, y: loss(features(QUERY)(x), y), lambda x, y: loss(features(SUPPORT)(x), y)
    )
    for ours, theirs in zip(problem().upper(x, y), plain.upper(x, y), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    scaled, twin = problem().in_units(2.0, 3.0), plain.in_units(2.0, 3.0)
    assert scaled.upper(x, y).value == twin.upper(x, y).value
    share = problem().on_this_rank(0.25, 0.5, lambda tensor: tensor)
    assert share.upper(x, y).value == pytest.approx(0.25 * plain.upper(x, y).value, rel=1e-14)


def test_gradients_are_those_of_f_and_g() -> None:
    x, y, z = (v.requires_grad_() for v in point())
    f = loss(features(QUERY)(x), y)
    at_y, at_z = loss(features(SUPPORT)(x), y), loss(features(SUPPORT)(x), z)
    whole = problem()
    episode = whole.episode(x.detach())
    (g_z,) = torch.autograd.grad(at_z, z, retain_graph=True)
    assert torch.allclose(episode.inner_gradient(z.detach()), g_z, rtol=1e-13)
    (mixed,) = torch.autograd.grad(0.3 * f + 0.7 * at_y, y, retain_graph=True)
    assert torch.allclose(episode.gradient(y.detach(), 0.3, 0.7), mixed, rtol=1e-13)
    (d_x,) = torch.autograd.grad(0.3 * f + 0.7 * (at_y - at_z), x)
    slope = episode.slope(y.detach(), z.detach(), 0.3, 0.7)
    assert torch.allclose(slope.grad_x, d_x, rtol=1e-12)
    assert [float(v) for v in slope[:3]] == pytest.approx([v.item() for v in (f, at_y, at_z)])
    assert whole.calls == Calls(upper=2, lower=2, gap=1)


def test_without_features_x_itself_is_kept() -> None:
    x, y, z = point()
    plain = BilevelProblem(
        lambda x, y: loss(features(QUERY)(x), y), lambda x, y: loss(features(SUPPORT)(x), y)
    )
    ours, theirs = (p.episode(x).slope(y, z, 1.0, 2.0) for p in (plain, problem()))
    assert torch.allclose(ours.grad_x, theirs.grad_x, rtol=1e-12)


def test_chunks_add_up() -> None:
    x, y, z = point()
    halves = [lambda values, y: 0.5 * loss(values, y)] * 2
    twice = BilevelProblem(
        halves, halves, upper_features=[features(QUERY)] * 2, features=[features(SUPPORT)] * 2
    )
    for ours, theirs in zip(
        twice.episode(x).slope(y, z, 1.0, 2.0),
        problem().episode(x).slope(y, z, 1.0, 2.0),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_a_closed_form_takes_the_place_of_autograd() -> None:
    x, y, _ = point()
    given = problem()

    def closed(values: Tensor, y: Tensor) -> Tensor:
        slope = (values @ y.view(2, 3)).softmax(-1) - torch.nn.functional.one_hot(LABELS, 3)
        return (values.T @ slope / 4).reshape(-1)

    autograd = given.episode(x)
    given.upper_terms = [LowerTerm(loss, features(QUERY), slope=closed)]
    given.lower_terms = [LowerTerm(loss, features(SUPPORT), slope=closed).weighted(1.0)]
    given.inner_terms = given.lower_terms
    episode = given.episode(x)
    assert torch.allclose(episode.inner_gradient(y), autograd.inner_gradient(y), rtol=1e-12)
    ours, theirs = (e.gradient(y, 0.3, 0.7) for e in (episode, autograd))
    assert torch.allclose(ours, theirs, rtol=1e-12)
    half = LowerTerm(loss, features(SUPPORT), slope=closed).weighted(0.5)
    assert half.slope is not None
    values = features(SUPPORT)(x)
    assert torch.equal(half.slope(values, y), 0.5 * closed(values, y))


def test_dropout_in_the_loss_is_the_same_at_y_and_z() -> None:
    def noisy(values: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.dropout(values @ y.view(2, 3), 0.5, train=True), LABELS)

    x, y, _ = point()
    random = BilevelProblem(loss, noisy, features=features(SUPPORT), upper_features=features(QUERY))
    slope = random.episode(x).slope(y, y, 1.0, 1.0)
    assert float(slope.lower) == float(slope.inner)
    assert float(noisy(features(SUPPORT)(x), y)) != float(slope.lower)


def test_a_lower_level_without_y_is_refused() -> None:
    x, y, _ = point()
    without = BilevelProblem(loss, lambda values, y: values.sum(), upper_features=features(QUERY))
    with pytest.raises(ValueError, match=r"^The lower-level function g does not depend on"):
        without.episode(x).inner_gradient(y)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "`Adaptation(steps=0)` must be a whole number of at least 1."),
        ({"steps": 2.5}, "`Adaptation(steps=2.5)` must be a whole number of at least 1."),
        ({"lr": 0.0}, "`Adaptation(lr=0.0)` must be positive and finite."),
        ({"lr": float("inf")}, "`Adaptation(lr=inf)` must be positive and finite."),
    ],
)
def test_an_adaptation_that_is_none_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Adaptation(**given)
