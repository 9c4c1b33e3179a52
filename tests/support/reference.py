"""IVSP in plain NumPy (float64), written from the paper alone: the tests' ground truth."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Distance = Callable[[Array, Array], float]

# (a_phi, b_phi): the uniform error of phi_mu is a_phi mu, the Lipschitz constant of its slope b_phi
# / mu.
SMOOTHING_CONSTANTS = {"huber": (1 / 8, 1.0), "softplus": (float(np.log(2.0)), 1 / 4)}
BB_FLOOR = 1e-24  # below it <dw, dv> counts as zero (safeguard of eq. bb-initialization)
ARMIJO_SLACK = 1e-12  # against stalling by round-off (eq. implemented-robust-armijo)
# Reached only with wrong constants or a NaN: raise instead of hanging.
MAX_INNER = 1_000_000
MAX_TRIALS = 200


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Constants of Algorithms 2 and 3.

    The defaults are the paper's "Common IVSP settings" (q does not follow r).
    """

    rho: float
    sigma: float
    delta: float = 1e-3
    mu0: float
    block: int
    r: float = 1 / 3
    q: float = 1 / r + 0.01
    gamma0: float
    zeta_bar: float
    c1: float = 1e-4
    c2: float = 1.0
    L_init: float
    L_min: float = 1e-11
    L_max: float = 1e11
    L_xy: float
    L_yy: float
    B_R: float = 1e3
    theta_low: float = 1e-24
    theta_hat: float = 1.99
    fixed_L: float | None = None
    smoothing: Literal["huber", "softplus"] = "huber"

    def mu(self, k: int) -> float:
        """mu_k = mu0 (1 + floor(k / B))^(-r)."""
        return self.mu0 * float((1 + k // self.block) ** -self.r)

    def zeta(self, k: int) -> float:
        """zeta_k = zeta_bar mu_k^q."""
        return self.zeta_bar * float(self.mu(k) ** self.q)

    def gamma(self, t: int) -> float:
        """gamma_t = gamma0 (t + 1)^(-1/2)."""
        return self.gamma0 * float((t + 1) ** -0.5)


@dataclass(frozen=True)
class Functions:
    """Both objectives, their partial gradients and the two projections, on vectors x and y."""

    f: Callable[[Array, Array], float]
    fx: Callable[[Array, Array], Array]
    fy: Callable[[Array, Array], Array]
    g: Callable[[Array, Array], float]
    gx: Callable[[Array, Array], Array]
    gy: Callable[[Array, Array], Array]
    project_x: Callable[[Array], Array]
    project_y: Callable[[Array], Array]


@dataclass
class Record:
    """One outer iteration: the new point with its z~, f and R~, and the constants used."""

    x: Array
    y: Array
    z: Array
    f: float
    R: float
    inner_iterations: int
    trials: int
    t: int
    L: float
    L_start: float
    mu: float
    gamma: float
    step: float
    multiplier: float


def smoothed_plus(value: float, mu: float, smoothing: str) -> tuple[float, float]:
    """phi_mu and phi'_mu: eq. centered-huber, or softplus."""
    if smoothing == "softplus":
        decay = float(np.exp(-abs(value) / mu))
        slope = (1.0 if value >= 0 else decay) / (1.0 + decay)
        return max(value, 0.0) + mu * float(np.log1p(decay)), slope
    if value <= -mu / 2:
        return 0.0, 0.0
    if value >= mu / 2:
        return value, 1.0
    return (value + mu / 2) ** 2 / (2 * mu), (value + mu / 2) / mu


def gap(functions: Functions, x: Array, y: Array, z: Array, rho: float, delta: float) -> float:
    """R~ = g(x, y) - g(x, z) - |z - y|^2 / (2 rho) - delta (Algorithm 2, step 3)."""
    return functions.g(x, y) - functions.g(x, z) - float((z - y) @ (z - y)) / (2 * rho) - delta


def gap_gradient(
    functions: Functions, x: Array, y: Array, z: Array, rho: float
) -> tuple[Array, Array]:
    """(gx(x, y) - gx(x, z), gy(x, y) - (y - z) / rho) (Algorithm 3, steps 0 and 5)."""
    return functions.gx(x, y) - functions.gx(x, z), functions.gy(x, y) - (y - z) / rho


def moreau(
    functions: Functions, x: Array, y: Array, z: Array, zeta: float, s: Settings
) -> tuple[Array, float, int]:
    """Algorithm 2, ME(w, z, zeta): z~, R~ and the number of projected-gradient steps."""
    eta = 1 / (s.L_yy + 1 / s.rho)
    modulus = 1 / s.rho - s.sigma
    for count in range(1, MAX_INNER + 1):
        new = functions.project_y(z - eta * (functions.gy(x, z) + (z - y) / s.rho))
        residual = (z - new) / eta
        z = new
        if residual @ residual <= 2 * modulus * zeta:
            return z, gap(functions, x, y, z, s.rho, s.delta), count
    raise ArithmeticError(
        f"The Moreau evaluation did not reach zeta = {zeta}: are sigma and L_yy right?"
    )


def ivsp(
    functions: Functions, x0: Array, y0: Array, settings: Settings, steps: int
) -> tuple[list[Record], int]:
    """Algorithm 3 with the paper's details; also returns the inner iterations of its step 0."""
    s, split = settings, x0.size
    a_phi, b_phi = SMOOTHING_CONSTANTS[s.smoothing]
    modulus = 1 / s.rho - s.sigma
    lipschitz = np.sqrt(s.L_xy**2 + 1 / s.rho**2)
    x = x0
    y = y0
    t = 0
    L_start = s.L_init
    z, R, inner_at_start = moreau(functions, x, y, y, s.zeta(0), s)
    f = functions.f(x, y)
    records: list[Record] = []
    w_old = grad_f_old = grad_G_old = np.zeros(x.size + y.size)  # read from k = 1 on
    for k in range(steps):
        mu = s.mu(k)
        zeta = s.zeta(k)
        zeta_next = s.zeta(k + 1)
        gamma = s.gamma(t)
        w = np.concatenate((x, y))
        grad_f = np.concatenate((functions.fx(x, y), functions.fy(x, y)))
        phi, slope = smoothed_plus(R, mu, s.smoothing)
        grad_G = slope * np.concatenate(gap_gradient(functions, x, y, z, s.rho))
        error = lipschitz * np.sqrt(2 * zeta / modulus) + b_phi * s.B_R * zeta / mu  # E_mu(zeta_k)
        if s.fixed_L is not None:
            L_start = s.fixed_L
        elif k > 0:  # eq. bb-initialization
            dw, dv = w - w_old, gamma * (grad_f - grad_f_old) + grad_G - grad_G_old
            product = abs(float(dw @ dv))
            L_bb = mu * float(dv @ dv) / product if product > BB_FLOOR else np.inf
            L_start = (
                L_bb if s.L_min <= L_bb <= s.L_max else min(s.L_max, max(s.L_min, L_start / 2))
            )
        w_old, grad_f_old, grad_G_old = w, grad_f, grad_G

        inner = 0
        for trials in range(1, MAX_TRIALS + 1):
            L = L_start * 2.0 ** (trials - 1)
            raw = w - mu / L * (gamma * grad_f + grad_G)
            x_new, y_new = functions.project_x(raw[:split]), functions.project_y(raw[split:])
            z_new, R_new, count = moreau(functions, x_new, y_new, z, zeta_next, s)
            f_new = functions.f(x_new, y_new)
            inner += count
            step = float(np.linalg.norm(np.concatenate((x_new, y_new)) - w))
            if s.fixed_L is not None:
                break
            ratio = mu * error / step if step > 0 else np.inf
            theta = max(min(ratio, s.theta_hat * L), s.theta_low)
            tau = mu * error**2 / (2 * theta) + zeta + zeta_next
            merit = gamma * f_new + smoothed_plus(R_new + zeta_next, mu, s.smoothing)[0]
            if merit <= gamma * f + phi - s.c1 / (2 * mu) * step**2 + tau + ARMIJO_SLACK:
                break
        else:
            raise ArithmeticError(
                f"No trial was accepted in iteration {k}: is f or g finite and smooth?"
            )

        if R_new > 2 * a_phi * mu and step <= s.c2 * mu * gamma:  # eq. inexact-PU
            t += 1
        x, y, z, f, R = x_new, y_new, z_new, f_new, R_new
        multiplier = smoothed_plus(R, mu, s.smoothing)[1] / gamma
        records.append(
            Record(x, y, z, f, R, inner, trials, t, L, L_start, mu, gamma, step, multiplier)
        )
    return records, inner_at_start


def prox(functions: Functions, x: Array, y: Array, rho: float, tolerance: float) -> Array:
    """Minimise psi(z) = g(x, z) + |z - y|^2 / (2 rho) over Y, at least to `tolerance`.

    The iteration goes on to the floor of round-off.

    A step d is accepted if <grad psi(z + d) - grad psi(z), d> <= (L/2) |d|^2. As psi is convex,
    this implies psi(z + d) <= psi(z) - (L/2) |d|^2, without the cancellation of a test on values.
    Once the projected-gradient mapping is below 1e-6 L is kept, and the iteration ends when ten
    steps in a row bring no smaller mapping.
    """
    z = y
    L = 1 / rho
    best = y
    smallest = np.inf
    stalled = 0
    gradient = functions.gy(x, z)
    for _ in range(MAX_INNER):
        new = functions.project_y(z - gradient / L)
        step = new - z
        residual = L * float(np.linalg.norm(step))
        new_gradient = functions.gy(x, new) + (new - y) / rho
        if residual > 1e-6 and (new_gradient - gradient) @ step > L / 2 * (step @ step):
            L *= 2
            continue
        stalled = 0 if residual < smallest else stalled + 1
        if residual < smallest:
            best, smallest = new, residual
        if residual == 0 or stalled == 10:
            break
        z, gradient = new, new_gradient
    if smallest > tolerance:
        raise ArithmeticError(
            f"The proximal point was found to {smallest:.1e} only, not to {tolerance:.1e}."
        )
    return best


def exact_kkt(
    functions: Functions,
    x: Array,
    y: Array,
    multiplier: float,
    rho: float,
    delta: float,
    normal_distance: tuple[Distance, Distance],
    tolerance: float = 1e-9,
) -> tuple[float, float, float]:
    """Stationarity, feasibility and complementarity (Definition approx-KKT) with the exact R.

    `normal_distance` holds dist(0, gradient + N(point)) as a function of (point, gradient), for X
    and for Y."""
    z = prox(functions, x, y, rho, tolerance)
    R = gap(functions, x, y, z, rho, delta)
    Rx, Ry = gap_gradient(functions, x, y, z, rho)
    in_x = normal_distance[0](x, functions.fx(x, y) + multiplier * Rx)
    in_y = normal_distance[1](y, functions.fy(x, y) + multiplier * Ry)
    return float(np.hypot(in_x, in_y)), max(R, 0.0), abs(multiplier * R)


def box_distance(bound: float) -> Distance:
    """dist(0, gradient + N(point)) for the box [-bound, bound]^n."""

    def distance(point: Array, gradient: Array) -> float:
        outward = ((point >= bound) & (gradient < 0)) | ((point <= -bound) & (gradient > 0))
        return float(np.linalg.norm(np.where(outward, 0.0, gradient)))

    return distance


def _box(bound: float) -> Callable[[Array], Array]:
    return lambda v: np.clip(v, -bound, bound)


def sine(n: int, a: float = 2.0, c: float = 2.0) -> tuple[Functions, Array, Array]:
    """f = (x - a)^2 + |y - a - c|^2, g = sum_i sin(x + y_i - c), boxes [-100, 100]."""
    functions = Functions(
        f=lambda x, y: float((x[0] - a) ** 2 + (y - a - c) @ (y - a - c)),
        fx=lambda x, y: 2 * (x - a),
        fy=lambda x, y: 2 * (y - a - c),
        g=lambda x, y: float(np.sin(x + y - c).sum()),
        gx=lambda x, y: np.cos(x + y - c).sum(keepdims=True),
        gy=lambda x, y: np.cos(x + y - c),
        project_x=_box(100.0),
        project_y=_box(100.0),
    )
    return functions, np.full(1, -6.0), np.zeros(n)


def sine_solution(n: int, a: float = 2.0, c: float = 2.0) -> tuple[Array, Array]:
    """x* = ((1 - n) a + n C) / (1 + n), y* = C + c - x*.

    C is the point of -pi/2 + 2 pi Z nearest to 2 a.
    """
    C = -np.pi / 2 + 2 * np.pi * np.round((2 * a + np.pi / 2) / (2 * np.pi))
    x = ((1 - n) * a + n * C) / (1 + n)
    return np.full(1, x), np.full(n, C + c - x)


def random_problem(
    seed: int, nx: int, ny: int, bound: float
) -> tuple[Functions, Array, Array, dict[str, Any]]:
    """Random problem: strongly convex f, nonconvex g, x and y in the box [-bound, bound].

    f = (w - center)' H (w - center) / 2 with w = (x, y), g = sum_i sin(a_i.y + b_i.x) + y'Qy / 2,
    where H >= I, Q >= 0 and |A|_2 = 1. The last value holds H, center, A, B, Q and the constants
    sigma = |A|^2 - lambda_min(Q), L_yy = |A|^2 + lambda_max(Q), L_xy = |A| |B| (spectral norms).
    """
    rng = np.random.default_rng(seed)
    n, terms = nx + ny, ny + 2
    factor = rng.standard_normal((n, n))
    H = np.eye(n) + factor @ factor.T / n
    center = 2 * rng.standard_normal(n)
    A = rng.standard_normal((terms, ny))
    A /= np.linalg.norm(A, 2)
    B = rng.standard_normal((terms, nx)) / np.sqrt(terms)
    half = rng.standard_normal((ny, ny))
    Q = 0.1 * half @ half.T / ny
    curvature = np.linalg.eigvalsh(Q)
    constants: dict[str, Any] = {
        "sigma": float(1.0 - curvature[0]),
        "L_yy": float(1.0 + curvature[-1]),
        "L_xy": float(np.linalg.norm(B, 2)),
        **{"H": H, "center": center, "A": A, "B": B, "Q": Q},
    }

    def shifted(x: Array, y: Array) -> Array:
        return np.concatenate((x, y)) - center

    functions = Functions(
        f=lambda x, y: float(shifted(x, y) @ H @ shifted(x, y) / 2),
        fx=lambda x, y: (H @ shifted(x, y))[:nx],
        fy=lambda x, y: (H @ shifted(x, y))[nx:],
        g=lambda x, y: float(np.sin(A @ y + B @ x).sum() + y @ Q @ y / 2),
        gx=lambda x, y: B.T @ np.cos(A @ y + B @ x),
        gy=lambda x, y: A.T @ np.cos(A @ y + B @ x) + Q @ y,
        project_x=_box(bound),
        project_y=_box(bound),
    )
    return functions, rng.uniform(-bound, bound, nx), rng.uniform(-bound, bound, ny), constants
