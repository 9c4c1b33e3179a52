"""A growing sample: its stages, its end on all data, its records, its checkpoints, its refusals."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import MILD, Weighting, samples
from records import Recorder, same
from running import same_parameters, trainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from lightning_bilevel import (
    F2SA,
    IVSP,
    BilevelProgressBar,
    Chunks,
    CleaningData,
    DigitsCleaning,
    FullBatchDataModule,
    GlyphEpisodes,
    Growing,
    HyperCleaning,
    KKTMonitor,
    OptimizationBudget,
)
from lightning_bilevel.core.unseen import Unseen
from lightning_bilevel.plugin import stages as stages_module
from lightning_bilevel.plugin.batches import BatchProblem
from lightning_bilevel.plugin.checkpoints import KEY
from lightning_bilevel.plugin.growing import NestedSample
from lightning_bilevel.plugin.stages import Stages

EARLY = "ignore:The run ended on a sample"


def data(growing: Growing | None, upper: int = 20, lower: int = 60, **options: Any) -> Any:
    return FullBatchDataModule(
        samples(upper, 1), samples(lower, 2), samples(20, 3), growing=growing, **options
    )


def fitted(
    tmp_path: Path, growing: Growing | None, steps: int, solver: Any = MILD, **options: Any
) -> tuple[Any, list[dict[str, Any]], Any]:
    module = Weighting(60, solver=solver)
    records = Recorder()
    run = trainer(tmp_path, max_steps=steps, callbacks=[records], **options)
    run.fit(module, datamodule=data(growing, epoch_length=5))
    return module, records.steps, run


class TestNestedSample:
    """The batches of the stages."""

    def test_stages_are_nested_and_the_last_is_the_batch_itself(self) -> None:
        batch = {"upper": samples(20, 1), "lower": samples(60, 2)}
        sample = NestedSample(Growing(start=8, factor=2), batch)
        assert sample.sizes == [8, 16, 32, 60]
        indices = [set(sample.at(i)["lower"][2].tolist()) for i in range(4)]
        assert [len(taken) for taken in indices] == sample.sizes
        assert all(a < b for a, b in pairwise(indices))
        assert len(sample.at(1)["upper"][0]) == 16
        assert sample.at(2)["upper"] is batch["upper"]
        assert sample.at(3)["lower"] is batch["lower"]
        # The tensors of a sample belong together.
        inputs, labels, index = sample.at(0)["lower"]
        assert torch.equal(inputs, batch["lower"][0][index])
        assert torch.equal(labels, batch["lower"][1][index])
        assert (sample.stage(1).upper, sample.stage(1).lower) == (16 / 20, 16 / 60)

    def test_parts_make_up_the_stage(self) -> None:
        sample = NestedSample(
            Growing(start=17, factor=2), {"upper": samples(9, 1), "lower": samples(60, 2)}
        )
        parts = [part["lower"][2].tolist() for part in sample.parts(0, 4)]
        assert sorted(map(len, parts)) == [4, 4, 4, 5]
        assert sorted(i for part in parts for i in part) == sample.at(0)["lower"][2].tolist()
        # The upper level is whole in each stage, and cut as well.
        upper = [part["upper"][2].tolist() for part in sample.parts(0, 4)]
        assert sorted(i for part in upper for i in part) == list(range(9))
        assert sample.stage(0, 4).upper == len(upper[0]) / 9
        # With fewer samples than parts each part has all of them.
        assert all(len(part["upper"][0]) == 9 for part in sample.parts(0, 10))
        assert (sample.stage(0, 10).upper, sample.stage(0).upper) == (1.0, 1.0)

    def test_unseen_samples_are_the_next_ones(self) -> None:
        batch = {"upper": samples(20, 1), "lower": samples(60, 2)}
        sample = NestedSample(Growing(start=16, factor=3), batch)
        unseen, stage = sample.unseen(0)
        inside, following = (set(sample.at(i)["lower"][2].tolist()) for i in (0, 1))
        taken = set(unseen["lower"][2].tolist())
        assert len(taken) == 8
        assert taken < following - inside
        # The upper level has only four others.
        assert len(unseen["upper"][0]) == 4
        assert (stage.upper, stage.lower) == (4 / 20, 8 / 60)
        # The next stage has all of the upper level: there is nothing that it has not seen.
        assert sample.unseen(1)[0]["upper"] is batch["upper"]
        assert sample.unseen(1)[1].upper == 1.0

    def test_chunks_stay_as_long_as_they_are(self) -> None:
        whole = samples(60, 2)
        chunks = [tuple(t[i : i + 25] for t in whole) for i in (0, 25, 50)]
        growing = Growing(start=30, factor=1.5)
        split, single = (
            NestedSample(growing, {"upper": samples(9, 1), "lower": lower})
            for lower in (chunks, whole)
        )
        taken = split.at(0)["lower"]
        assert isinstance(taken, Chunks)
        assert [len(part[0]) for part in taken.batches] == [25, 5]
        for i in range(3):
            column = torch.cat([part[i] for part in taken.batches])
            assert torch.equal(column, single.at(0)["lower"][i])

    def test_the_two_sets_of_an_episode_enter_together(self) -> None:
        _, episodes = parallel.problem("fewshot", parallel.SOLVERS["paper"])
        episodes.setup()
        batch = {"upper": episodes.upper, "lower": episodes.lower}
        taken = NestedSample(Growing(start=3), batch).at(0)
        assert torch.equal(taken["upper"][2], taken["lower"][2])


class TestRuns:
    """Runs by the Trainer."""

    @pytest.mark.parametrize("solver", [MILD, IVSP, partial(F2SA, T=2)])
    def test_a_first_sample_as_large_as_the_data_is_the_full_batch(
        self, tmp_path: Path, solver: Any
    ) -> None:
        full, steps, _ = fitted(tmp_path, None, 8, solver)
        grown, same_steps, _ = fitted(tmp_path, Growing(start=60), 8, solver)
        assert same_parameters(full, grown)
        assert steps == same_steps

    def test_a_stage_is_the_run_on_its_sample_and_then_the_sample_grows(
        self, tmp_path: Path
    ) -> None:
        growing = Growing(start=15, factor=2, every=4)
        module, steps, run = fitted(tmp_path, growing, 14)
        assert [step["samples"] for step in steps] == [15] * 4 + [30] * 4 + [60] * 6
        # The same by hand: one solver, which is given one problem after another.
        other = Weighting(60)
        solver = other._declaration.new_solver()
        sample = NestedSample(growing, {"upper": samples(20, 1), "lower": samples(60, 2)})
        for number, count in enumerate((4, 4, 6)):
            problem = other.bilevel_problem(sample.at(number))
            problem.stage = sample.stage(number)
            for _ in range(count):
                solver.step(problem=problem)
        assert same_parameters(module, other)
        assert module.last_step.passes == solver.progress.passes
        assert run.callback_metrics["bilevel/samples"] == 60

    def test_weights_outside_the_sample_stay(self, tmp_path: Path) -> None:
        growing = Growing(start=15, factor=2, every=100)
        with pytest.warns(UserWarning, match=r"ended on a sample of 15 of 60 samples"):
            module, _, _ = fitted(tmp_path, growing, 6)
        inside = NestedSample(growing, data(None).__dict__).at(0)["lower"][2]
        moved = module.logits.detach().nonzero().reshape(-1)
        assert set(moved.tolist()) == set(inside.tolist())

    @pytest.mark.filterwarnings(EARLY)
    def test_passes_are_those_over_all_data(self, tmp_path: Path) -> None:
        _, steps, _ = fitted(tmp_path, Growing(start=15, factor=2, every=100), 5)
        upper = sum(step["calls"]["upper"] for step in steps)
        lower = sum(step["calls"]["lower"] + 2 * step["calls"]["gap"] for step in steps)
        assert steps[-1]["passes"] == pytest.approx(15 / 20 * upper + 15 / 60 * lower)

    def test_the_run_says_when_and_comes_to_all_data(self, tmp_path: Path) -> None:
        _, steps, _ = fitted(tmp_path, Growing(start=15, factor=2), 130)
        sizes = [step["samples"] for step in steps]
        assert sizes == sorted(sizes)
        assert set(sizes) == {15, 30, 60}
        # Two looks at least, five iterations apart.
        assert sizes.count(15) >= 10

    def test_no_stage_lasts_for_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stages_module, "_LONGEST", 7)
        _, steps, _ = fitted(tmp_path, Growing(start=15, factor=2), 16)
        sizes = [step["samples"] for step in steps]
        assert [sizes.count(size) for size in (15, 30, 60)] == [7, 7, 2]

    def test_a_solver_that_cannot_tell_grows_by_the_schedule(self, tmp_path: Path) -> None:
        _, steps, _ = fitted(tmp_path, Growing(start=15, factor=2), 102, partial(F2SA, T=1))
        sizes = [step["samples"] for step in steps]
        assert [sizes.count(size) for size in (15, 30, 60)] == [50, 50, 2]

    def test_the_theorem_is_about_the_last_stage(self, tmp_path: Path) -> None:
        growing = Growing(start=15, factor=2, every=4)
        with pytest.warns(UserWarning, match="ended on a sample"):
            early, _, _ = fitted(tmp_path, growing, 7)
        assert early.proved is None
        with pytest.raises(MisconfigurationException, match="still on a sample of 30 samples"):
            early.certify(proved=True)
        late, steps, _ = fitted(tmp_path, growing, 20)
        kept = late.proved
        # 12 iterations are on all data; the point is of the second half of these.
        assert kept is not None
        assert kept.iteration > 8 + 6
        assert kept.iterations == 20
        of_half = [step for step in steps[14:] if not step["penalty_updated"]]
        assert kept.omega >= min(step["step"] / step["mu"] for step in of_half)

    def test_the_certificate_is_of_all_data_or_names_the_sample(self, tmp_path: Path) -> None:
        growing = Growing(start=15, factor=2, every=100)
        with pytest.warns(UserWarning, match="ended on a sample"):
            module, _, _ = fitted(tmp_path, growing, 6)
        whole = module.certify()
        assert whole.evaluated_on == ""
        assert whole.point == "the last iterate, iteration 6 on a sample of 15 of 60 samples"
        sample = module.certify(sample=True)
        assert sample.evaluated_on == "a sample of 15 of 60 samples"
        batch = {"upper": samples(20, 1), "lower": samples(60, 2)}
        for certificate, of in (
            (whole, batch),
            (sample, NestedSample(growing, batch).at(0)),
        ):
            problem = Weighting(60).bilevel_problem(of)
            assert certificate.upper == pytest.approx(problem.upper(*module.point).value)
        assert sample.upper != pytest.approx(whole.upper, rel=1e-4)

    @pytest.mark.filterwarnings(EARLY)
    def test_bar_monitor_and_budget_see_the_stage(self, tmp_path: Path) -> None:
        bar, monitor = BilevelProgressBar(), KKTMonitor(every_n_steps=2)
        module = Weighting(60)
        run = trainer(
            tmp_path,
            max_steps=4,
            enable_progress_bar=True,
            callbacks=[bar, monitor, OptimizationBudget("1h")],
        )
        run.fit(module, datamodule=data(Growing(start=15, every=100)))
        assert bar.get_metrics(run, module)["samples"] == "15"
        # The monitor looks at all data: the best point is the best for them.
        assert monitor.best["kkt"] == min(monitor.best["kkt"], module.certify(tolerance=1e-3).kkt)
        assert run.callback_metrics["bilevel/kkt_residual"] == pytest.approx(
            module.certify(tolerance=1e-3).kkt
        )

    def test_own_constants_are_corrected_on_a_larger_sample(self, tmp_path: Path) -> None:
        module, steps, _ = fitted(tmp_path, Growing(start=15, factor=2, every=4), 14, IVSP)
        first, _, _ = fitted(tmp_path, Growing(start=15, factor=2, every=4), 9, IVSP)
        constants = module._run.solver.constants
        # The smoothing and the penalty go on.
        assert constants["gamma0"] == first._run.solver.constants["gamma0"]
        mu = [step["mu"] for step in steps]
        assert mu == sorted(mu, reverse=True)
        assert constants["L_xy"] > 0.0
        assert math.log2(constants["own_unit"]).is_integer()

    def test_heads_of_new_episodes_are_solved_before_they_count(self) -> None:
        module, episodes = parallel.problem("growing episodes", parallel.SOLVERS["paper"])
        episodes.setup()
        batch = {"upper": episodes.upper, "lower": episodes.lower}
        whole = BatchProblem([], batch, batch, module.bilevel_problem(batch))
        declared = module._declaration
        solver = declared.new_solver()
        stages = Stages(episodes.growing, batch, declared)

        def make(part: Any) -> tuple[Any, Any]:
            return module.bilevel_problem(part), part

        inside = stages.sample.at(0)["lower"][2].tolist()
        for _ in range(3):
            stages.next_problem(solver, whole, make)
        assert not module.heads.weight.any()
        assert solver.progress.passes == 0
        assert stages.next_problem(solver, whole, make) is whole
        assert not module.heads.weight[inside].any()
        images, labels, index = episodes.lower
        with torch.no_grad():
            logits = module.heads(module(images), index).flatten(0, 1)
        losses = cross_entropy(logits, labels.flatten(), reduction="none")
        # Heads of zero have a loss of log 3 on three classes.
        for task, loss in enumerate(losses.view(5, -1).mean(1).tolist()):
            if task in inside:
                assert loss == pytest.approx(math.log(3))
            else:
                assert loss < math.log(3) - 0.1
        # 21 passes over three of five episodes.
        assert solver.progress.passes == pytest.approx(21 * 3 / 5)

    def test_unseen_episodes_get_heads_for_a_look_alone(self) -> None:
        module, episodes = parallel.problem("growing episodes", parallel.SOLVERS["paper"])
        episodes.setup()
        batch = {"upper": episodes.upper, "lower": episodes.lower}
        seen: list[Unseen] = []

        class Watching(F2SA):
            def is_too_small(self, parts: Any, unseen: Any) -> bool:
                seen.append(unseen())
                return False

        declared = module._declaration
        solver = Watching(declared.groups(), T=1)
        growing = Growing(start=2, factor=2)
        stages = Stages(growing, batch, declared)
        whole = BatchProblem([], batch, batch, module.bilevel_problem(batch))
        for _ in range(6):  # one look, before the sixth iteration
            stages.next_problem(solver, whole, lambda part: (module.bilevel_problem(part), part))
        assert not module.heads.weight.any()
        (found,) = seen
        outside = NestedSample(growing, batch).unseen(0)[0]
        assert len(outside["lower"][0]) == 1
        # Heads of zero have a loss of log 3; f is of heads that fit the support set.
        unsolved = module.bilevel_problem(outside).upper(*module.point).value
        assert unsolved == pytest.approx(math.log(3))
        assert found.upper is not None
        assert abs(found.upper - unsolved) > 0.01
        # R of solved heads tells nothing. The next stage has all five episodes.
        assert not found.has_gap
        assert found.growth == 5 / 2
        # 21 passes over the support set of one of five episodes, and one over its query set.
        assert solver.progress.passes == pytest.approx((21 + 1) / 5)


@pytest.mark.filterwarnings(EARLY)
@pytest.mark.parametrize(
    ("task", "solver", "steps"),
    [
        ("growing", "paper", 8),
        ("growing", "own", 8),
        ("growing", "f2sa", 8),
        ("looking", "paper", 12),  # it grows after iteration 10
        ("looking", "own", 8),  # after iteration 5
        ("growing episodes", "paper", 5),
        ("looking episodes", "paper", 37),  # after iteration 35
    ],
)
def test_a_run_resumes_bit_for_bit_in_any_stage(
    tmp_path: Path, task: str, solver: str, steps: int
) -> None:
    def run(**fit: Any) -> tuple[Any, list[dict[str, Any]], Any]:
        module, its_data = parallel.problem(task, parallel.SOLVERS[solver])
        records = Recorder()

        class Saving(Recorder):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                if not fit:
                    trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

        made = trainer(tmp_path, max_steps=steps, callbacks=[records, Saving()])
        made.fit(module, datamodule=its_data, **fit)
        state = made.optimizers[0].state_dict()["state"][0]
        state = {k: v for k, v in state.items() if k != "optimization_time"}
        return module.state_dict(), records.steps, state

    whole = run()
    assert len({step["samples"] for step in whole[1]}) > 1
    grown = [step["samples"] for step in whole[1]].index(whole[1][-1]["samples"])
    for stop in {2, 5, grown - 1, grown, grown + 1}:
        if stop >= steps:
            continue
        resumed = run(ckpt_path=tmp_path / f"{stop}.ckpt", weights_only=True)
        assert same(resumed[0], whole[0]), stop
        assert same(resumed[1], whole[1][stop:]), stop
        assert same(resumed[2], whole[2]), stop


class TestRefusals:
    """Each a sentence."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"factor": 1.0}, r"`Growing\(factor=1.0\)` must be above 1 and finite"),
            ({"factor": 0.5}, r"`Growing\(factor=0.5\)` must be above 1"),
            ({"factor": math.nan}, r"`Growing\(factor=nan\)` must be above 1"),
            ({"start": 0}, r"`Growing\(start=0\)` must be at least 1"),
            ({"every": 0}, r"`Growing\(every=0\)` must be at least 1"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Growing(**arguments)

    def test_a_start_larger_than_the_data(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"`Growing\(start=61\)` is larger than the data, which have 60 samp"
        ):
            fitted(tmp_path, Growing(start=61), 1)

    def test_a_class_of_one_sample(self, tmp_path: Path) -> None:
        inputs, labels, index = samples(30, 2)
        labels[7] = 9
        batch = {"upper": samples(20, 1), "lower": (inputs, labels, index)}
        with pytest.raises(ValueError, match=r"class 9 has one of the 30 samples alone"):
            NestedSample(Growing(start=10), batch)
        assert NestedSample(Growing(start=10, stratified=False), batch).sizes[0] == 10

    def test_data_without_a_length(self) -> None:
        with pytest.raises(ValueError, match="`growing` was given data without a length"):
            NestedSample(Growing(), {"upper": {}, "lower": torch.tensor(1.0)})

        class Endless(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(())

        with pytest.raises(TypeError, match=r"must be a Dataset with `__getitem__` and `__len__`"):
            CleaningData.from_datasets(Endless(), Endless(), growing=Growing())

    def test_chunks_with_weights_and_tensors_of_other_lengths(self) -> None:
        weighted = Chunks([samples(9, 1), samples(9, 2)], [0.7, 0.3])
        with pytest.raises(ValueError, match="a lower batch of `Chunks` with weights"):
            NestedSample(Growing(), {"upper": samples(9, 1), "lower": weighted})
        with pytest.raises(ValueError, match="tensors of lengths 3, 9: the first dimension"):
            NestedSample(Growing(), {"upper": (torch.ones(9), torch.ones(3)), "lower": {}})

    @pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
    @pytest.mark.parametrize("solver", [MILD, partial(F2SA, T=1)])
    def test_a_batch_that_changes_by_itself(self, tmp_path: Path, solver: Any) -> None:
        class Augmented(Weighting):
            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                def noisy(level: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                    return (level[0] + 0.1 * torch.randn_like(level[0]), *level[1:])

                if isinstance(batch, dict):
                    return {name: noisy(level) for name, level in batch.items()}
                return batch

        with pytest.raises(
            MisconfigurationException, match="a batch with other values than the one before"
        ):
            trainer(tmp_path, max_steps=3).fit(
                Augmented(60, solver=solver), datamodule=data(Growing(start=15))
            )

    def test_mini_batches(self) -> None:
        with pytest.raises(
            ValueError, match=r"`DigitsCleaning\(growing=..., batch_size=8\)` must be given one of"
        ):
            DigitsCleaning(growing=Growing(), batch_size=8)
        with pytest.raises(
            ValueError, match=r"`GlyphEpisodes\(growing=..., tasks_per_batch=2\)` must be given"
        ):
            GlyphEpisodes(growing=Growing(), tasks_per_batch=2)

    @pytest.mark.filterwarnings(EARLY)
    def test_a_checkpoint_of_another_growth(self, tmp_path: Path) -> None:
        growing = Growing(start=15, factor=2, every=3)
        _, _, run = fitted(tmp_path, growing, 4)
        run.save_checkpoint(tmp_path / "grown.ckpt")
        assert torch.load(tmp_path / "grown.ckpt", weights_only=True)[KEY]["stages"]["number"] == 1
        _, _, run = fitted(tmp_path, None, 4)
        run.save_checkpoint(tmp_path / "full.ckpt")

        def resumed(name: str, now: Growing | None) -> None:
            trainer(tmp_path, max_steps=6).fit(
                Weighting(60), datamodule=data(now), ckpt_path=tmp_path / name
            )

        with pytest.raises(MisconfigurationException, match=r"sample grew as \[15, 30, 60\] by"):
            resumed("grown.ckpt", Growing(start=15, factor=2, every=4))
        with pytest.raises(MisconfigurationException, match="a run on a growing sample, and this"):
            resumed("grown.ckpt", None)
        with pytest.raises(MisconfigurationException, match="a run on all data, and this one is"):
            resumed("full.ckpt", growing)


def test_hyper_cleaning_grows(tmp_path: Path) -> None:
    digits = DigitsCleaning(300, 200, growing=Growing(start=40, every=3), epoch_length=4)
    module = HyperCleaning(300, inputs=64, hidden=4)
    records = Recorder()
    trainer(tmp_path, max_steps=10, callbacks=[records]).fit(module, datamodule=digits)
    assert [step["samples"] for step in records.steps] == [40] * 3 + [300] * 7
    assert len(module.weights) == 300
