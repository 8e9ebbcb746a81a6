"""Programs that a model wrote: a right one passes, no other does, and in bubblewrap none can do
harm.
"""

import os
import shutil
import socket
import subprocess
import sys

import pytest
from commands import ROOT
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.measure import model_code
from keepmtp.validate.measure.model_code import fence, load, passes
from tables import table

FINE = "def f(a):\n    import math\n    return math.sqrt(a)\n"
TEST = "def check(candidate):\n    assert candidate(4) == 2\ncheck(f)\n"
needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


@pytest.fixture(params=["bubblewrap", "open"])
def words(request) -> tuple[str, ...]:
    """The words in front of a program's: with bubblewrap where it is installed, and without."""
    if request.param == "open":
        return ()
    return fence() or pytest.skip("bubblewrap is not installed")


@pytest.fixture
def machine(monkeypatch):
    """What was found on this machine is forgotten before and after."""
    fence.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    fence.cache_clear()


def test_a_right_program_passes_and_a_wrong_one_does_not(words):
    helper = (
        "import collections\ndef twice(a): return collections.Counter({'é': (a, a)}), "
        "frozenset([a]), None\n"
    )
    asks = "assert twice(a=f(9)) == ({'é': (3, 3)}, {3}, None)\n"
    assert passes(f"{helper}print('x'){chr(10)}{FINE}", TEST + asks, words)
    assert not passes("def f(a): return a", TEST, words)


def test_what_lm_eval_asks_for():
    code_eval = load("code_eval")
    assert code_eval.compute([TEST], [[FINE]], [1]) == ({"pass@1": 1.0}, None)
    assert code_eval.compute([TEST], [["def f(a): retur"]], [1]) == ({"pass@1": 0.0}, None)


def test_numbers_of_numpy_are_numbers():
    program = (
        "import numpy\ndef f(a): return numpy.int64(a), [numpy.float32(0.5)], numpy.bool_(True), "
        "numpy.mean([a])\n"
    )
    assert passes(program, "assert f(2) == (2, [0.5], True, 2.0)", ())


FALSE = table("validate/measure/false_programs")


@pytest.mark.parametrize("program", FALSE.values(), ids=FALSE)
def test_no_program_can_say_that_it_passed(program):
    assert not passes(program, TEST, ())


def test_the_test_is_nowhere_in_the_programs_process():
    """Not in frames, objects or, where bubblewrap does not hide it, the memory. The pattern does
    not match itself.
    """
    program = """
import gc, re, sys
SOUGHT = "[r]emar[k]"
def f():
    frame, texts = sys._getframe(), [each for each in gc.get_objects() if isinstance(each, str | dict)]
    while frame:
        texts.append({**frame.f_locals, **frame.f_globals})
        frame = frame.f_back
    memory = open("/proc/self/mem", "rb", 0)
    found = bool(re.search(SOUGHT, ascii(texts)))
    for line in open("/proc/self/maps"):
        start, end, rights = re.match("(.*)-(.*?) (.*?) ", line).groups()
        if rights.startswith("rw"):
            memory.seek(int(start, 16))
            found |= bool(re.search(SOUGHT.encode(), memory.read(int(end, 16) - int(start, 16))))
    return found
"""
    assert passes(program, "assert f() is False, 'remark'", ())
    assert passes(f"{program}{'remark'!r}\n", "assert f() is True", ()), "it would be found"


def test_a_program_without_an_end_is_ended(words, monkeypatch):
    monkeypatch.setattr(model_code, "WALL_SECONDS", 1.0)
    assert not passes("import time\ndef f(a): time.sleep(600)", TEST, words)


def test_what_a_program_gets(words, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = f"""
import os, resource
def limits(): return [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("CPU", "FSIZE", "NPROC")]
def environment(): return set(os.environ)
def home(): return os.path.exists(os.environ["HOME"]) and os.listdir(os.environ["HOME"])
def terminal():
    try: return open("/dev/tty") and "one"
    except OSError: return os.getsid(0) != {os.getsid(0)}
"""
    test = """
assert limits() == [(3, 3), (0, 0), (0, 0)]
assert environment() <= {"PATH", "HOME", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LC_CTYPE", "PWD"}
assert not home() and terminal() is True
"""
    assert passes(program, test, words)


HARM = """
import os, socket
DEEDS = {
    "write": lambda: open(KEPT, "w"),
    "remove": lambda: os.remove(KEPT),
    "read": lambda: open(SECRET),
    "kill": lambda: os.kill(PID, 9),
    "connect": lambda: socket.create_connection(("127.0.0.1", PORT), 1),
    "processes": lambda: os.listdir("/proc"),
}
def done():
    found = []
    for name, deed in DEEDS.items():
        try: deed()
        except OSError: continue
        found.append(name)
    return found
"""


@needs_bwrap
def test_nothing_outside_is_in_reach_of_bubblewrap(tmp_path):
    """A folder is shown to it on purpose, read only like those that it sees; a secret is not in
    it.
    """
    (tmp_path / "secret").write_text("hf_secret")
    folder = tmp_path / "shown"
    folder.mkdir()
    kept = folder / "kept"
    kept.write_text("as it was")
    before = os.stat(kept)
    words = [*fence()[:-2], "--ro-bind", str(folder), str(folder), *fence()[-2:]]
    with (
        subprocess.Popen(["/bin/sleep", "60"]) as other,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        port = server.getsockname()[1]
        given = (
            f"KEPT, SECRET, PID, PORT = {str(kept)!r}, {str(tmp_path / 'secret')!r}, "
            f"{other.pid}, {port}\n"
        )
        try:
            assert passes(given + HARM, "assert done() == []", words)
            assert other.poll() is None
        finally:
            other.kill()
    after = os.stat(kept)
    assert (after.st_mode, after.st_mtime_ns, kept.read_text()) == (
        before.st_mode,
        before.st_mtime_ns,
        "as it was",
    )
    assert os.listdir(folder) == ["kept"]


def test_the_page_says_what_is_open_without_bubblewrap():
    page = (ROOT / "docs" / "tasks.md").read_text().partition("## Programs that a model wrote")[2]
    rows = {
        line.split(" | ")[0].strip("| "): line
        for line in page.splitlines()
        if line.count("**") == 2
    }
    assert set(rows) == {"network", "files", "processes", "verdict"} and "--network none" in page


def test_a_machine_without_a_bubblewrap_that_works(machine, tmp_path):
    machine.setenv("PATH", str(tmp_path))
    assert fence() == ()
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    fence.cache_clear()
    assert fence() == ()


def test_a_machine_that_starts_no_process_judges_nothing(machine):
    machine.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        RecipeError, match=r"a process must start for each program; got .*Run the command again"
    ):
        passes(FINE, TEST, ())
