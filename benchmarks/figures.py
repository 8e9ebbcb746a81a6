"""What the scripts of `make benchmark` share, and the program that runs them all.

    python benchmarks/figures.py [--small]     each script below, whatever the one before it did

In: the parts of a script, by name. Out: a line for each figure when it is measured. Exit status 1 if
one has missed its target. With --small each part has sizes that take seconds, and speed has no
target: make test-all runs it, so that no script breaks unseen.

Easy to get wrong: a part that ends in an error has missed its target, and the other parts go on. So
it may raise but not exit. And a target is a bound that held in every run on a quiet machine: a
script says how far its figures were apart.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SCRIPTS = ("packing", "writer", "values", "dryload", "calibrating", "ranks")
FOLDER = Path(__file__).parent
# Packages that are measured log to standard output, also while they are imported. Without its log,
# llm-compressor's GPTQ ends in an error (0.14.0.1 logger.py), so that one has a level.
QUIET = {
    "LLM_COMPRESSOR_LOG_LEVEL": "CRITICAL",
    "COMPRESSED_TENSORS_LOG_DISABLED": "true",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was measured or compared.

    Attributes:
        part: of the program.
        what: was measured or compared.
        measured: for people.
        expected: what it must be; "" for a figure that nothing is expected of.
        met: whether it is that.
        at_any_size: it must be that in small sizes too: equal bytes, no error.
    """

    part: str = ""
    what: str
    measured: str
    expected: str = ""
    met: bool = True
    at_any_size: bool = False


# A part of a script: its folder for what it writes, and whether its sizes are small.
Part = Callable[..., Iterable[Figure]]


def measured(
    parts: Mapping[str, Part], only: list[str], folder: Path, *, small: bool
) -> Iterator[Figure]:
    """The figures of the parts that were asked for. A part that ends in an error is a figure, and
    the others go on.
    """
    for name in only or parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            for figure in parts[name](folder, small=small):
                if small and not figure.at_any_size:
                    figure = replace(figure, expected="", met=True)
                yield replace(figure, part=name)
        # Errors of PyTorch, refusals of keepmtp, a child or a file that is not as it must be.
        except (RuntimeError, ValueError, LookupError, AssertionError, OSError) as error:
            yield Figure(
                part=name,
                what="the whole part",
                measured=f"{type(error).__name__}: {error}".splitlines()[0][:300],
                expected="no error",
                met=False,
            )


def line(figure: Figure) -> str:
    """A figure, its target, and whether it is met."""
    text = f"{figure.part}, {figure.what}: {figure.measured}"
    if not figure.expected:
        return text
    verdict = "MISSED"
    if figure.met:
        verdict = "met"
    return f"{text} ({verdict}: {figure.expected})"


def run(
    about: str | None, parts: Mapping[str, Part], *, kept: Callable[[Figure], None] | None = None
) -> None:
    """The program of a script: run its parts, print the figures, exit.

    Args:
        about: for --help.
        parts: by name.
        kept: called with each figure of a run that is not small.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="seconds, and no target for speed")
    parser.add_argument("--only", action="append", choices=[*parts], help="a part; repeatable")
    chosen = parser.parse_args()
    all_met = True
    with tempfile.TemporaryDirectory(prefix="keepmtp-benchmark-") as folder:
        for figure in measured(parts, chosen.only or [], Path(folder), small=chosen.small):
            print(line(figure), flush=True)
            all_met = all_met and figure.met
            if kept and not chosen.small:
                kept(figure)
    sys.exit(not all_met)


def output_of(words: list[str], **more: Any) -> str:
    """What a process of its own prints.

    Raises:
        RuntimeError: it ended badly; with the last line that it said, and the whole of it on
            standard error.
    """
    done = subprocess.run(words, capture_output=True, text=True, **more)
    if done.returncode:
        sys.stderr.write(done.stderr[-3000:])
        last = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"exit status {done.returncode} of a process of its own: {last}")
    return done.stdout


def seconds_of_children() -> float:
    """Processor time of all children so far: other work on the machine does not count, and threads
    that wait do not either.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run every script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="seconds, and no target for speed")
    words = []
    if parser.parse_args().small:
        words = ["--small"]
    red = []
    for name in SCRIPTS:
        print(f"\n{name}.py", flush=True)
        script = [sys.executable, str(FOLDER / f"{name}.py"), *words]
        if subprocess.run(script, env=os.environ | QUIET).returncode:
            red.append(name)
    print(f"\nMissed something: {', '.join(red) or 'none'}.")
    sys.exit(bool(red))


if __name__ == "__main__":
    main()
