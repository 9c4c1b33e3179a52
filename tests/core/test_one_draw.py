"""One draw of random numbers for all evaluations of a mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from lightning_bilevel import BilevelProblem
from lightning_bilevel.core.one_draw import with_one_draw

CPU = torch.device("cpu")
X = torch.tensor([1.0, 2.0])
Y = torch.linspace(1.0, 2.0, 40)


def noisy(calls: list[str], name: str) -> BilevelProblem:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(name)
        return x.sum() * dropout(y, 0.5).sum()

    return BilevelProblem(loss, loss, mini_batch=True)


def test_all_points_see_the_same_masks() -> None:
    problem = noisy([], "g")
    torch.manual_seed(3)
    assert not torch.equal(problem.at(X).gradient(Y), problem.at(X).gradient(Y))
    torch.manual_seed(3)
    fixed = with_one_draw(problem, CPU)
    first = fixed.at(X).gradient(Y)
    # The gradient shows the mask: it is linear in y.
    assert torch.equal(first, fixed.at(X).gradient(Y + 1))
    assert torch.equal(first, fixed.at(X).full_gap(Y, 2 * Y).grad_z)
    assert torch.equal(2 * first, fixed.at(2 * X).gradient(Y))
    # f has its own, and they stay too.
    assert not torch.equal(first, fixed.upper_y(X, Y)[1])
    assert torch.equal(fixed.upper_y(X, Y)[1], fixed.upper_y(X, 3 * Y)[1])


def test_repeated_numbers_are_drawn_once() -> None:
    """Those that follow are the same after one evaluation and after many; another step has new."""
    after = []
    for evaluations in (1, 5):
        torch.manual_seed(3)
        fixed = with_one_draw(noisy([], "g"), CPU)
        masks = [fixed.at(X).gradient(Y) for _ in range(evaluations)]
        after.append((masks[-1], torch.rand(3)))
    assert torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])
    again = with_one_draw(noisy([], "g"), CPU).at(X).gradient(Y)
    assert not torch.equal(after[0][0], again)


def test_the_first_evaluation_is_of_y_and_the_others_of_the_twin() -> None:
    calls: list[str] = []
    problem, twin = noisy(calls, "own"), noisy(calls, "twin")
    problem.inner_terms = twin.lower_terms
    fixed = with_one_draw(problem, CPU)
    lower = fixed.at(X)
    lower.gradient(Y)
    lower.full_gap(Y, 2 * Y)
    assert calls == ["own", "twin", "twin"]
    # The problem itself is unchanged, and its count too.
    problem.at(X).gradient(Y)
    assert calls[3:] == ["own"]
    assert (problem.calls.passes, fixed.calls.passes) == (1, 3)


def test_parts_are_drawn_once_each() -> None:
    def part(v: Tensor) -> Tensor:
        return dropout(v, 0.5)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() * y.sum() ** 2

    for parts in ({"features": part}, {"outputs": part}):
        problem = BilevelProblem(loss, loss, mini_batch=True, **parts)  # type: ignore[arg-type]
        fixed = with_one_draw(problem, CPU)
        torch.manual_seed(1)
        values = [fixed.at(Y.clone()).gap_x(Y, 0 * Y)[0] for _ in range(4)]
        assert len(set(values)) == 1
