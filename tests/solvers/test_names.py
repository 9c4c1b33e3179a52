"""The logged names: records, monitors and the documentation agree."""

from __future__ import annotations

import ast
import re
from dataclasses import fields

import pytest
from package import MODULES
from places import ROOT

from lightning_bilevel.core.passes import Calls
from lightning_bilevel.solvers.record import (
    PenaltyInfo,
    StepInfo,
    StreamInfo,
    tag_of,
)

RECORDS = (StepInfo, PenaltyInfo, StreamInfo)


@pytest.mark.parametrize("record", RECORDS)
def test_what_a_record_logs_is_in_it(record: type[StepInfo]) -> None:
    assert set(record.SHOWN) <= set(record.LOGGED) <= {field.name for field in fields(record)}


def test_a_record_of_ones_own_is_logged_by_its_own_names() -> None:
    assert tag_of("momentum") == "bilevel/momentum"


def test_the_guide_lists_them_all() -> None:
    logged = {tag_of(name) for record in RECORDS for name in record.LOGGED}
    logged |= {f"bilevel/calls_{field.name}" for field in fields(Calls)}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(
                r"bilevel/\w+[^\W_]", str(node.value)
            ):
                logged.add(str(node.value))
    guide = (ROOT / "docs" / "lightning.md").read_text()
    listed = re.findall(r"^\| `(bilevel/\w+)` \|", guide, re.M)
    assert len(set(listed)) == len(listed)
    assert set(listed) == logged
