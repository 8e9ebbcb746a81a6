"""How the command ends: its status, and one sentence where something went wrong."""

import errno
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import KEEPMTP, ROOT, keepmtp, refused
from keepmtp.cli.exits import refusal_of
from keepmtp.cli.options import chosen_gpus

MODEL = str(ROOT / "models" / "tiny-glm4-moe")
RUN = "from keepmtp.cli import exits\nexits.run({command}, how_to_go_on='Do it again')\n"

# `keepmtp quantize`, with something else in the place of its plan.
WAITING = """
import sys, time
from keepmtp import pipeline
from keepmtp.cli import main

def wait(*words, **kept):
    {doing}

pipeline.plan_for = wait
sys.argv = ["keepmtp", "quantize", "tiny-glm4-moe"]
main.main()
"""


def python(code: str, **kept) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kept)


# --- what a person can mend: 2, and a sentence ----------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "place",
    [
        "./nope",
        "foo/bar baz",
        "foo/bar/baz",
        "/nowhere/at/all",
        "..",
        "a" * 300,
        "-/-",
        "org/offline",
    ],
)
def test_a_place_without_a_checkpoint(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("check --", place, says=place, cwd=tmp_path)


@pytest.mark.full
def test_a_home_folder_in_an_option(tmp_path):
    """A shell leaves the `~` of `--source=~/x`, and of one in quotes."""
    (tmp_path / "home").mkdir()
    shutil.copytree(MODEL, tmp_path / "home" / "mine")
    home = str(tmp_path / "home")
    for words in ("--source=~/mine", "--source ~/mine"):
        done = keepmtp(f"plan tiny-glm4-moe {words} --json", cwd=tmp_path, HOME=home)
        assert done.returncode == 0, done.stderr
    words = "quantize tiny-glm4-moe --source=~/mine --out=~/made/out"
    assert keepmtp(words, cwd=tmp_path, HOME=home).returncode == 0
    assert (tmp_path / "home" / "made" / "out").is_dir() and [
        each.name for each in tmp_path.iterdir()
    ] == ["home"]


def test_a_file_where_a_folder_is_needed(tmp_path):
    (tmp_path / "file").write_text("")
    done = keepmtp("quantize tiny-glm4-moe --out file/sub/out", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.few(2)
@pytest.mark.parametrize("verb", ["report", "gate", "card", "check", "publish"])
def test_a_link_to_itself(verb, tmp_path):
    (tmp_path / "report.json").symlink_to(tmp_path / "report.json")
    repo = ["--repo", "org/name"] if verb == "publish" else []
    done = keepmtp(verb, "report.json", *repo, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "report.json" in done.stderr and done.stderr.count("error: ") == 1


def test_a_disk_that_is_full(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([KEEPMTP, "ls"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "its disk must have room; got No space left" in done.stderr, (
        done.stderr
    )
    assert done.stderr.count("\n") == 1


def test_an_error_of_the_system_names_its_file():
    for name in ["EACCES", "EROFS", "EIO", "ENAMETOOLONG", "ELOOP", "EDQUOT"]:
        number = getattr(errno, name)
        told = str(refusal_of(OSError(number, os.strerror(number), "some/file")))
        assert told.startswith("some/file: ") and f"; got {os.strerror(number)}. " in told, told
    assert "network must answer" in str(refusal_of(ConnectionResetError(errno.ECONNRESET, "reset")))
    assert "enough memory" in str(refusal_of(MemoryError()))


def test_a_library_that_is_not_reached(tmp_path):
    import httpx
    from huggingface_hub.errors import HFValidationError

    assert "network must answer; got no route" in str(refusal_of(httpx.ConnectError("no route")))
    assert "ORG/NAME on the Hub" in str(refusal_of(HFValidationError("bad")))
    raising = (
        "__import__('httpx') and exec('def f(): raise httpx.ReadTimeout(\"slow\")', globals()) or f"
    )
    done = python(f"import httpx\n{RUN.format(command=raising)}")
    assert done.returncode == 2 and done.stderr == "error: the network must answer; got slow. " + (
        "Check the network, and run the same command again.\n"
    )


@pytest.mark.full
def test_one_hostile_folder_does_not_end_a_batch(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    (broken / "config.json").write_text("[]")
    shut = tmp_path / "loop"
    shut.symlink_to(shut)
    done = keepmtp(f"check ./nope {shut} {broken} {MODEL}", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"check passed {MODEL}" in done.stdout and "must be a JSON object" in done.stdout
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["./nope", str(shut)], (
        done.stderr
    )
    assert keepmtp(f"check {broken} {MODEL}").returncode == 1, "findings alone are 1"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("H100", "sm90"),
        ("RTX 4090", "sm89"),
        ("5090", "sm120"),
        ("NVIDIA B200", "sm100"),
        ("sm_90", "sm90"),
    ],
)
def test_a_gpu_by_its_name_in_a_shop(name, means):
    assert chosen_gpus([name]) == [means]


# --- a defect: 70, and a traceback ----------------------------------------------------------------


@pytest.mark.parametrize(
    "error", ["KeyError('x')", "ValueError('x')", "AssertionError()", "RecursionError()"]
)
def test_a_defect_has_a_traceback_and_a_status_of_its_own(error):
    done = python(f"def f(): raise {error}\n{RUN.format(command='f')}")
    assert done.returncode == 70 and "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: a defect of keepmtp 0.")


# --- stopped from outside -------------------------------------------------------------------------


def signalled(code: str, folder: Path, number: signal.Signals) -> tuple[int, str]:
    """The status of a process that gets a signal when the file `begun` is there, and its words."""
    running = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=folder
    )
    while not (folder / "begun").exists():
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(number)
    _, said = running.communicate(timeout=20)
    return running.returncode, said


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda each: str(each),
)
def test_a_stopped_command_says_how_to_go_on(number, status, tmp_path):
    code = WAITING.format(doing="open('begun', 'w').close(); time.sleep(60)")
    ended, said = signalled(code, tmp_path, number)
    assert ended == status, said
    assert said.startswith("stopped by ") and said.count("\n") == 1
    assert said.endswith("The same command goes on where this one stopped.\n")


@pytest.mark.parametrize("stop", ["raise KeyboardInterrupt", "sys.exit(143)"])
def test_a_command_that_is_stopped_when_its_output_is_there_does_not_say_that_it_goes_on(stop):
    """graft, fix and convert judge a folder that is finished; the same command would refuse it."""
    judge = f"def judge():\n    with exits.judging(Path('a b')):\n        {stop}\n"
    code = f"import sys\nfrom pathlib import Path\nfrom keepmtp.cli import exits\n{judge}"
    done = python(code + RUN.format(command="judge"))
    assert done.returncode in (130, 143) and "Do it again" not in done.stderr, done.stderr
    assert (
        "a b is written, and not yet judged" in done.stderr
        and "`keepmtp check 'a b' --gpu sm100`" in done.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_finalizer_is_not_lost(number):
    """Python drops what is raised there, as in the callback that ends an import."""
    late = (
        "import os, time\n"
        "class Late:\n"
        "    def __del__(self):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        for _ in range(1000): pass\n"
    )
    done = python(
        late + RUN.format(command="lambda: (Late() is None, time.sleep(20), print('went on'))")
    )
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr.startswith("stopped by ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_python_leaves_is_not_an_error_of_a_library(number, tmp_path):
    leaving = (
        "import atexit, time\natexit.register(lambda: (open('begun', 'w').close(), "
        "time.sleep(60)))\n"
    )
    code = leaving + RUN.format(command="lambda: exit(0)")
    assert signalled(code, tmp_path, number) == (-number, "")


@pytest.mark.full
def test_a_reader_that_went_away_is_no_error():
    for words in (["ls"], ["ls", "models"], ["plan", "tiny-glm4-moe"], ["check", MODEL]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run([KEEPMTP, *words], stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert (done.returncode, done.stderr) == (141, ""), words


def test_ctrl_c_at_a_question():
    leader, follower = pty.openpty()
    words = [sys.executable, "-c", WAITING.format(doing="__import__('typer').confirm('Go on?')")]
    os.write(leader, b"\x04")
    done = subprocess.run(words, stdin=follower, capture_output=True, text=True)
    assert done.returncode == 130 and "stopped by Ctrl-C" in done.stderr, done.stderr


# --- completion -----------------------------------------------------------------------------------


def test_a_shell_completes_verbs_and_options():
    shown = keepmtp(
        "--show-completion bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    ).stdout
    assert "_KEEPMTP_COMPLETE=complete_bash" in shown
    words = {"_KEEPMTP_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert keepmtp(**words, COMP_WORDS="keepmtp qu").stdout.split() == ["quantize"]
    words["COMP_CWORD"] = "2"
    assert "--source" in keepmtp(**words, COMP_WORDS="keepmtp plan --so").stdout.split()
