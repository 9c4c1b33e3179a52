"""Two nodes on this machine, each with a torchrun agent of its own: the path of one process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import two_nodes
from places import SUPPORT
from starting import started

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every run ended with, on both nodes."""
    folder = tmp_path_factory.mktemp("nodes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--master-addr", "127.0.0.1", "--master-port", port]
    size = ["--nnodes", 2, "--nproc-per-node", 1]
    script = [SUPPORT / "two_nodes.py", folder / "ends.pt"]
    agents = [
        started("-m", "torch.distributed.run", *size, "--node-rank", rank, *where, *script)
        for rank in (0, 1)
    ]
    for agent in agents:
        _, errors = agent.communicate(timeout=240)
        assert agent.returncode == 0, errors
    ends = torch.load(folder / "ends.pt", weights_only=True)
    assert [end["node"]["rank"] for end in ends] == [0, 1]
    assert ends[0]["node"]["process"] != ends[1]["node"]["process"]
    return ends


@pytest.mark.parametrize("case", two_nodes.EXACT)
def test_exact_mode_follows_the_path_of_one_process(nodes: Any, tmp_path: Path, case: str) -> None:
    one = two_nodes.run(case, tmp_path)
    first, second = (node[case] for node in nodes)
    assert torch.equal(first["parameters"], second["parameters"])
    torch.testing.assert_close(first["parameters"], one["parameters"], rtol=1e-11, atol=1e-12)
    for step, alone in zip(first["steps"], one["steps"], strict=True):
        assert step["upper"] == pytest.approx(alone["upper"], rel=1e-11)
    assert first["certificate"]["residual"] == pytest.approx(
        one["certificate"]["residual"], rel=1e-8, abs=1e-12
    )
