"""The fuzzer: hypothesis draws one damaged checkpoint, recipe, result, prompt or name after the
other, until the time is over.

    python tests/fuzz/campaign.py --seconds 60

In: seconds. Out: how many cases of each kind were tried, and of each kind that misbehaves the
smallest case; exit status 1 if there is one. A case that failed is tried first the next time:
hypothesis keeps it in .hypothesis/.

A case misbehaves if its exit status is not 0, 1, 2 or 3, if there is a traceback, if it takes more
than ten seconds or a gigabyte, if it prints raw control characters, if it passes what safetensors
refuses, if a file other than its outputs changes, or if an output has a secret that lies beside.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]
if __name__ == "__main__":
    # Before anything is imported: nothing outside this machine is asked, and one thread computes.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "dumb"}

import corpus  # noqa: E402
import promises  # noqa: E402
import warm  # noqa: E402
from damage import UNEDITABLE, replace  # noqa: E402
from data_files import put_json  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from judged import Verdict, judged  # noqa: E402
from kinds import KINDS, Case, cases  # noqa: E402
from sealed import seal  # noqa: E402
from test_wheels import no_server  # noqa: E402

AT_A_TIME = 5


def tried(case: Case) -> Verdict:
    """Make the case's folder, and call the command on it."""
    with tempfile.TemporaryDirectory(prefix="keepmtp-case-") as name:
        room = Path(name)
        folder = room / case.name
        promises.guard(room)
        corpus.copied(corpus.folder(case.base), folder)
        words = tuple(word.replace("{}", str(folder)) for word in case.words)
        call = warm.main
        with chdir(room):
            if case.begun:
                judged(words, folder, call=at(case.begun, lambda: os._exit(0)))
            _damage(case, folder)
            if case.changes:
                source = Path(words[1])
                call = at(case.changes, lambda: change(source))
            before = promises.seen(room)
            verdict = judged(words, folder, reads_weights=case.reads_weights, call=call)
        verdict.faults.extend(promises.broken(case, room, before, verdict.status))
        return verdict


def at(step: int, do: Callable[[], object]) -> Callable[[], None]:
    """The command, which does this when it comes to a file below an unfinished output for the
    step-th time.
    """
    left = [do, *[lambda: None] * (step - 1)]

    def at_event(event: str, arguments: tuple[object, ...]) -> None:
        if left and event.startswith(("open", "os.")) and ".out.partial/" in str(arguments[0]):
            left.pop()()

    def call() -> None:
        sys.addaudithook(at_event)
        warm.main()

    return call


def change(source: Path) -> None:
    """Write into its last shard."""
    with open(max(source.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (source.parent / "changed").touch()


def _damage(case: Case, folder: Path) -> None:
    for edit in case.edits:
        with suppress(*UNEDITABLE):
            edit.do(folder)
    if case.sealed:
        with suppress(*UNEDITABLE):
            seal(folder)
    if case.changes:  # the base's own files stay
        for path in folder.rglob("*.safetensors"):
            replace(path, path.read_bytes())
    if case.base in corpus.OF["answered"]:
        answers = {}
        for path in (folder / "answers").iterdir():
            if path.is_file() and path.stat().st_size < 2**20:
                answers[path.stem.replace("+", "/")] = path.read_bytes().decode("latin1")
        for checkpoint in (folder, folder / "source"):
            put_json(checkpoint / "answers.json", answers)


def campaign(seconds: float) -> int:
    """Try cases of all kinds in turn until the time is over; returns how many kinds misbehaved."""
    counts: Counter[str] = Counter()
    bad = set[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for kind in KINDS.keys() - bad:  # in another order each time
            if time.monotonic() < end and not _keeps_its_promises(kind, end, counts):
                bad.add(kind)
    for kind, number in counts.items():
        print(f"{kind:16} {number:6} tried{', misbehaves' * (kind in bad)}")
    print(f"{counts.total()} tried, {len(bad)} kinds misbehaved")
    return len(bad)


def _keeps_its_promises(kind: str, end: float, counts: Counter[str]) -> bool:
    """Some cases of a kind; one that fails is made smaller, however long that takes, and printed."""
    failed = []

    @settings(max_examples=AT_A_TIME, deadline=None, suppress_health_check=[*HealthCheck])
    @given(cases(kind))
    def keeps_its_promises(case: Case) -> None:
        if failed or not counts or time.monotonic() < end:  # the first case may be late
            counts[kind] += 1
            faults = tried(case).faults
            failed.extend(faults)
            assert not faults, f"[{kind}] {'; '.join(faults)}"

    try:
        keeps_its_promises()
    except AssertionError as error:
        words = "\n    ".join([str(error), *getattr(error, "__notes__", ())])
        print(words.encode("ascii", "backslashreplace").decode(), flush=True)
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    given_words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keepmtp-fuzz-") as scratch:
        python = no_server(Path(scratch) / "python")
        os.environ |= {"HOME": scratch, "TMPDIR": scratch, "VLLM_PYTHON": str(python)}
        tempfile.tempdir = scratch
        sys.exit(bool(campaign(given_words.seconds)))


if __name__ == "__main__":
    main()
