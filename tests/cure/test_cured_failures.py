"""Each failure of docs/tables/failures.md that a checkpoint can have: who cures it; that the command which
`keepmtp check` prints for it works as it is pasted; and that the check is green afterwards.

In: the checkpoints that tests/helpers/broken.py breaks, each by the change of its thread. Out: for
those that `fix` cures, a new folder that is green while the old one stays; for all
others, what they need.
"""

import json
import re
import shlex
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import releases
from broken import BROKEN, Case, built
from checkpoint_files import write
from commands import ROOT
from data_files import cases, table
from dry_corpus import DRY, TWINS
from foreign_form import w4afp8
from good import llmcompressor, ours, released
from good_checkpoints import GOOD
from keepmtp import api
from keepmtp.checkpoints.source import open_source
from keepmtp.checkpoints.source_of import refuse_another_model
from keepmtp.cli import main
from keepmtp.cure import fix
from keepmtp.cure.diff import diffs
from keepmtp.cure.rewritten import rewrite
from keepmtp.recipes.errors import CheckpointError, KeepMTPError
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.values import check_values, with_values
from keepmtp.validate.facts.findings import Finding, commands
from outputs import digests
from typer.testing import CliRunner, Result
from written_values import fill, opened, poke, tensors_of

CURES = table("cure/cures")


def starting(*starts: str) -> list[Case]:
    return [case for case in BROKEN if case.name.startswith(starts)]


GRAFTED, ANEW, RELEASED = (starting(*starts) for starts in CURES.values())
NOT_CURED = [*ANEW, *RELEASED]
CURED = [case for case in BROKEN if case not in GRAFTED and case not in NOT_CURED]
STATIC = [case for case in DRY if "both" in case.by and (case.tp, case.num_drafts) == (1, 1)]
CASES = {case.name: case for case in (*BROKEN, *STATIC)}
# By the base of a case: the word that gives the block its old form, where it is not what fix
# chooses.
WORDS = {"glm w4a16": "W4A16", "v3 nvfp4": "bf16", "dsv4 bf16": "bf16"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where releases are, each written once."""
    return tmp_path_factory.mktemp("cured")


@cache
def release(model: str, place: Path, *, is_filled: bool) -> Path:
    if not is_filled:
        return write(place / "releases" / model, released(model))
    fill(release(model, place, is_filled=False))
    return release(model, place, is_filled=False)


def release_of(folder: Path, place: Path) -> Path:
    """The release that a checkpoint was made from, by fix's own comparison; with values."""
    of_type = open_source(folder).config["model_type"]
    for model, config in releases.MODELS.items():
        if config["model_type"] == of_type and model not in TWINS:
            found = open_source(release(model, place, is_filled=False))
            try:
                refuse_another_model(open_source(folder), found)
            except KeepMTPError:
                continue
            return release(model, place, is_filled=True)
    raise LookupError(folder)


def grafted(old: Path, source: Path, new: Path, *, mtp: str | None) -> Path:
    """What it is with the block of its release."""
    made = fix.proposed(str(old), release=open_source(source), mtp=mtp)
    return rewrite(made.proposal, new, block=made.block).folder


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [each for each in findings if each.severity == "error"]


# --- commands -------------------------------------------------------------------------------------


def run(*words: str) -> Result:
    return CliRunner().invoke(main.app, words)


def checked(folder: Path, *words: str) -> dict:
    return json.loads(run("check", str(folder), *words, "--json").stdout)


def check(folder: Path, *words: str) -> list[dict]:
    return checked(folder, *words)["findings"]


# The kinds of a cure for which a command is printed.
KINDS = ("edit", "block")
PRINTED = [case.name for case in (*CURED, *GRAFTED)]


def _slow_twice() -> list[object]:
    """The first case of each number at once; the others, which fill more releases, with all
    tests.
    """
    first = {name.partition(" ")[0]: name for name in reversed(PRINTED)}.values()
    return [name if name in first else pytest.param(name, marks=pytest.mark.full) for name in CASES]


@pytest.mark.parametrize("name", _slow_twice())
def test_what_is_printed_works_as_pasted(name: str, place: Path, tmp_path, monkeypatch):
    """One command for all that has a cure; RELEASE alone is filled in."""
    monkeypatch.setenv("VLLM_PYTHON", "/nowhere")
    folder, new = write(tmp_path / "it's", CASES[name].build()), tmp_path / "NEW"
    before, found = digests(folder), checked(folder)
    findings, kinds, meant = found["findings"], set[str](), set[tuple[str, str]]()
    for finding in findings:
        if finding["cured_by"] in KINDS:
            kinds.add(finding["cured_by"])
            meant.add((finding["rule"], finding["where"]))
    without = [each for each in findings if each["severity"] == "error"]
    without = [each for each in without if each["cured_by"] not in KINDS]
    for command in found["cures"]:
        words = {"NEW": str(new)}
        assert ("RELEASE" in command) == ("block" in kinds)
        if "RELEASE" in command:
            words["RELEASE"] = str(release_of(folder, place))
        _, *typed = (words.get(word, word) for word in shlex.split(command))
        done = run(*typed)
        left = {(each["rule"], each["where"]) for each in check(new)} if new.is_dir() else meant
        assert not meant & left, done.output
        assert done.exit_code == 0 or without, done.output
    assert digests(folder) == before, "the old folder stays"
    assert len(found["cures"]) <= bool(meant)
    if name in PRINTED:
        assert len(found["cures"]) == 1 and not without


def test_a_block_that_sglang_misses_is_the_releases(tmp_path):
    checkpoint = ours("glm-4.7", "FP8_DYNAMIC")
    checkpoint.take(r"model\.layers\.3\..*")
    found = checked(write(tmp_path / "without", checkpoint), "--runtime", "sglang")
    assert len(found["findings"]) == 1 and "--from RELEASE" in found["cures"][0]


@cases
def test_where_only_a_number_is_wrong_nothing_is_fetched(model, change, tmp_path):
    checkpoint = built({"of": partial(llmcompressor, model, "FP8_DYNAMIC"), **change})
    folder = write(tmp_path / "it", checkpoint)
    findings = check(folder)
    assert findings and all(each["cured_by"] == "edit" for each in findings), findings
    assert fix.proposed(str(folder)).after.data.findings == ()


def test_a_fix_serves_both_engines(tmp_path):
    """W4AFP8 with a plain block that nothing excepts: SGLang has no linear class for it."""
    checkpoint = w4afp8()
    checkpoint.quantization["ignore"] = ["lm_head", "re:.*in_proj_(ba|[ab])$", "re:.*visual"]
    folder = write(tmp_path / "it", checkpoint)
    drafts = dict[str, list[Finding]]()
    for server in ("vllm", "sglang"):
        data = api.check(folder, runtimes=[server])
        drafts[server] = [each for each in data.findings if each.where.startswith("mtp.")]
    assert drafts["sglang"] and {each.cured_by for each in drafts["vllm"]} == {"edit"}
    cured = fix.proposed(str(folder)).proposal.outcome()
    left = examine(cured, runtimes=("vllm", "sglang")).data.findings
    assert [each for each in left if each.where.startswith("mtp.")] == []


def test_lists_wait_for_the_right_number_of_layers(tmp_path):
    """MiMo's draft has the number after the last layer in vLLM: entries for a wrong number would be
    no cure.
    """
    checkpoint = llmcompressor("mimo-7b", "FP8_DYNAMIC")
    assert check(write(tmp_path / "good", checkpoint)) == []
    checkpoint.config["num_hidden_layers"] += 1
    found = checked(write(tmp_path / "one too many", checkpoint))
    assert {"layer-missing", "form"} <= {each["rule"] for each in found["findings"]}
    assert found["cures"] == []


# --- what is cured --------------------------------------------------------------------------------


@pytest.mark.few(24)
@pytest.mark.parametrize("case", CURED, ids=lambda case: case.name)
def test_fix_keeps_the_block_and_says_why(case: Case, tmp_path):
    found = fix.proposed(str(write(tmp_path / "old", case.build())))
    assert (case.rule, case.severity) in {(e.rule, e.severity) for e in found.cured}
    assert all(change.why for change in found.proposal.edits) and diffs(found.proposal)
    after = examine(rewrite(found.proposal, tmp_path / "new").folder).data
    assert after.ok and after.findings == found.after.data.findings
    assert after.facts.num_mtp_tensors == found.after.data.facts.num_mtp_tensors > 0


@pytest.mark.few(12)
@pytest.mark.parametrize("case", GRAFTED, ids=lambda case: case.name)
def test_the_release_gives_back_what_there_was(case: Case, place, tmp_path):
    """Every name, dtype and shape; the backbone's bytes, and the release's where they are stored as
    released.
    """
    old = write(tmp_path / "old", case.build())
    fill(old)
    source = release_of(old, place)
    word = WORDS.get(str(case.base))
    new = grafted(old, source, tmp_path / "new", mtp=word)
    assert examine(new).data.findings == ()
    assert errors(check_values(opened(new), "all")) == []
    view, now, count = opened(new).view, tensors_of(new), 0
    before, wanted = tensors_of(old), tensors_of(source)
    built = GOOD[str(case.base)]().tensors.items()
    good = {name: (dtype, tuple(shape)) for name, (dtype, shape) in built}
    assert {name: tensor[:2] for name, tensor in now.items()} == good
    for name, tensor in now.items():
        if not view.is_mtp(name):
            assert tensor == before[name], "the backbone stays"
        elif name in wanted and wanted[name][:2] == good[name]:
            assert tensor == wanted[name], "what is stored as released is the same"
            count += 1
    assert count > 4


@cases
def test_the_release_cures_values_of_the_block(rule, leaf, value, place, tmp_path):
    tensor = f"model.layers.3.{leaf}"
    old = write(tmp_path / "old", GOOD["glm nvfp4"]())
    fill(old)
    poke(old, tensor, value)
    found = errors(check_values(opened(old), "all"))
    assert (rule, tensor) in [(each.rule, each.where) for each in found]
    judged = with_values(examine(old), "all").data.findings
    assert commands(judged, "it") == ["keepmtp fix it --from RELEASE --out NEW"]
    assert {each.cured_by for each in errors(judged)} == {"block"}
    new = grafted(old, release_of(old, place), tmp_path / "new", mtp="NVFP4A16")
    assert check_values(opened(new), "all") == () == examine(new).data.findings
    forms = [{name: each[:2] for name, each in tensors_of(folder).items()} for folder in (old, new)]
    assert forms[0] == forms[1]


@pytest.mark.parametrize("case", NOT_CURED, ids=lambda case: case.name)
def test_what_has_no_cure_here_is_not_said_to_have_one(case: Case, tmp_path):
    """The failure is left, and no command is named for it."""
    old = write(tmp_path / "old", case.build())
    if case.rule == "files":
        with pytest.raises(CheckpointError, match="; got "):
            fix.proposed(str(old))
        return
    left = set[str]()
    for each in fix.proposed(str(old)).after.data.findings:
        if (each.rule, each.severity) == (case.rule, case.severity) and case.where in each.where:
            left.add(each.cured_by)
    assert left and left.isdisjoint(KINDS)


@pytest.mark.full
@pytest.mark.vllm
def test_vllm_loads_what_was_cured(place, tmp_path):
    """One vLLM for all: everything that got its block, and of the fixes the first of each number."""
    first = {case.name.partition(" ")[0]: case for case in reversed(CURED)}.values()
    folders = list[Path]()
    for number, case in enumerate((*first, *GRAFTED)):
        old, new = write(tmp_path / f"old{number}", case.build()), tmp_path / f"new{number}"
        if case in GRAFTED:
            fill(old)
            grafted(old, release_of(old, place), new, mtp=WORDS.get(str(case.base)))
        else:
            rewrite(fix.proposed(str(old)).proposal, new)
        folders.append(new)
    loaded = api.check_all(folders, gpus=["sm100"])
    for case, checked in zip((*first, *GRAFTED), loaded, strict=True):
        found = checked.data
        assert found.ok and found.dry[0].failure is None, (case.name, found.findings)


def test_a_group_of_two_sides_is_a_finding_and_no_defect(tmp_path):
    """AutoRound's FP8 has [128, 128] as its group."""
    checkpoint = starting("F38 AutoRound")[0].build()
    checkpoint.quantization["group_size"] = [128, 128]
    assert fix.proposed(str(write(tmp_path / "old", checkpoint))).before.data.findings


# --- what the pages say ---------------------------------------------------------------------------


def test_every_case_has_one_cure():
    starts = [start for each in CURES.values() for start in each]
    assert all(map(starting, starts)), "each start is one of a case"
    assert len(GRAFTED) + len(NOT_CURED) == sum(len(starting(start)) for start in starts)


# The rows of the page's table, and their cases.
ROWS = {
    "`keepmtp fix`": CURED,
    "`keepmtp fix --from RELEASE`": GRAFTED,
    "quantize anew": ANEW,
    "the release's own files": RELEASED,
}


@pytest.mark.parametrize("cure", ROWS)
def test_the_page_lists_what_has_which_cure(cure):
    page, cases = (ROOT / "docs" / "tables" / "failures.md").read_text(), ROWS[cure]
    row = next(line for line in page.splitlines() if line.startswith(f"| {cure} |"))
    listed, count = row.split("|")[2:4]
    found = {re.match(r"(F|E|Fp|G|H|M|R)(\d+)(?= )", case.name) for case in cases} - {None}
    numbers = sorted({(match[1], int(match[2])) for match in found})
    wanted = ", ".join(f"{letter}{number}" for letter, number in numbers)
    assert listed.partition(":")[0].strip() == wanted
    assert count.strip() == f"{len(cases)} of {len(BROKEN)}"


def test_the_page_of_repairs_says_how_many():
    page = (ROOT / "docs" / "repair.md").read_text()
    assert f"rebuilt {len(BROKEN)} broken checkpoints" in page
    counts = re.findall(r"^\| .* \| (\d+) \|$", page, re.MULTILINE)
    assert [*map(int, counts)] == [*map(len, ROWS.values())]
