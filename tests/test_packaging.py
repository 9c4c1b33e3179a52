"""What the files around the code promise each other."""

from __future__ import annotations

import ast
import re
import runpy
import sys

import yaml
from places import ROOT

import lightning_bilevel

PROJECT = (ROOT / "pyproject.toml").read_text()


def test_hooks_and_ci_use_the_same_ruff() -> None:
    (pinned,) = re.findall(r'"ruff==([\d.]+)"', PROJECT)
    hook = re.search(
        r"ruff-pre-commit\n    rev: v([\d.]+)\n", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert hook is not None
    assert hook[1] == pinned


def test_all_packages_are_installed() -> None:
    """They are named one by one, so a new folder could be forgotten."""
    named = set(re.findall(r'^  "(lightning_bilevel[\w.]*)",$', PROJECT, re.MULTILINE))
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "lightning_bilevel").rglob("__init__.py")
    }
    assert named == folders | {"lightning_bilevel.configs"}


def test_a_plain_install_has_what_package_and_examples_import() -> None:
    """Extras are for tests, documentation, loggers and rivals: every ready task does without."""
    dependencies = PROJECT.split("\ndependencies = [")[1].split("\n]")[0]
    plain = set(re.findall(r'^  "([\w-]+)', dependencies, re.MULTILINE))
    called = {"scikit-learn": "sklearn", "PyYAML": "yaml", "typing-extensions": "typing_extensions"}
    # numpy and pillow come with torchvision.
    allowed = {called.get(name, name) for name in plain} | {"numpy", "PIL"}
    here = {"lightning_bilevel", "examples", *sys.stdlib_module_names}
    files = [*(ROOT / "lightning_bilevel").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    imported = {
        name.split(".")[0]
        for path in files
        if path.stem != "anil_learn2learn"  # has an extra of its own
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {"sklearn", "torchvision"} <= imported
    assert imported - here <= allowed


def test_the_extras() -> None:
    extras = PROJECT.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    names = re.findall(r"^(\w+) = ", extras, re.MULTILINE)
    assert set(names) == {"test", "docs", "lint", "benchmarks", "learn2learn", "loggers"}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """CI tests with .ci/oldest.txt, so it must name what pyproject.toml allows."""
    oldest = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / ".ci" / "oldest.txt").read_text(), re.MULTILINE)
    )
    bounds = dict(
        re.findall(
            r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', PROJECT.split("[project.optional-dependencies]")[0]
        )
    )
    bounds.pop("setuptools")
    assert bounds
    for name, bound in bounds.items():
        assert _numbers(oldest[name]) == _numbers(bound), name


def _numbers(version: str) -> tuple[int, ...]:
    """2.5 and 2.5.0 are one version."""
    parts = [int(part) for part in version.split(".")]
    while parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def test_the_version_has_one_place() -> None:
    places = [
        path
        for path in (ROOT / "lightning_bilevel").rglob("*.py")
        if re.search(r"__version__ = ", path.read_text())
    ]
    assert [path.name for path in places] == ["version.py"]
    assert 'attr = "lightning_bilevel.version.__version__"' in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_bilevel.__version__)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lightning_bilevel.__version__
    assert citation["license"] == re.findall(r'^license = "(.*)"$', PROJECT, re.MULTILINE)[0]


def test_the_changelog_has_this_version() -> None:
    """Dated, and the latest of them; what comes later stands above it."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert released[0][0] == lightning_bilevel.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released[0][1] == citation["date-released"]


def test_the_documentation_is_built_as_in_ci() -> None:
    settings = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert (ROOT / settings["sphinx"]["configuration"]).is_file()
    assert settings["sphinx"]["fail_on_warning"]
    (install,) = settings["python"]["install"]
    assert (install["path"], install["extra_requirements"]) == (".", ["docs"])


def test_no_address_is_named_before_it_exists() -> None:
    assert "[project.urls]" not in PROJECT


def test_the_package_is_typed() -> None:
    assert (ROOT / "lightning_bilevel" / "py.typed").exists()
    assert 'lightning_bilevel = ["py.typed"]' in PROJECT


def test_the_package_stays_small() -> None:
    """What a change adds, it takes away elsewhere."""
    mass = runpy.run_path(str(ROOT / "tools" / "mass.py"))["mass"]
    counted = mass(ROOT / "lightning_bilevel")
    assert sum(counted.values()) <= 8_000
    assert len(counted) <= 85
    assert [path.name for path, lines in counted.items() if lines > 250] == []
