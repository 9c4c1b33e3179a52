"""The strongest simple methods that are not bilevel, on the library's own splits."""

from lightning_bilevel.baselines.cleaning import cleaning_baselines as cleaning_baselines
from lightning_bilevel.baselines.cleaning_report import CleaningReport as CleaningReport
from lightning_bilevel.baselines.fewshot import few_shot_baselines as few_shot_baselines
from lightning_bilevel.baselines.row import Baseline as Baseline
