import dataclasses
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
import reference
import torch
from helpers import PROBLEMS, Problem, exact_residuals, gap_at, random_problem
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, Lagrangian, certify, minimiser
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.passes import Residuals
from lightning_bilevel.core.problem import BilevelProblem, Calls, Start
from lightning_bilevel.core.qualification import StrictlyConvex
from lightning_bilevel.core.sets import Box, Free
from lightning_bilevel.output import table
from lightning_bilevel.reading import reading

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
CASES = [(seed, *shape) for seed in range(5) for shape in ((3, 5, 5.0), (4, 8, 0.5))]


@every_problem
class TestKnownSolutions:
    def test_the_residuals_vanish(self, problem: Problem) -> None:
        certificate = certify(
            problem.build(),
            *problem.at("solution"),
            problem.envelope,
            multiplier=problem.multiplier,
        )
        assert certificate.kkt < 1e-7
        assert certificate.own_multiplier

    def test_the_least_squares_multiplier_is_the_known_one(self, problem: Problem) -> None:
        certificate = certify(problem.build(), *problem.at("solution"), problem.envelope)
        assert certificate.multiplier == pytest.approx(problem.multiplier, abs=1e-6)
        assert certificate.kkt < 1e-6
        assert not certificate.own_multiplier

    def test_they_do_not_vanish_elsewhere(self, problem: Problem) -> None:
        built, (x, y) = problem.build(), problem.at("solution")
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            x_near = built.upper_set.project(
                x + 0.02 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            )
            y_near = built.lower_set.project(
                y + 0.02 * torch.randn(y.shape, generator=generator, dtype=y.dtype)
            )
            assert (
                certify(built, x_near, y_near, problem.envelope, multiplier=problem.multiplier).kkt
                > 1e-3
            )

    def test_a_wrong_multiplier_shows(self, problem: Problem) -> None:
        built, point = problem.build(), problem.at("solution")
        assert (
            certify(built, *point, problem.envelope, multiplier=problem.multiplier + 1.0).kkt > 1e-3
        )

    def test_the_bounds_hold(self, problem: Problem) -> None:
        certificate = certify(problem.build(), *problem.at("solution"), problem.envelope)
        assert certificate.prox_distance <= certificate.distance_bound
        assert certificate.prox_stationarity <= certificate.stationarity_bound

    def test_float32_agrees_up_to_its_rounding(self, problem: Problem) -> None:
        single = certify(
            problem.build(),
            *problem.at("solution", torch.float32),
            problem.envelope,
            multiplier=problem.multiplier,
        )
        assert single.kkt < 2e-3
        assert single.tolerance == 1e-5


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("multiplier", [0.0, 0.3, 20.0])
def test_residuals_equal_the_reference(
    case: tuple[int, int, int, float], multiplier: float
) -> None:
    problem, functions, x, y, constants = random_problem(*case)
    envelope = Envelope(rho=0.5 / constants["sigma"], sigma=constants["sigma"], delta=0.05)
    got = certify(problem, x, y, envelope, multiplier=multiplier)
    distance = reference.box_distance(case[-1])
    expected = reference.exact_kkt(
        functions,
        x.numpy(),
        y.numpy(),
        multiplier,
        envelope.rho,
        envelope.delta,
        (distance, distance),
        tolerance=1e-9,
    )
    assert (got.stationarity, got.feasibility, got.complementarity) == pytest.approx(
        expected, rel=1e-7, abs=1e-8
    )
    assert got.upper == pytest.approx(functions.f(x.numpy(), y.numpy()))
    assert got.lower == pytest.approx(functions.g(x.numpy(), y.numpy()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_least_squares_multiplier_beats_a_fine_grid(case: tuple[int, int, int, float]) -> None:
    problem, functions, x, y, constants = random_problem(*case)
    # At the bounds the normal cone matters: the distance is then only piecewise smooth in the
    # multiplier.
    x, y = problem.upper_set.project(3 * x), problem.lower_set.project(3 * y)
    envelope = Envelope(rho=0.5 / constants["sigma"], sigma=constants["sigma"], delta=0.05)
    best = certify(problem, x, y, envelope)
    z = reference.prox(functions, x.numpy(), y.numpy(), envelope.rho, 1e-9)
    Rx, Ry = reference.gap_gradient(functions, x.numpy(), y.numpy(), z, envelope.rho)
    fx, fy = functions.fx(x.numpy(), y.numpy()), functions.fy(x.numpy(), y.numpy())
    distance = reference.box_distance(case[-1])
    multipliers = np.linspace(0.0, 2 * best.multiplier + 10.0, 2001)
    grid = [
        np.hypot(distance(x.numpy(), fx + m * Rx), distance(y.numpy(), fy + m * Ry))
        for m in multipliers
    ]
    assert best.stationarity <= min(grid) + 1e-9
    assert best.multiplier >= 0.0


@pytest.mark.parametrize(
    ("stationarity", "expected"),
    [
        (lambda m: abs(m - 7.5), 7.5),
        (lambda m: abs(m - 1e-3), 1e-3),
        (lambda m: abs(m - 54321.0), 54321.0),
        (lambda m: math.hypot(m - 3.0, 4.0), 3.0),
        (lambda m: m + 1.0, 0.0),
        # R has no gradient: every multiplier serves, and the smallest is meant.
        (lambda m: 2.0, 0.0),
        (lambda m: max(5.0 - m, 0.0), 5.0),  # a whole half-line of minimisers
    ],
)
def test_minimiser_of_known_functions(stationarity, expected: float) -> None:
    assert minimiser(stationarity) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_an_evaluation_is_not_counted() -> None:
    problem = PROBLEMS[0]
    built = problem.build()
    certify(built, *problem.at(), problem.envelope)
    assert built.calls == Calls()


def test_a_more_careful_evaluation_is_more_accurate() -> None:
    problem = PROBLEMS[-1]
    x, y = problem.at("solution")
    errors = []
    for tolerance in (1e-2, 1e-5, 1e-9):
        certificate = certify(
            problem.build(),
            x,
            y,
            problem.envelope,
            multiplier=problem.multiplier,
            tolerance=tolerance,
        )
        assert certificate.tolerance == tolerance
        errors.append(certificate.kkt)
    assert errors == sorted(errors, reverse=True)


def test_fields_of_a_certificate_by_hand() -> None:
    # g = (y - x)^2 / 2 with rho = 1: z is the middle of x and y, R = (y - x)^2 / 4 - delta.
    problem = BilevelProblem(
        lambda x, y: x.sum() + 3 * y.sum(), lambda x, y: ((y - x) ** 2).sum() / 2
    )
    x, y = torch.tensor([1.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    got = certify(
        problem,
        x,
        y,
        Envelope(rho=1.0, sigma=0.0, delta=0.25),
        multiplier=2.0,
        qualification="because",
    )
    # grad R = (-(y - x)/2, (y - x)/2) = (-1, 1): grad f + 2 grad R = (-1, 5)
    assert got.stationarity == pytest.approx(math.hypot(1.0, 5.0))
    assert got.residual == pytest.approx(0.75)
    assert got.feasibility == pytest.approx(0.75)
    assert got.complementarity == pytest.approx(1.5)
    assert got.kkt == got.stationarity
    assert (got.upper, got.lower) == pytest.approx((10.0, 2.0))
    assert (got.prox_distance, got.prox_stationarity) == pytest.approx((1.0, 1.0))
    # sqrt(2 rho (delta + violation)) with H = delta + violation = 1
    assert (got.distance_bound, got.stationarity_bound) == pytest.approx(
        (math.sqrt(2), math.sqrt(2))
    )
    assert got.gap == pytest.approx(1.0)
    assert got.theorem == "does not apply: X and Y are unbounded"
    assert (got.rho, got.sigma, got.delta, got.qualification, got.multiplier) == (
        1.0,
        0.0,
        0.25,
        "because",
        2.0,
    )
    assert (got.upper_gradient, got.lower_gradient) == pytest.approx((math.sqrt(10), 2.0))
    assert (got.upper_norm, got.lower_norm) == (1.0, 3.0)
    assert (got.first_upper_gradient, got.first_lower_gradient, got.evaluated_on) == (
        None,
        None,
        "",
    )
    slack = certify(problem, x, x, Envelope(rho=1.0, sigma=0.0, delta=0.25), multiplier=2.0)
    assert (slack.gap, slack.distance_bound) == pytest.approx((0.0, math.sqrt(0.5)))
    assert (slack.residual, slack.feasibility, slack.complementarity) == pytest.approx(
        (-0.25, 0.0, 0.5)
    )


def test_the_lower_gradient_is_that_of_y_and_not_of_z() -> None:
    """At its bound y = 3 is held against a pull upwards, but not downwards."""
    x = torch.tensor([5.0])
    y = torch.tensor([3.0])
    envelope = Envelope(rho=1.0, sigma=0.0, delta=0.25)
    for lower_set, expected in ((Box(0, 3), 0.0), (Box(3, 9), 2.0), (None, 2.0)):
        problem = BilevelProblem(
            lambda x, y: y.sum(), lambda x, y: ((y - x) ** 2).sum() / 2, lower_set=lower_set
        )
        assert certify(problem, x, y, envelope).lower_gradient == pytest.approx(expected)


def test_what_the_caller_knows_is_kept() -> None:
    problem = PROBLEMS[0]
    got = certify(
        problem.build(),
        *problem.at(),
        problem.envelope,
        start=Start(3.0, 4.0),
        evaluated_on="the last mini-batch",
        point="of iteration 3",
    )
    assert (got.first_upper_gradient, got.first_lower_gradient) == (3.0, 4.0)
    assert got.rows()[:2] == [
        ("point", "of iteration 3"),
        ("evaluated on", "the last mini-batch"),
    ]
    assert got.as_dict()["point"] == "of iteration 3"
    assert reading(got).startswith("point: of iteration 3; evaluated on the last mini-batch; ")


def test_errors() -> None:
    problem = PROBLEMS[0]
    with pytest.raises(
        TypeError,
        match=(
            r"^`certify\(envelope=None\)` must be an `Envelope`: "
            r".* Run it first, or give `Envelope\("
        ),
    ):
        certify(problem.build(), *problem.at(), None)  # type: ignore[arg-type]


class TestTable:
    def certificate(self, multiplier: float | None = None) -> Certificate:
        problem = PROBLEMS[0]
        return certify(
            problem.build(),
            *problem.at(),
            problem.envelope,
            multiplier=multiplier,
            qualification="not known",
        )

    def test_prints_all_rows(self) -> None:
        certificate = self.certificate()
        lines = str(certificate).splitlines()
        names = [
            "KKT stationarity",
            "KKT feasibility",
            "KKT complementarity",
            "multiplier",
            "KKT residual",
            "Moreau gap H",
            "residual R = H - delta",
            "upper level f",
            "lower level g",
            "|y - z|",
            "stationarity of z for g",
            "relaxation",
            "constraint qualification",
            "theorem of IVSP",
        ]
        assert lines[0].startswith("certificate ---")
        assert len(lines) == len(names) + 2
        for name, line, (_, text) in zip(names, lines[1:-1], certificate.rows(), strict=True):
            assert line.startswith(name + " ")
            assert line.rstrip().endswith(text)
        assert set(lines[-1]) == {"-"}
        assert len(lines[0]) == len(lines[-1]) == max(map(len, lines))

    def test_shows_the_numbers_and_the_origin_of_the_multiplier(self) -> None:
        own, least = self.certificate(3.25), self.certificate()
        assert dict(own.rows())["multiplier"] == "3.25 (of the solver)"
        assert dict(least.rows())["multiplier"].endswith("(least squares)")
        assert dict(own.rows())["KKT stationarity"] == f"{own.stationarity:.3e}"
        assert dict(own.rows())["Moreau gap H"] == f"{own.gap:.3e}"
        assert dict(own.rows())["residual R = H - delta"] == f"{own.residual:.3e}"
        assert dict(own.rows())["KKT residual"] == (
            f"{own.kkt:.3e} (the best multiplier would give {own.smallest_kkt:.3e})"
        )
        assert dict(own.rows())["relaxation"] == "delta = 0.01, rho = 1, sigma = 0"

    def test_layout(self) -> None:
        assert table("title", [("a", "1"), ("bcd", "22")]) == "title -\na    1\nbcd  22\n-------"

    def test_a_long_row_goes_on_below_itself(self) -> None:
        words = " ".join(["word"] * 30)
        title, *lines, last = table("title", [("a", words), ("bcd", "22")]).splitlines()
        assert max(map(len, (title, *lines, last))) <= 110
        assert len(title) == len(last) == max(map(len, lines))
        assert [line[:5] for line in lines] == ["a    ", "     ", "bcd  "]
        assert " ".join(line[5:] for line in lines[:2]) == words

    def test_as_dict_is_json(self) -> None:
        certificate = self.certificate()
        saved = certificate.as_dict()
        assert json.loads(json.dumps(saved)) == saved
        # What is stored, and what follows from it.
        stored = {field.name for field in dataclasses.fields(Certificate)}
        assert stored < set(saved)
        assert {name: getattr(certificate, name) for name in set(saved) - {"envelope"}} == {
            name: value for name, value in saved.items() if name != "envelope"
        }
        assert saved["envelope"] == {"rho": 1.0, "sigma": 0.0, "delta": 0.01}
        assert {"rho", "kkt", "feasibility", "gap", "constraints"} < set(saved)


def test_certify_does_not_need_gradients_to_be_enabled() -> None:
    problem = PROBLEMS[0]
    point: tuple[Tensor, Tensor] = problem.at()
    with torch.no_grad():
        inside = certify(problem.build(), *point, problem.envelope)
    assert inside == certify(problem.build(), *point, problem.envelope)


@pytest.fixture
def _every_warning() -> Iterator[None]:
    """Let torch repeat the warnings that it gives once per process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("_every_warning")
@every_problem
def test_parameters_may_be_given(problem: Problem) -> None:
    x, y = problem.at()
    expected = certify(problem.build(), x, y, problem.envelope)
    assert (
        certify(problem.build(), torch.nn.Parameter(x), torch.nn.Parameter(y), problem.envelope)
        == expected
    )


@every_problem
def test_residuals_equal_a_separate_computation(problem: Problem) -> None:
    x, y = problem.at()
    for multiplier in (0.0, 0.7, 12.0):
        got = certify(problem.build(), x, y, problem.envelope, multiplier=multiplier)
        expected = exact_residuals(problem, x, y, multiplier)
        assert (got.stationarity, got.feasibility, got.complementarity) == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_smallest_residual_beats_a_fine_grid(case: tuple[int, int, int, float]) -> None:
    problem, _, x, y, constants = random_problem(*case)
    envelope = Envelope(rho=0.5 / constants["sigma"], sigma=constants["sigma"], delta=0.05)
    least = certify(problem, x, y, envelope)
    own = certify(problem, x, y, envelope, multiplier=3.0)
    assert own.smallest_kkt == pytest.approx(least.smallest_kkt, rel=1e-3)
    assert least.smallest_kkt <= least.kkt
    assert own.smallest_kkt <= own.kkt
    # By the definitions of the residuals, at one proximal point for all multipliers.
    f, gap = problem.upper(x, y), gap_at(problem, x, y, envelope)
    grid = []
    for m in np.linspace(0.0, 2 * least.multiplier + 2.0, 41).tolist():
        stationarity = math.hypot(
            problem.upper_set.normal_cone_distance(x, f.grad_x + m * gap.grad_x),
            problem.lower_set.normal_cone_distance(y, f.grad_y + m * gap.grad_y),
        )
        grid.append(max(stationarity, gap.residual, abs(m * gap.residual)))
    assert own.smallest_kkt <= min(grid) * (1 + 1e-3)
    assert own.smallest_kkt >= min(grid) - 0.05 * max(grid)


@pytest.mark.parametrize(
    ("slopes", "residual", "multiplier", "expected"),
    [
        # |m - 6| and m/2 are equal at m = 4
        ((-6.0, 1.0), 0.5, 9.0, 2.0),
        ((-6.0, 1.0), -0.5, 9.0, 2.0),
        # A feasible point with R = 0: complementarity never counts.
        ((-6.0, 1.0), 0.0, 9.0, 0.0),
        # The violation itself is the largest.
        ((-0.1, 1.0), 5.0, 0.0, 5.0),
        # The known multiplier is as good as any.
        ((0.0, 0.0), 0.0, 7.0, 0.0),
    ],
)
def test_the_smallest_residual_by_hand(
    slopes: tuple[float, float], residual: float, multiplier: float, expected: float
) -> None:
    grad_f, grad_r = (torch.tensor([slope], dtype=torch.float64) for slope in slopes)
    residuals = Residuals((residual,), (grad_r,))
    got = Lagrangian(Free(), 0 * grad_f, grad_f, residuals).smallest_kkt([multiplier])
    assert expected <= got <= expected + 1e-3


def test_the_assumptions_of_the_theorem_are_named() -> None:
    problem = PROBLEMS[0]
    built = problem.build()
    boxed = BilevelProblem(problem.f, problem.g, upper_set=Box(-50, 50), lower_set=Box(-50, 50))
    point = problem.at()
    convex = StrictlyConvex()
    rows = dict(certify(boxed, *point, problem.envelope, qualification=convex).rows())
    assert rows["constraint qualification"].startswith("holds: for each delta > 0")
    assert rows["theorem of IVSP"] == "applies, if the gradients of f and g are Lipschitz"
    kinked = certify(boxed, *point, problem.envelope, qualification=convex, kinks=["ReLU"])
    assert kinked.theorem == "does not apply: ReLU is not differentiable"
    assert certify(boxed, *point, problem.envelope).theorem == (
        "not known: the constraint qualification"
    )
    assert "unbounded" in certify(built, *point, problem.envelope, qualification=convex).theorem


def test_few_passes_are_enough_or_say_how_accurate_they_were() -> None:
    """g = y'Dy/2 with curvatures 1 and 100, rho = 10: psi is quadratic, z = y/(1 + rho D)."""
    curvature = torch.tensor([1.0, 100.0], dtype=torch.float64)
    calls = 0

    def lower(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * (curvature * y).dot(y) + 0 * x.sum()

    problem = BilevelProblem(lambda x, y: (x * y[:1]).sum() + y.sum(), lower)
    x = torch.ones(1, dtype=torch.float64)
    y = torch.ones(2, dtype=torch.float64)
    envelope = Envelope(rho=10.0, sigma=0.0, delta=1e-3)
    exact = certify(problem, x, y, envelope, tolerance=1e-10)
    assert certify(problem, x, y, envelope, tolerance=1e-10, passes=10_000) == exact
    calls = 0
    few = certify(problem, x, y, envelope, tolerance=1e-10, passes=12)
    # 1 + 12 gradients for z; one for its accuracy, one at y, and the gap, which goes through twice.
    assert calls <= 1 + 12 + 1 + 1 + 2
    assert few.tolerance > 1e-10
    # The envelope is overestimated, by at most tolerance^2/(2 m).
    modulus = 1 / envelope.rho
    assert 0.0 < exact.residual - few.residual <= few.tolerance**2 / (2 * modulus)
