"""README and documentation are true: snippets run, commands parse, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from package import public_names
from places import ROOT

import lightning_bilevel
from lightning_bilevel import BilevelOptimizer, stochastic
from lightning_bilevel.__main__ import main
from lightning_bilevel.callbacks.ends import seconds
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.catalogue import ready
from lightning_bilevel.modules.reweighting import detection
from lightning_bilevel.stochastic import Method
from lightning_bilevel.stochastic.penalties import Penalty

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
}
EXTRAS = re.findall(
    r"^(\w+) = ",
    (ROOT / "pyproject.toml")
    .read_text()
    .split("[project.optional-dependencies]")[1]
    .split("\n[")[0],
    re.M,
)


# What a page needs besides the extra `test`.
NEEDS = {"docs/loggers.md": ("wandb", "mlflow")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.integration
@pytest.mark.parametrize(
    "page",
    # `test_the_readme_ends_with_certificates` runs those of the README.
    [page for page, text in PAGES.items() if blocks(text, "python") and page != "README.md"],
)
def test_python_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, as a reader would type them."""
    for package in NEEDS.get(page, ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(package, reason="it is in the extra `loggers`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    module = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)  # a dataclass looks its module up
    for number, snippet in enumerate(blocks(PAGES[page], "python"), start=1):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), vars(module))


@pytest.mark.integration
def test_the_readme_ends_with_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    declared, *modes = blocks(PAGES["README.md"], "python")
    assert len(declared.split("class Cleaner")[1].split("\n\n\n")[0].splitlines()) <= 20
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(declared, "README.md", "exec"), namespace)
    wrong = namespace["noisy"] != namespace["labels"][100:]
    assert len(modes) == 2  # exact, on mini-batches
    for snippet in modes:
        exec(compile(snippet, "README.md", "exec"), namespace)
        assert "KKT stationarity" in capsys.readouterr().out
        # The weights tell wrong labels from right ones.
        assert detection(-namespace["module"].logits.detach(), wrong)["auroc"] > 0.8


COMMANDS = sorted(
    {
        command.strip()
        for text in PAGES.values()
        for block in blocks(text, "console")
        for line in block.splitlines()
        for command in line.split(" && ")
    }
)


def check_ours(command: str, *args: str) -> None:
    if command == "compare":
        folders = [arg for arg in args if not arg.startswith("-")][:1]
        assert all(ready(Path(folder)).exists() for folder in folders)
        seconds(args[args.index("--budget") + 1])
    elif command in (*BilevelCLI.subcommands(), "certify", "probe"):
        # The config of a run stands for that of any: it is not there before the run.
        known = ["synthetic/ivsp" if arg.startswith("lightning_logs/") else arg for arg in args]
        with pytest.raises(SystemExit) as stop:
            main([command, *known, "--print_config"])
        assert stop.value.code == 0
    else:
        main([command, *args])  # it only prints


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    monkeypatch.chdir(ROOT)
    program, *args = shlex.split(command)
    if program == "lightning-bilevel" and args:
        check_ours(*args)
    elif program == "lightning-bilevel":
        main([])
    elif program == "pip":
        named = {extra for arg in args for extra in re.findall(r"^\.\[(.*)\]$", arg)}
        assert {extra for names in named for extra in names.split(",")} <= set(EXTRAS)
    elif program in ("python", "bash", "pytest", "sphinx-build"):
        # Every path that is named exists, but for what the command makes.
        paths = [arg for arg in args if "/" in arg and not arg.endswith(("_build/html", "venv"))]
        assert [path for path in paths if not (ROOT / path).exists()] == []
    else:
        assert program in (".", "git", "pre-commit")


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 20
    assert "lightning-bilevel fit --config configs/digits/ivsp_default.yaml" in COMMANDS


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)\s#]+)", PAGES[page])
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert missing == []


def test_the_matrix_has_every_method_in_the_modes_that_it_runs_in() -> None:
    text = PAGES["docs/solvers/matrix.md"]
    modes = re.findall(r"^\| `(\w+)` ((?:\| (?:yes|no) ){4})\|$", text, re.MULTILINE)
    said = {name: tuple(cells.strip("| ").split(" | ")) for name, cells in modes}
    solvers = {
        kind.__name__: kind
        for kind in (getattr(lightning_bilevel, name) for name in public_names())
        if isinstance(kind, type) and issubclass(kind, BilevelOptimizer)
    }
    solvers.pop("BilevelOptimizer")
    methods = {
        name: kind
        for name, kind in vars(stochastic).items()
        if isinstance(kind, type) and issubclass(kind, Method) and kind is not Method
    }
    held = {
        name: (
            name in solvers,
            name in methods,
            name in methods and issubclass(methods[name], Penalty),
            name in solvers and solvers[name].method_type.penalised,
        )
        for name in {**solvers, **methods}
    }
    assert said == {
        name: tuple("yes" if cell else "no" for cell in cells) for name, cells in held.items()
    }
    tasks = re.findall(r"^\| `(\w+)` (?:\| [^|]+ ){5}\|$", text, re.MULTILINE)
    assert tasks == list(said)


STOCHASTIC = "docs/api/stochastic.md"


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(
        text
        for page, text in PAGES.items()
        if page.startswith(("docs/api/", "docs/solvers/")) and page != STOCHASTIC
    )
    named = re.findall(
        r"^\.\. (?:autoclass|autofunction|data):: (?:lightning_bilevel\.)?(\w+)$",
        reference,
        re.MULTILINE,
    )
    assert sorted(named) == public_names()
    page = PAGES[STOCHASTIC]
    methods = re.findall(
        r"^\.\. autoclass:: (?:lightning_bilevel\.stochastic\.)?(\w+)$", page, re.M
    )
    assert sorted(methods) == sorted(name for name in vars(stochastic) if name[0].isupper())


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150
