"""How the command ends: its status, and one sentence where something went wrong."""

import errno
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GLM, KEEPMTP, captured, keepmtp, ran, refused
from keepmtp.cli.exits import refusal_of
from keepmtp.cli.options import chosen_gpus
from processes import until

MODEL = str(GLM)
RUN = "from keepmtp.cli import exits\nexits.run({command}, how_to_go_on='Do it again')\n"

# `keepmtp quantize`, with a question in the place of its plan.
ASKING = """
import sys, typer
from keepmtp import pipeline
from keepmtp.cli import main
pipeline.plan_for = lambda *_, **__: typer.confirm("Go on?")
sys.argv = ["keepmtp", "quantize", "tiny-glm4-moe"]
main.main()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return captured([sys.executable, "-c", code])


# --- what a person can mend: 2, and a sentence ----------------------------------------------------


def test_a_repository_without_a_network(tmp_path):
    refused("check org/offline", says="org/offline", cwd=tmp_path, HF_HUB_OFFLINE="1")


def test_a_file_where_a_folder_is_needed(tmp_path):
    (tmp_path / "file").write_text("")
    refused("quantize tiny-glm4-moe --out file/sub/out", says="file/sub", cwd=tmp_path)


@pytest.mark.full
def test_a_home_folder_in_an_option(tmp_path):
    """A shell leaves the `~` of `--source=~/x`, and of one in quotes."""
    home = tmp_path / "home"
    shutil.copytree(MODEL, home / "mine")
    for words in (
        "plan tiny-glm4-moe --source=~/mine",
        "plan tiny-glm4-moe --source ~/mine",
        "quantize tiny-glm4-moe --source=~/mine --out=~/made/out",
    ):
        ran(words, cwd=tmp_path, HOME=str(home))
    assert (home / "made" / "out").is_dir() and [*tmp_path.iterdir()] == [home]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "command",
    [
        *(f"{verb} report.json" for verb in ("eval --only gates", "card", "check")),
        "publish report.json --repo org/name",
    ],
)
def test_a_link_to_itself(command, tmp_path):
    (tmp_path / "report.json").symlink_to(tmp_path / "report.json")
    done = keepmtp(command, cwd=tmp_path, status=2)
    assert "Traceback" not in done.stderr, done.stderr
    assert "report.json" in done.stderr and done.stderr.count("error: ") == 1


def test_a_disk_that_is_full():
    with open("/dev/full", "w") as full:
        done = subprocess.run([KEEPMTP, "ls"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "its disk must have room; got No space left" in done.stderr


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
    raising = "import httpx\ndef f(): raise httpx.ReadTimeout('slow')\n"
    done = python(raising + RUN.format(command="f"))
    says = "got slow. Check the network, and run the same command again.\n"
    assert (done.returncode, done.stderr) == (2, f"error: the network must answer; {says}")


@pytest.mark.full
def test_one_hostile_folder_does_not_end_a_batch(tmp_path):
    shutil.copytree(MODEL, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("[]")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    done = keepmtp(f"check ./nope loop broken {MODEL}", cwd=tmp_path, status=2)
    assert "Traceback" not in done.stderr
    assert f"check passed {MODEL}" in done.stdout and "must be a JSON object" in done.stdout
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["./nope", "loop"]
    ran(f"check broken {MODEL}", status=1, cwd=tmp_path)


def test_a_gpu_by_its_name_in_a_shop():
    names = ["H100", "RTX 4090", "5090", "NVIDIA B200", "sm_90", "A100", "GeForce RTX 3090"]
    assert chosen_gpus(names) == ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]


# --- a defect: 70, and a traceback ----------------------------------------------------------------


@pytest.mark.parametrize(
    "error", ["KeyError('x')", "ValueError('x')", "AssertionError()", "RecursionError()"]
)
def test_a_defect_has_a_traceback_and_a_status_of_its_own(error):
    done = python(f"def f(): raise {error}\n{RUN.format(command='f')}")
    assert done.returncode == 70 and "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: a defect of keepmtp 0.")


# --- stopped from outside -------------------------------------------------------------------------


each_signal = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def signalled(code: str, folder: Path, number: signal.Signals) -> tuple[int, str]:
    """The status of a process that gets a signal when the file `begun` is there, and its words."""
    running = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=folder
    )
    until((folder / "begun").exists, seconds=600, by=running)
    running.send_signal(number)
    _, said = running.communicate(timeout=55)
    return running.returncode, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_finalizer_is_not_lost(number):
    """Python drops what is raised there, as in the callback that ends an import."""
    late = f"""
import os, time
class Late:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})
        for _ in range(1000): pass
"""
    command = "lambda: (Late() is None, time.sleep(20), print('went on'))"
    done = python(late + RUN.format(command=command))
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr.startswith("stopped by ") and done.stderr.count("\n") == 1


@each_signal
def test_a_signal_while_python_leaves_is_not_an_error_of_a_library(number, tmp_path):
    late = "lambda: (open('begun', 'w').close(), time.sleep(60))"
    code = f"import atexit, time\natexit.register({late})\n" + RUN.format(command="lambda: exit(0)")
    assert signalled(code, tmp_path, number) == (-number, "")


@pytest.mark.full
def test_a_reader_that_went_away_is_no_error():
    for words in ("ls", "ls models", "plan tiny-glm4-moe", f"check {MODEL}"):
        reading, writing = os.pipe()
        os.close(reading)
        line = [KEEPMTP, *words.split()]
        done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert (done.returncode, done.stderr) == (141, ""), words


def test_ctrl_c_at_a_question():
    leader, follower = pty.openpty()
    os.write(leader, b"\x04")
    done = captured([sys.executable, "-c", ASKING], stdin=follower, status=130)
    assert "stopped by Ctrl-C" in done.stderr, done.stderr


# --- completion -----------------------------------------------------------------------------------


def test_a_shell_completes_verbs_and_options():
    shown = ran("--show-completion bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_KEEPMTP_COMPLETE=complete_bash" in shown
    for words, wanted in (("qu", "quantize"), ("plan --so", "--source")):
        place = {"COMP_WORDS": f"keepmtp {words}", "COMP_CWORD": str(len(words.split()))}
        assert wanted in ran("", _KEEPMTP_COMPLETE="complete_bash", **place).split()
