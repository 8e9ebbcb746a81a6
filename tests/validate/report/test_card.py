"""The model card: every number measured, every string text, everything that is not known said.

Whole cards are in tests/printed/.
"""

import html
import re
import shutil
import sys
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cards
import evaluations
import measured
import pytest
import reports
import stations
import yaml
from commands import captured, shell
from data_files import json_of, printed
from evaluations import Answers
from huggingface_hub import ModelCard
from keepmtp.checkpoints.identity import Identity
from keepmtp.checkpoints.record import RECORD, Record, read_record
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes import extras
from keepmtp.recipes.errors import CheckpointError, KeepMTPError, RecipeError
from keepmtp.recipes.protocol import Gates
from keepmtp.recipes.schema import TextsOfMix
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.facts.evaluated import TaskFact
from keepmtp.validate.facts.results import report_folder
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.publish.upload import prepare
from keepmtp.validate.report import card
from keepmtp.validate.report import report as full_reports
from keepmtp.validate.report.base_model import (
    NO_BASE_MODEL,
    base_model_of,
    refuse_no_id,
)
from keepmtp.validate.report.card import portable, shortened
from keepmtp.validate.report.card_metadata import front_matter, metadata_of, read_front_matter
from keepmtp.validate.report.card_page import CardFacts, page
from keepmtp.validate.report.charts import Chart
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.html import page_of
from keepmtp.validate.report.markdown import Code, Table, code, inline, markdown
from keepmtp.validate.report.provenance import (
    gpus_of,
    groups_of,
    recipe_text,
)
from markdown_it import MarkdownIt

HOSTILE = (
    "</td><script>top()</script>![x](http://a.b/c)[y](http://a.b)|# ``` *z* \u202e\n- a\n\n# b"
)
KEEPMTP = Path(sys.executable).with_name("keepmtp")
COPY = {"as_served": evaluations.COPY, "reason": "no kernel"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A quantized checkpoint with check, servers and GSM8K beside it, and its card."""
    folder = cards.checkpoint(tmp_path_factory.mktemp("made") / "tiny")
    cards.evidence(folder)
    card.build(folder)
    return folder


@pytest.fixture
def own(made, tmp_path) -> Path:
    """A copy to be spoilt, with its card."""
    for folder in (made, report_folder(made), card.card_folder(made)):
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / made.name


def whole(**changed: Any) -> FullReport:
    """Dry loads, servers, calibration and GSM8K, and the verdict that they come to."""
    report, asked = reports.whole(), evaluations.evaluation(**changed)
    judgement = judge(gates=Gates(), check=report, serve=report.serve, evaluation=asked)
    fact = reports.calibrated().calibration
    return report.model_copy(
        update={"evaluation": asked, "calibration": fact, "judgement": judgement}
    )


def facts(folder: Path, report: FullReport, **changed: Any) -> CardFacts:
    """What a card of the checkpoint in `folder` is made from, with any report, and versions that do
    not change; `changed` are fields of it.
    """
    record, opened = read_record(folder / RECORD), open_source(folder)
    fields = {
        "name": folder.name,
        "record": record,
        "recipe": recipe_text(folder),
        "groups": groups_of(opened, record),
        "base_model": NO_BASE_MODEL,
        "repository": "",
        "metadata": {"pipeline_tag": "text-generation"},
    } | changed
    fixed = {"keepmtp": "1.2.3", "versions": {"torch": "2.9.0"}}
    fields["record"] = fields["record"].model_copy(update=fixed)
    return CardFacts(report=report.model_copy(update={"keepmtp": "1.2.3"}), **fields)


def card_of(folder: Path, report: FullReport, **changed: Any) -> str:
    return page(facts(folder, report, **changed))


# --- the page -------------------------------------------------------------------------------------

assembled = partial(full_reports.assemble, vllm=reports.VLLM, made_at=reports.AT)


def test_a_card_with_every_part(made, tmp_path):
    """Measured on a GPU, published under a long name, with an FP8 cache."""
    texts = TextsOfMix(
        share=0.5,
        dataset="org/b",
        subset="de",
        dataset_revision="c0ffee",
        split="train",
        column="text",
    )
    record, bench = read_record(made / RECORD), stations.bench_fact()
    recipe = record.recipe.model_copy(update={"whole": {**record.recipe.whole, "kv_cache": "FP8"}})
    calibration = reports.calibrated().calibration
    assert calibration
    fact = calibration.model_copy(
        update={"data": calibration.data.model_copy(update={"also": (texts,)})}
    )
    loads = [reports.account(gpu, tp) for gpu in ("sm90", "sm100") for tp in (1, 4)]
    data = cards.checked(made, *loads).model_copy(update={"calibration": fact})
    on_gpu = {"environment": bench.environment}
    serve = reports.served(is_copy=False).model_copy(update=on_gpu)
    asked = {"environment": {**bench.environment, "lm-eval": "0.4.13"}}
    evaluated = evaluations.evaluation(switched=(3, 4)).model_copy(update=asked)
    parts = {
        "serve": serve,
        "evaluation": evaluated,
        "bench": bench,
        "closeness": stations.closeness(tmp_path),
    }
    gates = Gates(min_speedup=1.2, max_divergence=0.02, max_flips=0.03)
    judgement = judge(gates=gates, check=data, **parts)
    identity = Identity(sha256="e" * 64, files={})
    report = assembled(data, judgement=judgement, identity=identity, **parts)
    text = card_of(
        made,
        report,
        record=record.model_copy(update={"recipe": recipe}),
        repository="a-long-organization/A-Long-Name-NVFP4A16-FP8-MTP",
        chart=Chart(alt="what is drawn", png=b""),
    )
    printed("card.md", text)
    assert text.count("\n") <= 150
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(block for language, block in blocks if not language).splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 78, lines


def test_a_card_of_what_was_only_checked(made):
    text = card_of(made, assembled(cards.checked(made)))
    for says in (
        "**Not measured: too little is known of this checkpoint to pass or fail it.** Not measured "
        "of both source and checkpoint",
        "| Measured by | the publisher; nobody else has verified it |",
        "## Gates: not measured",
        'vllm serve ORG/tiny \\\n  --speculative-config \'{"method":"mtp","num_speculative_tokens":1}\'',
        "| loads | not measured | Not tried. `keepmtp check CHECKPOINT --gpu sm100 --record`",
        "| gsm8k | not measured | Not measured: `keepmtp eval CHECKPOINT` does. |",
        "Speed was not measured in a way that promises one: that needs a GPU",
        "| Calibration | None: every value was computed from the weights alone, without batches. |",
        "keepmtp quantize recipe.yaml --source tiny-glm4-moe --out tiny\n",
    ):
        assert says in text, says


def test_a_card_of_a_draft(tmp_path):
    """It names its target, in the serve line too, and nothing that a draft cannot have."""
    folder = cards.draft(tmp_path / "draft")
    _, report = card.build(folder, source=reports.MODEL)
    assert report.judgement is not None and report.judgement.verdict == "pass"
    gates = {reason.gate: reason.verdict for reason in report.judgement.reasons}
    assert gates == dict.fromkeys(("findings", "loads", "acceptance"), "pass")
    text = (card.card_folder(folder) / "README.md").read_text()
    heads = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "Results",
        "Gates: pass",
        "Serve",
        "What is in it",
        "Limitations",
        "Made with",
    ]
    assert report.target is not None
    for says in (
        "block of `tiny-glm4-moe`, kept unquantized, which still drafts for speculative decoding",
        f"| Target | `tiny-glm4-moe`, revision `local`; SHA-256 over its files `{report.target.sha256}` |",
        'vllm serve tiny-glm4-moe \\\n  --speculative-config \\\n  \'{"method":"mtp","num_speculative_tokens":1,"model":"ORG/draft"}\'',
        "vLLM's own classes take every tensor on sm90 (H100, H200)",
        "--draft-for tiny-glm4-moe",
        "license: apache-2.0\n",
    ):
        assert says in text, says
    assert "gsm8k" not in text.lower() and "base_model_relation" not in text


def test_a_card_says_whose_groups_it_has(made):
    record = read_record(made / RECORD)
    donor = record.source.model_copy(update={"name": "org/other", "revision": "5" * 40})
    record = record.model_copy(update={"donors": {"experts": donor}})
    text = card_of(made, assembled(cards.checked(made)), record=record)
    says = f"`experts` is not of `{record.source.name}`, but of `org/other`, revision `{'5' * 40}`,"
    assert f"{says} with a license of its own." in " ".join(text.split())


def report_of(kind: str, changed: dict[str, Any]) -> FullReport:
    if "answers" in changed:
        changed = changed | {"answers": Answers(**changed["answers"])}
    kinds = {"whole": whole, "broken": reports.broken, "calibrated": reports.calibrated}
    return kinds[kind](**changed)


@pytest.mark.parametrize(
    "kind, changed, says",
    [
        (
            "whole",
            {"answers": {"both": 900, "only_source": 120, "only_checkpoint": 1, "neither": 7}},
            "[!CAUTION]\n> **Regression: this checkpoint failed its gates.**",
        ),
        (
            "whole",
            {"answers": {"both": 50, "only_source": 2, "only_checkpoint": 1, "neither": 7}},
            "[!WARNING]\n> **Not measured: too little is known of this checkpoint to pass or fail",
        ),
        ("broken", {}, "[!CAUTION]"),
    ],
)
def test_the_verdict_stands_on_top(kind, changed, says, made):
    assert says in card_of(made, report_of(kind, changed)).partition("| | |")[0]


@pytest.mark.parametrize(
    "kind, changed, says",
    [
        (
            "whole",
            {"checkpoint": {"as_served": "BF16 copy of the same weights", "reason": "no kernel"}},
            "Figures of the checkpoint are of a BF16 copy of the same weights: no kernel. What",
        ),
        ("whole", {}, "No GPU was used (CPU: Xeon, 2 cores)"),
        ("whole", {}, "Speed was not measured in a way that promises one: that needs a GPU"),
        ("calibrated", {"unmeasured": "no class."}, "No acceptance by calibration: no class."),
    ],
)
def test_limitations_follow_from_what_was_measured(kind, changed, says, made):
    assert says in card_of(made, report_of(kind, changed)).partition("## Limitations")[2]


@pytest.mark.parametrize(
    "changed, says",
    [
        ({}, "gsm8k: the checkpoint was not asked with MTP off"),
        ({"has_source": False}, "gsm8k: the source was not evaluated"),
        ({"protocol": {"limit": 50}}, "gsm8k: only some of the benchmark's questions"),
    ],
)
def test_what_a_task_did_not_ask_is_noted_beside_its_results(changed, says, made):
    text = card_of(made, whole(**changed))
    assert says in text.partition("## Results")[2].partition("## Gates")[0]


def speed_card(made: Path, *, with_source: bool = True, device: str = "GPU", **own: object) -> str:
    """With a speed matrix; `own` are changes of the checkpoint's."""
    found = stations.bench_fact(with_source=with_source)
    changed = {
        "checkpoint": found.checkpoint.model_copy(update=own),
        "environment": found.environment | {"device": device},
    }
    return card_of(made, reports.benched(found.model_copy(update=changed)))


def test_where_drafting_is_slower_the_serve_line_does_not_draft(made):
    text = speed_card(made, cells=stations.benched({0: 342.0, 1: 128.0}).cells)
    assert "vllm serve ORG/tiny\n" in text and "num_speculative_tokens" not in text
    assert "This serves without drafting, as bench recommends for 1 at once" in text


@pytest.mark.parametrize("changes, device", [(COPY, "GPU"), ({}, "CPU: x, 2 cores")])
def test_a_copy_or_a_cpu_recommends_nothing_elsewhere(changes, device, made):
    text = speed_card(made, device=device, **changes)
    assert '"num_speculative_tokens":1' in text
    assert "This drafts 1 token a step, one for each MTP layer." in text
    assert "Speed was not measured in a way that promises one" in text
    assert "tokens a second" not in text.lower()
    said = text.partition("## Limitations")[2]
    assert ("Figures of the checkpoint are of a BF16 copy" in said) == bool(changes)
    assert ("No GPU was used" in said) == device.startswith("CPU")


@pytest.mark.parametrize(
    "gib, says",
    [
        (
            100,
            ["8 x 4090", "4 x L40S", "2 x H100", "1 x H200"],
        ),
        (2000, []),
    ],
)
def test_gpus_are_counted_from_the_bytes(gib, says):
    """Of 100 GiB a half is on each of two H100, which have 61.7 GiB of 74.5 for weights: 0.92 of
    it, less a tenth.
    """
    gpus = [f"{number} x {name}" for number, name in gpus_of((1, 2, 4, 8), gib << 30)]
    assert gpus == says


def test_gpus_at_a_size_that_does_not_load():
    """The twin: 62.5 GiB, GLM-4.5-Air's W4A16, of which ranks would get half groups."""
    assert gpus_of((1,), 64_000 << 20) == ((1, "H200"),)


@pytest.mark.parametrize("make", [reports.hostile, evaluations.hostile])
def test_strings_of_strangers_are_text(make, made):
    """No HTML, heading, link, picture or cell that the template did not write."""
    report = make(HOSTILE)
    record = read_record(made / RECORD)
    recipe = record.recipe.model_copy(update={"summary": HOSTILE, "model": HOSTILE})
    source = record.source.model_copy(update={"name": HOSTILE})
    text = card_of(
        made,
        report,
        name=HOSTILE,
        recipe=f"a: b\n```\n{HOSTILE}",
        record=record.model_copy(update={"recipe": recipe, "source": source}),
    )
    tokens = []
    for token in PARSER.parse(text):
        tokens += [token, *(token.children or ())]
    types = Counter(token.type for token in tokens)
    page = page_of(text, heading=HOSTILE, pictures={})
    assert not re.search(r"<(script|a|img)\b", page)
    assert not types.keys() & {"html_block", "html_inline", "link_open", "image"}
    assert types["heading_open"] == len(re.findall("^##? [A-Z<&]", text, re.MULTILINE))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        bars = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(bars)) == 1, table
    assert "\u202e" not in text


@pytest.mark.parametrize("make", [reports.hostile, evaluations.hostile])
def test_no_control_character_of_a_stranger_is_in_page_or_card(make, made):
    """An escape moves no cursor and a bidi override turns no line around: both are shown."""
    report = make("a\x1b[31m\u202eb\x07\u200bc")
    text = card_of(made, report, name="x\x9b\u2066y", recipe="a: \x1b]0;b")
    shown = (html.unescape(page_of(text, heading="x\x1b\u202e", pictures={})), text)
    for text in shown:
        strange = {letter for letter in text if not letter.isprintable() and letter not in "\n\t"}
        assert not strange and "\\x1b" in text and "\\u202e" in text, strange


def test_a_card_names_the_cures_that_vllm_needs(made):
    cured = "`a.b` in vLLM 0.31.0 to 0.32.0, no more from 0.33.0 on"
    text = card_of(made, whole(), cures=("a.b",), cured=(cured,))
    assert cured in text and text.count("KEEPMTP_CURES=a.b") == 1
    assert "--no-deps" in text and "KEEPMTP_CURES" not in card_of(made, whole())


def test_a_path_of_the_machine_in_a_recipe_is_shortened():
    assert shortened("source: /data/models/GLM-4.7\nat vllm/a/b.py:3, models/x.jsonl") == (
        "source: GLM-4.7\nat vllm/a/b.py:3, models/x.jsonl"
    )
    unchanged = "https://huggingface.co/a/b and /v1/completions, 3/4"
    assert shortened(unchanged) == unchanged
    assert shortened("in /my data/it/x.json", ["/my data/it/"]) == "in x.json"


def test_a_portable_report_keeps_its_numbers():
    report = reports.whole()
    moved = report.model_copy(
        update={
            "path": "/home of/me/out/tiny",
            "absent": dict(report.absent) | {"calibration": "Look at /home of/me/out/x.log"},
        }
    )
    told = portable(moved)
    assert told.path == "tiny" and told.absent["calibration"] == "Look at x.log"
    assert told.dry == report.dry and portable(told) == told


# --- what is in the checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize(
    "mtp, decided",
    [
        ({}, "bf16"),
        ({"mtp": "FP8_DYNAMIC"}, "FP8_DYNAMIC"),
    ],
)
def test_what_lies_in_it_is_what_the_run_decided(mtp, decided, tmp_path):
    folder = cards.checkpoint(tmp_path / "made", "tiny-glm4-moe.w4a16-fp8", **mtp)
    record = read_record(folder / RECORD)
    groups = groups_of(open_source(folder), record)
    told = {(group.part, group.modules): group.schemes for group in groups}
    assert told["backbone", "experts"] == (record.recipe.backbone["experts"],)
    assert told.get(("mtp", "experts"), ("bf16",)) == (decided,)
    assert ("mtp", "glue") not in told


def test_every_scheme_says_where_it_runs(made):
    group = groups_of(open_source(made), read_record(made / RECORD))[0]
    text = card_of(made, reports.bare(), groups=(replace(group, schemes=tuple(SCHEMES)),))
    (row,) = re.findall(r"^\| Runs on \| (.*) \|$", text, re.MULTILINE)
    assert re.findall(r"`(\w+)` on ", row) == list(SCHEMES)


# --- the folder -----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_card_is_the_same_each_time_and_is_verified(made, tmp_path):
    first, report = card.build(made, out=tmp_path / "a.card")
    files = contents(first)
    assert set(files) == {"README.md", "acceptance.png", "report.json", "report.html"}
    text = files["README.md"].decode().split("---\n", 2)[2]
    page = files["report.html"].decode()
    assert page.count("<table") == text.count("\n|---") and page.count("<img") == 1
    assert f'src="data:image/png;base64,{b64encode(files["acceptance.png"]).decode()}"' in page
    assert files["acceptance.png"].startswith(b"\x89PNG") and report.judgement is not None
    assert card.verified_files(made) == files == contents(card.card_folder(made))


@pytest.mark.full
def test_an_older_card_is_replaced_whole(own):
    folder = card.card_folder(own)
    (folder / "README.md").write_text("old")
    left = folder.with_name(f"{folder.name}.partial")
    left.mkdir()
    (left / "README.md").write_text("a killed run's")
    card.build(own)
    assert card.verified_files(own) and not left.exists()


@pytest.mark.parametrize("place", ["mine", "mine.partial"])
def test_a_folder_that_is_no_card_is_not_replaced(place, made, tmp_path):
    (tmp_path / place).mkdir()
    (tmp_path / place / "thesis.txt").write_text("years")
    with pytest.raises(
        RecipeError,
        match=r"must be a card's folder, or not there; got .*thesis\.txt\. Choose another",
    ):
        card.build(made, out=tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == [place, "thesis.txt"]


def test_no_folder_of_this_machine_is_in_it(own):
    for name, content in contents(card.card_folder(own)).items():
        assert str(own.parent).encode() not in content, name
    report = json_of(card.card_folder(own) / "report.json")
    first = report["serve"]["checkpoint"]["runs"][0]
    assert (report["path"], first["log"]) == ("tiny", "server.log")


# --- what makes no card, and what is no card ------------------------------------------------------


@pytest.mark.parametrize(
    "file, old, new, says",
    [
        (
            "tiny.report/report.json",
            '"difference": 0.01',
            '"difference": 0.02',
            r"report\.json: evaluation: must be",
        ),
        (
            "tiny/recipe.yaml",
            "mtp: bf16",
            "mtp: FP8_BLOCK",
            r"must be the bytes .* got another recipe\.yaml|got another text or drawing",
        ),
    ],
)
def test_an_altered_number_makes_no_card(file, old, new, says, own):
    cards.edit(own.parent / file, old, new)
    for make in (card.build, card.verified_files):
        with pytest.raises(KeepMTPError, match=says):
            make(own)


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("README.md", "88.33 %", "98.33 %"),
        ("report.html", "gsm8k", "gsm9k"),
    ],
)
def test_a_card_altered_by_hand_is_refused(file, old, new, own):
    cards.edit(card.card_folder(own) / file, old, new)
    says = (
        rf"{file}: a card holds what its report makes; got another text or drawing\. Run "
        rf"`keepmtp card .*tiny` again"
    )
    with pytest.raises(CheckpointError, match=says):
        card.verified_files(own)


@pytest.mark.parametrize(
    "command, says",
    [
        ("> acceptance.png", "png: .* got another text"),
        ("rm acceptance.png", "png: a card holds .* got no such file"),
        ("echo mine > notes.txt", r"notes\.txt: .* got a file that the report does not make"),
        ('rm -r "$PWD"', r"tiny\.card: must hold the checkpoint's card; got no README\.md"),
        ("rm report.json && mkfifo report.json", "regular file"),  # it is not waited for
    ],
)
def test_a_card_with_another_file_is_refused(command, says, own):
    shell(command, card.card_folder(own))
    with pytest.raises(CheckpointError, match=says):
        card.verified_files(own)


@pytest.mark.parametrize(
    "missing, says",
    [
        (".report", r"no report\.json\. Run `"),
        (".report/report.json", r"no report\.json\. Run `"),
        ("", r"no config\.json"),
        ("/keepmtp.json", r"keepmtp\.json"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(missing, says, own):
    shutil.move(f"{own}{missing}", own.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=says):
        card.build(own)


def test_a_checkpoint_of_another_tool_has_no_card(tmp_path):
    """And publish says so before anybody measures: no gate that turns green would help."""
    measured.measured(tmp_path / "strange", record={})
    full_reports.refresh(report_folder(tmp_path / "strange"))
    for make in (card.build, prepare):
        with pytest.raises(
            CheckpointError, match=r"keepmtp\.json: must be keepmtp's own record; got .*`hf upload"
        ):
            make(tmp_path / "strange")
        shutil.rmtree(report_folder(tmp_path / "strange"), ignore_errors=True)


def test_without_the_report_extra_nothing_is_begun(own, monkeypatch):
    def absent(name: str) -> str:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "version", absent)
    for make in (card.build, card.verified_files):
        with pytest.raises(
            RecipeError,
            match=r"needs keepmtp's `report` extra; got no markdown-it-py and no matplotlib",
        ):
            make(own)


# --- front matter ---------------------------------------------------------------------------------


def test_the_front_matter_is_what_the_hub_reads(own):
    folder, _ = card.build(own, base_model="org/Big-Model", license_id="mit")
    text = (folder / "README.md").read_text()
    assert ModelCard(text).data.base_model == "org/Big-Model"
    assert text.startswith(
        "---\nbase_model: org/Big-Model\nlibrary_name: vllm\nlicense: mit\n"
        "pipeline_tag: text-generation\ntags:\n- compressed-tensors\n- nvfp4\n"
    )
    assert "\n- keepmtp\nbase_model_relation: quantized\n---\n\n# tiny\n\n" in text
    tags = {"fp8", "nvfp4a16", "fp8-block", "mtp", "speculative-decoding", "vllm", "moe"}
    assert tags <= {*ModelCard(text).data.tags}
    assert (
        "| Base model | [org/Big-Model](https://huggingface.co/org/Big-Model). Stated by the "
        "author. What was read"
    ) in text
    assert "--source tiny-glm4-moe" in text and "--source org/Big-Model" not in text
    assert card.verified_files(own)


def test_without_a_base_model_the_card_says_so(own):
    text = (card.card_folder(own) / "README.md").read_text()
    assert not ModelCard(text).data.to_dict().keys() & {"base_model_relation", "license"}
    assert "| Base model | `tiny-glm4-moe` is a small model that comes with keepmtp" in text


@pytest.mark.full
def test_the_source_s_card_gives_license_language_and_task(own, tmp_path):
    text = (
        "---\nlicense: other\nlicense_name: glm-5\nlicense_link: LICENSE\nlanguage: [en, "
        "no]\nbase_model: a/b\ntags: [chat]\n---\n# Model\n"
    )
    (tmp_path / "README.md").write_text(text)
    folder, _ = card.build(own, source=tmp_path)
    data = ModelCard.load(folder / "README.md").data.to_dict()
    told = [data[f"license{part}"] for part in ("", "_name", "_link")]
    assert told == ["other", "glm-5", "LICENSE"]
    assert data["language"] == ["en", "no"] and "chat" not in data["tags"]
    assert "base_model" not in data, "the source's own base model is not this checkpoint's"
    assert card.verified_files(own)
    chosen = metadata_of(open_source(own), read_front_matter(folder), license_id="mit")
    assert [chosen.get(f"license{part}") for part in ("", "_name", "_link")] == ["mit", None, None]


def test_license_and_language_may_be_mended_by_hand(own):
    """They are claims, and stay what they are when the source is gone."""
    cards.edit(card.card_folder(own) / "README.md", "library_name", "language:\n- en\nlibrary_name")
    card.verified_files(own)


def test_a_word_of_another_card_adds_no_line_of_its_own(made):
    front = {"license": "mit\ntags: [x]", "language": ["en", "x: y"], "license_name": "a\u202eb"}
    told = yaml.safe_load(front_matter(facts(made, reports.bare(), metadata=front)))
    assert told.items() >= front.items() and "x" not in told["tags"]


def test_a_model_that_sees_has_another_task():
    opened = open_source(reports.MODEL)
    seeing = replace(opened, config={**opened.config, "vision_config": {}})
    assert metadata_of(seeing, {}) == {"pipeline_tag": "image-text-to-text"}


def test_a_plain_checkpoint_has_tags_of_no_scheme(made):
    tags = yaml.safe_load(front_matter(facts(made, reports.bare(), groups=())))["tags"]
    assert tags == [reports.bare().facts.dialect, "mtp", "speculative-decoding", "vllm", "keepmtp"]


# --- the base model -------------------------------------------------------------------------------

RELEASE = "org/Release"
SOURCES = {
    "read": ("a/B", "f" * 40),
    "own": ("my-finetune", "local"),
    "shipped": (reports.MODEL.name, "local"),
}


@pytest.mark.parametrize(
    "source, named, expected, says",
    [
        ("read", None, ["a/B", True], "commit `ffffffffffffffffffffffffffffffffffffffff`"),
        ("read", "c/D", ["c/D", False], "What was read is the repository `a/B`"),
        (
            "own",
            "me/Base",
            ["me/Base", False],
            "Stated by the author. What was read is the local folder `my-finetune`",
        ),
        ("own", "none", ["", False], "names no base model"),
        ("shipped", "none", ["", False], "comes with keepmtp"),
    ],
)
def test_the_base_model_is_what_was_read_or_is_stated(source, named, expected, says, made):
    found = base_model_of(read_from(made, *SOURCES[source]), named)
    assert found and [found.name, found.is_proven] == expected and says in found.says


def test_neither_the_recipe_s_source_nor_a_shipped_name_is_taken_for_a_folder(made):
    files = {"model.safetensors": 7}
    assert base_model_of(read_from(made, *SOURCES["own"]), None) is None
    assert base_model_of(read_from(made, *SOURCES["shipped"], files=files), None) is None


def read_from(folder: Path, name: str, revision: str, **more: object) -> Record:
    """The record of a run that read this source, by the recipe of a release."""
    record = read_record(folder / RECORD)
    source = {"name": name, "revision": revision, **more}
    return record.model_copy(
        update={
            "source": record.source.model_copy(update=source),
            "recipe": record.recipe.model_copy(update={"source": RELEASE, "revision": "main"}),
        }
    )


@pytest.mark.parametrize(
    "name",
    [
        "GLM-4.7",
        "a b/c",
    ],
)
def test_what_is_no_id_is_refused(name):
    with pytest.raises(
        RecipeError,
        match=r"--base-model: must have the Hub's form; got .* Choose with --base-model ORG/NAME",
    ):
        refuse_no_id(name)


@pytest.fixture
def finetune(tmp_path) -> Path:
    """A copy of a shipped model under another name."""
    return shutil.copytree(reports.MODEL, tmp_path / SOURCES["own"][0])


def test_of_a_local_folder_the_author_is_asked(finetune, tmp_path):
    out = cards.checkpoint(tmp_path / "out")
    (out / RECORD).write_text(read_from(out, *SOURCES["own"]).text())
    cards.evidence(out)
    words = [KEEPMTP, "card", out, "--source", finetune]
    done = captured(words)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and not card.card_folder(out).exists()
    assert "a card names a base model that was read or is stated; got the local folder" in said
    assert "Name it with --base-model ORG/NAME, or say --base-model none." in said
    captured([*words, "--base-model", "me/Base"], status=0)
    text = (card.card_folder(out) / "README.md").read_text()
    assert "base_model: me/Base" in text and "Stated by the author" in text
    assert card.verified_files(out)
    assert RELEASE not in text.partition("<details><summary>recipe.yaml")[0]


# --- Markdown -------------------------------------------------------------------------------------

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TEXTS = """# a
- a
+ a
1. a
12) a
a_b _c_ *d*
a ` b
[a](b) ![c](d)
<b>a</b> & &amp; c
a | b
~~a~~
\\a \\
===\x20
---
https://a.b/c_d
5.5 %
-5 points"""


@pytest.mark.parametrize("text", TEXTS.splitlines())
def test_escaped_text_reads_as_it_is_written(text):
    quoted = text.replace("`", "'")
    for block, kind, says in (
        (text, "paragraph_open", text),
        ([text], "list_item_open", text),
        (Table(columns=("x",), rows=[(text,)]), "table_open", text),
        (Table(columns=("x",), rows=[(code(text),)]), "table_open", quoted),
    ):
        tokens = PARSER.parse(markdown([block]))
        types = {token.type for token in tokens}
        shown = [token for token in tokens if token.type == "inline"][-1].children or []
        assert {child.type for child in shown} <= {"text", "code_inline", "text_special"}
        assert "".join(child.content for child in shown) == " ".join(says.split())
        assert kind in types and "heading_open" not in types


def test_code_and_quotes():
    said = inline("Run `keepmtp eval A|B` or not_here_.")
    assert said == "Run `keepmtp eval A|B` or not_here\\_."
    assert inline("one ` alone") == "one \\` alone" and code("a`b") == "`a'b`" and code("") == ""
    block = Code(text="a\n```\nb\n", language="yaml")
    assert markdown([block]) == "````yaml\na\n```\nb\n````\n"


# --- its head -------------------------------------------------------------------------------------


def test_the_parsers_of_calls_and_thoughts_are_named(made, tmp_path):
    known = "`--enable-auto-tool-choice --tool-call-parser glm45 --reasoning-parser glm45`"
    chats = shutil.copytree(made, tmp_path / "chats")
    (chats / "chat_template.jinja").write_text("{{ tools }}")
    for folder, parsers in ((chats, known), (made, "")):
        assert card._facts(folder, reports.bare(), NO_BASE_MODEL, {}).parsers == parsers
    text = card_of(made, whole(), parsers=known)
    assert f"| Parsers | {known} |" in text
    assert "divergence from the source" not in text


def test_every_task_has_its_scores_in_a_row(made):
    report = whole()
    assert report.evaluation
    protocol = report.evaluation.protocol.model_copy(update={"task": "ifeval"})
    fields = {name: getattr(report.evaluation, name) for name in TaskFact.model_fields}
    other = TaskFact(**fields | {"protocol": protocol})
    evaluation = report.evaluation.model_copy(update={"tasks": (other,)})
    text = card_of(made, report.model_copy(update={"evaluation": evaluation}))
    rows = re.findall(
        r"^\| (gsm8k|ifeval), .* questions \| ([\d.]+ % ± .*) \|$", text, re.MULTILINE
    )
    assert [task for task, _ in rows] == ["gsm8k", "ifeval"]


def test_an_attention_that_a_gpu_needs_is_said(made):
    """It is DeepSeek-V4.1's alone."""
    needed = {"sm100": "FLASHMLA_SPARSE_DSV41"}
    says = "On sm100 add `--attention-backend FLASHMLA_SPARSE_DSV41`."
    assert says in card_of(made, reports.bare(), attention=needed)
    assert "--attention-backend" not in card_of(made, reports.bare())
