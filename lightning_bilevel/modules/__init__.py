"""Ready modules, one per task."""

from lightning_bilevel.modules.fewshot import FewShot as FewShot
from lightning_bilevel.modules.reweighting import HyperCleaning as HyperCleaning
from lightning_bilevel.modules.reweighting import Reweighting as Reweighting
from lightning_bilevel.modules.sine import SineProblem as SineProblem
from lightning_bilevel.modules.weights import ClassWeights as ClassWeights
from lightning_bilevel.modules.weights import SampleWeights as SampleWeights
from lightning_bilevel.modules.weights import SourceWeights as SourceWeights
from lightning_bilevel.modules.weights import TableRMS as TableRMS
from lightning_bilevel.modules.weights import WeightNet as WeightNet
