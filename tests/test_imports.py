import ast
import sys
from functools import cache

import pytest
from package import MODULES, public_names
from places import ROOT

# Each may import those above it, besides itself; what stands beside them in the package is for all.
FLOORS: list[set[str]] = [
    {"output", "version"},
    {"core"},
    {"solvers"},
    {"stochastic"},
    {"reading"},
    {"solving"},
    {"checkpoint", "checks", "distributed", "functional", "declaration", "logging", "run"},
    {"mini_batches", "whole_data"},
    {"module"},
    {"callbacks", "data", "modules"},
    {"cli"},
    {"__main__"},
]
TORCH_ONLY = {"core", "solvers", "stochastic", "reading", "solving"}
PUBLIC = [
    "AID",
    "BOME",
    "Ball",
    "BilevelError",
    "BilevelMixin",
    "BilevelModule",
    "BilevelOptimizer",
    "BilevelProblem",
    "Box",
    "Calls",
    "Certificate",
    "CertificateMonitor",
    "CertificateReport",
    "Chunks",
    "ClassWeights",
    "CleaningData",
    "Condition",
    "ConstantAffineSegments",
    "ConvexSet",
    "DARTS",
    "DatasetCleaning",
    "DigitsCleaning",
    "Envelope",
    "EpisodeData",
    "Episodes",
    "F2BA",
    "F2SA",
    "FashionMNISTCleaning",
    "FewShot",
    "Free",
    "FullBatchDataModule",
    "GlyphEpisodes",
    "Growing",
    "HJFBiO",
    "HyperCleaning",
    "ITD",
    "IVSP",
    "InnerLoopError",
    "LastCheckpoint",
    "LineSearchError",
    "LuMei",
    "MEHA",
    "MNISTCleaning",
    "NonFiniteError",
    "Numbered",
    "OmniglotEpisodes",
    "OptimizationBudget",
    "PBGDFree",
    "PNGBiO",
    "PenaltyMonitor",
    "Power",
    "Product",
    "Reweighted",
    "ReweightedSigmoidNetwork",
    "Reweighting",
    "SLM",
    "SOBA",
    "SampleWeights",
    "Simplex",
    "SineProblem",
    "Solution",
    "SolverCallable",
    "SolverMonitor",
    "SourceWeights",
    "Splits",
    "StepInfo",
    "StreamInfo",
    "StrictlyConvex",
    "TableRMS",
    "TaskEpisodes",
    "VPBGD",
    "WeightNet",
    "certify",
    "corrupt_labels",
    "cross_entropy_bound",
    "solve",
]


@cache
def imported(module: str) -> set[str]:
    """The full names of the modules that a module imports, anywhere."""
    tree, found = ast.parse(MODULES[module].read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            # `from package import module` names a module, `from module import name` does not.
            found |= {
                full if (full := f"{node.module}.{alias.name}") in MODULES else str(node.module)
                for alias in node.names
            }
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


def floor_of(module: str) -> int:
    name = module.split(".")[1]
    return next(number for number, names in enumerate(FLOORS) if name in names)


INSIDE = sorted(module for module in MODULES if "." in module)


@pytest.mark.parametrize("module", INSIDE)
def test_a_folder_imports_only_what_stands_above_it(module: str) -> None:
    above = [other for other in within(module) if floor_of(other) > floor_of(module)]
    assert above == []


@pytest.mark.parametrize(
    "module", [module for module in INSIDE if module.split(".")[1] in TORCH_ONLY]
)
def test_mathematics_and_words_need_torch_and_the_standard_library_only(module: str) -> None:
    foreign = {name for name in imported(module) if not name.startswith("lightning_bilevel")}
    allowed = {"torch", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in foreign} <= allowed


def test_no_cycles() -> None:
    for module in MODULES:
        cycle = [other for other in within(module) if module in reachable({other})]
        assert not cycle, f"{module} is imported by {cycle}, which it imports"


def test_the_rest_of_the_package_does_not_import_from_its_top() -> None:
    assert [module for module in MODULES if "lightning_bilevel" in imported(module)] == []


def test_public_names() -> None:
    assert public_names() == sorted(PUBLIC)


TESTS = sorted((ROOT / "tests").rglob("*.py"))


def test_no_test_imports_a_test() -> None:
    """What several need is in tests/support or a fixture."""
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [
                name for name in names if name.split(".")[-1].startswith(("test_", "conftest"))
            ], path


def test_tests_mirror_the_package() -> None:
    """Names are unique: pytest imports by name, and no support module may be shadowed."""
    folders = {
        path.parent.relative_to(ROOT / "tests").as_posix()
        for path in TESTS
        if path.name.startswith("test_")
    }
    assert {
        folder for folder in folders if not (ROOT / "lightning_bilevel" / folder).is_dir()
    } == set()
    names = [path.stem for path in TESTS]
    assert sorted(set(names)) == sorted(names)


OUTSIDE = sorted(module for module in INSIDE if not module.startswith("lightning_bilevel.solvers"))


@pytest.mark.parametrize("module", OUTSIDE)
def test_nobody_outside_the_solvers_reads_their_state(module: str) -> None:
    """Logs, callbacks and comparisons know the record.

    Code that shows a run asks for its progress and hyper-parameters.
    """
    read = [
        node.attr
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute)
    ]
    assert not {"memory", "constants"} & set(read)


@pytest.mark.parametrize(
    "module", [m for m in INSIDE if not m.startswith("lightning_bilevel.solvers.ivsp")]
)
def test_nobody_asks_whether_a_solver_is_ivsp(module: str) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Call)
    ]
    asked = [
        ast.unparse(call)
        for call in calls
        if getattr(call.func, "id", "") in ("isinstance", "issubclass")
    ]
    assert [text for text in asked if "IVSP" in text] == []
