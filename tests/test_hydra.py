"""Modules, solvers and optimisers from a Hydra config: the snippet of the documentation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

from lightning_bilevel import MEHA, TableRMS
from lightning_bilevel.stochastic import F2SA

hydra = pytest.importorskip("hydra.utils", reason="Hydra is not installed")
omegaconf = pytest.importorskip("omegaconf")
pytestmark = pytest.mark.compatibility


def snippet() -> dict[str, Any]:
    page = (ROOT / "docs" / "lightning.md").read_text()
    (block,) = [b.split("```")[0] for b in page.split("```yaml\n")[1:] if "_partial_" in b]
    found: dict[str, Any] = yaml.safe_load(block)
    return found


def test_the_snippet_of_the_documentation_trains(tmp_path: Path) -> None:
    config = snippet()
    config["trainer"] |= {"max_steps": 2, "default_root_dir": str(tmp_path), "logger": False}
    config["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    made = hydra.instantiate(omegaconf.OmegaConf.create(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.trainer.fit(made.model, datamodule=made.data)
    assert made.model.last_step.iteration == 2
    assert made.model.mini_batches.step.method == F2SA(multiplier=0.2)
    upper, lower = made.trainer.optimizers
    assert isinstance(upper, TableRMS)
    assert lower.param_groups[0]["lr"] == config["model"]["lower_optimizer"]["lr"]


def test_a_pair_is_a_list_in_yaml() -> None:
    import torch

    config = {"_target_": "lightning_bilevel.MEHA", "_partial_": True, "alpha": [0.01, 0.0]}
    make = hydra.instantiate(omegaconf.OmegaConf.create(config))
    levels = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "level": level}
        for level in ("upper", "lower")
    ]
    pair = MEHA(levels, alpha=(0.01, 0.0)).param_groups[0]["alpha"]
    assert make(levels).param_groups[0]["alpha"] == pair
