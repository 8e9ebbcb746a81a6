"""The scripts of benchmarks/: each starts, those of `make benchmark` run in small sizes, and none stops
the others.
"""

import json
import runpy
import sys
from dataclasses import asdict
from functools import partial

import figures
import llmcompressor  # noqa: F401 # the children below have it already
import pytest
import torch
from commands import ROOT, captured
from figures import Figure
from forked import forked

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
    """Bytes are compared there, too."""
    words = [sys.executable, FOLDER / f"{script}.py", "--small", "--json"]
    done = captured(words, status=0)
    lines = done.stdout.splitlines()
    assert lines
    for line in lines:
        figure = Figure(**json.loads(line))
        assert figure.at_any_size or not figure.expected, line


def test_a_part_that_ends_in_an_error_is_red_and_the_others_go_on():
    def broken():
        yield GOOD
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    parts = {"a": broken, "b": lambda: [GOOD], "c": broken}
    first, red, last = figures.measured(parts, only=["a", "b"])
    assert first == last == GOOD and not red.met
    assert red.measured == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_every_script_runs_and_what_is_missed_stands_at_the_end(tmp_path, monkeypatch, capsys):
    slow = Figure(what="speed", measured="1.0x", expected=">= 2x", met=False)
    for name, figure, status in (("slow", slow, 1), ("dead", GOOD, 3), ("good", GOOD, 0)):
        text = f"print({json.dumps(asdict(figure))!r})\nraise SystemExit({status})"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "SCRIPTS", ("slow", "dead", "good"))
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    with pytest.raises(SystemExit) as ended:
        figures.main()
    assert ended.value.code == 1
    lines, _, missed = capsys.readouterr().out.partition("2 figures")
    assert lines.count("w: 1 (met: > 0)") == 2
    assert missed.splitlines()[1:] == [
        "speed: 1.0x (MISSED: >= 2x)",
        "dead, the whole part: exit status 3 (MISSED: no error)",
    ]
