"""The fuzzer: one changed checkpoint, recipe, result, log, prompt or name after the other, until
the time is over.

    python tests/fuzz/campaign.py --seconds 60            a fresh seed, printed
    python tests/fuzz/campaign.py --seed 7 --case 1234    one case again, with what it printed

In: seconds, a seed. Out: how many cases of each kind were tried and misbehaved, and each failure
with seed, number and the fewest edits that still fail; exit status 1 if there is one.

A case misbehaves if its exit status is not 0, 1, 2 or 3, if there is a traceback, if it takes more
than ten seconds or a gigabyte, if it prints raw control characters, if it passes what safetensors
refuses, if a file other than its outputs changes, or if an output has a secret that lies beside.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import chdir
from dataclasses import replace
from itertools import count
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]
if __name__ == "__main__":
    # Before anything is imported: nothing outside this machine is asked, and one thread computes.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "dumb"}

import canary  # noqa: E402
import corpus  # noqa: E402
import kinds  # noqa: E402
import planted  # noqa: E402
import verbs  # noqa: E402
import warm  # noqa: E402
from case import Case  # noqa: E402
from edits import UNEDITABLE  # noqa: E402
from judged import Verdict, judged  # noqa: E402


def tried(case: Case) -> Verdict:
    """Make the case's folder, and call the command on it."""
    with tempfile.TemporaryDirectory(prefix="keepmtp-case-") as name:
        room = Path(name)
        folder = room / case.name
        canary.guard(room)
        corpus.copied(corpus.folder(case.base), folder)
        words = tuple(word.replace("{}", str(folder)) for word in case.words)
        if case.begun:
            killed = planted.interrupted(case.begun, lambda: os._exit(0))
            with chdir(room):
                judged(words, folder, reads_weights=False, call=killed)
        for edit in case.edits:
            try:
                edit.do(folder)
            except UNEDITABLE:
                continue
        call = case.call or warm.main
        if case.changes:
            call = planted.interrupted(case.changes, lambda: planted.change(Path(words[1])))
        before = canary.seen(room)
        with chdir(room):
            verdict = judged(words, folder, reads_weights=case.reads_weights, call=call)
        beside = (*canary.left(case, room, before), *case.also(case, folder, verdict.status))
        return replace(verdict, faults=(*verdict.faults, *beside))


def shrunk(case: Case) -> Case:
    """The case with the fewest edits that still misbehaves."""
    for number in reversed(range(len(case.edits))):
        smaller = case.without(number)
        if smaller.edits and tried(smaller).faults:
            case = smaller
    return case


def campaign(
    seconds: float,
    seed: int,
    *,
    chosen: Collection[str] = tuple(kinds.KINDS),
) -> int:
    """Run the cases of these kinds until the time is over; returns how many misbehaved."""
    print(f"KEEPMTP_FUZZ_SEED={seed}", flush=True)
    counts = Counter()
    bad = Counter()
    start = time.monotonic()
    for number in count():
        if time.monotonic() - start >= seconds:
            break
        if kinds.kind_of(number) not in chosen:
            continue
        case = kinds.make(seed, number)
        verdict = tried(case)
        counts[case.kind] += 1
        if verdict.faults:
            bad[case.kind] += 1
            _say(f"case {number}: {'; '.join(verdict.faults)}\n    {shrunk(case)}")
    for kind in counts:
        print(f"{kind:16} {counts[kind]:6} tried {bad[kind]:5} misbehaved")
    print(
        f"{'all':16} {counts.total():6} tried {bad.total():5} misbehaved in "
        f"{time.monotonic() - start:.0f} s"
    )
    return bad.total()


def repeat(seed: int, number: int) -> int:
    """One case again, with what it printed."""
    case = kinds.make(seed, number)
    verdict = tried(case)
    ended = "; ".join(verdict.faults) or "as promised"
    _say(f"{case}\nstatus {verdict.status}: {ended}\n\n{verdict.printed}")
    return bool(verdict.faults)


def _say(words: str) -> None:
    print(words.encode("ascii", "backslashreplace").decode(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", type=int, default=None, help="run this one alone")
    parser.add_argument("--kinds", default=",".join(kinds.KINDS), help="these alone, with commas")
    given = parser.parse_args()
    fresh = random.SystemRandom().randrange(2**32)
    seed = given.seed
    if given.seed is None:
        seed = int(os.environ.get("KEEPMTP_FUZZ_SEED") or fresh)
    with tempfile.TemporaryDirectory(prefix="keepmtp-fuzz-") as scratch:
        python = verbs.no_server(Path(scratch) / "python")
        os.environ |= {"HOME": scratch, "TMPDIR": scratch, "VLLM_PYTHON": str(python)}
        tempfile.tempdir = scratch
        if given.case is not None:
            sys.exit(repeat(seed, given.case))
        sys.exit(bool(campaign(given.seconds, seed, chosen=given.kinds.split(","))))


if __name__ == "__main__":
    main()
