import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import simplex_projection
from torch import Tensor

from lightning_bilevel.core.sets import (
    Ball,
    Box,
    ConvexSet,
    Face,
    Free,
    Product,
    Simplex,
    face_at,
    is_bounded,
)

N, INF = 6, float("inf")
SETS: dict[str, ConvexSet] = {
    "free": Free(),
    "box": Box(-1.0, 0.5),
    "box per coordinate": Box([-1.0, 0.0, -2.0, 0.3, 0.0, -1.0], [1.0, 0.1, -1.0, 0.3, 5.0, 1.0]),
    "box one bound per coordinate": Box(-0.1, torch.linspace(0.0, 1.0, N)),
    "box half infinite": Box([-INF, 0.0, -INF, -1.0, -INF, 0.1], [INF, INF, -0.2, 1.0, 0.0, 0.1]),
    "point": Box(0.3, 0.3),
    "nonnegative": Box(0.0, torch.inf),
    "ball": Ball(1.3),
    "ball around all": Ball(100.0),
    "ball elsewhere": Ball(0.7, [1.0, -1.0, 0.5, 0.0, 2.0, 0.0]),
    "simplex": Simplex(),
    "simplex of 3": Simplex(3.0),
    "product": Product([Box(-1.0, 1.0), Simplex(2.0), Ball(0.5)], [1, 3, 2]),
}
every_set = pytest.mark.parametrize("convex_set", SETS.values(), ids=SETS.keys())
both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)


def vectors(count: int, dtype: torch.dtype = torch.float64, n: int = N) -> list[Tensor]:
    """Points near and far, some of them with equal and with zero coordinates."""
    generator = torch.Generator().manual_seed(1)
    drawn = [
        10.0 ** (i % 3 - 1) * torch.randn(n, generator=generator, dtype=torch.float64)
        for i in range(count)
    ]
    return [v.to(dtype) for v in (*drawn, torch.zeros(n), torch.ones(n), -3.0 * torch.ones(n))]


@both_dtypes
@every_set
class TestProjection:
    def test_is_idempotent(self, convex_set: ConvexSet, dtype: torch.dtype) -> None:
        for v in vectors(12, dtype):
            once = convex_set.project(v)
            assert once.dtype == dtype
            assert once.shape == v.shape
            torch.testing.assert_close(
                convex_set.project(once),
                once,
                rtol=1e-6 if dtype == torch.float32 else 1e-14,
                atol=1e-7,
            )

    def test_is_nonexpansive(self, convex_set: ConvexSet, dtype: torch.dtype) -> None:
        points = vectors(12, dtype)
        rounding = 20 * torch.finfo(dtype).eps
        for v, w in pairwise(points):
            before, after = (v - w).norm(), (convex_set.project(v) - convex_set.project(w)).norm()
            assert after <= before + rounding * (v.norm() + w.norm() + 5.0)

    def test_does_not_change_its_argument(self, convex_set: ConvexSet, dtype: torch.dtype) -> None:
        v = vectors(1, dtype)[0]
        copy = v.clone()
        convex_set.project(v)
        assert torch.equal(v, copy)

    def test_is_the_nearest_point(self, convex_set: ConvexSet, dtype: torch.dtype) -> None:
        # The variational inequality <v - Pv, c - Pv> <= 0 for every c of the set.
        points = vectors(12, dtype)
        members = [convex_set.project(v) for v in points]
        for v, nearest in zip(points, members, strict=True):
            for c in members:
                outward, inward = (v - nearest).double(), (c - nearest).double()
                slack = (
                    20
                    * torch.finfo(dtype).eps
                    * (1.0 + v.norm())
                    * (1.0 + c.norm() + nearest.norm())
                )
                assert outward @ inward <= slack


@both_dtypes
@pytest.mark.parametrize(
    ("name", "violation"),
    [
        ("box", lambda v: torch.relu(torch.maximum(-1.0 - v, v - 0.5)).max()),
        ("point", lambda v: (v - 0.3).abs().max()),
        ("nonnegative", lambda v: torch.relu(-v).max()),
        ("ball", lambda v: torch.relu(v.norm() - 1.3)),
        (
            "ball elsewhere",
            lambda v: torch.relu(
                (v - torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 0.0]).double()).norm() - 0.7
            ),
        ),
        ("simplex", lambda v: torch.maximum((v.sum() - 1.0).abs(), torch.relu(-v).max())),
        ("simplex of 3", lambda v: torch.maximum((v.sum() - 3.0).abs(), torch.relu(-v).max())),
        (
            "product",
            lambda v: torch.maximum((v[1:4].sum() - 2.0).abs(), torch.relu(v[4:].norm() - 0.5)),
        ),
    ],
)
def test_projection_lies_in_the_set(name: str, violation, dtype: torch.dtype) -> None:
    for v in vectors(12, dtype):
        assert float(violation(SETS[name].project(v).double())) <= 20 * torch.finfo(dtype).eps * (
            1.0 + float(v.norm())
        )


@pytest.mark.parametrize("total", [1.0, 0.01, 30.0])
@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_simplex_projection_equals_bisection(n: int, total: float) -> None:
    for v in vectors(10, n=n):
        expected = simplex_projection(v.numpy(), total)
        np.testing.assert_allclose(
            Simplex(total).project(v).numpy(), expected, atol=1e-12 * (1 + float(v.norm()))
        )


def test_box_bounds_meet_the_variable_in_its_own_dtype() -> None:
    assert torch.equal(Box(-0.1, 0.1).project(torch.tensor([5.0])), torch.tensor([0.1]))
    assert torch.equal(
        Box(-0.1, 0.1).project(torch.tensor([5.0]).double()),
        torch.tensor([0.1], dtype=torch.float64),
    )


def test_a_set_keeps_no_reference_to_the_given_bounds() -> None:
    lower = torch.zeros(2, dtype=torch.float64)
    box = Box(lower, 1.0)
    lower.fill_(9.0)
    assert torch.equal(box.project(torch.full((2,), -1.0)), torch.zeros(2))


@every_set
def test_normal_cone_distance_is_the_length_of_the_projected_direction(
    convex_set: ConvexSet,
) -> None:
    # P(v - t d) - v = t P_T(-d) + O(t^2) with T the tangent cone, and |P_T(-d)| = dist(0, d + N).
    t = 1e-6
    for v in map(convex_set.project, vectors(12)):
        for d in vectors(6):
            expected = (v - convex_set.project(v - t * d)).norm() / t
            got = convex_set.normal_cone_distance(v, d)
            assert got == pytest.approx(
                float(expected), rel=1e-4, abs=1e-8 + 1e-4 * float(d.norm())
            )


@every_set
def test_normal_cone_distance_is_zero_at_constrained_minimisers(convex_set: ConvexSet) -> None:
    # Projected gradient on random strongly convex quadratics, run to its fixed point.
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        factor = torch.randn(N, N, generator=generator, dtype=torch.float64)
        H = torch.eye(N, dtype=torch.float64) + factor @ factor.T / N
        center = 3 * torch.randn(N, generator=generator, dtype=torch.float64)
        v, step = torch.zeros(N, dtype=torch.float64), 1 / torch.linalg.matrix_norm(H, 2)
        for _ in range(500):
            v = convex_set.project(v - step * (H @ (v - center)))
        assert convex_set.normal_cone_distance(v, H @ (v - center)) < 1e-9
        if convex_set is not SETS["point"]:  # whose normal cone is the whole space
            assert (
                convex_set.normal_cone_distance(
                    v, torch.randn(N, generator=generator, dtype=torch.float64)
                )
                > 1e-3
            )


@every_set
def test_normal_cone_distance_of_a_projected_float32_point_absorbs_the_residual(
    convex_set: ConvexSet,
) -> None:
    # d = Pv - v lies in -N_C(Pv), so the distance vanishes up to the rounding of the point.
    for v in vectors(12, torch.float32):
        nearest = convex_set.project(v)
        assert convex_set.normal_cone_distance(nearest, nearest - v) < 1e-5 * (1 + float(v.norm()))


def test_normal_cone_distance_by_hand() -> None:
    box = Box([0.0, 0.0, -INF], [1.0, 1.0, INF])
    v = torch.tensor([0.0, 1.0, 7.0])
    d = torch.tensor([3.0, 4.0, 12.0])
    assert box.normal_cone_distance(v, d) == pytest.approx(np.hypot(4.0, 12.0))
    assert box.normal_cone_distance(v, -d) == pytest.approx(np.hypot(3.0, 12.0))
    ball, v = Ball(2.0), torch.tensor([2.0, 0.0])
    assert ball.normal_cone_distance(v, torch.tensor([-3.0, 4.0])) == pytest.approx(4.0)
    assert ball.normal_cone_distance(v, torch.tensor([3.0, 4.0])) == pytest.approx(5.0)
    assert ball.normal_cone_distance(v / 2, torch.tensor([-3.0, 4.0])) == pytest.approx(5.0)
    simplex, v = Simplex(), torch.tensor([0.5, 0.5, 0.0])
    assert simplex.normal_cone_distance(v, torch.tensor([1.0, 1.0, 5.0])) == pytest.approx(0.0)
    assert simplex.normal_cone_distance(v, torch.tensor([1.0, 3.0, 5.0])) == pytest.approx(
        np.sqrt(2.0)
    )
    assert simplex.normal_cone_distance(v, torch.tensor([1.0, 1.0, -2.0])) == pytest.approx(
        np.sqrt(6.0)
    )
    assert Box(0.3, 0.3).normal_cone_distance(torch.tensor([0.3]), torch.tensor([9.0])) == 0.0


def test_product_is_its_blocks_side_by_side() -> None:
    first, second = Box(-1.0, 1.0), Simplex(2.0)
    product = Product([first, second], [2, 4])
    for v in vectors(10):
        assert torch.equal(
            product.project(v), torch.cat([first.project(v[:2]), second.project(v[2:])])
        )
        p, d = product.project(v), v + 1.0
        parts = first.normal_cone_distance(p[:2], d[:2]), second.normal_cone_distance(p[2:], d[2:])
        assert product.normal_cone_distance(p, d) == pytest.approx(np.hypot(*parts))


@every_set
@pytest.mark.parametrize("seed", range(4))
def test_the_face_has_the_limit_of_difference_quotients(convex_set: ConvexSet, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    u, v, w = (torch.randn(N, generator=generator, dtype=torch.float64) for _ in range(3))
    face = face_at(convex_set, u)
    t = 1e-6
    quotient = (convex_set.project(u + t * v) - convex_set.project(u - t * v)) / (2 * t)
    torch.testing.assert_close(face.differential(v), quotient, rtol=1e-7, atol=1e-8)
    # T is an orthogonal projection.
    torch.testing.assert_close(face.tangent(face.tangent(v)), face.tangent(v))
    assert float(w @ face.tangent(v)) == pytest.approx(float(v @ face.tangent(w)), abs=1e-12)


def test_a_point_at_a_bound_without_a_force_is_free() -> None:
    face = face_at(Box(0.0, 1.0), torch.tensor([0.0, 1.0, -1e-9, 2.0]))
    assert face.tangent(torch.ones(4)).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_set_of_the_user_needs_a_face_for_hypergradients() -> None:
    with pytest.raises(TypeError, match=r"projection onto Silent\(\) is not known: hypergradients"):
        face_at(Product([Free(), Silent()], [1, 1]), torch.zeros(2))

    class Line(Silent):
        def face(self, u: Tensor) -> Face:
            return Face(lambda v: 0 * v)

    face = face_at(Product([Free(), Line()], [1, 1]), torch.zeros(2))
    assert face.differential(torch.ones(2)).tolist() == [1.0, 0.0]


@every_set
def test_sets_satisfy_the_protocol(convex_set: ConvexSet) -> None:
    assert isinstance(convex_set, ConvexSet)


@pytest.mark.parametrize(
    ("convex_set", "text"),
    [
        (Free(), "Free()"),
        (Box(-1.0, 2.5), "Box(-1, 2.5)"),
        (Box([0.0, 1.0], INF), "Box(<2 bounds>, inf)"),
        (Ball(2.0), "Ball(radius=2, center=0)"),
        (Simplex(), "Simplex(total=1)"),
        (Product([Free(), Simplex()], [1, 2]), "Product([Free(), Simplex(total=1)], [1, 2])"),
    ],
)
def test_repr(convex_set: ConvexSet, text: str) -> None:
    assert repr(convex_set) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box(1.0, 0.0), "`Box(1, 0)`: a lower bound must not exceed its upper bound."),
        (lambda: Box(float("nan"), 0.0), "`Box(nan, 0)`: a lower bound must not exceed its upper"),
        (lambda: Box([0.0, 2.0], 1.0), "`Box(<2 bounds>, 1)`: a lower bound must not exceed its"),
        (lambda: Ball(0.0), "`Ball(radius=0.0)` must be positive and finite."),
        (lambda: Ball(-1.0), "`Ball(radius=-1.0)` must be positive and finite."),
        (lambda: Ball(INF), "`Ball(radius=inf)` must be positive and finite."),
        (lambda: Ball(float("nan")), "`Ball(radius=nan)` must be positive and finite."),
        (lambda: Simplex(0.0), "`Simplex(total=0.0)` must be positive and finite."),
        (lambda: Simplex(INF), "`Simplex(total=inf)` must be positive and finite."),
    ],
)
def test_errors_name_the_call_the_value_and_the_rule(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()


class Silent:
    """A user's set that does not say whether it is bounded."""

    def __repr__(self) -> str:
        return "Silent()"

    def project(self, v: Tensor) -> Tensor:
        return v

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("convex_set", "bounded"),
    [
        (Free(), False),
        (Box(-1, 1), True),
        (Box(-1, INF), False),
        (Box([0.0, -INF], [1.0, 1.0]), False),
        (Box([0.0, -3.0], [1.0, 1.0]), True),
        (Box(0.0, torch.inf), False),
        (Ball(), True),
        (Simplex(), True),
        (Product([Box(0, 1), Simplex()], [1, 2]), True),
        (Product([Box(0, 1), Free()], [1, 2]), False),
        (Product([Silent(), Free()], [1, 2]), False),
        (Product([Silent(), Ball()], [1, 2]), None),
        (Silent(), None),
    ],
    ids=repr,
)
def test_bounded(convex_set: ConvexSet, bounded: bool | None) -> None:
    assert isinstance(convex_set, ConvexSet)
    assert is_bounded(convex_set) is bounded


@every_set
def test_a_bounded_set_has_no_far_point(convex_set: ConvexSet) -> None:
    generator = torch.Generator().manual_seed(0)
    far = [
        float(convex_set.project(1e6 * torch.randn(N, generator=generator)).abs().max())
        for _ in range(20)
    ]
    assert (max(far) < 1e3) is is_bounded(convex_set)
