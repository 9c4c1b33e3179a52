"""States of runs that earlier versions saved, as this one reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["readable"]


def readable(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a saved state with all constants that this version has.

    Args:
        state_dict: The state as it was saved. The oldest format names the chosen constants in one
            string, ``estimated``.
        groups: The parameter groups of the solver that loads it.
    """
    pairs = list(zip(groups, state_dict["param_groups"], strict=True))
    if "estimated" in state_dict["param_groups"][0]:
        pairs = [(mine, _without_estimated(mine, saved)) for mine, saved in pairs]
    new = [{"keep_proved": mine["keep_proved"], **saved} for mine, saved in pairs]
    return {**state_dict, "param_groups": new}


def _without_estimated(mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    own_unit = saved["unit"]
    chosen = tuple(saved["estimated"].split())
    group = {name: value for name, value in saved.items() if name != "estimated"}
    group["own_unit"] = own_unit
    group["chosen"] = None if own_unit is None else chosen
    group["rules"] = "own" if chosen else "paper"
    scales = own_unit is not None and mine["level"] == "upper"
    group["unit"] = mine["unit"] * (own_unit if scales else 1.0)
    return group
