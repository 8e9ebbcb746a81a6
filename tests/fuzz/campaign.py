"""The fuzzer: one changed checkpoint, recipe or result after the other, until the time is over.

    python tests/fuzz/campaign.py --seconds 60            a fresh seed, printed
    python tests/fuzz/campaign.py --seed 7 --case 1234    one case again, with what it printed

In: seconds, a seed. Out: how many cases of each kind were tried and misbehaved, and each failure with seed, number and
the fewest edits that still fail; exit status 1 if there is one.

A case misbehaves if its exit status is not 0, 1, 2 or 3, if there is a traceback, if it takes more than ten seconds or
a gigabyte, if it prints raw control characters, or if it passes what safetensors refuses.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import chdir
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]
if __name__ == "__main__":
    # Before anything is imported: nothing outside this machine is asked, and one thread computes.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "dumb"}

import kinds  # noqa: E402
import warm  # noqa: E402
from edits import UNEDITABLE  # noqa: E402
from judged import Verdict, judged  # noqa: E402
from kinds import Case  # noqa: E402


def copied(source: Path, target: Path) -> None:
    """A copy of a base, by hard links."""
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def tried(case: Case) -> Verdict:
    """Make the case's folder, and call the command on it."""
    import corpus

    with tempfile.TemporaryDirectory(prefix="keepmtp-case-") as room:
        folder = Path(room) / "in"
        copied(corpus.folder(case.base), folder)
        for edit in case.edits:
            try:
                edit.do(folder)
            except UNEDITABLE:
                continue
        words = tuple(word.replace("{}", str(folder)) for word in case.words)
        with chdir(room):
            verdict = judged(words, folder, reads_weights=case.reads_weights, call=warm.main)
    return verdict


def shrunk(case: Case) -> Case:
    """The case with the fewest edits that still misbehaves."""
    for number in reversed(range(len(case.edits))):
        smaller = case.without(number)
        if smaller.edits and tried(smaller).faults:
            case = smaller
    return case


def campaign(seconds: float, seed: int, *, first: int = 0, most: int = 10**9, log: Path | None = None) -> int:
    """Run cases until the time is over; returns how many misbehaved."""
    print(f"KEEPMTP_FUZZ_SEED={seed}", flush=True)
    counts: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    start = time.monotonic()
    number = first
    while time.monotonic() - start < seconds and number - first < most:
        case = kinds.make(seed, number)
        verdict = tried(case)
        counts[case.kind] += 1
        if verdict.faults:
            bad[case.kind] += 1
            print(f"case {number}: {'; '.join(verdict.faults)}\n    {shrunk(case)}", flush=True)
        if log is not None:
            row = {"case": number, "kind": case.kind, "status": verdict.status, "faults": verdict.faults}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
        number += 1
    for kind in kinds.KINDS:
        print(f"{kind:16} {counts[kind]:6} tried {bad[kind]:5} misbehaved")
    print(f"{'all':16} {counts.total():6} tried {bad.total():5} misbehaved in {time.monotonic() - start:.0f} s")
    return bad.total()


def repeat(seed: int, number: int) -> int:
    """One case again, with what it printed."""
    case = kinds.make(seed, number)
    verdict = tried(case)
    print(f"{case}\nstatus {verdict.status}: {'; '.join(verdict.faults) or 'as promised'}\n")
    print(verdict.printed.encode("ascii", "backslashreplace").decode())
    return bool(verdict.faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", type=int, default=None, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--most", type=int, default=10**9, help="stop after so many cases")
    parser.add_argument("--log", type=Path, default=None, help="a JSON line for each case")
    given = parser.parse_args()
    fresh = random.SystemRandom().randrange(2**32)
    seed = int(os.environ.get("KEEPMTP_FUZZ_SEED") or fresh) if given.seed is None else given.seed
    if given.case is not None:
        sys.exit(repeat(seed, given.case))
    sys.exit(bool(campaign(given.seconds, seed, first=given.first, most=given.most, log=given.log)))


if __name__ == "__main__":
    main()
