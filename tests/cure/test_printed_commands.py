"""Each command that `keepmtp check` prints for a finding works as it is pasted, and cures that
finding.

In: every broken checkpoint that the static check flags. Out: the commands of its findings, run;
RELEASE alone is filled in.
"""

import json
import shlex
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from broken import BROKEN
from checkpoint_files import write
from curable import CURED, GRAFTED, release_of
from dry_corpus import DRY, DryCase
from good import llmcompressor, ours
from keepmtp.cli import main
from keepmtp.cli.findings import pasted
from typer.testing import CliRunner, Result

STATIC = [case for case in DRY if "both" in case.by and (case.tp, case.num_drafts) == (1, 1)]
CASES = {case.name: case for case in (*BROKEN, *STATIC)}
VERBS = {case.name: "fix" for case in CURED} | {case.name: "graft" for case in GRAFTED}


class Pasted(NamedTuple):
    """A command that was printed: its verb, how it ended, and the findings that it was printed for
    and that stay.
    """

    verb: str
    ended: Result
    stay: set[tuple[str, str]]


def run(*words: str) -> Result:
    return CliRunner().invoke(main.app, words)


def found(folder: Path, *words: str) -> list[dict]:
    return json.loads(run("check", str(folder), *words, "--json").stdout)["findings"]


def commands(finding: dict) -> list[str]:
    return [each for each in pasted(finding["cure"]) if each.startswith("keepmtp ")]


def paste_all(case: DryCase, place: Path) -> tuple[list[dict], list[Pasted]]:
    """The findings of a case, and its commands, each run where NEW is not there yet."""
    folder = write(place / f"case {sorted(CASES).index(case.name)}" / "it's", case.build())
    findings = found(folder)
    printed = defaultdict(set)
    for finding in findings:
        for command in commands(finding):
            printed[command].add((finding["rule"], finding["where"]))
    done = []
    for number, (command, meant) in enumerate(printed.items()):
        new = folder.parent / f"NEW{number}"
        words = {"NEW": str(new)}
        if "RELEASE" in command:
            words["RELEASE"] = str(release_of(folder, place))
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


def _slow_twice() -> list[object]:
    """The first case of each number at once; the others, which fill more releases, with all
    tests.
    """
    first = {name.partition(" ")[0]: name for name in reversed(VERBS)}.values()
    return [name if name in first else pytest.param(name, marks=pytest.mark.full) for name in CASES]


@pytest.mark.parametrize("name", _slow_twice())
def test_what_is_printed_works_as_pasted(name: str, place: Path):
    findings, done = paste_all(CASES[name], place)
    errors = [each for each in findings if each["severity"] == "error"]
    is_cured = len(done) == 1 and all("keepmtp " in each["cure"] for each in errors)
    for each in done:
        assert each.stay == set(), (each.verb, each.ended.output)
        assert each.ended.exit_code == 0 or not is_cured, each.ended.output
    if verb := VERBS.get(name):
        assert verb in {each.verb for each in done}
        assert [each for each in errors if "keepmtp " not in each["cure"]] == []


def test_a_block_that_sglang_misses_is_grafted(tmp_path):
    checkpoint = ours("glm-4.7", "FP8_DYNAMIC")
    checkpoint.take(r"model\.layers\.3\..*")
    (finding,) = found(write(tmp_path / "without", checkpoint), "--runtime", "sglang")
    assert commands(finding)[0].startswith("keepmtp graft ")


def test_lists_wait_for_the_right_number_of_layers(tmp_path):
    """MiMo's draft has the number after the last layer in vLLM: entries for a wrong number would be
    no cure.
    """
    checkpoint = llmcompressor("mimo-7b", "FP8_DYNAMIC")
    assert found(write(tmp_path / "good", checkpoint)) == []
    checkpoint.config["num_hidden_layers"] += 1
    findings = found(write(tmp_path / "one too many", checkpoint))
    assert {"layer-missing", "form"} <= {each["rule"] for each in findings}
    assert [each for finding in findings for each in commands(finding)] == []
