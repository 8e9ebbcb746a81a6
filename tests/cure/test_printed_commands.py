"""Each command that `keepmtp check` prints for a finding works as it is pasted, and cures that finding.

In: every broken checkpoint that the static check flags. Out: the commands of its findings, run; RELEASE alone is
filled in. `print_share` counts them: `python tests/cure/test_printed_commands.py` from the checkout.
"""

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import releases
from broken import BROKEN
from checkpoint_files import write
from cures import CURED, GRAFTED
from dry_corpus import DRY, DryCase
from good import released
from keepmtp.checkpoints.source import open_source
from keepmtp.cli import main
from keepmtp.cli.findings import pasted
from keepmtp.cure.graft_refusals import refuse_another_model
from keepmtp.recipes.errors import KeepMTPError
from typer.testing import CliRunner, Result

STATIC = [case for case in DRY if "both" in case.by and (case.tp, case.num_drafts) == (1, 1)]
# One cause, seen twice by headers; what is printed for the others cures all of it.
CASES = {case.name: case for case in (*BROKEN, *STATIC)}
VERBS = {case.name: "fix" for case in CURED} | {case.name: "graft" for case in GRAFTED}


class Pasted(NamedTuple):
    """A command that was printed: its verb, how it ended, and the findings that it was printed for and that stay."""

    verb: str
    ended: Result
    stay: set[tuple[str, str]]


def run(*words: str) -> Result:
    return CliRunner().invoke(main.app, words)


def found(folder: Path) -> list[dict]:
    return json.loads(run("check", str(folder), "--json").stdout)["findings"]


@cache
def _release(model: str, place: Path) -> Path:
    return write(place / "releases" / model, released(model))


def release_of(folder: Path, place: Path) -> Path:
    """The release that a checkpoint was made from, by graft's own comparison."""
    for model in releases.MODELS:
        release = _release(model, place)
        try:
            refuse_another_model(open_source(folder), open_source(release))
        except KeepMTPError:
            continue
        return release
    raise LookupError(folder)


def paste_all(case: DryCase, place: Path) -> tuple[list[dict], list[Pasted]]:
    """The findings of a case, and its commands, each run where NEW is not there yet."""
    folder = write(place / f"case {sorted(CASES).index(case.name)}" / "it's", case.build())
    findings = found(folder)
    printed: dict[str, set[tuple[str, str]]] = {}
    for finding in findings:
        for command in pasted(finding["cure"]):
            if command.startswith("keepmtp "):
                printed.setdefault(command, set()).add((finding["rule"], finding["where"]))
    done = []
    for number, (command, meant) in enumerate(printed.items()):
        new = folder.parent / f"NEW{number}"
        words = {"NEW": str(new), "RELEASE": str(release_of(folder, place)) if "RELEASE" in command else ""}
        _, verb, *rest = (words.get(word, word) for word in shlex.split(command))
        ended = run(verb, *rest)
        left = {(each["rule"], each["where"]) for each in found(new)} if new.is_dir() else meant
        done.append(Pasted(verb, ended, meant & left))
    return findings, done


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pasted")


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", "/nowhere")


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_works_as_pasted(name: str, place: Path):
    findings, done = paste_all(CASES[name], place)
    for each in done:
        assert each.stay == set(), (each.verb, each.ended.output)
        assert each.ended.exit_code == (1 if len(done) > 1 else 0), each.ended.output
    if verb := VERBS.get(name):
        assert verb in {each.verb for each in done}
        errors = [each for each in findings if each["severity"] == "error"]
        assert all(any(text.startswith("keepmtp ") for text in pasted(each["cure"])) for each in errors), errors


def print_share() -> None:
    """How many flagged cases there are, and for how many a printed command works as pasted."""
    os.environ["VLLM_PYTHON"] = "/nowhere"
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        for case in CASES.values():
            findings, done = paste_all(case, Path(folder))
            counts["flagged"] += bool(findings)
            works = [each for each in done if not each.stay and each.ended.exit_code in (0, 1)]
            counts["with a command"] += bool(done)
            counts["works as pasted"] += bool(done) and len(works) == len(done)
    print(dict(counts))


if __name__ == "__main__":
    print_share()
