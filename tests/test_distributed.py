"""Several processes: the same path as one, real processes, and nothing silently wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import samples
from places import SUPPORT
from records import same
from starting import Forked, gone, two_process_config
from torch import Tensor

from lightning_bilevel import BilevelProblem, Chunks
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.distributed import part_of
from lightning_bilevel.run import check_trainer

# In float32 a difference of gradients has three digits, and with them the constants that IVSP
# chooses differ. What is shared is the sum of a pass, which no method sees: four of them stand for
# all.
CASES = [
    case.replace("/own/32-true", "/own/64-true")
    for case in parallel.alternating(("sine", "cleaning", "fewshot"))
    if case.split("/")[1] in ("paper", "own", "f2sa", "soba")
]
CASES += [
    f"{task}/paper/64-true" for task in ("chunks", "encoded", "one sample", "weights", "bounded")
]
CASES.append("growing/paper/64-true")
# A sum in another order rounds differently, and the iterations carry that on.
CLOSE = {"64-true": 1e-12, "32-true": 1e-5}


@pytest.fixture(scope="module")
def over_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every case ended with in both of two processes."""
    out = tmp_path_factory.mktemp("parallel") / "out.pt"
    process = Forked(SUPPORT / "parallel.py", out, *CASES, cwd=out.parent)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


@pytest.mark.filterwarnings("ignore:LuMei ended outer iteration")
@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_two_processes_follow_the_path_of_one(
    tmp_path: Path, over_two: dict[str, Any], case: str
) -> None:
    _, _, one = parallel.run(case, default_root_dir=tmp_path)
    first, second = over_two[case]
    tolerance = CLOSE[case.split("/")[-1]]
    assert torch.equal(first["parameters"], second["parameters"])
    # All decisions, the certificate, even the time.
    assert same(first, second)
    assert len(first["steps"]) == parallel.STEPS
    size = max(1.0, float(one["parameters"].abs().max()))
    torch.testing.assert_close(
        first["parameters"], one["parameters"], rtol=0, atol=tolerance * size
    )
    before = torch.cat([p.detach().reshape(-1) for p in start(case)])
    assert float((one["parameters"] - before).abs().max()) > 1e-3
    for mine, theirs in zip(first["steps"], one["steps"], strict=True):
        for name, value in theirs.items():
            if value is None or isinstance(value, int):
                assert mine[name] == value, name
            else:
                sizes = map(abs, value if isinstance(value, tuple) else (value,))
                scale = max((*sizes, abs(theirs["upper"]) + abs(theirs["lower"])))
                assert mine[name] == pytest.approx(
                    value, rel=1e3 * tolerance, abs=1e3 * tolerance * scale, nan_ok=True
                ), name


def start(case: str) -> Any:
    task, solver, _ = case.split("/")
    return parallel.problem(task, parallel.SOLVERS[solver])[0].parameters()


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each wrong module or loader was refused with, in both of two processes."""
    out = tmp_path_factory.mktemp("refusals") / "out"
    # They leave files where they run.
    process = Forked(SUPPORT / "parallel_faults.py", "refusals", out, cwd=out.parent)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "summed",
            (
                r"`Summed.upper_loss` on the whole batch .* is not the mean of what it is on the "
                r"parts of the processes \("
            ),
        ),
        (
            "positional",
            r"`Positional.lower_loss` on the whole batch .* by its number, carried in the batch",
        ),
        (
            "normalised",
            r"`Normalised.upper_loss` on the whole batch .* nor normalised over the batch",
        ),
        (
            "of all",
            (
                r"`OfAll.lower_loss` on the whole batch .* processes \(RuntimeError.*"
                r"belongs to a sample by its number"
            ),
        ),
        ("loaders", r"be given the same batch, .*use_distributed_sampler=False"),
        (
            "nan",
            (
                r"IVSP stopped in outer iteration 3: in each of 100 trials .*: The upper-level "
                r"function f returned a value nan"
            ),
        ),
        ("same loaders", r"was given a batch with other values than the one before"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(
    refusals: list[dict[str, str]], what: str, sentence: str
) -> None:
    assert [bool(re.search(sentence, told[what])) for told in refusals] == [True, True], [
        told[what] for told in refusals
    ]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        ("raise", 1, "the disk of the second machine has failed"),
        ("kill", 1, "died with exit code|Connection closed by peer|Connection reset"),
        ("kill", 0, None),
    ],
)
def test_a_process_that_fails_ends_the_job(
    tmp_path: Path, how: str, rank: int, words: str | None
) -> None:
    process = Forked(SUPPORT / "parallel_faults.py", how, rank, cwd=tmp_path)
    try:
        _, errors = process.communicate(timeout=60)
        assert process.returncode != 0
        assert words is None or re.search(words, errors)
        pids = [int((tmp_path / f"process-{r}").read_text()) for r in range(2)]
        deadline = time.monotonic() + 20
        while not all(map(gone, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(map(gone, pids))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.integration
def test_a_comparison_is_made_in_one_process(tmp_path: Path) -> None:
    path = two_process_config(tmp_path)
    arguments = [
        "compare",
        path,
        "--budget",
        "300ms",
        "--evaluations",
        "3",
        "--out",
        tmp_path / "out",
    ]
    process = Forked("-m", "lightning_bilevel", *arguments, cwd=tmp_path)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    result = json.loads((tmp_path / "out" / "ivsp" / "result.json").read_text())
    assert result["error"] is None
    assert result["rows"][-1]["optimization_time"] >= 0.3
    assert len(result["rows"]) >= 2
    assert printed.count("| ivsp |") == 1


@pytest.mark.integration
def test_certify_and_probe_over_two_processes_print_once(tmp_path: Path) -> None:
    quiet = [
        "--trainer.logger=false",
        "--trainer.max_steps=3",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    path = two_process_config(tmp_path)
    command = ["-m", "lightning_bilevel"]
    one = Forked(
        *command,
        "fit",
        "--config",
        path,
        *quiet,
        "--trainer.devices=1",
        "--trainer.strategy=auto",
        cwd=tmp_path,
    )
    _, errors = one.communicate(timeout=120)
    assert one.returncode == 0, errors
    checkpoint = ["--ckpt_path", tmp_path / "checkpoints" / "last.ckpt"]
    calls = {
        "certify": Forked(*command, "certify", "--config", path, *quiet, *checkpoint, cwd=tmp_path)
    }
    calls["probe"] = Forked(*command, "probe", "--config", path, *quiet, cwd=tmp_path)
    for name, process in calls.items():
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 0, (name, errors)
        assert "Starting with 2 processes" in errors, name
        assert printed.count("IVSP on SineProblem") == 1, name


class TestParts:
    """Who evaluates which samples."""

    @pytest.mark.parametrize("world", [1, 2, 3, 7])
    @pytest.mark.parametrize("count", [1, 2, 5, 30])
    def test_every_sample_is_in_one_part(self, count: int, world: int) -> None:
        inputs, labels, index = samples(count, 0)
        found = [part_of((inputs, labels, index), rank, world) for rank in range(world)]
        assert torch.equal(torch.cat([part[2] for part, weight in found if weight]), index)
        assert all(
            weight == pytest.approx(len(part[2]) / count) for part, weight in found if weight
        )
        assert sum(weight for _, weight in found) == pytest.approx(1.0)
        sizes = [len(part[2]) if weight else 0 for part, weight in found]
        assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize("world", [2, 3, 5])
    def test_samples_are_counted_through_all_chunks(self, world: int) -> None:
        chunks = [{"a": torch.arange(a, b)} for a, b in ((0, 4), (4, 5), (5, 11))]
        parts = [part_of(chunks, rank, world) for rank in range(world)]
        batches = [as_chunks(part).batches for part, _ in parts]
        assert torch.equal(torch.cat([b["a"] for part in batches for b in part]), torch.arange(11))
        assert [w * 11 for _, w in parts] == pytest.approx(
            [sum(len(b["a"]) for b in part) for part in batches]
        )

    def test_weighted_chunks_go_whole(self) -> None:
        chunks = Chunks(["a", "b", "c"], [0.5, 0.2, 0.3])
        (first, one), (second, other) = (part_of(chunks, rank, 2) for rank in range(2))
        assert (first, one) == (Chunks(["a", "c"], [0.5, 0.3]), 1.0)
        assert (second, other) == (Chunks(["b"], [0.2]), 1.0)
        assert part_of(chunks, 3, 4) == (chunks, 0.0)

    def test_nothing_to_cut_is_evaluated_once(self) -> None:
        assert [part_of(None, rank, 3)[1] for rank in range(3)] == [1.0, 0.0, 0.0]

    def test_numbers_without_samples_go_along(self) -> None:
        part, _ = part_of((torch.arange(4), torch.tensor(7.0)), 1, 2)
        assert part[0].tolist() == [2, 3]
        assert float(part[1]) == 7.0


def test_one_collective_per_evaluation() -> None:
    sizes = []

    def reduce(tensor: Tensor) -> Tensor:
        sizes.append((tensor.dtype, len(tensor)))
        return tensor

    problem = BilevelProblem(
        lambda x, y: (x * y).sum(), lambda x, y: ((x - y) ** 2).sum()
    ).on_this_rank(1.0, 1.0, reduce)
    x, y, z = torch.ones(3), torch.zeros(3), torch.ones(3)
    level = problem.at(x)
    for evaluate in (
        lambda: problem.upper(x, y),
        lambda: problem.upper_x(x, y),
        lambda: problem.upper_y(x, y),
        lambda: level.gradient(z),
        lambda: level.gap(y, z),
        lambda: level.gap_x(y, z),
        lambda: level.value(z),
    ):
        evaluate()
    # values and, for each gradient, whether it is there and its entries
    assert sizes == [
        (torch.float64, n) for n in (1 + 2 * 4, 1 + 4, 1 + 4, 1 + 4, 2 + 2 * 4, 2 + 4, 1)
    ]


def test_a_process_without_samples_adds_nothing() -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("evaluated without a sample")

    problem = BilevelProblem(fail, fail, features=fail).on_this_rank(
        0.0, 0.0, lambda tensor: tensor + 1.0
    )
    x, y = torch.ones(2), torch.zeros(2)
    value, grad_x, grad_y = problem.upper(x, y)
    # These are the numbers of the other processes.
    assert (value, grad_x.tolist(), grad_y.tolist()) == (1.0, [1.0, 1.0], [1.0, 1.0])
    assert problem.at(x).gap(y, x).grad_x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_sharded_strategies_are_refused(strategy: Any) -> None:
    trainer = type("Fake", (), {"precision": "32-true", "strategy": strategy()})()
    with pytest.raises(
        MisconfigurationException,
        match=rf'strategy={strategy.__name__}.* cuts into pieces. Use `strategy="ddp"`',
    ):
        check_trainer(trainer, "IVSP")


def test_a_strategy_on_top_of_ddp_is_refused_too() -> None:
    """DeepSpeed's strategy, which shards, is a DDPStrategy to isinstance."""
    trainer = type(
        "Fake",
        (),
        {"precision": "32-true", "strategy": type("DeepSpeedStrategy", (DDPStrategy,), {})()},
    )()
    with pytest.raises(
        MisconfigurationException, match=r"strategy=DeepSpeedStrategy.* is not supported"
    ):
        check_trainer(trainer, "IVSP")
