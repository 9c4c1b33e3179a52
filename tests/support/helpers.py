"""The table of problems, and the problems of `reference.py` in torch.

The table of solvers is in `tables.py`.

Every problem comes with a KKT point of its delta-relaxed Moreau-gap problem, derived without the
library: its lower level is such that the proximal point has a closed form (or is the root of one
scalar equation), and with it the gap R.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import reference
import torch
from torch import Tensor

from lightning_bilevel import (
    IVSP,
    Ball,
    BilevelProblem,
    Box,
    ConvexSet,
    Envelope,
    Free,
    Simplex,
    SolverCallable,
)
from lightning_bilevel.core.moreau import MoreauPoint, evaluate_gap
from lightning_bilevel.core.prox import precise_prox
from lightning_bilevel.solvers.record import PenaltyInfo, StepInfo

Vector = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Problem:
    """A bilevel problem, the envelope that relaxes it, and a KKT point of the relaxed problem.

    Attributes:
        f: The upper-level function, for float32 and float64.
        g: The lower-level function, likewise.
        start: Where solvers start, (x, y).
        solution: A KKT point of the relaxed problem, (x, y).
        multiplier: Its multiplier.
        ivsp: Constants with which IVSP gets there, beyond those of the envelope.
        steps: Outer iterations that IVSP needs for residuals below 1e-3.
    """

    name: str
    f: Callable[[Tensor, Tensor], Tensor]
    g: Callable[[Tensor, Tensor], Tensor]
    upper_set: ConvexSet
    lower_set: ConvexSet
    start: tuple[Vector, Vector]
    envelope: Envelope
    solution: tuple[Vector, Vector]
    multiplier: float
    ivsp: dict[str, Any] = field(default_factory=dict)
    steps: int = 400

    def __str__(self) -> str:
        return self.name

    def build(self) -> BilevelProblem:
        return BilevelProblem(self.f, self.g, self.upper_set, self.lower_set)

    def at(self, point: str = "start", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        x, y = getattr(self, point)
        return torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)


# What the paper chooses per task, besides rho and sigma: with all of them given, nothing is
# estimated.
PLAIN = {
    "mu0": 1e-2,
    "block": 1,
    "gamma0": 1.0,
    "zeta_bar": 1.0,
    "L_init": 1.0,
    "L_xy": 1.0,
    "L_yy": 1.0,
}


def paper_constants(problem: Problem) -> dict[str, Any]:
    """All that IVSP may be given for a problem."""
    envelope = problem.envelope
    return {
        "rho": envelope.rho,
        "sigma": envelope.sigma,
        "delta": envelope.delta,
        **PLAIN,
        **problem.ivsp,
    }


def make_ivsp(problem: Problem, **more: Any) -> SolverCallable:
    return partial(IVSP, **{**paper_constants(problem), **more})


def groups(x: Tensor, y: Tensor, units: tuple[float, float] = (1.0, 1.0)) -> list[dict[str, Any]]:
    """Fresh parameters at (x, y) as a solver takes them."""
    return [
        {"params": [x.detach().clone().requires_grad_()], "level": "upper", "unit": units[0]},
        {"params": [y.detach().clone().requires_grad_()], "level": "lower", "unit": units[1]},
    ]


@dataclass(frozen=True)
class InUnit:
    """The set of u with unit * u in another one."""

    base: ConvexSet
    unit: float

    def project(self, v: Tensor) -> Tensor:
        return self.base.project(self.unit * v) / self.unit

    def normal_cone_distance(self, v: Tensor, gradient: Tensor) -> float:
        return self.base.normal_cone_distance(self.unit * v, gradient)


def in_unit(base: ConvexSet, unit: float) -> ConvexSet:
    return (
        Box(base.lower / unit, base.upper / unit) if isinstance(base, Box) else InUnit(base, unit)
    )


def in_units(problem: Problem, upper: float, lower: float) -> BilevelProblem:
    """The problem in the variables u and v with x = upper * u and y = lower * v."""
    return BilevelProblem(
        lambda u, v: problem.f(upper * u, lower * v),
        lambda u, v: problem.g(upper * u, lower * v),
        in_unit(problem.upper_set, upper),
        in_unit(problem.lower_set, lower),
    )


def point_of(optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """The iterate, copied out of the parameters."""
    x, y = (
        torch.cat([p.detach().reshape(-1) for p in group["params"]]).clone()
        for group in optimizer.param_groups
    )
    return x, y


def advance(optimizer: IVSP, problem: BilevelProblem, steps: int) -> list[PenaltyInfo]:
    return [optimizer.step(problem=problem) for _ in range(steps)]


def facts(info: StepInfo) -> dict[str, Any]:
    """All of a record but its time."""
    return {name: value for name, value in asdict(info).items() if name != "optimization_time"}


def gap_at(problem: BilevelProblem, x: Tensor, y: Tensor, envelope: Envelope) -> MoreauPoint:
    """R and its gradient at a precise proximal point."""
    lower = problem.at(x)
    z = precise_prox(lower, y, envelope.rho, problem.lower_set, tolerance=1e-12)
    return evaluate_gap(lower, y, z, envelope)


def exact_residuals(
    problem: Problem, x: Tensor, y: Tensor, multiplier: float
) -> tuple[float, float, float]:
    """The residuals at a point in float64: stationarity, feasibility, complementarity.

    They are computed by other means than the library's.

    The proximal point by many small projected-gradient steps, gradients by autograd on the gap as a
    whole, and the distance to the normal cone as the length of an infinitesimal projected-gradient
    step, |v - P(v - t d)| / t.
    """
    rho, sets = problem.envelope.rho, (problem.upper_set, problem.lower_set)
    z, step = y.clone(), 1 / (10.0 + 1 / rho)
    for _ in range(10_000):
        u = z.clone().requires_grad_()
        psi = problem.g(x, u) + ((u - y) ** 2).sum() / (2 * rho)
        new = sets[1].project(z - step * torch.autograd.grad(psi, u)[0])
        if (new - z).norm() <= 1e-14 * (1 + z.norm()):
            break
        z = new
    x, y, t = x.clone().requires_grad_(), y.clone().requires_grad_(), 1e-7
    gap = (
        problem.g(x, y)
        - problem.g(x, z)
        - ((y - z) ** 2).sum() / (2 * rho)
        - problem.envelope.delta
    )
    gradients = torch.autograd.grad(problem.f(x, y) + multiplier * gap, (x, y))
    steps = []
    for v, d, convex_set in zip((x.detach(), y.detach()), gradients, sets, strict=True):
        steps.append((v - convex_set.project(v - t * d)).norm().item() / t)
    return float(np.hypot(*steps)), max(gap.item(), 0.0), abs(multiplier * gap.item())


def distance(center: Vector, weight: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    """f = weight |w - center|^2 / 2 with w = (x, y)."""
    c = torch.tensor(center)

    return lambda x, y: weight / 2 * (torch.cat([x, y]) - c.to(x)).square().sum()


def tracking(B: Vector) -> Callable[[Tensor, Tensor], Tensor]:
    """g = |y - B x|^2 / 2."""
    matrix = torch.tensor(B)
    return lambda x, y: (y - matrix.to(x) @ x).square().sum() / 2


def quadratic() -> Problem:
    """g = |y - x|^2 / 2 without constraints.

    R = k |y - x|^2 / 2 - delta with k = rho/(1 + rho): R <= 0 is a ball in u = y - x.

    f = (|x - a|^2 + |y - b|^2) / 2 for a given u is least at x = (a + b - u)/2 and then |u - (b -
    a)|^2 / 4, so u is the projection of b - a on the ball of radius s = sqrt(2 delta / k), and y -
    b + multiplier k u = 0 gives the multiplier.
    """
    envelope = Envelope(rho=1.0, sigma=0.0, delta=1e-2)
    a, b = np.array([1.0, -1.0, 0.5]), np.array([0.0, 1.0, 0.5])
    k = envelope.rho / (1 + envelope.rho)
    s, far = np.sqrt(2 * envelope.delta / k), np.linalg.norm(b - a)
    u = (b - a) * s / far
    return Problem(
        "quadratic",
        distance(np.concatenate([a, b])),
        tracking(np.eye(3)),
        Free(),
        Free(),
        start=(np.array([2.0, 2.0, 2.0]), np.array([-1.0, 0.0, 1.0])),
        envelope=envelope,
        solution=((a + b - u) / 2, (a + b + u) / 2),
        multiplier=float((far / s - 1) / (2 * k)),
        ivsp={"mu0": 2e-3, "gamma0": 0.25},  # gamma0 > 1/multiplier: the penalty has to grow
        steps=600,
    )


def slack() -> Problem:
    """The same with a = b: f's minimiser solves the lower level, R = -delta, multiplier 0."""
    a = np.array([1.0, -1.0, 0.5])
    return Problem(
        "slack",
        distance(np.concatenate([a, a])),
        tracking(np.eye(3)),
        Free(),
        Free(),
        start=(np.array([2.0, 2.0, 2.0]), np.array([-1.0, 0.0, 1.0])),
        envelope=Envelope(rho=1.0, sigma=0.0, delta=1e-2),
        solution=(a, a),
        multiplier=0.0,
        ivsp={"mu0": 1e-2, "gamma0": 1.0},
    )


def flat() -> Problem:
    """g = (sum(y) - x)^2 / 2: convex, not strongly convex, with a plane of minimisers.

    The proximal point moves all of y by the same amount, which gives R = n rho u^2 / (2 (1 + n
    rho)) - delta with u = sum(y) - x: a slab |u| <= s with normal (-1, 1, ..., 1), on which f = |w
    - c|^2 / 2 projects c.
    """
    envelope = Envelope(rho=2.0, sigma=0.0, delta=1e-2)
    n, c = 4, np.array([-1.0, 1.0, 0.5, -0.5, 1.0])
    k = n * envelope.rho / (1 + n * envelope.rho)
    s, normal = np.sqrt(2 * envelope.delta / k), np.array([-1.0, 1.0, 1.0, 1.0, 1.0])
    excess = (normal @ c - s) / (n + 1)
    w = c - excess * normal
    return Problem(
        "flat",
        distance(c),
        lambda x, y: (y.sum() - x.sum()) ** 2 / 2,
        Box(-10.0, 10.0),
        Box(-10.0, 10.0),
        start=(np.array([2.0]), np.array([-1.0, 0.0, 1.0, 2.0])),
        envelope=envelope,
        solution=(w[:1], w[1:]),
        multiplier=float(excess / (k * s)),
        ivsp={"mu0": 1e-2, "gamma0": 0.12, "L_xy": 2.0, "L_yy": 4.0},
    )


def manufactured(
    name: str,
    B: Vector,
    sets: tuple[ConvexSet, ConvexSet],
    project_y: Callable[[Vector], Vector],
    x: Vector,
    y: Vector,
    normal: Vector,
    multiplier: float,
    start: tuple[Vector, Vector],
    weight: float = 1.0,
    **more: Any,
) -> Problem:
    """A problem that has the KKT point (x, y) by construction.

    g = |y - B x|^2 / 2, and f is a squared distance.

    As psi is isotropic, z = P_Y((rho B x + y)/(1 + rho)) for any set Y. delta is chosen such that
    R(x, y) = 0, and the centre of f such that grad f + multiplier grad R + normal = 0 with `normal`
    a vector of the normal cone at (x, y).
    """
    rho = 1.0
    z = project_y((rho * B @ x + y) / (1 + rho))
    delta = float(
        ((y - B @ x) ** 2).sum() / 2
        - ((z - B @ x) ** 2).sum() / 2
        - ((z - y) ** 2).sum() / (2 * rho)
    )
    grad_R = np.concatenate([-B.T @ (y - z), (y - B @ x) - (y - z) / rho])
    center = np.concatenate([x, y]) + (multiplier * grad_R + normal) / weight
    f, envelope = distance(center, weight), Envelope(rho=rho, sigma=0.0, delta=delta)
    return Problem(name, f, tracking(B), *sets, start, envelope, (x, y), multiplier, **more)


def simplex_projection(v: Vector, total: float = 1.0) -> Vector:
    """The projection on the simplex by bisection on the shift (the library sorts)."""
    low, high = float(v.min()) - total, float(v.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0.0).sum() > total else (low, middle)
    return np.maximum(v - (low + high) / 2, 0.0)


def active_box() -> Problem:
    """Active bounds at the solution: x in coordinate 1, y in 2, z alone in 3."""
    return manufactured(
        "active_box",
        B=np.eye(3),
        sets=(Box([-1.0, -1.0, -2.0], 1.0), Box(0.0, [2.0, 2.0, 2.0])),
        project_y=lambda v: np.clip(v, 0.0, 2.0),
        x=np.array([1.0, -0.5, -1.0]),
        y=np.array([1.2, 0.0, 0.1]),
        normal=np.array([0.7, 0.0, 0.0, 0.0, -1.0, 0.0]),
        multiplier=5.0,
        start=(np.array([-1.0, 1.0, 1.0]), np.array([2.0, 2.0, 0.0])),
        weight=10.0,
        ivsp={"mu0": 1e-1, "gamma0": 0.1},
    )


def ball() -> Problem:
    """x and y in balls, x's not about 0; both constraints are active at the solution."""
    angle, center = 0.4, np.array([0.5, -0.5])
    x = center + 1.5 * np.array([np.cos(angle), np.sin(angle)])
    y = np.array([np.cos(0.3), -np.sin(0.3)])
    return manufactured(
        "ball",
        B=np.array([[1.0, 0.3], [-0.2, 0.8]]),
        sets=(Ball(1.5, center), Ball(1.0)),
        project_y=lambda v: v / max(1.0, float(np.linalg.norm(v))),
        x=x,
        y=y,
        normal=np.concatenate([0.8 * (x - center) / 1.5, 0.6 * y]),
        multiplier=3.0,
        start=(np.array([0.0, 0.0]), np.array([-0.5, 0.5])),
        weight=2.0,
        ivsp={"mu0": 1e-1, "gamma0": 0.166, "L_xy": 1.2},
    )


def simplex() -> Problem:
    """y on the simplex, one coordinate of it zero at the solution and one more zero in z."""
    return manufactured(
        "simplex",
        B=np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [-1.0, 0.2]]),
        sets=(Box(-1.0, 1.0), Simplex()),
        project_y=simplex_projection,
        x=np.array([0.2, 1.0]),
        y=np.array([0.3, 0.4, 0.3, 0.0]),
        normal=np.array([0.0, 0.4, 0.1, 0.1, 0.1, -0.5]),
        multiplier=2.0,
        start=(np.array([-1.0, 0.0]), np.array([0.25, 0.25, 0.25, 0.25])),
        # gamma0 > 1/multiplier: the penalty has to grow.
        ivsp={"mu0": 1e-3, "gamma0": 2.0, "L_xy": 1.6},
        steps=600,
    )


def sine_functions(
    a: float = 2.0, c: float = 2.0
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The paper's f = (x - a)^2 + |y - a - c|^2 and g = sum of sin(x + y_i - c)."""
    return (
        lambda x, y: ((x - a) ** 2).sum() + ((y - a - c) ** 2).sum(),
        lambda x, y: torch.sin(x + y - c).sum(),
    )


def sine(n: int = 5) -> Problem:
    """The paper's nonconvex problem. By symmetry its gap is n times that of one coordinate.

    With t = x + y_i - c and p = x + z_i - c: cos p + (p - t)/rho = 0, so t = p + rho cos p, and the
    gap is n (sin t - sin p - rho cos(p)^2 / 2), which grows with the distance of p from the
    minimiser C of the sine. The root p of gap = delta on the side of 2 a gives t, and f on the line
    x + y_i - c = t is least at x = ((1 - n) a + n t)/(1 + n)."""
    envelope, a, c = Envelope(rho=0.5, sigma=1.0, delta=1e-3), 2.0, 2.0
    C = float(-np.pi / 2 + 2 * np.pi * np.round((2 * a + np.pi / 2) / (2 * np.pi)))
    rho = envelope.rho
    side = np.sign(2 * a - C)
    low, high = 0.0, 0.5  # of |p - C|
    for _ in range(100):
        p = C + side * (low + high) / 2
        t = p + rho * np.cos(p)
        gap = n * (np.sin(t) - np.sin(p) - rho * np.cos(p) ** 2 / 2)
        low, high = ((low + high) / 2, high) if gap < envelope.delta else (low, (low + high) / 2)
    x = ((1 - n) * a + n * t) / (1 + n)
    f, g = sine_functions(a, c)
    return Problem(
        "sine",
        f,
        g,
        Box(-100.0, 100.0),
        Box(-100.0, 100.0),
        start=(np.array([0.0]), np.full(n, 5.0)),
        envelope=envelope,
        solution=(np.array([x]), np.full(n, t + c - x)),
        multiplier=float(-2 * (x - a) / (n * (np.cos(t) - np.cos(p)))),
        ivsp={"mu0": 3e-3, "gamma0": 0.027, "zeta_bar": 3.0, "L_xy": float(np.sqrt(n))},
    )


PROBLEMS = [quadratic(), slack(), flat(), active_box(), ball(), simplex(), sine()]


def random_functions(
    constants: dict[str, Any],
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """f and g of `reference.random_problem` in torch."""
    H, center, A, B, Q = (torch.tensor(constants[name]) for name in ("H", "center", "A", "B", "Q"))

    def f(x: Tensor, y: Tensor) -> Tensor:
        shifted = torch.cat([x, y]) - center.to(x)
        return shifted @ H.to(x) @ shifted / 2

    def g(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(A.to(x) @ y + B.to(x) @ x).sum() + y @ Q.to(x) @ y / 2

    return f, g


def random_problem(
    seed: int, nx: int, ny: int, bound: float
) -> tuple[BilevelProblem, reference.Functions, Tensor, Tensor, dict[str, Any]]:
    """`reference.random_problem` in torch and in NumPy.

    Returns the problem, its functions, the start (x, y) and the constants.
    """
    functions, x, y, constants = reference.random_problem(seed, nx, ny, bound)
    box = Box(-bound, bound)
    return (
        BilevelProblem(*random_functions(constants), box, box),
        functions,
        torch.tensor(x),
        torch.tensor(y),
        constants,
    )
