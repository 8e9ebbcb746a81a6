"""The scripts of benchmarks/: each starts, those of `make benchmark` run in small sizes, and none stops
the others.
"""

import os
import runpy
import sys
from dataclasses import replace
from functools import partial

import figures
import llmcompressor  # noqa: F401 # the children below have it already
import pytest
import torch
from commands import ROOT, captured
from figures import Figure
from processes import forked

FOLDER = ROOT / "benchmarks"
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]
GOOD = Figure(what="w", measured="1", expected="> 0")


def started(script):
    """As `python SCRIPT --help`: no folder of the tests is on the path, and none of their modules known."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith((f"{ROOT}/tests/", f"{FOLDER}/")):
            del sys.modules[name]
    elsewhere = [path for path in sys.path if not path.startswith((f"{ROOT}/tests", str(FOLDER)))]
    sys.path[:] = [str(FOLDER), *elsewhere]
    sys.argv[:] = [str(script), "--help"]
    runpy.run_path(str(script), run_name="__main__")


def test_every_script_shows_its_help():
    ended = {script.name: forked(partial(started, script), seconds=60) for script in SCRIPTS}
    for name, end in ended.items():
        assert not end.code and "--help" in end.out, f"{name}: {end.err}"
    assert {f"{name}.py" for name in figures.SCRIPTS} < {*ended}


@pytest.mark.full
@pytest.mark.parametrize("script", figures.SCRIPTS)
def test_a_script_runs_in_small(script):
    """Bytes are compared there, too; speed has no target."""
    words = [sys.executable, FOLDER / f"{script}.py", "--small"]
    said = captured(words, status=0, env=os.environ | figures.QUIET).stdout
    assert said and "MISSED" not in said


def test_a_part_that_ends_in_an_error_is_red_and_the_others_go_on(tmp_path):
    def broken(folder, small):
        yield GOOD
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    parts = {"a": broken, "b": lambda folder, small: [GOOD], "c": broken}
    first, red, last = figures.measured(parts, ["a", "b"], tmp_path, small=False)
    assert (first, last) == (replace(GOOD, part="a"), replace(GOOD, part="b")) and not red.met
    assert red.measured == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert len([*figures.measured(parts, [], tmp_path, small=False)]) == 5


def test_in_small_only_what_holds_at_any_size_is_judged(tmp_path):
    slow = Figure(what="speed", measured="1.0x", expected=">= 2x", met=False)
    other = replace(slow, what="bytes", at_any_size=True)
    parts = {"a": lambda folder, small: [slow, other]}
    found = [*figures.measured(parts, [], tmp_path, small=True)]
    assert [(each.expected, each.met) for each in found] == [("", True), (">= 2x", False)]
    assert figures.line(found[1]) == "a, bytes: 1.0x (MISSED: >= 2x)"


def test_every_script_runs_and_those_that_missed_are_named_at_the_end(tmp_path, monkeypatch, capfd):
    for name, status in (("slow", 1), ("dead", 3), ("good", 0)):
        (tmp_path / f"{name}.py").write_text(f"print('of {name}')\nraise SystemExit({status})")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "SCRIPTS", ("slow", "dead", "good"))
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    with pytest.raises(SystemExit) as ended:
        figures.main()
    assert ended.value.code == 1
    said = capfd.readouterr().out
    assert "of slow" in said and "of good" in said
    assert said.splitlines()[-1] == "Missed something: slow, dead."
