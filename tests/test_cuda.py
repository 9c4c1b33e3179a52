"""On a GPU: the same path as on the CPU, everything of a run on the device, and resume across both.

Run with `-m cuda`; without a GPU each test is skipped. Sums have another order on a GPU, so
comparisons are in float64 and to ten digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, Problem, groups, point_of
from lightning.pytorch import Trainer
from streaming import Streamed, loader, loaders
from tables import SOLVERS
from torch import Tensor

from lightning_bilevel import (
    Envelope,
    LastCheckpoint,
    TableRMS,
    certify,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def check_on_gpu(memory: dict[str, Any]) -> None:
    """All of the state but torch's counters of steps."""
    for name, value in memory.items():
        if isinstance(value, dict):
            check_on_gpu(value)
        elif isinstance(value, Tensor) and name != "step":
            assert value.device.type == "cuda", name


def test_a_table_of_weights() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        v = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64, device=device))
        table = TableRMS([v], lr=0.5)
        for k in range(4):
            index = torch.tensor([[k, k + 2]], device=device)
            values = torch.tensor([1.0, -2.0 - k], dtype=torch.float64, device=device)
            v.grad = torch.sparse_coo_tensor(index, values, v.shape, check_invariants=True)
            table.step()
        ends.append(v.detach().cpu())
    torch.testing.assert_close(*ends, **CLOSE)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", ["paper", "own"])
def test_exact_iterations_of_ivsp(name: str, problem: Problem) -> None:
    solver = SOLVERS[name]
    built = problem.build()
    here, there = (
        solver.make(problem)(groups(*(v.to(device) for v in problem.at())))
        for device in ("cpu", "cuda")
    )
    # A few: later ones may take another trial in a line search that rounding decides.
    for _ in range(3):
        here.step(problem=built)
        there.step(problem=problem.build())
    for u, v in zip(point_of(here), point_of(there), strict=True):
        torch.testing.assert_close(u, v.cpu(), rtol=1e-8, atol=1e-10)
    check_on_gpu(there.memory)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_certificate(problem: Problem) -> None:
    here = certify(problem.build(), *problem.at(), problem.envelope)
    there = certify(problem.build(), *(v.cuda() for v in problem.at()), problem.envelope)
    for name in ("stationarity", "feasibility", "complementarity", "gap", "upper", "lower"):
        assert getattr(there, name) == pytest.approx(getattr(here, name), rel=1e-6, abs=1e-9), name


# A GPU that a run on the CPU leaves idle.
@pytest.mark.filterwarnings("ignore:GPU available but not used")
class TestTrainer:
    ENVELOPE = Envelope(0.1, 1.0, 1e-3)

    def fit(self, folder: Path, accelerator: str, epochs: int, **options: Any) -> Streamed:
        module = Streamed(envelope=self.ENVELOPE)
        checkpoint = LastCheckpoint(folder)
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=epochs,
            default_root_dir=folder,
            callbacks=[checkpoint],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loaders(), loader(20, 3, 20), **options)
        assert trainer.global_step == epochs * 4
        return module

    def test_fit_and_certify(self, tmp_path: Path) -> None:
        module = self.fit(tmp_path, "gpu", 2)
        device = torch.device("cuda", 0)
        module.to(device)
        certificate = module.certify()
        assert certificate.evaluated_on.startswith("all data (20 upper and 30 lower samples)")

    @pytest.mark.parametrize(("first", "second"), [("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")])
    def test_resume(self, tmp_path: Path, first: str, second: str) -> None:
        self.fit(tmp_path, first, 1)
        saved = next(tmp_path.glob("*.ckpt"))
        module = self.fit(tmp_path, second, 2, ckpt_path=saved)
        assert module.last_step is not None
        assert module.last_step.iteration == 8
        assert all(p.isfinite().all() for p in module.parameters())
