"""Checkpoints that people broke, for tests that go over all of them: the rows `met` of the tests of
the rules.

In: tests/validate/check/test_*.py, where a rule's rows stand next to its assertion. Out: BROKEN, and
WITHOUT_MTP, those of models that never had an MTP block. What a dry load alone can see is in
dry_corpus.py.
"""

import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from broken_case import Case
from checkpoint_files import Change, Checkpoint, config, lose, rename, reshape
from good_checkpoints import GOOD

_TESTS = Path(__file__).parents[1] / "validate" / "check"
_ALONE = _TESTS / "test_without_family.py"


def _met(file: Path) -> list[Case]:
    """What people met, of one file of tests."""
    found = []
    for test in runpy.run_path(str(file)).values():
        for mark in getattr(test, "pytestmark", ()):
            if mark.args[:1] == ("case",):
                found += [case for case in mark.args[1] if case.is_met]
    return found


def _collected() -> Iterator[Case]:
    for file in sorted(_TESTS.glob("test_*.py")):
        if " met(" in file.read_text() and file != _ALONE:
            yield from _met(file)


BROKEN = tuple(_collected())
WITHOUT_MTP = tuple(_met(_ALONE))
_CHANGES = {"config": config, "rename": rename, "reshape": reshape}


def built(row: str | Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of tests/cure's tables: a good one's name, or what makes one, under `of`; and
    changes.
    """
    if isinstance(row, str):
        return GOOD[row]()
    changes = list[Change]()
    for verb, change in _CHANGES.items():
        changes += [change(*given) for given in row.get(verb, {}).items()]
    if "lose" in row:
        changes.append(lose(row["lose"]))
    return Case("", row["of"], tuple(changes), ()).build()
