"""Programs that a model wrote: a right one passes, and none of the others does anything to this machine."""

import os
from pathlib import Path

import pytest
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.evaluation import sandbox, sandboxed
from keepmtp.validate.evaluation.sandbox import CodeEval, passes

FINE = "def f(a):\n    import math, collections, typing\n    return math.sqrt(a)\n"
TEST = "def check(candidate):\n    assert candidate(4) == 2\ncheck(f)\n"


@pytest.fixture
def kept(tmp_path) -> Path:
    """A file that nobody may touch."""
    path = tmp_path / "kept"
    path.write_text("as it was")
    return path


def test_a_right_program_passes_and_a_wrong_one_does_not():
    assert passes(FINE + TEST) and passes(FINE + "print('FAILED')\n" + TEST)
    assert not passes("def f(a):\n    return a\n" + TEST)
    found, _ = CodeEval().compute([TEST, TEST], [[FINE], ["def f(a): return 2"]], [1])
    assert found == {"pass@1": 1.0}
    assert CodeEval().compute([TEST], [["def f(a): retur"]], [1])[0] == {"pass@1": 0.0}


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(10000): os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import threading; threading.Thread(target=print).start()",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(0, 9)",
        "import os; os.execv('/bin/true', ['true'])",
        "everything = bytearray(8 << 30)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import ctypes; ctypes.string_at(0)",
        "print('FAILED'); exit()",
    ],
)
def test_what_a_program_may_not_do(program):
    assert not passes(program)


@pytest.mark.parametrize(
    "program",
    [
        "open({!r}, 'w').write('gone')",
        "import os; os.truncate({!r}, 0)",
        "import os; os.remove({!r})",
        "import os; os.rename({0!r}, {0!r} + '.moved')",
        "import os; os.chmod({!r}, 0)",
        "import os; os.utime({!r}, (0, 0))",
        "import os; os.symlink({0!r}, {0!r} + '.link')",
        "open({!r} + '.new', 'w').write('mine')",
    ],
)
def test_nothing_is_written_anywhere(program, kept):
    before = os.stat(kept)
    assert not passes(program.format(str(kept)))
    after = os.stat(kept)
    assert (after.st_mode, after.st_mtime_ns, kept.read_text()) == (before.st_mode, before.st_mtime_ns, "as it was")
    assert os.listdir(kept.parent) == ["kept"]


def test_a_program_that_catches_what_stops_it_gets_no_further(kept):
    """It passes, as a program that does nothing does; it has started and written nothing."""
    program = (
        f"import os\nfor do in (os.fork, lambda: open({str(kept)!r}, 'w')):\n    try: do()\n    except OSError: pass"
    )
    assert passes(program) and kept.read_text() == "as it was"


def test_a_program_without_an_end_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "WALL_SECONDS", 0.5)
    assert not passes("while True: pass")
    assert not passes("import time; time.sleep(600)")


def test_its_processor_time_is_limited_for_good():
    line = rf"Max cpu time +{sandboxed.CPU_SECONDS} +{sandboxed.CPU_SECONDS + 1} "
    assert passes(f"import re; assert re.search({line!r}, open('/proc/self/limits').read())")
    assert not passes("import resource; resource.setrlimit(resource.RLIMIT_CPU, (600, 600))")


def test_what_it_can_say_is_limited():
    """Its standard output is closed; of the file that the word is said in it may find the number."""
    flood = "import os\nfor at in range(3, 99):\n    try: os.write(at, b'x' * 99999)\n    except OSError: pass\n"
    done = sandbox._run("word", flood)
    assert done is not None and done.stdout == "x" * sandboxed.OUTPUT_BYTES and not passes(flood)


def test_a_machine_that_cannot_close_a_process_runs_none(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(f"import sys\nsys.stderr.write('Landlock: off')\nsys.exit({sandboxed.CANNOT_CLOSE})\n")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(
        RecipeError, match=r"here: runs programs only in a closed process.*; got Landlock: off\. Score it"
    ):
        CodeEval.refuse_machine("here")
    with pytest.raises(OSError, match="Landlock: off"):
        passes(FINE)
