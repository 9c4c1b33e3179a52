"""The logged names: records, monitors, TensorBoard and the documentation agree with one table."""

from __future__ import annotations

import ast
import re
from dataclasses import fields

import pytest
from lightning_bilevel.solvers.names import NAMES, tag_of
from package import MODULES
from places import ROOT

from lightning_bilevel.solvers.record import MultiplierInfo, PenaltyInfo, StepInfo

TAGS = [name.tag for name in NAMES]


def test_each_stands_there_once() -> None:
    assert len(set(TAGS)) == len(TAGS)
    attributes = [name.attribute for name in NAMES if name.attribute]
    assert len(set(attributes)) == len(attributes)


@pytest.mark.parametrize("record", [StepInfo, MultiplierInfo, PenaltyInfo])
def test_what_a_record_logs_is_in_the_table(record: type[StepInfo]) -> None:
    assert set(record.SHOWN) <= set(record.LOGGED) <= {field.name for field in fields(record)}
    assert {tag_of(attribute) for attribute in record.LOGGED} <= set(TAGS)


def test_a_record_of_ones_own_is_logged_by_its_own_names() -> None:
    assert tag_of("momentum") == "bilevel/momentum"


def test_no_other_name_is_written_anywhere() -> None:
    written = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"bilevel/\w+", node.value)
            ):
                written.add(node.value)
    assert written <= set(TAGS)


def test_the_guide_lists_them_all() -> None:
    guide = (ROOT / "docs" / "lightning.md").read_text()
    listed = re.findall(r"^\| `(bilevel/\w+)` \| (.+?) \|", guide, re.M)
    assert listed == [(name.tag, name.meaning) for name in NAMES]
