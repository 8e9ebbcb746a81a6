"""The model card: every number measured, every string text, everything that is not known said."""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cards
import closenesses
import evaluations
import measured
import pytest
import reports
import yaml
from huggingface_hub import ModelCard
from keepmtp.checkpoints.record import RECORD, read_record
from keepmtp.recipes import extras
from keepmtp.recipes.errors import CheckpointError, KeepMTPError, RecipeError
from keepmtp.recipes.protocol import Gates
from keepmtp.recipes.schema import TextsOfMix
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.facts.results import report_folder
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.publish.upload_set import prepare
from keepmtp.validate.report import card
from keepmtp.validate.report import html as report_html
from keepmtp.validate.report import report as full_reports
from keepmtp.validate.report.card_metadata import front_matter, metadata_of, read_front_matter
from keepmtp.validate.report.card_page import Metadata, page
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.markdown import code, escaped, fenced, quoted, ticked
from keepmtp.validate.report.portable import portable, shortened
from keepmtp.validate.report.provenance import groups_of
from markdown_it import MarkdownIt

HOSTILE = (
    "</td><script>top()</script>![x](http://a.b/c)[y](http://a.b)|# ``` *z* \u202e\n- a\n\n# b"
)


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
    """Every part is there: dry loads, servers, calibration and GSM8K, and the verdict that they
    come to.
    """
    report, asked = reports.whole(), evaluations.evaluation(**changed)
    judgement = judge(gates=Gates(), check=report, serve=report.serve, evaluation=asked)
    fact = reports.calibrated().calibration
    return report.model_copy(
        update={"evaluation": asked, "calibration": fact, "judgement": judgement}
    )


def tables(text: str) -> Iterator[list[list[str]]]:
    """Rows of cells of each table, as a Markdown parser sees them."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and token.level >= 4:
            rows[-1].append("".join(child.content for child in token.children or []))
        elif token.type == "table_close":
            yield rows
            rows = []


# --- the folder -----------------------------------------------------------------------------------


def test_a_card_is_the_same_each_time_and_is_verified(made, tmp_path):
    first, report = card.build(made, out=tmp_path / "a.card")
    old = card.card_folder(made)
    files = {
        path.relative_to(first).as_posix(): path.read_bytes()
        for path in first.rglob("*")
        if path.is_file()
    }
    assert set(files) == {"README.md", "acceptance.png", "report.json", "report.html"}
    assert all(files[name].startswith(b"\x89PNG") for name in files if name.endswith(".png"))
    assert card.verified_files(made) == files and report.judgement is not None
    assert files == {
        path.relative_to(old).as_posix(): path.read_bytes()
        for path in old.rglob("*")
        if path.is_file()
    }


def test_an_fp8_cache_is_a_row(made):
    facts = cards.told(made, whole())
    recipe = facts.record.recipe.model_copy(
        update={"whole": {**facts.record.recipe.whole, "kv_cache": "FP8"}}
    )
    cached = replace(facts, record=facts.record.model_copy(update={"recipe": recipe}))
    assert "| KV cache | `FP8` with calibrated scales" in page(cached) and "KV cache" not in page(
        facts
    )


def test_closeness_is_a_row_and_a_section(made, tmp_path):
    text = page(
        cards.told(made, whole().model_copy(update={"closeness": closenesses.closeness(tmp_path)}))
    )
    assert (
        "| Closeness | at least 0.01 ± 0.00023 nats a token from the source on 4,000 tokens of "
        "held-out text; the most "
        "likely token differs at 1.98 % (1." in text
    )
    assert (
        "## Quality: closeness to the source" in text
        and "so the divergence is a lower bound" in text
    )
    assert "loseness" not in page(cards.told(made, whole()))


@pytest.mark.full
def test_an_older_card_is_replaced_whole(own):
    folder = card.card_folder(own)
    (folder / "README.md").write_text("old")
    left = folder.with_name(f"{folder.name}.partial")
    left.mkdir()
    (left / "README.md").write_text("a killed run's")
    card.build(own)
    assert card.verified_files(own) and folder == own.with_name("tiny.card")
    assert sorted(path.name for path in own.parent.iterdir()) == [
        "tiny",
        "tiny.card",
        "tiny.report",
    ]


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


def test_a_pipe_in_a_card_is_not_waited_for(own):
    """As the fuzzer found."""
    page = card.card_folder(own) / "report.json"
    page.unlink()
    os.mkfifo(page)
    with pytest.raises(CheckpointError, match="regular file"):
        card.verified_files(own)


def test_no_folder_of_this_machine_is_in_it(own):
    for path in card.card_folder(own).rglob("*"):
        if path.is_file():
            assert str(own.parent).encode() not in path.read_bytes(), path.name
    report = json.loads((card.card_folder(own) / "report.json").read_text())
    assert (
        report["path"] == "tiny" and report["serve"]["checkpoint"]["runs"][0]["log"] == "server.log"
    )


# --- what makes no card, and what is no card ------------------------------------------------------


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} has no {old}"
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (
            "tiny.report/report.json",
            '"difference": 0.01',
            '"difference": 0.02',
            r"report\.json: evaluation: must be",
        ),
        (
            "tiny.report/gsm8k.json",
            '"difference": 0.01',
            '"difference": 0.02',
            r"gsm8k\.json: must be as its station",
        ),
        (
            "tiny.report/gsm8k.checkpoint.jsonl",
            '"strict-match":false',
            '"strict-match":true',
            "must be the file that was counted",
        ),
        ("tiny/keepmtp.json", '"0.1.0"', '"9.1.0"', "keepmtp.json"),
        (
            "tiny/recipe.yaml",
            "mtp: bf16",
            "mtp: FP8_BLOCK",
            r"must be the bytes .* got another recipe\.yaml",
        ),
    ],
)
def test_an_altered_number_makes_no_card(file, old, new, says, own):
    edit(own.parent / file, old, new)
    for make in (card.build, card.verified_files):
        with pytest.raises(KeepMTPError, match=says):
            make(own)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("README.md", "88.33 %", "98.33 %"),
        ("README.md", "| too few samples |", "| pass |"),
        ("report.json", '"difference": 0.01', '"difference": 0.02'),
        ("report.html", "GSM8K", "GSM9K"),
    ],
)
def test_a_card_altered_by_hand_is_refused(file, old, new, own):
    edit(card.card_folder(own) / file, old, new)
    says = (
        rf"{file}: a card holds what its report makes; got another text or drawing\. Run "
        rf"`keepmtp card .*tiny` again"
    )
    with pytest.raises(CheckpointError, match=says):
        card.verified_files(own)


@pytest.mark.full
def test_a_card_with_another_picture_a_file_more_or_less_or_none_is_refused(own):
    folder = card.card_folder(own)
    picture = folder / "acceptance.png"
    drawn = picture.read_bytes()
    picture.write_bytes(drawn[:-1])
    with pytest.raises(CheckpointError, match=r"acceptance\.png: .* got another text or drawing"):
        card.verified_files(own)
    picture.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"acceptance\.png: a card holds what its report makes; got no such file",
    ):
        card.verified_files(own)
    picture.write_bytes(drawn)
    (folder / "notes.txt").write_text("for me")
    with pytest.raises(
        CheckpointError, match=r"notes\.txt: .* got a file that the report does not make"
    ):
        card.verified_files(own)
    shutil.rmtree(folder)
    with pytest.raises(
        CheckpointError, match=r"tiny\.card: must hold the checkpoint's card; got no README\.md"
    ):
        card.verified_files(own)


def test_license_and_language_may_be_mended_by_hand(own):
    """They are claims, and stay what they are when the source is gone."""
    edit(card.card_folder(own) / "README.md", "library_name", "language:\n- en\nlibrary_name")
    card.verified_files(own)


@pytest.mark.parametrize("what", ["report", "report.json", "checkpoint", "keepmtp.json"])
def test_what_is_missing_is_said_in_a_sentence(what, own):
    wrong = {
        "report": report_folder(own),
        "report.json": report_folder(own) / "report.json",
        "checkpoint": own,
        "keepmtp.json": own / "keepmtp.json",
    }[what]
    shutil.rmtree(wrong) if wrong.is_dir() else wrong.unlink()
    says = {"checkpoint": r"no config\.json", "keepmtp.json": r"keepmtp\.json"}.get(
        what, r"no report\.json\. Run `"
    )
    with pytest.raises(CheckpointError, match=says):
        card.build(own)


def test_a_checkpoint_of_another_tool_has_no_card(tmp_path):
    measured.measured(tmp_path / "strange", record={})
    full_reports.refresh(report_folder(tmp_path / "strange"))
    with pytest.raises(
        CheckpointError, match=r"keepmtp\.json: must be keepmtp's own record; got .*`hf upload"
    ):
        card.build(tmp_path / "strange")


def test_publish_says_so_before_anybody_measures(tmp_path):
    """A cured checkpoint has no keepmtp.json: no gate that turns green would help."""
    (tmp_path / "cured").mkdir()
    (tmp_path / "cured" / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"keepmtp\.json: must be keepmtp's own record; got .*`hf upload"
    ):
        prepare(tmp_path / "cured")


def test_without_the_report_extra_nothing_is_begun(own, monkeypatch):
    def absent(name: str) -> str:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "version", absent)
    for make in (card.build, card.verified_files):
        with pytest.raises(
            RecipeError, match=r"needs keepmtp's `report` extra; got no jinja2 and no matplotlib"
        ):
            make(own)


@pytest.mark.full
def test_the_command(own, tmp_path):
    """JSON on standard output, words elsewhere, and a refusal in one line."""
    run = partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path)
    keepmtp = Path(sys.executable).with_name("keepmtp")
    done = run([keepmtp, "card", own, "--base-model", "org/Big", "--json"])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (
        told["verdict"] == "infeasible"
        and told["card"].endswith("tiny.card")
        and "README.md" in told["files"]
    )
    assert "base_model: org/Big" in (card.card_folder(own) / "README.md").read_text()
    shutil.rmtree(report_folder(own))
    done = run([keepmtp, "card", own])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "a card is made from the checkpoint's report; got no report.json" in done.stderr


# --- front matter ---------------------------------------------------------------------------------


@pytest.mark.full
def test_the_front_matter_is_what_the_hub_reads(made, tmp_path):
    folder, _ = card.build(made, base_model="org/Big-Model", license_id="mit", out=tmp_path / "c")
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert data == {
        "base_model": "org/Big-Model",
        "base_model_relation": "quantized",
        "license": "mit",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": [
            "compressed-tensors",
            "nvfp4",
            "fp8",
            "nvfp4a16",
            "fp8-block",
            "mtp",
            "speculative-decoding",
            "vllm",
            "moe",
            "keepmtp",
        ],
    }
    text = (folder / "README.md").read_text()
    assert (
        "| Base model | [org/Big-Model](https://huggingface.co/org/Big-Model). Stated by the "
        "author. What was read"
    ) in text
    assert (
        "[org/Big-Model](https://huggingface.co/org/Big-Model) quantized" not in text
        and "`tiny-glm4-moe` quant" in text
    )
    assert "--source tiny-glm4-moe" in text and "--source org/Big-Model" not in text
    assert card.verified_files(made, out=folder)


def test_without_a_base_model_the_card_says_so(own):
    text = (card.card_folder(own) / "README.md").read_text()
    data = ModelCard.load(card.card_folder(own) / "README.md").data.to_dict()
    assert "base_model" not in data and "base_model_relation" not in data and "license" not in data
    assert (
        "| Base model | `tiny-glm4-moe` is a small model that comes with keepmtp" in text
        and "| License | not stated here" in text
    )


@pytest.mark.full
def test_the_source_s_card_gives_license_language_and_task(made, tmp_path):
    text = (
        "---\nlicense: other\nlicense_name: glm-5\nlicense_link: LICENSE\nlanguage: [en, "
        "no]\nbase_model: a/b\n"
        "tags: [chat]\n---\n# Model\n"
    )
    opened = cards.source_with_card(tmp_path / "source", text)
    folder, _ = card.build(made, source=tmp_path / "source", out=tmp_path / "c")
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert (data["license"], data["license_name"], data["license_link"]) == (
        "other",
        "glm-5",
        "LICENSE",
    )
    assert data["language"] == ["en", "no"] and "chat" not in data["tags"]
    assert "base_model" not in data, "the source's own base model is not this checkpoint's"
    assert card.verified_files(made, out=folder)
    chosen = metadata_of(opened, read_front_matter(folder), license_id="mit", where="x")
    assert (chosen.license, chosen.license_name, chosen.license_link) == ("mit", "", "")


@pytest.mark.parametrize(
    ("front", "says"),
    [
        ({"license": "mit\ntags: [x]"}, r"README\.md: license: must have the Hub's form"),
        ({"language": ["en", "x: y"]}, r"README\.md: language: must have"),
    ],
)
def test_what_is_no_form_of_the_hub_s_is_refused(front, says, tmp_path):
    opened = cards.source_with_card(tmp_path, "")
    with pytest.raises(RecipeError, match=says):
        metadata_of(opened, front, where="README.md")


def test_a_model_that_sees_has_another_task(tmp_path):
    opened = cards.source_with_card(tmp_path, "")
    seeing = replace(opened, config={**opened.config, "vision_config": {}})
    assert metadata_of(seeing, {}, where="x") == Metadata(pipeline_tag="image-text-to-text")


@pytest.mark.parametrize("text", ["---\n- a\n---\n", "---\na: [\n---\n", "\xff"])
def test_a_front_matter_that_is_no_mapping_is_refused(text, tmp_path):
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"README\.md: front matter must be a YAML mapping"):
        read_front_matter(tmp_path)


# --- the page -------------------------------------------------------------------------------------


def numbers_of(report: FullReport) -> set[str]:
    """Every number of a report, and what the card computes from two of them, in every form the card
    prints.
    """
    found: set[float] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            found.add(len(value))
            for inner in value:
                walk(inner)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.add(value)

    walk(report.model_dump(mode="json", by_alias=True))
    counted = (
        [run for model in report.serve.served for run in model.drafting] if report.serve else []
    )
    counted += report.evaluation.evaluated if report.evaluation else []
    for each in counted:
        found |= {
            each.acceptance or 0,
            each.mean_accepted_length or 0,
            *each.acceptance_per_position,
        }
    if report.evaluation and report.evaluation.source:
        scores = [
            (
                report.evaluation.checkpoint.score(name).value,
                report.evaluation.source.score(name).value,
            )
            for name in evaluations.FILTERS
        ]
        found |= {after / before for after, before in scores}
    forms = set()
    for number in found:
        share = abs(100 * number)
        forms |= {
            f"{number:,}",
            f"{number:.2f}",
            f"{number:.4g}",
            f"{share:.0f}",
            f"{share:.1f}",
            f"{share:.2f}",
        }
        forms |= {f"{number / unit:,.1f}" for unit in (2**10, 2**20, 2**30)}
    return forms


def test_every_number_of_the_result_tables_is_in_the_report(made):
    report = whole()
    text = page(cards.told(made, report))
    results = text[text.index("## Quality") : text.index("## What is different")]
    told = [cell for rows in tables(results) for row in rows[1:] for cell in row[1:]]
    numbers = [
        number for cell in told for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", cell)
    ]
    assert len(numbers) > 90
    strange = [number for number in numbers if number not in numbers_of(report)]
    assert not strange
    assert "88.34" not in numbers_of(report), "not just any number is in the report"


def test_the_page_has_its_parts(made):
    text = page(cards.told(made, whole(), plots={"acceptance.png": b""}))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert headings == [
        "tiny",
        "Serve",
        "Intended use",
        "Hardware",
        "Quality: GSM8K",
        "Throughput",
        "Draft acceptance",
        "What is different: quantized, kept, and why",
        "Gates",
        "Limitations",
        "Made with",
    ]
    command = """vllm serve ORG/tiny \\\n  --speculative-config '{"method":"mtp","num_speculative_tokens":3}'"""
    assert command in text
    assert "](acceptance.png)" in text and "](speed.png)" not in text
    kept = next(rows for rows in tables(text) if rows[0][:2] == ["part", "modules"])
    glue = next(row for row in kept if row[:2] == ["mtp", "glue"])
    assert (
        glue[2] == "BF16"
        and glue[5] == "vLLM builds eh_proj as a plain nn.Linear, which has no slot for scales"
    )
    experts = next(row for row in kept if row[:2] == ["backbone", "experts"])
    assert experts[2] == "NVFP4A16" and experts[5] == "recipe: NVFP4A16"
    scopes = next(rows for rows in tables(text) if rows[0][0] == "scheme")
    assert [row[0] for row in scopes[1:]] == ["NVFP4A16", "FP8_BLOCK"]
    assert (made / "recipe.yaml").read_text().strip() in text
    assert "keepmtp quantize recipe.yaml --source tiny-glm4-moe --out tiny" in text
    for rows in tables(text):
        assert len({len(row) for row in rows}) == 1, rows


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: whole(), None),
        (
            lambda: whole(
                answers=evaluations.Answers(
                    both=900, only_source=120, only_checkpoint=9, neither=290
                )
            ),
            "[!CAUTION]\n> **Regression: this checkpoint failed its gates.**",
        ),
        (
            lambda: whole(
                answers=evaluations.Answers(both=50, only_source=2, only_checkpoint=1, neither=7)
            ),
            "[!WARNING]\n> **Too few samples: what was measured neither passes nor fails",
        ),
        (lambda: reports.bare(), "[!WARNING]\n> **Not judged: what"),
        (lambda: reports.broken(), "[!CAUTION]"),
    ],
)
def test_the_verdict_stands_on_top(make, says, made):
    text = page(cards.told(made, make()))
    assert ("> [!" not in text) if says is None else (says in text.partition("| | |")[0])


def test_what_was_not_measured_is_said(made):
    report = reports.bare()
    text = page(cards.told(made, report))
    results = text[text.index("## Quality") : text.index("## What is different")]
    assert [line for line in results.split("\n") if line] == [
        "## Quality: GSM8K",
        "Not measured.",
        "## Throughput",
        "Not measured.",
        "## Draft acceptance",
        "Not measured on a server.",
    ]
    assert (
        "| GSM8K | not measured |" in text
        and "No dry load was made" in text
        and "Not judged." in text
    )
    limits = text[text.index("## Limitations") :]
    for part in ("dry", "serve", "evaluation", "identity"):
        assert ticked(report.absent[part]) in limits, part
    assert "keepmtp eval" not in text[text.index("Again, with") :]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: whole(checkpoint={"as_served": evaluations.COPY, "reason": "no kernel."}),
            "Figures of the checkpoint are of a BF16 copy of the same weights: no kernel. What",
        ),
        (whole, "No GPU was used (CPU: Xeon, 2 cores)"),
        (lambda: whole(has_source=False), "The source was not evaluated"),
        (lambda: whole(protocol={"limit": 50}), "only some of the benchmark's questions"),
        (whole, "3 of 1,319 answers of the source were cut at 1,024 tokens"),
        (whole, "data to 2 expert modules (`model.layers.2.mlp.experts.1.up_proj`"),
        (whole, "The check warns of config.json: older versions want aliases"),
        (
            lambda: whole(
                answers=evaluations.Answers(both=50, only_source=2, only_checkpoint=1, neither=7)
            ),
            "The gate of gsm8k neither passes nor fails (too few samples)",
        ),
        (lambda: reports.calibrated(unmeasured="no class."), "measure acceptance: no class."),
        (reports.bare, "another vLLM than 0.32.0"),
    ],
)
def test_limitations_follow_from_what_was_measured(make, says, made):
    assert says in page(cards.told(made, make())).partition("## Limitations")[2]


@pytest.mark.parametrize(
    "make", [lambda: reports.hostile(HOSTILE), lambda: evaluations.hostile(HOSTILE)]
)
def test_strings_of_strangers_are_text(make, made):
    """No HTML, heading, link, picture or cell that the template did not write."""
    report = make()
    record = read_record(made / RECORD)
    recipe = record.recipe.model_copy(update={"summary": HOSTILE, "model": HOSTILE})
    source = record.source.model_copy(update={"name": HOSTILE})
    told = cards.told(
        made,
        report,
        name=HOSTILE,
        recipe=f"a: b\n```\n{HOSTILE}",
        record=record.model_copy(update={"recipe": recipe, "source": source}),
    )
    text = page(told)
    tokens = [
        child
        for token in MarkdownIt("commonmark").enable("table").parse(text)
        for child in (token, *(token.children or []))
    ]
    html = {
        token.content.strip() for token in tokens if token.type in ("html_block", "html_inline")
    }
    assert all(re.fullmatch(r"(</?(details|summary)>[\w.', -]*)+", part) for part in html), html
    leading = [token for token in tokens if token.type in ("link_open", "image")]
    links = {token.attrs.get("href") or token.attrs.get("src") for token in leading}
    assert links == {"https://github.com/vllm-project/vllm"}
    headings = [token for token in tokens if token.type == "heading_open"]
    assert len(headings) == 11 + bool(report.closeness)
    for rows in tables(text):
        assert len({len(row) for row in rows}) == 1, rows
    assert "\u202e" not in text


@pytest.mark.parametrize("make", [reports.hostile, evaluations.hostile])
def test_no_control_character_of_a_stranger_is_in_page_or_card(make, made):
    """An escape moves no cursor and a bidi override turns no line around: both are shown."""
    report = make("a\x1b[31m\u202eb\x07\u200bc")
    shown = (
        html.unescape(report_html.render(report)),
        page(cards.told(made, report, name="x\x9b\u2066y", recipe="a: \x1b]0;b")),
    )
    for text in shown:
        strange = {letter for letter in text if not letter.isprintable() and letter not in "\n\t"}
        assert not strange and "\\x1b" in text and "\\u202e" in text, strange


def test_a_path_of_the_machine_in_a_recipe_is_shortened(made):
    assert shortened("source: /data/models/GLM-4.7\nat vllm/a/b.py:3, models/x.jsonl") == (
        "source: GLM-4.7\nat vllm/a/b.py:3, models/x.jsonl"
    )
    assert shortened("https://huggingface.co/a/b and /v1/completions, 3/4") == (
        "https://huggingface.co/a/b and /v1/completions, 3/4"
    )
    assert shortened("in /my data/it/x.json", ["/my data/it/"]) == "in x.json"


def test_a_portable_report_keeps_its_numbers_and_what_models_wrote():
    report = reports.whole()
    assert report.serve is not None
    moved = report.model_copy(
        update={
            "path": "/home of/me/out/tiny",
            "serve": report.serve.model_copy(update={"prompts": ("Is /usr/bin/env a path?",)}),
            "absent": dict(report.absent) | {"evaluation": "Look at /home of/me/out/x.log"},
        }
    )
    told = portable(moved)
    assert told.path == "tiny" and told.absent["evaluation"] == "Look at x.log"
    assert told.serve is not None and told.serve.prompts == ("Is /usr/bin/env a path?",)
    assert told.dry == report.dry and told.sizes == report.sizes and portable(told) == told


# --- what lies in the checkpoint ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtp", "decided"), [({}, "bf16"), ({"mtp": "FP8_DYNAMIC"}, "FP8_DYNAMIC")]
)
def test_what_lies_in_it_is_what_the_run_decided(mtp, decided, tmp_path):
    folder = cards.checkpoint(tmp_path / "made", "tiny-glm4-moe.w4a16-fp8", **mtp)
    record = read_record(folder / RECORD)
    told = {
        (group.part, group.modules): group
        for group in groups_of(reports.open_source(folder), record)
    }
    experts, drafts = told["backbone", "experts"], told["mtp", "experts"]
    assert experts.schemes == (record.recipe.backbone["experts"],)
    assert experts.why == f"recipe: {experts.schemes[0]}"
    assert (drafts.schemes or ("bf16",)) == (decided,) and drafts.why == f"recipe: {decided}"
    assert "recipe: " not in told["mtp", "glue"].why != ""


def test_every_scheme_says_where_it_runs(made):
    group = groups_of(reports.open_source(made), read_record(made / RECORD))[0]
    all_of_them = replace(group, schemes=tuple(SCHEMES))
    text = page(cards.told(made, reports.bare(), groups=(all_of_them,)))
    rows = next(rows for rows in tables(text) if rows[0][0] == "scheme")
    assert [row[0] for row in rows[1:]] == list(SCHEMES)


def test_a_plain_checkpoint_has_tags_of_no_scheme(made):
    told = cards.told(
        made, reports.bare(), groups=(), metadata=Metadata(pipeline_tag="text-generation")
    )
    assert yaml.safe_load(front_matter(told))["tags"] == [
        reports.bare().facts.dialect,
        "mtp",
        "speculative-decoding",
        "vllm",
        "keepmtp",
    ]


# --- Markdown -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "# a",
        "- a",
        "+ a",
        "1. a",
        "12) a",
        "a_b _c_ *d*",
        "`a`",
        "[a](b) ![c](d)",
        "<b>a</b> & &amp; c",
        "a | b",
        "~~a~~",
        "\\a \\",
        "=== ",
        "---",
        "https://a.b/c_d",
        "5.5 %",
        "-5 points",
    ],
)
def test_escaped_text_reads_as_it_is_written(text):
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    table = "| x |\n|---|\n| {} |".format
    for wrapped, kind in (
        (f"- {escaped(text)}", "list_item_open"),
        (table(escaped(text)), "table_open"),
        (table(code(text)), "table_open"),
    ):
        tokens = parser.parse(wrapped)
        inline = [token for token in tokens if token.type == "inline"][-1]
        assert {child.type for child in inline.children or []} <= {
            "text",
            "code_inline",
            "text_special",
        }
        assert "".join(child.content for child in inline.children or []) == " ".join(text.split())
        assert kind in {token.type for token in tokens} and "heading_open" not in {
            token.type for token in tokens
        }


def test_code_and_quotes():
    assert (
        ticked("Run `keepmtp eval A|B` or not_here_.") == "Run `keepmtp eval A\\|B` or not_here\\_."
    )
    assert ticked("one ` alone") == "one \\` alone"
    assert quoted('a\n"b"') == '`"a\\n\\"b\\""`'
    assert fenced("a\n```\nb\n", "yaml") == "````yaml\na\n```\nb\n````"
    assert code("a`b") == "``a`b``" and code("`a") == "`` `a ``" and code("") == ""


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_card_names_the_repository_that_it_is_published_to(own):
    """What is sent names it; the folder's card, which knows no repository, stays as it is."""
    files, sent = card.verified_files(own), card.verified_files(own, repository="me/Tiny-NVFP4")
    assert {name for name in files if files[name] != sent[name]} == {"README.md"}
    text = sent["README.md"].decode()
    assert (
        "vllm serve me/Tiny-NVFP4 \\\n  --speculative-config '{" in text
        and "`ORG` is the owner" not in text
    )


def test_no_command_is_cut_by_a_narrow_page(made):
    """Every line of a block of code but the recipe's fits; a shell reads what was one line
    before.
    """
    report = whole()
    text = page(
        cards.told(made, report, repository="a-long-organization/A-Long-Name-NVFP4A16-FP8-MTP")
    )
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in found if not language]
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(blocks) == 3 and max(map(len, lines)) <= 78, lines
    commands = [
        shlex.split(part) for block in blocks for part in block.replace("\\\n", " ").splitlines()
    ]
    serve, quantize = (
        commands[0],
        next(words for words in commands if words[:2] == ["keepmtp", "quantize"]),
    )
    assert serve[:3] == ["vllm", "serve", "a-long-organization/A-Long-Name-NVFP4A16-FP8-MTP"]
    assert json.loads(serve[4]) == {"method": "mtp", "num_speculative_tokens": 3}
    assert quantize[2:] == ["recipe.yaml", "--source", "tiny-glm4-moe", "--out", "tiny"]


@pytest.mark.parametrize(
    ("make", "is_said"), [(lambda: whole(), True), (lambda: reports.bare(), False)]
)
def test_only_what_was_measured_still_drafts(make, is_said, made):
    assert (
        "which still drafts for speculative decoding" in page(cards.told(made, make()))
    ) == is_said


def test_no_speed_of_a_cpu_is_on_the_card(made):
    """The report's page has it; on a card it would be read as that of the reader's GPU."""
    report = whole()
    assert report.serve and report.serve.environment["device"].startswith("CPU")
    text = page(cards.told(made, report))
    assert (
        "tokens a second" not in text
        and "Not measured in a way that promises a speed: that needs a GPU" in text
    )


def test_no_words_of_a_card_run_together(made, tmp_path):
    """What a template joins keeps its spaces, in each part that a report may have."""
    report = whole(switched=(3, 4)).model_copy(
        update={"closeness": closenesses.closeness(tmp_path)}
    )
    assert report.calibration is not None
    texts = TextsOfMix(
        share=0.5,
        dataset="org/b",
        subset="de",
        dataset_revision="c0ffee",
        split="train",
        column="text",
    )
    data = report.calibration.data.model_copy(update={"also": (texts,)})
    report = report.model_copy(
        update={"calibration": report.calibration.model_copy(update={"data": data})}
    )
    text = page(cards.told(made, report))
    prose = "\n".join(re.split(r"^```.*?^```$", text, flags=re.MULTILINE | re.DOTALL))
    bare = re.sub(
        r"`[^`]*`|\([^)]*\.png\)|\]\([^)]*\)|nn\.Linear|\S+\.(json|html|jsonl|yaml)\b", "x", prose
    )
    assert not re.findall(
        r".{20}[a-z][,;:][A-Za-z0-9].{9}|.{20}[a-z]\.[A-Z].{9}|.{20}\)[A-Za-z].{9}", bare
    )
    assert "50 % of `org/b` (`de`) (revision `c0ffee`)" in text
    assert "0.32.0 or newer" not in text and "| vLLM | 0.32.0; no other version was tried |" in text
