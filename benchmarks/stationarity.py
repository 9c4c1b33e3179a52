"""The KKT residual of our methods after equal numbers of passes on hyper-cleaning of MNIST.

Every point is judged alike: the same rho, sigma and delta (IVSP's), a proximal point to 1e-3, and
the multiplier that makes the residual smallest. Only IVSP aims at this residual; the others have
measures of their own.
"""

from __future__ import annotations

from benchmarks.contenders import METHODS, method
from benchmarks.results import Curve, Row, Section
from benchmarks.tasks import Size
from benchmarks.timing import doublings
from lightning_bilevel import BilevelError, certify

# The paper's tolerance of the proximal point.
TOLERANCE = 1e-3


def descent(name: str, size: Size) -> Curve:
    """Return the KKT residual against the passes, at the first point at or after each count."""
    _, ivsp, _, _ = method("ivsp", size)
    envelope = ivsp.envelope
    assert envelope is not None
    _, module, chosen, problem = method(name, size)
    curve = Curve(name, [], [])
    passes = 0
    for count in doublings(size.passes):
        try:
            while passes < count:
                passes = chosen.step(problem=problem).passes
            certificate = certify(problem, *module.point, envelope, tolerance=TOLERANCE)
        except BilevelError:  # a method that diverges has come to its end
            break
        curve.xs.append(passes)
        curve.ys.append(certificate.smallest_kkt)
    return curve


def row(curve: Curve) -> Row:
    """Return the last residual, with the earlier ones as its note."""
    if not curve.ys:
        return Row(f"{curve.name}: KKT residual", None, note="it diverged at once")
    earlier = zip(curve.xs[:-1], curve.ys[:-1], strict=True)
    return Row(
        f"{curve.name}: KKT residual after {curve.xs[-1]:,.0f} passes",
        curve.ys[-1],
        note=", ".join(f"{y:.2g} after {x:,.0f}" for x, y in earlier),
    )


def run(size: Size) -> Section:
    curves = [descent(name, size) for name in METHODS]
    return Section(
        "KKT residual against passes, MNIST hyper-cleaning, rho = 0.05, delta = 1e-3",
        [row(curve) for curve in curves],
        curves,
    )
