"""What the scripts of `make benchmark` share, and the program that runs them all.

    python benchmarks/figures.py [--small]     each script below, whatever the one before it did

In: the parts of a script, by name. Out: a line for each figure when it is measured, or its JSON with
--json; after the last, what has missed its target. Exit status 1 if anything has. With --small each
part has sizes that take seconds, and speed has no target: make test-all runs it, so that no script
breaks unseen.

Easy to get wrong: a part that ends in an error has missed its target, and the other parts go on. So
it may raise but not exit. And a target is a bound that held in every run on a quiet machine: a
script says how far its figures were apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

SCRIPTS = ("packing", "writer", "values", "dryload", "calibrating", "ranks")
FOLDER = Path(__file__).parent


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


Part = Callable[[], Iterable[Figure]]
# A part of a script: its folder for what it writes, and whether its sizes are small.
SizedPart = Callable[..., Iterable[Figure]]


def measured(parts: Mapping[str, Part], only: list[str]) -> Iterator[Figure]:
    """The figures of the parts that were asked for. A part that ends in an error is a figure, and
    the others go on.
    """
    for name, part in parts.items():
        if only and name not in only:
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield from part()
        # Errors of PyTorch, refusals of keepmtp, a child or a file that is not as it must be.
        except (RuntimeError, ValueError, LookupError, AssertionError, OSError) as error:
            yield failed(name, f"{type(error).__name__}: {error}".splitlines()[0][:300])


def failed(part: str, got: str) -> Figure:
    """What stands for a part that did not end well."""
    return Figure(
        part=part,
        what="the whole part",
        measured=got,
        expected="no error",
        met=False,
        at_any_size=True,
    )


def printed(figures: Iterable[Figure], *, as_json: bool) -> list[Figure]:
    """All figures, each of them printed when it comes."""
    found = []
    for figure in figures:
        found.append(figure)
        print(json.dumps(asdict(figure)) if as_json else line(figure), flush=True)
    return found


def line(figure: Figure) -> str:
    """A figure, its target, and whether it is met."""
    text = f"{figure.what}: {figure.measured}"
    if figure.part:
        text = f"{figure.part}, {text}"
    if not figure.expected:
        return text
    return f"{text} ({'met' if figure.met else 'MISSED'}: {figure.expected})"


def in_small(figure: Figure) -> Figure:
    """Of small sizes, speed says nothing."""
    return figure if figure.at_any_size else replace(figure, expected="", met=True)


def run(about: str | None, parts: Mapping[str, SizedPart]) -> None:
    """The program of a script: run its parts, print the figures, exit."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each figure")
    parser.add_argument("--small", action="store_true", help="seconds, and no target for speed")
    parser.add_argument(
        "--only", action="append", default=[], choices=[*parts], help="a part; may be given again"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keepmtp-benchmark-") as folder:
        calls = {
            name: partial(part, Path(folder), small=chosen.small) for name, part in parts.items()
        }
        figures = measured(calls, chosen.only)
        if chosen.small:
            figures = map(in_small, figures)
        missed = [figure for figure in printed(figures, as_json=chosen.json) if not figure.met]
    if not chosen.json:
        summarize(missed)
    sys.exit(bool(missed))


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


def summarize(missed: list[Figure]) -> None:
    """The last words: what has missed its target."""
    print(f"\n{len(missed)} figures have missed their targets." if missed else "\nNothing missed.")
    for figure in missed:
        print(line(figure))


def of_script(name: str, words: list[str]) -> Iterator[Figure]:
    """What a script measures, when it does. It runs to its end, whatever it misses."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", *words]
    is_met = True
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        for said in script.stdout:
            figure = Figure(**json.loads(said))
            is_met &= figure.met
            yield figure
    if script.returncode and is_met:
        yield failed(name, f"exit status {script.returncode}")


def main() -> None:
    """Run every script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="seconds, and no target for speed")
    words = ["--small"] * parser.parse_args().small
    # Packages that are measured log to standard output, also while they are imported. Without its
    # log, llm-compressor's GPTQ ends in an error (0.14.0.1 logger.py), so that one has a level.
    os.environ.pop("LLM_COMPRESSOR_LOG_DISABLED", None)
    os.environ.update(
        LLM_COMPRESSOR_LOG_LEVEL="CRITICAL",
        COMPRESSED_TENSORS_LOG_DISABLED="true",
        TQDM_DISABLE="1",
    )
    missed = []
    for name in SCRIPTS:
        print(f"\n{name}.py", flush=True)
        figures = printed(of_script(name, words), as_json=False)
        missed += [figure for figure in figures if not figure.met]
    summarize(missed)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
