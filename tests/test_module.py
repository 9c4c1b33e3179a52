"""The mixin: what is declared is what is solved."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import MILD, PAPER, Encoded, EncodedOnce, Weighting, samples, weighting_data
from running import bare, same_parameters, trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    BOME,
    F2SA,
    IVSP,
    MEHA,
    SLM,
    BilevelError,
    BilevelMixin,
    BilevelModule,
    BilevelProblem,
    Box,
    Chunks,
    Envelope,
    FullBatchDataModule,
    Simplex,
    SineProblem,
    solve,
)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("units", [{}, {"upper_unit": 30.0, "lower_unit": 0.5}])
def test_fit_and_a_bare_loop_follow_the_same_path(
    tmp_path: Any, precision: str, units: dict[str, float]
) -> None:
    fitted, looped = Weighting(**units), Weighting(**units)
    data = weighting_data()
    trainer(tmp_path, max_steps=25, precision=precision).fit(fitted, datamodule=data)
    batch = {"upper": samples(20, 1), "lower": samples(30, 2)}
    if precision == "64-true":
        looped = looped.double()
        batch = {
            level: tuple(t.double() if t.is_floating_point() else t for t in part)
            for level, part in batch.items()
        }
    history = bare(looped, batch, 25)
    assert same_parameters(fitted, looped)
    assert fitted.last_step is not None
    assert replace(fitted.last_step, optimization_time=0.0) == replace(
        history[-1], optimization_time=0.0
    )


def test_module_and_plain_functions_are_the_same_problem(tmp_path: Any) -> None:
    module = SineProblem(n=20, solver=PAPER)
    trainer(tmp_path, max_steps=40, precision="64-true").fit(
        module, datamodule=FullBatchDataModule()
    )
    problem = (
        SineProblem(n=20, solver=PAPER).double().bilevel_problem({"upper": None, "lower": None})
    )
    start = torch.tensor([-6.0], dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    solution = solve(problem, *start, PAPER, max_steps=40)
    assert torch.equal(module.x.detach(), solution.x)
    assert torch.equal(module.y.detach(), solution.y)
    known = module.certify()
    assert known is not None
    assert known.qualification.startswith("fails: ")
    # Two functions declare nothing.
    assert solution.certificate == replace(
        known, qualification="not known", theorem="not known: the constraint qualification"
    )


def test_unit_is_a_change_of_variables() -> None:
    """The solver's path in u is the path of the problem that was rescaled by hand."""
    unit = 7.0
    module = Weighting(upper_unit=unit).double()
    batch = {
        level: tuple(t.double() if t.is_floating_point() else t for t in samples(30, 2))
        for level in ("upper", "lower")
    }
    plain = module.bilevel_problem(batch)
    x0 = torch.zeros(30, dtype=torch.float64)
    y0 = torch.cat([p.detach().reshape(-1) for p in module.classifier.parameters()])
    by_hand = BilevelProblem(
        lambda u, y: plain.upper_terms[0](unit * u, y),
        lambda u, y: plain.lower_terms[0](unit * u, y),
        Box(-5 / unit, 5 / unit),
        Box(-5, 5),
    )
    solution = solve(by_hand, x0, y0, MILD, max_steps=20)
    bare(module, batch, 20)
    torch.testing.assert_close(module.logits.detach(), unit * solution.x, rtol=0, atol=1e-9)


def test_lower_unit_certifies_the_same_relaxed_problem(tmp_path: Any) -> None:
    """rho acts as rho * unit^2 in y, so the certificate's R is the R that the solver works with."""
    module = Weighting(lower_unit=0.5)
    trainer(tmp_path, max_steps=30, precision="64-true").fit(module, datamodule=weighting_data())
    certificate = module.certify()
    assert certificate is not None
    assert module.last_step is not None
    assert certificate.rho == pytest.approx(0.1 * 0.25)
    assert certificate.residual == pytest.approx(
        module.last_step.residual, abs=2 * module.last_step.zeta
    )  # type: ignore[attr-defined]


def test_declared_encoder_part_changes_nothing_but_the_cost(tmp_path: Any) -> None:
    plain, once = Encoded(), EncodedOnce()
    data = FullBatchDataModule(samples(20, 1), samples(10, 2))
    for module in (plain, once):
        trainer(tmp_path, max_steps=15, precision="64-true").fit(module, datamodule=data)
    for p, q in zip(plain.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)
    # once per point x: one per trial, the start, and the two checks before the first step
    assert once.encoded < 15 * 3
    assert plain.last_step is not None
    assert plain.last_step.inner_iterations >= 1


def test_chunks_add_up_to_the_full_batch() -> None:
    module = Weighting().double()
    whole = tuple(t.double() if t.is_floating_point() else t for t in samples(30, 2))
    parts = [tuple(t[a:b] for t in whole) for a, b in ((0, 7), (7, 19), (19, 30))]
    x, y = torch.randn(30, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    problems = [
        module.bilevel_problem({"upper": b, "lower": b}) for b in (whole, parts, Chunks(parts))
    ]
    values = [(*p.upper(x, y), *p.at(x).gap(y, 0.5 * y)) for p in problems]
    for other in values[1:]:
        for a, b in zip(values[0], other, strict=True):
            torch.testing.assert_close(
                torch.as_tensor(a), torch.as_tensor(b), rtol=1e-12, atol=1e-14
            )


def test_what_is_known_of_a_point_is_used_again_only_on_the_same_batch() -> None:
    module = Weighting()
    batch = {"upper": samples(20, 1), "lower": samples(30, 2)}
    first = module.problem_on(batch)
    assert module.problem_on({**batch}) is first
    batch["upper"][0].add_(1.0)
    assert module.problem_on(batch) is not first
    assert module.problem_on({"upper": samples(20, 1), "lower": batch["lower"]}) is not first


@pytest.mark.parametrize(("solver", "shuffled"), [(MILD, False), (MILD, True), (F2SA, False)])
def test_an_exact_solver_refuses_mini_batches(tmp_path: Any, solver: Any, shuffled: bool) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    size = 30 if shuffled else 10
    loaders = {
        level: DataLoader(TensorDataset(*samples(30, s)), batch_size=size, shuffle=shuffled)
        for level, s in (("upper", 1), ("lower", 2))
    }
    words = "other values than the one before.*FullBatchDataModule; or .*two torch optimisers"
    run = trainer(tmp_path, max_epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MisconfigurationException, match=words):
            run.fit(Weighting(solver=solver), loaders)


def test_a_frozen_parameter_is_a_constant(tmp_path: Any) -> None:
    class Frozen(Weighting):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2), requires_grad=False)

    trainer(tmp_path, max_steps=2).fit(Frozen(), datamodule=weighting_data())


def test_one_set_per_declared_item() -> None:
    class Two(Weighting):
        def __init__(self) -> None:
            LightningModule.__init__(self)
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
            self.classifier = nn.Linear(2, 3)
            self.declare(
                upper=[self.a, self.b],
                lower=self.classifier,
                upper_set=[Simplex(), Box(0, 0.5)],
                solver=MILD,
            )

    module = Two()
    projected = module._declaration.upper.feasible.project(torch.full((5,), 2.0))
    torch.testing.assert_close(projected, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]))


class WeightingOnce(Weighting):
    """The weighting with the part of g that depends on y alone declared."""

    forward_passes = 0

    def lower_outputs(self, batch: Any) -> Tensor:
        self.forward_passes += 1
        return cross_entropy(self.classifier(batch[0]), batch[1], reduction="none")

    def lower_loss(self, batch: Any, losses: Tensor) -> Tensor:  # type: ignore[override]
        return (self.logits[batch[2]].sigmoid() * losses).mean()


@pytest.mark.parametrize("solver", [MILD, BOME, MEHA, SLM])
@pytest.mark.parametrize("units", [(1.0, 1.0), (10.0, 2.0)])
def test_the_part_that_depends_on_y_is_evaluated_once_and_the_path_is_the_same(
    solver: Any, units: tuple[float, float], tmp_path: Any
) -> None:
    plain, once = (
        kind(solver=solver, upper_unit=units[0], lower_unit=units[1])
        for kind in (Weighting, WeightingOnce)
    )
    for module in (plain, once):
        trainer(tmp_path, max_steps=10).fit(module, datamodule=weighting_data())
    assert all(torch.equal(a, b) for a, b in zip(plain.point, once.point, strict=True))
    calls = once.last_step.calls  # type: ignore[union-attr]
    passes = 10 * (calls.lower + 2 * calls.gap + calls.values)
    assert 0 < once.forward_passes < passes


def test_features_and_outputs_are_not_declared_both() -> None:
    class Both(WeightingOnce):
        def lower_features(self, batch: Any) -> Tensor:
            return self.logits[batch[2]].sigmoid()

    with pytest.raises(ValueError, match="was given features and outputs"):
        Both().bilevel_problem({"upper": samples(20, 1), "lower": samples(30, 2)})


def test_declared_envelope_serves_solvers_without_one(tmp_path: Any) -> None:
    envelope = Envelope(rho=0.2, sigma=1.0, delta=0.01)
    for solver, rho, own in ((BOME, 0.2, False), (MILD, 0.1, True)):
        module = Weighting(solver=solver, envelope=envelope, qualification="holds by assumption")
        trainer(tmp_path, max_steps=2).fit(module, datamodule=weighting_data())
        certificate = module.certify()
        assert certificate is not None
        assert (certificate.rho, certificate.own_multiplier) == (rho, own)
        assert certificate.qualification == "holds by assumption"
        assert module.certify(envelope=Envelope(rho=0.3, sigma=1.0, delta=0.01)).rho == 0.3  # type: ignore[union-attr]
    without = Weighting(solver=BOME)
    trainer(tmp_path, max_steps=2).fit(without, datamodule=weighting_data())
    assert without.certify() is None


class Nothing(BilevelModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))


def declaring(**kwargs: Any) -> Any:
    def build() -> None:
        module = Nothing()
        items = {
            "a": module.a,
            "b": module.b,
            "none": nn.Identity(),
            "word": "a",
        }
        module.declare(
            **{
                k: items[v] if isinstance(v, str) else v
                for k, v in {"solver": IVSP, **kwargs}.items()
            }
        )

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            declaring(upper="a", lower="a"),
            "parameters appear in more than one parameter group",
        ),
        (
            declaring(upper="none", lower="b"),
            r"`Nothing.declare\(upper=...\)` has no trainable parameter",
        ),
        (
            declaring(upper="a", lower="b", upper_unit=0.0),
            r"`Nothing.declare\(upper_unit=0.0\)` must be positive",
        ),
        (
            declaring(upper="a", lower="b", lower_unit=-1.0),
            r"`Nothing.declare\(lower_unit=-1.0\)` must be positive",
        ),
        (
            declaring(upper="a", lower="b", upper_set=[Box(0, 1)] * 2),
            r"has 2 sets: it must be one set, or one for each of the 1 declared items",
        ),
        (
            declaring(upper="a", lower="b", solver=lambda groups: IVSP(groups, rho=2.0, sigma=1.0)),
            r"`rho=2.0` must be smaller than 1/sigma",
        ),
    ],
)
def test_wrong_declarations(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_mixin_comes_first() -> None:
    with pytest.raises(TypeError, match="consistent method resolution"):
        type("Wrong", (LightningModule, BilevelMixin), {})


class Forgetful(Weighting):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(1, 1)


class Borrowing(BilevelModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.declare(upper=self.a, lower=nn.Parameter(torch.ones(1)), solver=IVSP)


class Undeclared(BilevelModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))


class Lossless(BilevelModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.declare(upper=self.a, lower=self.b, solver=IVSP)


class Random(Weighting):
    def upper_loss(self, batch: Any) -> Tensor:
        return torch.dropout(self.classifier(batch[0]), 0.5, train=True).square().mean()


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (
            Forgetful,
            {},
            MisconfigurationException,
            "names neither as upper nor as lower: forgotten.weight, forgotten.bias",
        ),
        (Borrowing, {}, MisconfigurationException, "a parameter that is not the module's"),
        (Undeclared, {}, MisconfigurationException, "`Undeclared` has not declared its levels"),
        (Lossless, {}, NotImplementedError, "`Lossless` must define `upper_loss"),
        (
            Random,
            {},
            BilevelError,
            "The upper-level function f was .* at the same point: .* Or run on mini-batches: ",
        ),
        (
            Weighting,
            {"precision": "bf16-mixed"},
            MisconfigurationException,
            "precision='bf16-mixed'.* is not supported",
        ),
        (
            Weighting,
            {"precision": "16-true"},
            MisconfigurationException,
            "precision='16-true'.* is not supported",
        ),
    ],
)
def test_what_fit_refuses(
    tmp_path: Any, module: type, options: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path, max_steps=2, **options).fit(module(), datamodule=weighting_data())


@pytest.mark.parametrize("batch", [samples(5, 0), {"upper": samples(5, 0)}])
def test_a_batch_names_both_levels(batch: Any) -> None:
    with pytest.raises(
        MisconfigurationException, match=r'it must be \{"upper": ..., "lower": ...\}'
    ):
        Weighting().bilevel_problem(batch)


class TestProved:
    def fitted(self, tmp_path: Any, steps: int = 60, **more: Any) -> SineProblem:
        module = SineProblem(n=20, solver=PAPER)
        trainer(tmp_path, max_steps=steps, precision="64-true", **more).fit(
            module, datamodule=FullBatchDataModule()
        )
        return module

    def test_it_is_that_of_solve(self, tmp_path: Any) -> None:
        module = self.fitted(tmp_path)
        problem = (
            SineProblem(n=20, solver=PAPER).double().bilevel_problem({"upper": None, "lower": None})
        )
        start = torch.tensor([-6.0], dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
        solution = solve(problem, *start, PAPER, max_steps=60)
        proved = module.proved
        assert proved is not None
        assert solution.proved is not None
        assert proved.iteration == solution.proved.iteration
        assert proved.iteration != 60
        assert torch.equal(proved.x, solution.proved.x)
        got = module.certify(proved=True)
        expected = solution.proved.certificate
        assert got is not None
        assert (got.kkt, got.multiplier, got.point) == (
            expected.kkt,
            expected.multiplier,
            expected.point,
        )
        current = module.certify()
        assert current is not None
        assert current.point == "the last iterate, iteration 60"
        assert current.kkt != got.kkt

    def test_another_envelope_has_other_bounds(self, tmp_path: Any) -> None:
        """The theorem's are for the relaxation of the solver: they are left out."""
        module = self.fitted(tmp_path)
        other = Envelope(rho=0.25, sigma=1.0, delta=0.1)
        got = module.certify(proved=True, envelope=other)
        assert got is not None
        assert module.proved is not None
        assert got.point == module.proved.name
        assert "bounds" not in got.point

    def test_every_certificate_names_its_point(self, tmp_path: Any) -> None:
        module = self.fitted(tmp_path)
        x, y = module.point
        module.point = x, 0.5 * y
        moved = module.certify()
        assert moved is not None
        assert moved.point == "a point that was written into the module"
        module.restore((x, y), 1.0)
        restored = module.certify()
        assert restored is not None
        assert restored.point == "an earlier point of the run, which was restored"

    def test_a_checkpoint_knows_it(self, tmp_path: Any) -> None:
        module = SineProblem(n=20, solver=PAPER)
        run = trainer(tmp_path, max_steps=60)
        run.fit(module, datamodule=FullBatchDataModule())
        path = tmp_path / "run.ckpt"
        run.save_checkpoint(path)
        other = SineProblem.load_from_checkpoint(path, n=20, solver=PAPER)
        assert other.proved is not None
        assert module.proved is not None
        assert torch.equal(other.proved.y, module.proved.y)
        assert other._run.shown_point(other)[2] == "the last iterate, iteration 60"
        module.restore((module.proved.x, module.proved.y), module.proved.multiplier)
        run.save_checkpoint(path)
        restored = SineProblem.load_from_checkpoint(path, n=20, solver=PAPER)
        name = restored._run.shown_point(restored)[2]
        assert name == "an earlier point of the run, which was restored"

    def test_a_solver_without_it_says_so(self, tmp_path: Any) -> None:
        module = Weighting(solver=BOME, envelope=Envelope(rho=0.2, sigma=1.0, delta=0.01))
        trainer(tmp_path, max_steps=2).fit(module, datamodule=weighting_data())
        assert module.proved is None
        message = (
            "`Weighting.certify(proved=True)` has no point to certify: BOME does not keep the "
            "point of its theorem, only IVSP does."
        )
        with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
            module.certify(proved=True)


def test_certify_needs_a_batch() -> None:
    with pytest.raises(RuntimeError, match=r"`Weighting.certify\(\)` needs a training batch"):
        Weighting().certify()


def test_ivsp_is_the_default() -> None:
    class Short(BilevelMixin, LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
            self.declare(upper=self.a, lower=self.b)

    assert isinstance(Short()._declared().new_solver(), IVSP)
