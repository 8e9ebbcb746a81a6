"""report.json says what was found, once and for all; the page shows it, whole, to anybody, and to
nobody else.
"""

import hashlib
import html
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import benches
import closenesses
import evaluations
import measured
import pytest
import reports
from browser import PROBE, contrast, look, opened
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.quantize import found as calibration_found
from keepmtp.cli.report import save
from keepmtp.recipes import extras
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.check.check import check, examine
from keepmtp.validate.facts.dry_load import DryLoad, LoadedModel
from keepmtp.validate.facts.findings import CheckpointFacts
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report import tables
from keepmtp.validate.report.charts import charts
from keepmtp.validate.report.check_data import (
    calibration_fact,
    calibration_of,
    check_data,
    sizes_by_group,
)
from keepmtp.validate.report.html import render, write_html
from keepmtp.validate.report.report import assemble, read_json, write_json
from PIL import Image
from releases import source_layout, write_checkpoint
from rich.console import Console

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
SCRIPT = (
    '<script>document.title="hit"</script><img src=x onerror=\'document.title="hit"\'>$x^2$ & '
    '"quoted"'
)
BAD = evaluations.Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PAGES = {
    "whole": reports.whole,
    "native": lambda: reports.whole(is_copy=False),
    "dead": lambda: reports.whole(is_dead=True),
    "broken": reports.broken,
    "benched": reports.benched,
    "bare": reports.bare,
    "hostile": lambda: reports.hostile(SCRIPT),
    "calibrated": reports.calibrated,
    "evaluated": lambda: evaluations.judged(evaluations.evaluation(switched=(4, 3))),
    "strange": lambda: evaluations.hostile(SCRIPT),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, FullReport]:
    return {name: make() for name, make in PAGES.items()}


def probed(html: str, folder: Path, *, extra: str = "") -> Path:
    """A copy of a page that may run the probe, without the policy that would hold anything back."""
    assert POLICY.search(html)
    path = folder / "probed.html"
    path.write_text(POLICY.sub("", html).replace("</body>", extra + PROBE + "</body>"))
    return path


# --- report.json ----------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("name", PAGES)
def test_a_report_read_back_is_the_same_and_renders_the_same(name, pages, tmp_path):
    path = write_json(tmp_path / "deep" / "folder", pages[name])
    again = read_json(path)
    assert again == pages[name]
    assert render(again) == render(pages[name])
    assert json.loads(path.read_text())["schema"] == 6
    assert list(path.parent.iterdir()) == [path], "nothing partial is left"


def test_version_6_is_what_it_was():
    """Other fields are another version: change `schema`, what reads it, and this digest, in one
    change. A field that goes is none, where older files are still read (`Fact.dropped`).
    """
    schema = FullReport.model_json_schema(mode="serialization")
    shape = sorted(fields(schema, schema["$defs"]))
    digest = hashlib.sha256("\n".join(shape).encode()).hexdigest()
    assert digest[:16] == "c95f6465b8891168", shape


def test_a_field_that_went_is_passed_over():
    told = reports.summary()
    told["candidates"][0] |= {"needed_slots": 812}
    assert calibration_fact(told, reports.SETTINGS) == calibration_fact(
        reports.summary(), reports.SETTINGS
    )


def fields(part: object, defs: dict, path: str = "") -> set[str]:
    """Every key of the file by its path, whatever the class that holds it is called."""
    if isinstance(part, list):
        return set().union(*(fields(each, defs, path) for each in part))
    if not isinstance(part, dict):
        return set()
    if "$ref" in part:
        return fields(defs[part["$ref"].rpartition("/")[2]], defs, path)
    named = {
        name: fields(inner, defs, f"{path}.{name}")
        for name, inner in part.get("properties", {}).items()
    }
    deeper = (
        fields(part.get(key), defs, path)
        for key in ("anyOf", "items", "prefixItems", "additionalProperties")
    )
    return {f"{path}.{name}" for name in named}.union(*named.values(), *deeper)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda told: told | {"schema": 5}, "schema"),
        (lambda told: told | {"colour": "red"}, "colour"),
        (lambda told: {key: told[key] for key in told if key != "verdict"}, "verdict"),
    ],
)
def test_another_version_is_refused(change, says, pages, tmp_path):
    path = write_json(tmp_path, pages["whole"])
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=rf"version 6; got {says}.*Run the check again"):
        read_json(path)


# --- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        (
            "whole",
            "Loads and drafts",
            [
                "on sm90 (H100, H200), sm100 (B200) and sm120 (",
                "BF16 copy",
                "78.17 %",
                "(source: 79.33 %)",
            ],
        ),
        ("native", "Loads and drafts", ["served natively with k=3", "accepts 78.17 %"]),
        ("dead", "Not ready", ["acceptance", "0.10 %", "at least 90.00 % is asked for"]),
        (
            "broken",
            "Not ready",
            ["its gate for loads: A dry load fails on sm90", "sm100 (B200) at TP 1 and 4: model."],
        ),
        ("bare", "No fault found", ["neither dry-loaded nor served"]),
    ],
)
def test_the_verdict_is_one_sentence_that_claims_no_more_than_was_tried(name, label, words, pages):
    verdict = pages[name].verdict
    assert (verdict.label, verdict.ok) == (label, label != "Not ready")
    assert all(word in verdict.says for word in words), verdict.says
    assert verdict.says.endswith(".") and "\n" not in verdict.says


def test_the_headline_is_what_the_gate_judged():
    """Not k=1 over a few prompts where the gate judged k=3 over a thousand questions."""
    served = reports.served(is_copy=False)
    few = {model.role: model.model_copy(update={"runs": model.runs[:2]}) for model in served.served}
    served = served.model_copy(update=few)
    asked = evaluations.evaluation(checkpoint={"as_served": evaluations.COPY})
    for evaluation, words in (
        (
            asked,
            (
                "served as a BF16 copy of the same weights with k=3, it accepts 79.33 % of 120,000 "
                "drafted tokens"
            ),
        ),
        (
            evaluations.evaluation(has_source=False),
            "served natively with k=1, it accepts 92.00 % of 1,000 drafted",
        ),
    ):
        says = evaluations.judged(evaluation, serve=served).verdict.says
        assert words in says and says.count("drafted tokens") == 1, says


def test_a_fault_in_silence_is_no_load():
    """A draft whose BF16 weights are cast into FP8: vLLM raised nothing, and the report must not
    say that it loads.
    """
    full = reports.loaded(
        reports.account("sm90", 1, casts=(reports.CAST,)), reports.account("sm120", 1)
    )
    assert [load.ok for load in full.dry] == [False, True]
    assert not full.verdict.ok and "down_proj" in full.verdict.says
    assert reports.loaded(reports.account("sm90", 1)).verdict.label == "Loads"


def test_acceptance_without_a_source_is_no_proof():
    served = reports.served().model_copy(update={"source": None})
    assert reports.loaded(reports.account("sm90", 1), serve=served).verdict.label == "Served"


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_files():
    rows = sizes_by_group(open_source(reports.MODEL))
    held, mtp = 0, 0
    for file in reports.MODEL.glob("*.safetensors"):
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        spans = {
            name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
        }
        held += sum(end - start for start, end in spans.values())
        mtp += sum(
            end - start
            for name, (start, end) in spans.items()
            if name.startswith("model.layers.3.")
        )
    assert sum(row.num_bytes for row in rows) == held
    assert sum(row.num_bytes for row in rows if row.part == "mtp") == mtp > 0
    assert {row.num_bytes_before for row in rows} == {None}


def test_a_group_that_is_gone_is_still_a_row(tmp_path):
    config, tensors = source_layout("glm-4.7", size="tiny")
    whole = open_source(write_checkpoint(tmp_path / "whole", config, tensors))
    rest = {name: spec for name, spec in tensors.items() if ".shared_experts." not in name}
    rest["model.surprise.weight"] = rest["lm_head.weight"]
    rows = sizes_by_group(open_source(write_checkpoint(tmp_path / "rest", config, rest)), whole)
    gone = [row for row in rows if row.group == "shared_experts"]
    assert gone and all(row.num_bytes == 0 and row.num_bytes_before for row in gone)
    (odd,) = [row for row in rows if row.group == "unknown"]
    assert odd.num_tensors == 1 and odd.num_bytes_before == 0


# --- calibration ----------------------------------------------------------------------------------


def recorded(folder: Path, record: object) -> tuple[object, str]:
    """What is read of a checkpoint whose keepmtp.json is `record`: text as it is, anything else as
    JSON.
    """
    if not (folder / "config.json").is_file():
        write_checkpoint(folder, *source_layout("glm-4.7", size="tiny"))
    (folder / "keepmtp.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return calibration_of(open_source(folder))


def test_a_run_s_own_account_is_read_from_the_checkpoint(tmp_path):
    """And the figures of the page are those of the account, as `keepmtp quantize` has them on the
    terminal.
    """
    record = measured.recorded(summary=reports.summary(), calibration=reports.SETTINGS)
    found, why = recorded(tmp_path / "glm", record)
    assert found == reports.calibrated().calibration and not why
    checked = examine(tmp_path / "glm")
    page = save(tmp_path / "page", checked.data, vllm="0.32.0", opened=checked.source)
    assert read_json(page.with_name("report.json")).calibration == found
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*calibration_found(found))
    told, text = console.export_text(), re.sub(r"<[^>]*>", "", page.read_text())
    for words in (
        "97.80 %",
        "94.20 %",
        "3.29",
        "model.layers.2.mlp.experts.3.up_proj",
        "K must be a multiple of 128",
        "chosen; keeps enough",
    ):
        assert words in told and words in text, words


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (measured.recorded(), "None: every value was computed from the weights alone"),
        ("{", "Not read: "),
        ("[" * 100_000, "Not read: "),
        ("[]", "Not read: "),
        (
            {"keepmtp": "0.1.0"},
            "Not read: keepmtp.json is not as this keepmtp writes it (keepmtp.json: must be",
        ),
        ("7", "Not read: "),
        (measured.recorded(summary={}, calibration=None), "Not read: "),
        (measured.recorded(summary={}), "Not read: "),
        (measured.recorded(summary={}, calibration=reports.SETTINGS), "mtp: Field required"),
    ],
)
def test_a_record_that_says_nothing_is_no_error(record, why, tmp_path):
    found, told = recorded(tmp_path / "odd", record)
    assert found is None and why in told and told.endswith(".")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda told: told["rows"][0].update(perplexity=float("nan")), "rows.0.perplexity"),
        (lambda told: told["rows"][0].update(perplexity=float("inf")), "rows.0.perplexity"),
        (lambda told: told["candidates"][0].update(bytes=10**400), "candidates.0.bytes"),
        (lambda told: told["candidates"].extend(told["candidates"] * 20), "candidates"),
        (
            lambda told: told["rows"][1]["acceptance"]["by_position"].update({"3": [1.0]}),
            "rows.1.acceptance",
        ),
        (
            lambda told: told["rows"][1]["acceptance"]["by_position"].update(
                {"3": [0.1, 0.1, 1.1]}
            ),
            "by_position.3.2",
        ),
        (
            lambda told: told["rows"][1]["acceptance"]["by_position"].pop("2"),
            "rows.1.acceptance",
        ),
        (lambda told: told.update(colour="red"), "colour"),
    ],
)
def test_figures_that_nobody_measured_are_not_shown(change, where, tmp_path):
    told = reports.summary()
    change(told)
    found, why = recorded(
        tmp_path / "odd", measured.recorded(summary=told, calibration=reports.SETTINGS)
    )
    assert found is None and where in why


def test_a_checkpoint_without_a_record():
    assert calibration_of(open_source(reports.MODEL)) == (
        None,
        "Not known: the checkpoint has no keepmtp.json.",
    )


def test_a_block_that_could_not_be_run_has_no_acceptance_and_says_why():
    rows = [row | {"acceptance": None} for row in reports.summary()["rows"][:2]]
    changed = {
        "rows": rows,
        "candidates": [],
        "min_acceptance": None,
        "mtp": "bf16",
        "unmeasured": "no class for it.",
    }
    html = render(reports.calibrated(**changed))
    assert "No acceptance: no class for it." in html and "<img" not in html


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "width", "is_dark"),
    [
        ("whole", 390, False),
        ("whole", 1280, True),
        ("broken", 390, True),
        ("bare", 390, False),
        ("hostile", 390, False),
        ("hostile", 1280, False),
        ("calibrated", 390, True),
        ("calibrated", 1280, False),
        ("evaluated", 390, True),
        ("evaluated", 1280, False),
        ("strange", 390, False),
        ("strange", 1280, False),
        ("benched", 390, False),
        ("benched", 1280, True),
    ],
)
def test_the_page_in_a_browser(name, width, is_dark, pages, tmp_path):
    """Nothing fetched, nothing sticking out, every table and chart there, and text that can be
    read.
    """
    full = pages[name]
    seen = look(probed(render(full), tmp_path), width=width, is_dark=is_dark, scratch=tmp_path)
    probe = seen.probe
    assert probe["inner"] == width, "the browser has the width that is tested"
    assert probe["scroll"] <= width and not probe["wide"], probe["wide"]
    assert probe["fetched"] == [] and probe["title"] != "hit" and probe["scripts"] == 1
    assert seen.counts.get("img", 0) == len(charts(full)) and not seen.console, seen.console
    assert probe["empty"] == 0
    tables = {
        "whole": 7,
        "broken": 4,
        "bare": 0,
        "hostile": 13,
        "calibrated": 2,
        "benched": 3,
        "evaluated": 5,
        "strange": 4,
    }
    assert seen.counts.get("table", 0) == tables[name]
    assert full.verdict.label in seen.text and full.verdict.says in seen.text
    assert all(reason.replace("`", "") in seen.text for reason in full.absent.values())
    dim = min(contrast(ink, probe["sheet"]) for ink in probe["inks"])
    assert dim >= 4.5, "WCAG AA for text"
    is_sheet_dark = contrast(probe["sheet"], "rgb(0, 0, 0)") < 4
    assert is_sheet_dark == is_dark


def test_the_page_as_it_is_sent_runs_without_a_word_on_the_console(pages, tmp_path):
    seen = opened(write_html(tmp_path, pages["whole"]), scratch=tmp_path)
    assert not seen.console and "script" not in seen.counts and seen.counts["img"] == 1


def test_the_browser_test_bites(pages, tmp_path):
    """A page with each fault on purpose: the looks that pass above see every one."""
    faults = (
        "<div style='width: 500px'>wide</div><img src='http://example.invalid/a.png'>"
        "<script>document.title = 'hit'; console.error('no')</script><img class='chart'>"
        "<table><tr><td style='color: #888'>dim</td></tr></table>"
    )
    seen = look(probed(render(pages["bare"]), tmp_path, extra=faults), width=390, scratch=tmp_path)
    assert seen.probe["scroll"] > 390 and any("wide" in told for told in seen.probe["wide"])
    assert seen.probe["fetched"] == ["http://example.invalid/a.png"] and seen.counts["img"] == 2
    assert seen.probe["title"] == "hit" and seen.probe["scripts"] == 2
    assert any("no" in line for line in seen.console) and seen.probe["empty"] == 1
    assert min(contrast(ink, seen.probe["sheet"]) for ink in seen.probe["inks"]) < 4.5


@pytest.mark.parametrize("name", ["hostile", "strange"])
def test_a_strangers_words_stay_words(name, pages):
    """Without a browser: nothing that a checkpoint may choose opens an element, in text, attributes
    or charts.
    """
    html = render(pages[name])
    assert "<script" not in html and "<img src" not in html
    assert html.count("&lt;script&gt;") > 20


def text_of(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", page.replace("<wbr>", "")).split()))


SAID: dict[str, tuple[Callable[[Path], FullReport], tuple[str, ...]]] = {
    "evaluated": (
        lambda _: PAGES["evaluated"](),
        (
            "68.92 % ± 1.27",
            "0.23 % (3)",
            "-0.08 ± 0.34",
            "-0.74 to +0.59",
            "Gates pass",
            "at most 2 points of the source's GSM8K score",
            "79.33 % 93.0 81.0 64.0 3.38 171,470 276",
        ),
    ),
    "alone, on a copy": (
        lambda _: evaluations.judged(
            evaluations.evaluation(
                has_source=False, checkpoint={"drafts": 0, "as_served": evaluations.COPY}
            )
        ),
        ("so there is no difference to show", "NOT its own bytes"),
    ),
    "several tasks": (
        lambda _: evaluations.judged(evaluations.several(("gsm8k_platinum", BAD))),
        ("All tasks task", "gsm8k_platinum, flexible-extract 66.00 % 61.00 % ± 1.54", "92.42 % ("),
    ),
    "benched": (
        lambda _: reports.benched(benches.bench_fact(), Gates(min_speedup=1.2)),
        (
            "Tokens a second: checkpoint, served as it is",
            "1 at once best 3 193.0 ± 3.9 1.82 20.0 5.2 90.0 81.0 72.9 3.44",
            "1 at once 0 63.5 ± 1.3",
            "1 at once: k=3, 1.82 times as fast as k=0: its slowest repetition, 189.1 tokens",
            "8 at once: k=0: no larger k is faster than k=0 beyond the spread",
            "k=1, 8 at once: 90.0 % of the drafts are accepted, and it is slower than k=0",
            "NVIDIA H200 (140 GiB)",
            "at least 1.2 times as many tokens a second with drafting",
        ),
    ),
    "a cell that failed": (
        lambda _: benched_as(
            cells=(*benches.benched().cells[:2], benches.cell(2, (), error="it died: OOM"))
        ),
        ("best 1 152.7 ± 3.1 1.44", "1 at once 2 failed", "1 at once: no figure. it died: OOM."),
    ),
    "a speed of a copy": (
        lambda _: benched_as(as_served=evaluations.COPY, reason="x"),
        ("NOT its own bytes: a BF16 copy",),
    ),
    "one repetition": (
        lambda _: benched_as(cells=(benches.cell(1, [5.0]),)),
        ("1 at once: no k is recommended: one repetition",),
    ),
    "near": (
        lambda folder: PAGES["calibrated"]().model_copy(
            update={"closeness": closenesses.closeness(folder)}
        ),
        (
            "divergence from the source at least 0.01 ± 0.00023 nats a token",
            "the most likely token differs 1.98 % (1.",
            "perplexity: source, checkpoint 7.389, 8.166",
            "4,000 in 40 windows",
            "the likeliest 512 of 151,936",
            "counts as one token, so the divergence is a lower bound",
            "None of the texts is a row of calibration.jsonl",
            "The divergence in the section on calibration is another one",
            '0.01 "The sky is" " blue" " blue" " red"',
        ),
    ),
}


def benched_as(**own: object) -> FullReport:
    bench = benches.bench_fact(with_source=False)
    own_fact = bench.checkpoint.model_copy(update=own)
    return reports.benched(bench.model_copy(update={"checkpoint": own_fact}))


@pytest.mark.parametrize("name", SAID)
def test_what_was_measured_is_told_in_figures(name, tmp_path):
    make, words = SAID[name]
    text = text_of(render(make(tmp_path)))
    assert [each for each in words if each not in text] == [], text


def test_a_section_of_what_was_not_measured_is_left_out(pages):
    html = render(pages["bare"])
    assert 'id="closeness"' not in html and 'id="bench"' not in html


def test_a_red_gate_is_red_on_the_page(pages):
    """With the twin: the same page of a good checkpoint has no red pill."""
    lost = evaluations.judged(evaluations.evaluation(evaluations.Answers(only_source=80)))
    html = render(lost)
    assert '<span class="pill bad">regression</span>' in html and "at least 3.99 points" in html
    assert "pill bad" not in render(pages["evaluated"])


# --- the card's pictures --------------------------------------------------------------------------


def test_pictures_of_equal_reports_are_equal_bytes_and_name_no_date(pages):
    first = charts(pages["evaluated"])["acceptance"]
    assert first == charts(pages["evaluated"])["acceptance"]
    assert first.alt.startswith("this checkpoint: 93.00 %, 81.00 %, 64.00 %; source: 93.00 %")
    picture = Image.open(io.BytesIO(first.png))
    assert picture.format == "PNG" and set(picture.info) <= {"dpi"}
    assert picture.width == 1100 and picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    other = evaluations.judged(evaluations.evaluation(checkpoint={"shares": (0.5, 0.4, 0.3)}))
    assert charts(other)["acceptance"].png != first.png
    assert charts(pages["bare"]) == {}


def test_speed_is_drawn_over_each_loads_own_k_0():
    assert charts(reports.benched())["speed"].alt.startswith(
        "1 at once: k=0 1.00, k=1 1.44, k=2 1.70, k=3 1.82, k=4 1.53; 8 at once: k=0 1.00"
    )
    assert "speed" not in charts(benched_as(cells=(benches.cell(0, [5.0, 6.0]),)))


def test_how_a_model_was_served_is_said_three_times(pages):
    copied, native = render(pages["whole"]), render(pages["native"])
    assert "NOT its own bytes: a BF16 copy of the same weights" in copied
    assert copied.count("BF16 copy") > native.count("BF16 copy") == 0
    assert "this checkpoint (BF16 copy): " in copied, "in the words of the chart too"


def test_kernels_of_several_gpus_are_one_row_where_they_agree(pages):
    rows = tables.kernels(pages["whole"].dry).rows
    told = {(row[0], row[3]): row[4] for row in rows}
    assert told["target", "MarlinExperts"] == "sm90 at TP 1 and 4"
    assert told["draft", "CutlassFP8ScaledMMLinearKernel"] == "sm90, sm100 and sm120 at TP 1 and 4"
    assert len(rows) == 4
    rows = tables.kernels((*pages["whole"].dry, *reports.hostile("word").dry)).rows
    assert all(row[-1] == "refused: word" for row in rows[:2])


def test_a_server_that_never_came_up_has_a_page(tmp_path):
    """No run loaded: no chart to draw, the error quoted."""
    served = reports.served()
    fate = {"loaded": False, "partings": None, "error": "CUDA out of memory"}
    dead = tuple(run.model_copy(update=fate) for run in served.checkpoint.runs)
    checkpoint = served.checkpoint.model_copy(update={"runs": dead})
    html = render(
        reports.loaded(serve=served.model_copy(update={"source": None, "checkpoint": checkpoint}))
    )
    assert html.count("CUDA out of memory") >= len(dead)
    assert (
        "No server came up with method=mtp" in html
        and "no output with and without MTP to compare" in html
    )


def without(name: str) -> str:
    raise extras.PackageNotFoundError(name)


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_without_the_extra_it_is_one_sentence(name, pages, monkeypatch, tmp_path):
    known = extras.version
    monkeypatch.setattr(
        extras, "version", lambda asked: without(name) if asked == name else known(asked)
    )
    with pytest.raises(
        RecipeError, match=rf"got no {name}\. Run \S+ -m pip install 'keepmtp\[report\]'\.$"
    ):
        write_html(tmp_path, pages["bare"])
    assert not list(tmp_path.iterdir())


# --- from the command line, and in the wheel ------------------------------------------------------


@pytest.mark.full
def test_a_page_is_made_again_from_its_json(pages, tmp_path):
    path = write_json(tmp_path, pages["broken"])
    done = subprocess.run([KEEPMTP, "report", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'report.html'}\n", done.stderr
    assert (tmp_path / "report.html").read_text() == render(pages["broken"])
    path.write_text("{")
    done = subprocess.run([KEEPMTP, "report", str(path)], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"error: {path}: ")
        and done.stderr.count("\n") == 1
    )


def test_save_writes_both_even_for_what_cannot_be_read(tmp_path):
    checked = examine(reports.MODEL)
    page = save(
        tmp_path / "good", checked.data, vllm="0.32.0", opened=checked.source, source=checked.source
    )
    assert "experts" in page.read_text() and read_json(page.with_name("report.json")).verdict.ok
    (tmp_path / "empty").mkdir()
    page = save(tmp_path / "bad", check(tmp_path / "empty"), vllm="0.32.0")
    assert (
        "could not be read" in page.read_text()
        and not read_json(page.with_name("report.json")).verdict.ok
    )


def test_an_unknown_family_has_a_report_without_sizes(tmp_path):
    config, tensors = source_layout("glm-4.7", size="tiny")
    folder = write_checkpoint(tmp_path / "odd", config | {"model_type": "odd"}, tensors)
    checked = examine(folder)
    told = read_json(
        save(tmp_path, checked.data, vllm="0.32.0", opened=checked.source).with_name("report.json")
    )
    assert told.absent["sizes"].startswith("No sizes: ") and "odd" in told.absent["sizes"]


def test_an_empty_report_has_a_page():
    """A checkpoint with nothing in it, and a dry load that died before it built anything."""
    died = DryLoad(
        gpu="sm90",
        tp=1,
        k=1,
        ok=False,
        num_errors=1,
        failure=reports.REFUSED,
        target=LoadedModel(),
        draft=LoadedModel(),
    )
    data = check_data(CheckData(path="", findings=(), facts=CheckpointFacts(), dry=(died,)))
    full = assemble(data, vllm="0.32.0", made_at=reports.AT)
    html = render(full)
    assert (
        "not reached" in html
        and "KeyError" in full.verdict.says
        and "No load came as far as" in html
    )
