"""Record the paths of all exact solvers, and compare two records.

``python tools/paths.py save FILE`` makes some 300 runs on the problems of ``tests/support`` and
writes each run's last point, calls and records. ``python tools/paths.py compare A B`` lists what
differs. Run it on the commit before and the commit after a change that must not change a path.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

SUPPORT = Path(os.environ.get("PATHS_SUPPORT", Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(SUPPORT))

import torch  # noqa: E402
from helpers import PROBLEMS, groups, paper_constants, point_of  # noqa: E402

import lightning_bilevel.solvers as solvers  # noqa: E402

torch.set_num_threads(1)
STEPS = 30
LONG = {"alpha": 0.02, "beta": 0.02, "eta": 0.02, "gamma": 0.5}
HYPER = {"alpha": 0.02, "beta": 0.1, "damping": 2.0}
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "meha": ("MEHA", LONG),
    "pngbio": ("PNGBiO", LONG),
    "slm": ("SLM", {"eta": 0.01, "alpha": 0.01, "gamma": 0.05, "tau": 0.1, "T": 3}),
    "f2sa": ("F2SA", {"alpha": 0.01, "gamma": 0.02, "T": 2}),
    "vpbgd": ("VPBGD", {"alpha": 0.005, "beta": 0.05, "T": 3}),
    "bome": ("BOME", {"xi": 0.02, "alpha": 0.05, "T": 3}),
    "aid": ("AID", {**HYPER, "T": 3, "N": 3}),
    "aid-fixed-point": ("AID", {**HYPER, "T": 3, "N": 2, "linear_solver": "fixed_point"}),
    "itd": ("ITD", {"alpha": 0.02, "beta": 0.1, "T": 4, "K": 3}),
    "soba": ("SOBA", HYPER),
    "darts": ("DARTS", {"alpha": 0.02, "beta": 0.1, "xi": 0.1}),
    "f2ba": ("F2BA", {"eta": 0.05, "tau": 0.1, "sigma": 0.3, "K": 3}),
    "hjfbio": ("HJFBiO", {"gamma": 0.04, "lam": 0.15, "tau": 0.03, "r": 50.0}),
    "pbgd_free": ("PBGDFree", {"eta": 0.05, "alpha": 0.1, "K": 2}),
    "lumei": ("LuMei", {"eps": 1.0, "L_f": 1.0, "L_g": 1.0, "D": 1.0, "max_inner": 2}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "softplus": {"smoothing": "softplus"},
    "accelerated": {"inner": "accelerated"},
    "long": {"bb": "long"},
    "fixed": {"fixed_L": 50.0, "L_init": None},
    "block": {"block": 5, "r": 0.5},
    "own": {"rules": "own"},
    "curved": {"L_yy": 0.05},
}
UNITS = {"1": (1.0, 1.0), "2": (4.0, 0.5), "3": (3.0, 0.7)}


def runs() -> Iterator[tuple[str, Any, Callable[..., Any], tuple[float, float], torch.dtype]]:
    """Yield name, problem, solver, units and dtype of each run."""
    place = 0
    for problem in PROBLEMS:
        ivsp = {
            "paper": paper_constants(problem),
            "chosen": {"delta": problem.envelope.delta},
            **{name: {**paper_constants(problem), **more} for name, more in SETTINGS.items()},
        }
        makes = {f"ivsp-{name}": partial(solvers.IVSP, **given) for name, given in ivsp.items()}
        for name, (kind, given) in RIVALS.items():
            makes[name] = partial(getattr(solvers, kind), **given)
        for name, make in makes.items():
            for label, units in UNITS.items():
                # Units meet each solver and each problem, not each pair.
                if label != "1" and place % 4 and not name.startswith("ivsp-"):
                    place += 1
                    continue
                place += 1
                dtype = (torch.float64, torch.float32)[place % 2]
                yield f"{problem}/{name}/{label}", problem, make, units, dtype


def record(
    problem: Any, make: Callable[..., Any], units: tuple[float, float], dtype: torch.dtype
) -> dict[str, Any]:
    """Run a solver; return its point, calls and a table of its records."""
    built = problem.build()
    x, y = problem.at(dtype=dtype)
    table = []
    ended = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solver = make(groups(x, y, units))
        for _ in range(STEPS):
            try:
                info = solver.step(problem=built)
            except Exception as error:  # a run that ends in an error has to end in the same one
                ended = type(error).__name__
                break
            table.append((info.upper, info.step, info.inner_iterations, info.passes))
    x, y = point_of(solver)
    calls = built.calls
    counts = [calls.upper, calls.lower, calls.gap, calls.products, calls.values]
    return {"x": x, "y": y, "calls": counts, "table": table, "ended": ended}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """List what differs between two records, worst first."""
    rows = []
    for name in sorted(before.keys() & after.keys()):
        a, b = before[name], after[name]
        off = max(float((a[v] - b[v]).abs().max()) for v in ("x", "y"))
        same = a["calls"] == b["calls"] and a["ended"] == b["ended"]
        if off or not same or not _same_tables(a["table"], b["table"]):
            rows.append((off, f"{name}: off by {off:.2g}, calls {a['calls']} {b['calls']}"))
    rows.sort(reverse=True)
    return [row for _, row in rows]


def _same_tables(a: list[tuple[float, ...]], b: list[tuple[float, ...]]) -> bool:
    return len(a) == len(b) and all(
        u == v or (math.isnan(u) and math.isnan(v))
        for row, other in zip(a, b, strict=True)
        for u, v in zip(row, other, strict=True)
    )


def main(command: str, *files: str) -> None:
    """Save or compare."""
    if command == "save":
        made = {
            name: record(problem, make, units, dtype)
            for name, problem, make, units, dtype in runs()
        }
        torch.save(made, files[0])
        errors = sum(bool(run["ended"]) for run in made.values())
        print(f"{len(made)} runs, {errors} ended in an error")
        return
    before, after = (torch.load(file) for file in files)
    missing = before.keys() ^ after.keys()
    rows = differences(before, after)
    print(f"{len(before.keys() & after.keys())} runs compared, {len(rows)} differ")
    print(*rows[:40], sep="\n")
    if missing:
        print(f"{len(missing)} runs in one record only:", *sorted(missing)[:10])


if __name__ == "__main__":
    main(*sys.argv[1:])
