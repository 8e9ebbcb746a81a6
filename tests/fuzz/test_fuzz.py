"""A minute of fuzzing with a fresh seed, which is printed; and that the judge of the cases sees each fault.

To repeat a failure: `python tests/fuzz/campaign.py --seed SEED --case NUMBER`. KEEPMTP_FUZZ_SEED=SEED repeats a run,
FUZZ_SECONDS is its length.
"""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import edits
import judged
import kinds
import pytest
from judged import Verdict
from kinds import KINDS


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
    """The verdict on a function in place of the command, under short limits; of a good checkpoint by default."""
    monkeypatch.setattr(judged, "WALL_SECONDS", 2)
    monkeypatch.setattr(judged, "SECONDS", 1)
    monkeypatch.chdir(tmp_path)

    def verdict(call, *, reads_weights: bool = False) -> Verdict:
        return judged.judged((), tmp_path, reads_weights=reads_weights, call=call)

    return verdict


@pytest.mark.parametrize(
    ("call", "status", "fault"),
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
def test_the_judge_sees_each_fault(judge, call, status, fault):
    verdict = judge(call)
    assert verdict.status == status
    assert verdict.faults[-1:] == ((fault,) if fault else ()), verdict


def test_a_call_that_computes_too_long_is_a_hang(judge, monkeypatch):
    monkeypatch.setattr(judged, "WALL_SECONDS", 60)
    verdict = judge(busy)
    assert (verdict.status, verdict.faults) == (-signal.SIGXCPU, ("hang",))


def test_what_a_call_leaves_running_is_ended(judge, tmp_path):
    judge(leaves_a_child)
    time.sleep(1.2)
    assert not (tmp_path / "survived").exists()


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', ""),
        (b'{"__metadata__":[],"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "__metadata__"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.encode("utf-16"), "utf-8"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "dtype"),
    ],
)
def test_a_pass_of_what_safetensors_refuses_is_a_fault(judge, tmp_path, header, why):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    faults = judge(lambda: None, reads_weights=True).faults
    assert not faults if not why else faults[0].startswith("false pass"), faults


def test_a_minute_of_hostile_files_breaks_no_promise(capsys):
    seconds = os.environ.get("FUZZ_SECONDS", "60")
    words = [sys.executable, "-P", str(Path(__file__).with_name("campaign.py")), "--seconds", seconds]
    done = subprocess.run(words, capture_output=True, text=True)
    with capsys.disabled():  # a run that passed can be repeated too
        print(f"\n{done.stdout.partition(chr(10))[0]} {done.stdout.strip().rpartition(chr(10))[2]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-7]) >= len(KINDS)


def test_a_case_is_made_from_its_seed_and_number_alone():
    made = [str(kinds.make(7, number)) for number in range(30)]
    assert made == [str(kinds.make(7, number)) for number in range(30)]
    assert made != [str(kinds.make(8, number)) for number in range(30)]
    assert {case.partition("]")[0].strip("[") for case in made} == set(KINDS)


def test_an_edit_leaves_the_original_alone(tmp_path):
    import campaign
    import corpus

    original = corpus.folder("tiny-qwen3_5")
    before = {path.name: path.read_bytes() for path in original.iterdir()}
    rng = random.Random(0)
    for number in range(50):
        campaign.copied(original, tmp_path / str(number))
        edits.grafted(rng, "config.json", json.loads(before["config.json"])).do(tmp_path / str(number))
        edits.no_file(rng, "model.safetensors").do(tmp_path / str(number))
        edits.mangled(rng, "model.safetensors.index.json", 100).do(tmp_path / str(number))
    assert {path.name: path.read_bytes() for path in original.iterdir()} == before
