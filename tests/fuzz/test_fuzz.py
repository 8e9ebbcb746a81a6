"""Some seconds of fuzzing, and that the judge of the cases sees each fault.

FUZZ_SECONDS is its length; a case that failed is tried first the next time.
"""

import os
import shutil
import signal
import struct
import sys
import time
from contextlib import chdir
from pathlib import Path

import judged
import promises
import pytest
from commands import captured
from damage import Bytes, Other, Tree
from data_files import cases
from judged import Verdict
from kinds import Case


def sentence() -> None:
    sys.stderr.write("error: config.json: must be JSON; got nothing. Download it again.\n")
    sys.exit(2)


def forever() -> None:
    time.sleep(60)


def busy() -> None:
    while True:
        pass


def greedy() -> None:
    bytearray(2**31)


def red() -> None:
    sys.stdout.write("\x1b[31mred\x1b[0m\n")


def leaves_a_child() -> None:
    if not os.fork():
        Path("alive").touch()
        time.sleep(1)
        Path("survived").touch()
        os._exit(0)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """The verdict on a function in place of the command, in a second of a processor; of a good
    checkpoint by default.
    """
    monkeypatch.setattr(judged, "SECONDS", 1)
    monkeypatch.chdir(tmp_path)

    def verdict(call, *, reads_weights: bool = False) -> Verdict:
        return judged.judged((), tmp_path, reads_weights=reads_weights, call=call)

    return verdict


@pytest.mark.parametrize(
    "call, status, fault",
    [
        (lambda: None, 0, ""),
        (lambda: sys.exit(1), 1, ""),
        (sentence, 2, ""),
        (lambda: sys.exit(2), 2, "status 2 without a sentence"),
        (lambda: sys.exit(70), 70, "status 70"),
        (forever, -signal.SIGALRM, "hang"),
        (greedy, 99, "memory"),
        (red, 0, "raw '\\x1b' on the terminal"),
        (lambda: {}["gone"], 99, "traceback: KeyError: 'gone' at ?"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM, "killed by SIGTERM"),
    ],
)
def test_the_judge_sees_each_fault(judge, call, status, fault, monkeypatch):
    if call is forever:
        monkeypatch.setattr(judged, "WALL_SECONDS", 1)
    verdict = judge(call)
    assert verdict.status == status
    assert "".join(verdict.faults[-1:]) == fault, verdict


def test_a_call_that_computes_too_long_is_a_hang(judge):
    verdict = judge(busy)
    assert (verdict.status, verdict.faults) == (-signal.SIGXCPU, ["hang"])


def test_what_a_call_leaves_running_is_ended(judge, tmp_path):
    judge(leaves_a_child)
    time.sleep(1.2)
    assert not (tmp_path / "survived").exists()


@cases
def test_a_pass_of_what_safetensors_refuses_is_a_fault(judge, tmp_path, text, encoding, why):
    header = text.encode(encoding)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    faults = judge(lambda: None, reads_weights=True).faults
    assert "".join(faults).startswith("false pass") == bool(why), faults


def writes_beside() -> None:
    Path("beside/new").touch()
    Path("in/config.json").write_bytes(b"{}")


def publishes_a_secret() -> None:
    shutil.copy("beside/secret", "in.out")


@pytest.mark.parametrize(
    "call, faults",
    [
        (lambda: None, set()),
        (lambda: Path("in.out").touch(), set()),
        (writes_beside, {"writes 'beside/new'", "writes 'in/config.json'"}),
        (publishes_a_secret, {"a secret in 'in.out'"}),
    ],
)
def test_a_change_of_what_is_no_output_is_a_fault(call, faults, tmp_path):
    for name in ("in", "beside"):
        (tmp_path / name).mkdir()
    case = Case(base="", edits=(), words=("check",))
    (tmp_path / "in" / "config.json").touch()
    (tmp_path / "beside" / "secret").write_bytes(promises.SECRET)
    before = promises.seen(tmp_path)
    with chdir(tmp_path):
        call()
    assert set(promises.broken(case, tmp_path, before, 0)) == faults


@pytest.mark.parametrize("value, faults", [(1.0, []), (2.0, ["other values in 'a'"])])
def test_what_a_new_folder_has_otherwise_is_a_fault(value, faults, tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    for name, number in (("in/first", 1.0), ("in.out", value)):
        (tmp_path / name).mkdir(parents=True)
        raw = struct.pack("<Q", len(header)) + header + struct.pack("<f", number)
        (tmp_path / name / "model.safetensors").write_bytes(raw)
    case = Case(base="", edits=(), words=("fix", "{}/first"))
    before = promises.seen(tmp_path)
    assert promises.broken(case, tmp_path, before, 0) == faults
    assert promises.broken(case, tmp_path, before, 2) == []


def test_some_hostile_files_break_no_promise(capsys):
    """As many as a few seconds allow; FUZZ_SECONDS is their length."""
    seconds = os.environ.get("FUZZ_SECONDS", "6")
    campaign = str(Path(__file__).with_name("campaign.py"))
    done = captured([sys.executable, "-P", campaign, "--seconds", seconds], status=0)
    in_all = done.stdout.splitlines()[-1]
    with capsys.disabled():
        print(f"\n{in_all}")
    assert int(in_all.split()[0])


@pytest.mark.parametrize(
    "edit",
    [
        Tree("config.json", ("model_type",), "remove", None, ""),
        Other("model.safetensors", "gone"),
        Bytes("model.safetensors.index.json", 9, 1, b"\xe9"),
    ],
)
def test_an_edit_leaves_the_original_alone(edit, tmp_path):
    import corpus

    original = corpus.folder("tiny-qwen3_5")
    before = bytes_of(original)
    promises.guard(tmp_path)
    corpus.copied(original, tmp_path / "in")
    edit.do(tmp_path / "in")
    assert bytes_of(original) == before != bytes_of(tmp_path / "in")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
