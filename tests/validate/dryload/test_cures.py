"""keepmtp_cures without vLLM: a toy module on the path stands for a piece of it. Whatever is not as
the cure was written for, nothing is patched, and one line says why.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from keepmtp.validate import keepmtp_cures
from keepmtp.validate.dryload.failures import known
from keepmtp.validate.keepmtp_cures import Cure, source_hash

NAME = "toy.draft"
MODULE = "toy_piece_of_vllm"
SOURCE = "class Draft:\n    def load(self):\n        return 'as it is'\n"
Cures = dict[str, Cure]


def mended(module: Any) -> None:
    module.Draft.load = lambda self: "mended"


def of_another_fork(module: Any) -> None:
    module.Draft.load = module.only_in_vllm


@pytest.fixture
def toy(tmp_path: Path, monkeypatch) -> Any:
    """A toy's cures switched on, before it is imported or after."""
    file = tmp_path / f"{MODULE}.py"
    cures = Cures()
    file.write_text(SOURCE)
    fits = Cure(mended, MODULE, ("Draft.load",), (source_hash(file, ["Draft.load"]),))
    cures[NAME] = fits
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(keepmtp_cures, "OUTCOMES", {})
    monkeypatch.setattr(keepmtp_cures, "cures", lambda: cures)

    def loads(chosen: str = "1", *, before: bool = False) -> str:
        importlib.invalidate_caches()
        if before:
            importlib.import_module(MODULE)
        keepmtp_cures.mend(chosen)
        return importlib.import_module(MODULE).Draft().load()

    yield loads, cures, fits
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("chosen", ["1", NAME, f" {NAME} ,"])
def test_what_is_as_it_was_read_is_mended(chosen, before, toy):
    loads, *_ = toy
    assert loads(chosen, before=before) == "mended" and keepmtp_cures.OUTCOMES == {NAME: ""}
    keepmtp_cures.mend(chosen)
    assert keepmtp_cures.OUTCOMES == {NAME: ""}, "a second call mends nothing"


def another(**other: Any) -> Callable[[Cures, Cure], None]:
    def change(cures: Cures, fits: Cure) -> None:
        cures[NAME] = Cure(**(vars(fits) | other))

    return change


@pytest.mark.parametrize(
    ("chosen", "change", "why"),
    [
        ("1", another(hashes=("0" * 12,)), "is not the source that it was written for"),
        ("1", another(names=("Draft.gone",)), "is not the source that it was written for: no"),
        ("1", another(apply=of_another_fork), "no attribute 'only_in_vllm'"),
        ("toy.gone", None, "there is no such cure"),
    ],
)
def test_what_is_not_is_left_alone_and_a_line_says_why(chosen, change, why, toy, capsys):
    loads, cures, fits = toy
    if change:
        change(cures, fits)
    assert loads(chosen) == "as it is"
    assert why in next(iter(keepmtp_cures.OUTCOMES.values()))
    lines = capsys.readouterr().err.splitlines()
    assert lines and all("did nothing: " in each for each in lines)


def test_a_module_that_is_never_imported_costs_nothing(toy):
    _, cures, fits = toy
    another(module="toy_never_imported")(cures, fits)
    assert toy[0]() == "as it is" and keepmtp_cures.OUTCOMES == {}


@pytest.mark.parametrize("variable", ["", "0"])
def test_it_is_off_unless_it_is_asked_for(variable, monkeypatch, toy):
    monkeypatch.setenv(keepmtp_cures.VARIABLE, variable)
    before = [*sys.meta_path]
    keepmtp_cures.register()
    assert sys.meta_path == before and keepmtp_cures.OUTCOMES == {}


def test_every_cure_of_the_table_is_there_and_no_other():
    named = [row.cure_in_vllm for row in known().defects if row.cure_in_vllm]
    assert sorted(named) == sorted(keepmtp_cures.cures())


def test_no_two_cures_replace_the_same():
    """The second would undo the first."""
    replaced = []
    for cure in keepmtp_cures.cures().values():
        replaced += [(cure.module, name) for name in cure.names]
    assert len(replaced) == len({*replaced}) > 5
