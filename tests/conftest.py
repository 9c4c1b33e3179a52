"""How the tests run: in parallel where that pays, on one thread each, seeded.

Some tests run only when they are asked for.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Lightning warns of a GPU that a run on the CPU leaves idle, and warnings are errors: a GPU is
# shown only to those who ask for it, by `-m cuda` or by the file. Worker processes inherit that.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("cuda" in word for word in sys.argv):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from clocks import Clock

# The problems are tiny, and bitwise comparisons need one order of summation.
torch.set_num_threads(1)
ON_REQUEST = ("slow", "learn2learn", "cuda")
MOST_PROCESSES = 8  # each takes 1 GB


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders with a process per core.

    A file or a test is faster in one process, and a debugger works only there.

    Here and not in pyproject.toml, where `-n` would be an unknown option without pytest-xdist. `-n`
    and `--dist` still count.
    """
    options = config.option
    if (
        hasattr(config, "workerinput")
        or not config.pluginmanager.has_plugin("xdist")
        or options.numprocesses is not None
    ):
        return
    if getattr(options, "cov_source", None):  # pytest-cov has decided by now: give it `-n` as well
        return
    if options.usepdb or options.tx or not all(Path(argument).is_dir() for argument in config.args):
        return
    options.numprocesses = min(os.cpu_count() or 1, MOST_PROCESSES)
    if options.dist == "no":
        options.dist = "loadfile"  # what a file prepares is prepared once
        options.loadscopereorder = False  # the order is that of `long_files_first`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes or needs a package of its own, unless `-m` names it."""
    unasked = [marker for marker in ON_REQUEST if marker not in config.option.markexpr]
    left_out = [
        item for item in items if any(item.get_closest_marker(marker) for marker in unasked)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    long_files_first(items)


def long_files_first(items: list[pytest.Item]) -> None:
    """Move files with integration tests to the front, then those with many tests.

    They take longest. Short files at the end keep all processes busy to the last.
    """
    count = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("integration"))
    items.sort(key=lambda item: (-slow[item.path], -count[item.path]))


@pytest.fixture(scope="session", autouse=True)
def _packages_are_searched_once() -> Iterator[None]:
    """For callbacks: each Trainer goes through what is installed, which takes up to 10 ms."""
    from lightning.fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    logging.disable(logging.NOTSET)  # a command may have done so for its process
    assert torch.get_default_dtype() == torch.float32, "a test changed the default dtype"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which the package counts seconds of optimisation and of evaluation."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock
