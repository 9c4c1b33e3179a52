"""Exact iterations from the point of a run on mini-batches."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import samples
from running import trainer
from streaming import Streamed, loader, loaders
from torch import Tensor

from lightning_bilevel import F2SA, IVSP, Adaptation, Envelope, solve

ENVELOPE = Envelope(0.1, 1.0, 1e-3)


def streamed(tmp_path: Path, **options: Any) -> Streamed:
    module = Streamed(envelope=ENVELOPE, **options)
    trainer(tmp_path, max_epochs=3).fit(module, loaders(), loader(20, 3, 20))
    return module


def as_double(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def test_it_starts_at_the_streamed_point_and_leaves_the_module_alone(tmp_path: Path) -> None:
    module = streamed(tmp_path)
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    solution = module.polish(3)
    assert all(torch.equal(a, before[name]) for name, a in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert all(layer.training for layer in module.modules())
    assert len(solution.history) == 3
    assert not torch.equal(solution.y, module.point[1])
    # It starts where the module is, on all data in eval mode: the gradient of f there is known.
    module.eval()
    loss = module.upper_loss(samples(20, 1))
    gradient = torch.autograd.grad(loss, list(module.network.parameters()))
    assert solution.certificate is not None
    assert solution.certificate.first_upper_gradient == pytest.approx(
        math.hypot(*(float(part.norm()) for part in gradient)), rel=1e-5
    )


def test_it_is_the_exact_solver_on_the_whole_batch_in_eval_mode(tmp_path: Path) -> None:
    """In float64, against `solve` on the module's losses as one batch without chunks."""
    module = Streamed(envelope=ENVELOPE).double()
    trainer(tmp_path, max_epochs=3, precision="64-true").fit(module, loaders(), loader(20, 3, 20))
    exact = partial(IVSP, delta=1e-3)
    polished = module.polish(5, exact)
    batch = {
        "upper": as_double(samples(20, 1)),
        "lower": as_double(samples(30, 2)),
    }
    module.eval()
    by_hand = solve(module.bilevel_problem(batch), *module.point, exact, 5, tolerance=1e-3)
    torch.testing.assert_close(polished.x, by_hand.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(polished.y, by_hand.y, rtol=1e-9, atol=1e-12)
    assert polished.certificate is not None
    assert by_hand.certificate is not None
    assert polished.certificate.kkt == pytest.approx(by_hand.certificate.kkt, rel=1e-6)


def test_it_ends_with_the_certificate_of_all_data(tmp_path: Path) -> None:
    module = streamed(tmp_path, qualification="as the test says")
    solution = module.polish(3)
    certificate = solution.certificate
    assert certificate is not None
    assert certificate.evaluated_on == ("all data (20 upper and 30 lower samples), in eval mode")
    assert certificate.point == "the last iterate, iteration 3"
    assert certificate.qualification == "as the test says"
    assert certificate.own_multiplier
    # Written into the module, the same point has the same certificate.
    module.restore((solution.x, solution.y), certificate.multiplier)
    envelope = Envelope(certificate.rho, certificate.sigma, certificate.delta)
    again = module.certify(envelope=envelope, passes=10_000)
    assert again.kkt == pytest.approx(certificate.kkt, rel=1e-3)


def test_it_lowers_the_kkt_residual(tmp_path: Path) -> None:
    module = streamed(tmp_path)
    few, many = module.polish(1), module.polish(60)
    assert few.certificate is not None
    assert many.certificate is not None
    envelope = Envelope(many.certificate.rho, many.certificate.sigma, many.certificate.delta)
    start = module.certify(envelope=envelope, passes=10_000)
    assert many.certificate.smallest_kkt < 0.5 * start.smallest_kkt


def test_it_needs_a_run_on_mini_batches() -> None:
    with pytest.raises(MisconfigurationException, match=r"`Streamed.polish\(\)` goes on from a"):
        Streamed().polish()


def test_its_arguments_are_checked(tmp_path: Path) -> None:
    module = streamed(tmp_path)
    with pytest.raises(ValueError, match=r"`Streamed.polish\(max_steps=0\)` must be at least 1"):
        module.polish(0)
    with pytest.raises(TypeError, match=r"`Streamed.polish\(solver='IVSP'\)` cannot be called"):
        module.polish(1, "IVSP")  # type: ignore[arg-type]


def test_a_lower_level_of_the_batch_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    module = Streamed(
        solver=partial(F2SA, upper_optimizer=partial(torch.optim.SGD, lr=0.1)),
        adaptation=Adaptation(2, 0.1),
        norm=False,
        dropout=0.0,
    )
    trainer(tmp_path, max_epochs=1).fit(module, loaders(), loader(20, 3, 20))
    with pytest.raises(
        MisconfigurationException, match=r"`Streamed\.polish\(\)` has no y to go on"
    ):
        module.polish()
