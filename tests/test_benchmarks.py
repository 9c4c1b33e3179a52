"""The benchmarks run at tiny sizes and say what they skip; what they time is not tested."""

from __future__ import annotations

import io
import itertools
import json
import math
import runpy
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks import __main__ as command
from benchmarks import (
    accuracy,
    boat,
    contenders,
    growing,
    growth,
    hyperparameters,
    memory,
    mini_batches,
    results,
    reweighting,
    stationarity,
    step_cost,
    tasks,
    trusted,
    trusted_figure,
)
from benchmarks.baselines import table
from benchmarks.baselines.cleaning import TrustedSamples
from benchmarks.baselines.row import Baseline
from benchmarks.results import Curve, Row, Section
from benchmarks.timing import doublings, exponent, in_turns, ratio
from lightning_bilevel import BilevelError, DigitsCleaning, Envelope, GlyphEpisodes, certify
from lightning_bilevel.stochastic import F2SA, StreamingIVSP

TINY = tasks.Size(
    n=20,
    samples=60,
    episodes=2,
    channels=1,
    steps=2,
    rounds=1,
    seconds=0.05,
    passes=40,
    most_coordinates=3000,
    most_samples=1200,
    most_episodes=9,
)


FEW_GLYPHS = partial(GlyphEpisodes, train_classes=10, validation_classes=10, test_classes=10)
# Its networks learn next to nothing.
HASTY = partial(TrustedSamples, epochs=1, fewest_steps=1)


def in_this_process(command: list[str], env: dict[str, str], **options: Any) -> Any:
    """Run `python -m MODULE ARGUMENTS` as a new process would, without seconds of imports."""
    python, dash_m, module, *arguments = command
    assert (python, dash_m) == (sys.executable, "-m")
    assert env["THP_MEM_ALLOC_ENABLE"] in ("0", "1")
    assert (options["cwd"] / "benchmarks").is_dir()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [module, *arguments])
        runpy.run_module(module, run_name="__main__")
    return SimpleNamespace(stdout=printed.getvalue())


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tasks, "DATA", {"mnist": DigitsCleaning, "fashion_mnist": DigitsCleaning})
    monkeypatch.setattr(tasks, "GlyphEpisodes", FEW_GLYPHS)
    for module in (step_cost, reweighting):
        monkeypatch.setattr(module, "BATCH", 8)
    # What is timed is not tested: a few steps show that it is there.
    for module, name, count in (
        (step_cost, "WARM_UP", 1),
        (step_cost, "ROUNDS", 1),
        (step_cost, "WIDTH", 200),
        (mini_batches, "TIMES_STEPS", 5),
    ):
        monkeypatch.setattr(module, name, count)
    for module in (mini_batches, trusted):
        monkeypatch.setattr(module, "TrustedSamples", HASTY)
    monkeypatch.setattr(growth.subprocess, "run", in_this_process)
    # No rival is installed, whatever is.
    for module in (boat, memory, contenders, mini_batches, step_cost):
        monkeypatch.setattr(module, "installed", lambda package: None)
    return tmp_path


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "overhead",
        "calls",
        "byhand",
        "boat",
        "stationarity",
        "accuracy",
        "memory",
        "growth",
        "chunks",
        "step_cost",
        "mini_batches",
    ],
)
def test_a_section_runs_and_leaves_its_results(name: str, tiny: Path) -> None:
    command.run([name], TINY, tiny)
    section = Section.load(tiny / f"{name}.json")
    assert section.rows
    rivals = [row for row in section.rows if row.verdict == "skipped"]
    missing = {"boat": 3, "accuracy": 9, "memory": 2, "mini_batches": 4, "step_cost": 8}
    assert len(rivals) == missing.get(name, 0)
    assert section.title in (tiny / "table.md").read_text()
    drawn = ("boat", "stationarity", "accuracy", "memory", "growth")
    assert (tiny / "benchmarks.png").exists() == (name in drawn)


def test_those_that_are_there_are_not_run_again_unless_they_are_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(command, "run", lambda names, size, folder: ran.append(list(names)))
    (tiny / "growth.json").write_text("{}")
    command.main(["--out", str(tiny)])
    assert ran[-1] == [name for name in command.SECTIONS if name != "growth"]
    command.main(["growth", "--out", str(tiny)])
    assert ran[-1] == ["growth"]
    with pytest.raises(SystemExit):
        command.main(["nothing"])


def test_baselines_are_a_table_of_means_and_half_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(task: str, seed: int, seconds: float, clean: int | None) -> list[Baseline]:
        assert (task, seconds, clean) == ("digits", 60.0, None)
        oracle = Baseline("oracle", {"test_error": 0.1}, 2.0)
        return [Baseline("simple", {"test_error": 0.1 * seed, "iteration": 10 + seed}, 1.0), oracle]

    monkeypatch.setattr(table, "baselines", made)
    command.main(["baselines", "digits", "--seeds", "1", "2", "6", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[:4] == [
        "| digits | test_error | iteration | seconds |",
        "| --- | --- | --- | --- |",
        "| simple | 0.300 ± 0.250 | 13 ± 2 | 1.0 |",
        "| oracle | 0.100 ± 0.000 |  | 2.0 |",
    ]
    saved = json.loads((tmp_path / "baselines-digits.json").read_text())
    assert saved["6"][0] == {
        "name": "simple",
        "metrics": {"test_error": pytest.approx(0.6), "iteration": 16},
        "seconds": 1.0,
    }
    with pytest.raises(SystemExit):
        command.main(["baselines", "nothing"])


def test_an_exponent_is_that_of_the_power_law() -> None:
    sizes = [10.0, 100.0, 1000.0]
    assert exponent(sizes, [3.0 * size**1.25 for size in sizes]) == pytest.approx(1.25)
    assert exponent(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0.0)


def test_sides_take_turns() -> None:
    order: list[str] = []
    times = in_turns([lambda: order.append("a"), lambda: order.append("b")], rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert [len(side) for side in times] == [2, 2]
    assert ratio([1.0, 2.0, 9.0], to=[1.0, 1.0, 3.0]) == 2.0


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"at_most": 1.0}, "met"),
        ({"at_most": 0.9}, "missed"),
        ({"at_least": 1.0}, "met"),
        ({"at_least": 1.1}, "missed"),
        ({}, ""),
    ],
)
def test_a_row_says_whether_it_meets_its_target(limits: dict[str, Any], verdict: str) -> None:
    assert Row("", 1.0, **limits).verdict == verdict
    assert Row("", None, **limits).verdict == "not reached"
    assert results.skipped("", "a-package").verdict == "skipped"


def test_each_number_is_half_of_the_next() -> None:
    assert doublings(400, 4) == [50, 100, 200, 400]


@pytest.mark.integration
def test_a_method_is_judged_as_a_certificate_of_that_point_is(tiny: Path) -> None:
    """Its passes are the first at or after each number, and IVSP's envelope is everybody's."""
    curve = stationarity.descent("meha", TINY)
    _, module, method, problem = contenders.method("meha", TINY)
    infos = []
    while not infos or infos[-1].passes < TINY.passes:
        infos.append(method.step(problem=problem))
    passes = [info.passes for info in infos]
    asked = doublings(TINY.passes)
    assert curve.xs == [next(count for count in passes if count >= most) for most in asked]
    envelope = Envelope(rho=0.05, sigma=1.0, delta=1e-3)
    found = certify(problem, *module.point, envelope, tolerance=1e-3)
    assert curve.ys[-1] == found.smallest_kkt > 0


def test_a_run_is_measured_at_the_first_iteration_after_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(accuracy.time, "process_time", lambda: clock[0])

    def step() -> None:
        clock[0] += 3.0

    curve = accuracy.descent("a", step, lambda: 1 / clock[0], doublings(32.0))
    assert curve.xs == [3.0, 3.0, 6.0, 9.0, 18.0, 33.0]
    assert curve.ys == [1 / x for x in curve.xs]


def test_a_run_that_diverges_has_no_last_error() -> None:
    values = iter([0.5, 0.4, float("nan")])
    times = accuracy.looks(1e-4)
    curve = accuracy.descent("a", lambda: sum(range(1000)), lambda: next(values), times)
    assert curve.ys == [0.5, 0.4]
    last, reached = accuracy.rows(curve, 1e-4)
    assert last.value is reached.value is None
    assert last.note.startswith("it diverged; 0.500 after ")

    def fails() -> None:
        raise BilevelError("it diverges")

    last, _ = accuracy.rows(accuracy.descent("a", fails, lambda: 0.5, [1.0]), 1.0)
    assert (last.value, last.note) == (None, "it diverged at once")


def test_rows_have_the_last_number_with_earlier_ones_and_the_time_to_an_error() -> None:
    times = accuracy.looks(32.0)
    assert times[:: accuracy.LOOKS] == doublings(32.0)
    assert all(1.18 < b / a < 1.2 for a, b in itertools.pairwise(times))
    errors = [0.6 * 0.9**k for k in range(len(times))]
    last, reached = accuracy.rows(Curve("a", times, errors), 32)
    assert last.what == "a: test error after 32 s"
    assert last.value == errors[-1]
    assert last.note.split(", ")[-1] == f"{errors[-5]:.3f} after 16 s"
    first = next(time for time, error in zip(times, errors, strict=True) if error <= 0.1)
    assert (reached.what, reached.value) == ("a: seconds to a test error of 0.1", first)
    _, missed = accuracy.rows(Curve("a", times, [0.2] * len(times)), 32)
    assert (missed.value, missed.note) == (None, "not within 32 s")


def test_a_residual_has_the_earlier_ones_as_its_note() -> None:
    found = stationarity.row(Curve("a", [1000.0, 2001.0], [0.25, 0.125]))
    assert found.what == "a: KKT residual after 2,001 passes"
    assert (found.value, found.note) == (0.125, "0.25 after 1,000")
    assert stationarity.row(Curve("a", [], [])).note == "it diverged at once"


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [*trusted.METHODS, *trusted.OF_ANNOTATORS])
def test_methods_with_trusted_samples_are_judged_alike(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the network of the trusted samples must have learned something.
    if method != "trusted":
        monkeypatch.setattr(trusted, "TrustedSamples", HASTY)
    kind = "annotators" if method in trusted.OF_ANNOTATORS else "pair"
    made, options = trusted.data_of("digits", kind)
    data = made(300, 40, corruption=0.6, batch_size=32, **options)
    data.setup()
    assert data.corrupted is not None
    row = trusted.measure(data, method, 0, trusted.Settings(steps=3))
    keys = {"kept", "wrong_kept", "seconds", "auroc", "missed_errors", "test_error"}
    assert row.keys() == (keys if method != "oracle" else keys - {"auroc", "missed_errors"})
    if method == "all":
        assert row["kept"] == 1.0
        assert row["wrong_kept"] == pytest.approx(0.6)
    if method == "trusted":
        # 40 right labels say more than 300 of which most are wrong.
        assert row["kept"] == 0.0
        assert row["auroc"] > 0.8
        assert row["test_error"] < 0.5
    if method == "oracle":
        assert (row["kept"], row["wrong_kept"]) == (pytest.approx(0.4), 0.0)
    assert "held_out_error" in trusted.measure(
        data, method, 0, trusted.Settings(steps=3), judge=data.upper
    )


def test_an_error_is_the_share_of_wrong_predictions() -> None:
    images = torch.eye(4)
    labels = torch.tensor([0, 1, 2, 0])
    assert accuracy.error(torch.nn.Identity(), (images, labels)) == 0.25
    assert math.isnan(accuracy.error(torch.nn.Identity(), (images / 0, labels)))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    section = Section(
        "a title",
        [Row("a", 1.5, "s", at_most=2.0, note="b"), Row("c", None)],
        [Curve("d", [1.0], [2.0])],
    )
    section.save(tmp_path / "x.json")
    assert Section.load(tmp_path / "x.json") == section
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["value"] == 1.5
    lines = results.markdown([section]).splitlines()
    assert "| a | 1.5 s | at most 2 | met | b |" in lines
    assert "| c | - |  | not reached |  |" in lines


@pytest.mark.filterwarnings("ignore")
def test_memory_counts_what_is_held_at_once() -> None:
    def work() -> None:
        first = torch.zeros(1000, dtype=torch.float64)
        del first
        torch.zeros(2000, dtype=torch.float64)

    assert memory.peak_bytes(work) == 16_000
    kept: list[torch.Tensor] = []
    assert (
        memory.peak_bytes(work, lambda: kept.append(torch.zeros(1000, dtype=torch.float64)))
        == 24_000
    )


@pytest.mark.filterwarnings("ignore")
def test_ivsp_holds_twelve_parameter_vectors_and_two_for_the_theorem() -> None:
    assert memory.vectors(10_000, keep_proved=False) <= 12.0
    assert 13.9 < memory.vectors(10_000) <= 14.0


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_a_fit_on_mini_batches_holds_nine_networks() -> None:
    """y, z, two moments of each, two gradients, and what AdamW's step makes."""
    rows = {row.what: row.value for row in step_cost.memory_rows(600)}
    for name in step_cost.METHODS:
        what = f"1,198,210 parameters, {step_cost.fit_of(name)}: peak memory in networks"
        assert 8.0 < rows[what] <= 9.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [F2SA(), StreamingIVSP()])
def test_the_loop_by_hand_takes_the_steps_of_the_fit(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Adam makes steps of what is left of a difference in float32.
    monkeypatch.setitem(step_cost.QUIET, "precision", "64-true")
    net = step_cost.network(784, 16, 10)
    batches: Any = [
        {level: (images.double(), *more) for level, (images, *more) in pair.items()}
        for pair in step_cost.pairs(3)
    ]
    ours = step_cost.Ours(net, step_cost.SAMPLES, method, step_cost.UPPER, step_cost.LOWER)
    by_hand = step_cost.ByHand(net.double(), method)
    by_hand.x.data = by_hand.x.data.double()
    fit = step_cost.Fit(ours, batches)
    for k in range(5):
        assert fit.turn() > 0
        by_hand.step(batches[k % 3]["upper"], batches[k % 3]["lower"])
        assert ours.global_step == k + 1
    fit.end()
    for mine, hers in zip(
        [ours.logits, *ours.net.parameters()], [by_hand.x, *by_hand.ys], strict=True
    ):
        torch.testing.assert_close(mine, hers, rtol=1e-9, atol=1e-9)


def test_a_fit_that_fails_in_its_thread_fails_in_its_turn() -> None:
    class Fails(step_cost.Plain):
        def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
            raise ValueError("no such batch")

    fit = step_cost.Fit(Fails(step_cost.network(784, 10)), step_cost.pairs(1))
    with pytest.raises(ValueError, match="no such batch"):
        fit.turn()


def test_the_figure_of_trusted_samples_has_a_bar_for_each_method(tmp_path: Path) -> None:
    rows = [
        {"data": data, "method": method, "test_error": error}
        for data in ("mnist", "fashion_mnist")
        for method, error in (("ivsp", 0.1), ("ivsp", 0.2), ("oracle", 0.05))
    ]
    panels = trusted_figure.draw(rows).axes
    assert [panel.get_title() for panel in panels] == ["MNIST", "FashionMNIST"]
    for panel in panels:
        widths = sorted(bar.get_width() for bar in panel.patches)
        assert widths == pytest.approx([0.05, 0.15])
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(["a line of Lightning", *map(json.dumps, rows)]))
    trusted_figure.main([str(results), "--out", str(tmp_path / "trusted.png")])
    assert (tmp_path / "trusted.png").stat().st_size > 5000


def test_the_figure_of_trusted_samples_makes_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method once on both data sets, F2SA with its own multiplier."""
    made = []

    def prints(call: list[str]) -> None:
        given = dict(zip(call[::2], call[1::2], strict=False))
        made.append((given["--data"], given["--trusted"], "0.05" in call))
        for method in call[call.index("--methods") + 1 :]:
            if method in trusted_figure.NAMES:
                print(json.dumps({"data": given["--data"], "method": method, "test_error": 0.1}))

    monkeypatch.setattr(trusted_figure.trusted, "main", prints)
    trusted_figure.main(["--out", str(tmp_path / "trusted.png")])
    assert made == [
        (data, "1000", own) for data in ("mnist", "fashion_mnist") for own in (False, True)
    ]
    rows = list(map(json.loads, (tmp_path / "trusted.jsonl").read_text().splitlines()))
    assert sorted(row["method"] for row in rows) == sorted(2 * list(trusted_figure.NAMES))
    assert (tmp_path / "trusted.png").stat().st_size > 5000


@pytest.mark.integration
def test_hyperparameters(tmp_path: Path) -> None:
    found = hyperparameters.main(short=True, out=tmp_path / "hyper.png")
    assert (tmp_path / "hyper.png").exists()
    assert list(found) == ["start", "learned", "random search"]
    # Ten classes: a network that has learned nothing has an error of 0.9 and a loss of log 10.
    for row in found.values():
        assert row["error"] < 0.6
        assert row["loss"] < 2.0


def test_the_training_loss_of_the_hyperparameters_is_torchs() -> None:
    """Label smoothing and weight decay against torch's own."""
    torch.manual_seed(0)
    net = hyperparameters.network()
    batch = torch.rand(7, 1, 8, 8), torch.arange(7)
    x = torch.tensor([-1.0, -2.0, -3.0, -0.5])
    smoothing = float(x[3].sigmoid())
    decays = [
        0.5 * math.exp(c) * float(layer.weight.detach().square().sum())
        for c, layer in zip(x[:3].tolist(), (net[1], net[3], net[5]), strict=True)
    ]
    with torch.no_grad():
        plain = cross_entropy(net(batch[0]), batch[1], label_smoothing=smoothing)
        ours = hyperparameters.training_loss(net, x, batch)
    assert float(ours) == pytest.approx(float(plain) + sum(decays), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
class TestGrowing:
    """A growing sample against all data."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(growing.DATA, "mnist", DigitsCleaning)
        # A second of processor time is one call of the clock.
        monkeypatch.setattr(growing.time, "process_time", itertools.count().__next__)

    def test_both_sides_run_and_leave_their_rows(self, tmp_path: Path) -> None:
        constants = ["paper", "own"]
        options = ["--task", "mnist", "--train", "300", "--validation", "100"]
        out = tmp_path / "out.jsonl"
        how = ["--growing", '{"start": 2, "every": 2}', "--error", "0.9", "0.0", "--budget", "6"]
        growing.main([*options, "--constants", *constants, *how, "--seeds", "1", "--out", str(out)])
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert [each["constants"] for each in found] == constants
        for each in found:
            rows = each["growing"]["rows"]
            assert [row[1] for row in each["full"]["rows"]][-1] == 6 == rows[-1][1]
            assert all(row[2] == 0 for row in each["full"]["rows"])
            assert rows[0][2] == 2 < rows[-1][2]
            # No side is without an error, so none ends early.
            assert each["growing"]["error"]["0.0"] is None
            assert each["growing"]["seconds"] == 6

    def test_the_full_side_ends_after_a_multiple_of_the_other(self, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        options = "--task mnist --train 300 --validation 100 --constants own --seeds 1 --kkt 0"
        marks = "--error 1.0 --ratio 3 --budget 30"
        growing.main([*options.split(), *marks.split(), "--out", str(out)])
        found = json.loads(out.read_text())
        # Any error is at most 1: both are done at their first evaluation.
        assert found["growing"]["error"] == {"1.0": 1}
        assert found["full"]["error"] == {"1.0": 1}
        marks = "--error 1.0 0.0 --ratio 3 --budget 30"
        growing.main([*options.split(), *marks.split(), "--out", str(out)])
        found = json.loads(out.read_text().splitlines()[1])
        # The growing side has a third of the budget. It reached 1.0 in its first second, and the
        # full side, which has had its turns until then, ends with it.
        assert found["growing"]["seconds"] == 10
        assert 3 <= found["full"]["seconds"] <= 10

    def test_the_growing_side_runs_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = "--task mnist --train 300 --validation 100 --constants cleaning --seeds 1 --kkt 0"
        growing.main([*options.split(), "--alone", "--budget", "2", "--error", "0", "--verbose"])
        printed = capsys.readouterr().out
        assert "growing 1 1 " in printed
        assert "full" not in printed
        assert "mnist 300 cleaning seed 1: growing error 0.0 in -; smallest error" in printed
