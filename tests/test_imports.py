import ast
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import lightning_bilevel

PACKAGE = Path(lightning_bilevel.__file__).parent
CORE = [
    "scalars",
    "leaves",
    "problem",
    "sets",
    "penalty",
    "moreau",
    "linesearch",
    "kkt",
    "solve",
    "schedule",
    "solvers",
    "tally",
    "reading",
]
PUBLIC = [
    "BOME",
    "Ball",
    "BilevelError",
    "BilevelMixin",
    "BilevelModule",
    "BilevelOptimizer",
    "BilevelProblem",
    "BilevelProgressBar",
    "Box",
    "Calls",
    "Certificate",
    "CertificateReport",
    "Chunks",
    "CleaningData",
    "ConvergencePlot",
    "ConvexSet",
    "DatasetCleaning",
    "DigitsCleaning",
    "Envelope",
    "EpisodeData",
    "Episodes",
    "F2SA",
    "FashionMNISTCleaning",
    "FewShot",
    "Free",
    "FullBatchDataModule",
    "GlyphEpisodes",
    "HyperCleaning",
    "IVSP",
    "IVSPInfo",
    "IVSPMixin",
    "InnerLoopError",
    "KKTMonitor",
    "LastCheckpoint",
    "LineSearchError",
    "MEHA",
    "MNISTCleaning",
    "MoreauGapMonitor",
    "NonFiniteError",
    "NonNegative",
    "OmniglotEpisodes",
    "OptimizationBudget",
    "PNGBiO",
    "PenaltyMonitor",
    "Power",
    "Product",
    "SLM",
    "Simplex",
    "SineProblem",
    "Solution",
    "SolverCallable",
    "SolverMonitor",
    "Splits",
    "StepInfo",
    "TaskEpisodes",
    "VPBGD",
    "certify",
    "corrupt_labels",
    "draw_glyphs",
    "solve",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(module: str) -> set[str]:
    """The modules that a module imports, anywhere in its text, by full name."""
    path, found = MODULES[module], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            # `from package import module` names a module, `from module import name` does not.
            found |= {full if (full := f"{node.module}.{alias.name}") in MODULES else str(node.module) for alias in node.names}
    return found


def within(module: str) -> set[str]:
    return {name for name in imported(module) if name in MODULES}


def reachable(start: set[str]) -> set[str]:
    seen: set[str] = set()
    waiting = set(start)
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= within(module) - seen
    return seen


def core_modules() -> set[str]:
    roots = {f"lightning_bilevel.{name}" for name in CORE}
    assert roots <= set(MODULES)
    return {module for module in MODULES if module in roots or module.startswith("lightning_bilevel.solvers.")}


@pytest.mark.parametrize("module", sorted(reachable(core_modules())))
def test_the_core_imports_torch_and_the_standard_library_only(module: str) -> None:
    foreign = {name for name in imported(module) if not name.startswith("lightning_bilevel")}
    assert {name.split(".")[0] for name in foreign} <= {"torch", *sys.stdlib_module_names}


def test_the_core_does_not_reach_the_rest() -> None:
    above = {
        "mixin",
        "callbacks",
        "modules",
        "data",
        "cli",
        "compare",
        "report",
        "evaluation",
        "processes",
        "checkpoints",
        "messages",
    }
    reached = {module.split(".")[1] for module in reachable(core_modules()) if "." in module}
    assert not reached & above
    assert "lightning_bilevel" not in reachable(core_modules())


def test_no_cycles() -> None:
    for module in MODULES:
        cycle = [other for other in within(module) if module in reachable({other})]
        assert not cycle, f"{module} is imported by {cycle}, which it imports"


def test_the_rest_of_the_package_does_not_import_from_its_top() -> None:
    assert [module for module in MODULES if "lightning_bilevel" in imported(module)] == []


def test_public_names() -> None:
    found = {
        name
        for name, value in vars(lightning_bilevel).items()
        if not name.startswith("_") and not (isinstance(value, ModuleType) and value.__name__.startswith("lightning_bilevel."))
    }
    assert sorted(found) == sorted(PUBLIC)


def test_every_all_names_what_exists() -> None:
    for module in MODULES:
        if module in sys.modules:
            names = getattr(sys.modules[module], "__all__", [])
            assert [name for name in names if not hasattr(sys.modules[module], name)] == [], module
