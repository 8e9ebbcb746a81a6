"""report.json says what was found, once and for all; the page shows it, whole, to anybody, and to
nobody else.
"""

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import benches
import closenesses
import evaluations
import measured
import pytest
import reports
from browser import PROBE, contrast, look, opened
from commands import keepmtp
from evaluations import COPY, Answers, evaluation
from json_files import json_of
from keepmtp.checkpoints.files import write_whole
from keepmtp.checkpoints.identity import Identity
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.measured import calibrated as calibration_found
from keepmtp.cli.measuring import save
from keepmtp.recipes import extras
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.check.check import check, examine
from keepmtp.validate.facts.dry_load import LoadedModel
from keepmtp.validate.facts.findings import CheckpointFacts
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report.charts import _LIMIT, _OWN, _SOURCE, charts
from keepmtp.validate.report.check_data import calibration_fact, calibration_of, sizes_by_group
from keepmtp.validate.report.html import render, write_html
from keepmtp.validate.report.report import read_json, text_of
from PIL import Image, ImageColor
from printed import printed
from releases import source_layout, write_checkpoint
from rich.console import Console

SCRIPT = (
    '<script>document.title="hit"</script><img src=x onerror=\'document.title="hit"\'>$x^2$ & '
    '"quoted"'
)
HOSTILE = ("hostile", "strange")
BAD = Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
DIED = reports.account("sm90", 1, failure=reports.REFUSED).load.model_copy(
    update={"target": LoadedModel(), "num_errors": 1}
)


def benched(**own: Any) -> FullReport:
    """A speed matrix of the checkpoint alone."""
    bench = benches.bench_fact(with_source=False)
    changed = bench.checkpoint.model_copy(update=own)
    return reports.benched(bench.model_copy(update={"checkpoint": changed}))


def dead() -> FullReport:
    """No server came up."""
    served = reports.served()
    fate = {"loaded": False, "partings": None, "error": "CUDA out of memory"}
    runs = tuple(run.model_copy(update=fate) for run in served.checkpoint.runs)
    checkpoint = served.checkpoint.model_copy(update={"runs": runs})
    return reports.judged(
        serve=served.model_copy(update={"source": None, "checkpoint": checkpoint})
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, FullReport]:
    near = closenesses.closeness(tmp_path_factory.mktemp("near"))
    native, cells = reports.served(is_copy=False), benches.benched().cells[:2]
    asked = evaluation(switched=(4, 3))
    identity = Identity(sha256="e" * 64, files={})
    calibrated = reports.calibrated()
    unmeasured = {
        "rows": [row | {"acceptance": None} for row in reports.summary()["rows"][:2]],
        "candidates": [],
        "min_acceptance": None,
        "mtp": "bf16",
        "of_backbone": None,
        "of_block": None,
        "unmeasured": "no class for it.",
    }
    return {
        "bare": reports.bare(),
        "native": reports.whole(is_copy=False),
        "whole": reports.whole(),
        "dead": reports.whole(is_dead=True),
        "no source": reports.judged(serve=native.model_copy(update={"source": None})),
        "no server came up": dead(),
        "loaded": reports.loaded(reports.account("sm90", 1)),
        "broken": reports.broken(),
        "nothing in it": reports.judged(
            CheckData(path="", findings=(), facts=CheckpointFacts(), dry=(DIED,))
        ),
        "calibrated": calibrated,
        "calibrated, with a block of no class": reports.calibrated(**unmeasured),
        "evaluated": reports.judged(evaluation=asked, identity=identity),
        "evaluated without a source, and served": reports.judged(
            evaluation=evaluation(has_source=False, checkpoint={"as_served": COPY}), serve=native
        ),
        "evaluated, with answers lost": reports.judged(
            evaluation=evaluation(Answers(only_source=80))
        ),
        "several tasks": reports.judged(
            evaluation=evaluations.several(("gsm8k_platinum", BAD)),
            gates=Gates(min_mean_recovery=0.98, max_worst_drop=0.02),
        ),
        "near": calibrated.model_copy(update={"closeness": near}),
        "benched": reports.benched(gates=Gates(min_speedup=1.2)),
        "benched, and a cell failed": benched(
            cells=(*cells, benches.cell(2, (), error="it died: OOM"))
        ),
        "benched on a copy, once": benched(
            as_served=COPY, reason="no kernel.", cells=(benches.cell(1, [5.0]),)
        ),
        "hostile": reports.hostile(SCRIPT),
        "strange": evaluations.hostile(SCRIPT),
    }


def probed(html: str, folder: Path, *, extra: str = "") -> Path:
    """A copy of a page that may run the probe, without the policy that would hold anything back."""
    assert POLICY.search(html)
    path = folder / "probed.html"
    path.write_text(POLICY.sub("", html).replace("</body>", extra + PROBE + "</body>"))
    return path


def lines_of(page: str) -> list[str]:
    """What a reader sees: a line for each row and paragraph."""
    page = re.sub(r"<(style|title)>.*?</\1>", "", page, flags=re.DOTALL)
    page = re.sub(r'<img[^>]*alt="([^"]*)"[^>]*>', r"[\1]", " ".join(page.split()))
    page = re.sub(r" *</(td|th)> *", " | ", page)
    page = re.sub(r" *</(tr|p|h\d|li)> *", "\n", page)
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    return [" ".join(line.split()).strip(" |") for line in text.splitlines()]


SAID = {
    "bare": (
        "No fault found Nothing in config.json and the headers is in vLLM 0.32.0's way; it was "
        "neither dry-loaded nor served.",
        "None: nothing was found that vLLM 0.32.0 would stumble over.",
        "No sizes: the checkpoint's headers could not be read.",
    ),
    "native": (
        "[Drafts accepted by position, k=3, serve-check's 2 prompts: this checkpoint: 92.00 %, "
        "80.00 %, 62.50 %; source: 93.00 %, 81.00 %, 64.00 %; 90 % of the source: 83.70 %, "
        "72.90 %, 57.60 %]",
        "0.32.0 | sm90 | 1 | yes | yes | | 1,312 of 1,312: Glm4MoeForCausalLM | 1,310 of 1,312, 2 "
        "shared: Glm4MoeMTP | 31.1 s",
        "checkpoint: its own bytes; out/tiny-glm4-moe.nvfp4a16; 2.2 MiB stored as nvfp4, plain",
        "checkpoint | 3 | 24 s | 78.17 % | 92.0 80.0 62.5 | 3.35 | 78.0 | 1.90 | 1/2",
        'source | 3 | "Line\\none" | 17 | 311 | 902 | 0.062 | near-tie',
        "2 prompts, at most 128 tokens each, 312 s in all. vllm: 0.32.0; device: CPU: Xeon, 2 "
        "cores.",
    ),
    "whole": (
        "checkpoint: NOT its own bytes, a BF16 copy of the same weights; "
        "out/tiny-glm4-moe.nvfp4a16; 2.2 MiB stored as nvfp4, plain; vLLM's CPU build has no "
        "kernel for NVFP4 experts; packed kernels are not judged.",
    ),
    "no server came up": (
        "No server came up with method=mtp, so there is no acceptance to show.",
        "checkpoint | 1 | failed | - | - | - | - | - | -",
        "checkpoint, k=3: did not come up: CUDA out of memory",
        "There was no output with and without MTP to compare.",
    ),
    "broken": (
        "0.32.0 | sm100 | 1 | yes | no | model.layers.3.eh_proj.weight_scale: vLLM 0.32.0 stops "
        "while loading the draft: ... | 1,312 of 1,312: Glm4MoeForCausalLM | not reached | 31.1 s",
    ),
    "nothing in it": (
        "family | unknown",
        "size | -",
        "No load came as far as choosing kernels.",
        "No calibration: nobody looked for the checkpoint's own record.",
    ),
    "calibrated, with a block of no class": ("No acceptance: no class for it.",),
    "evaluated": (
        "source | 79.33 % | 93.0 81.0 64.0 | 3.38 | 171,470 | 276",
        'Question 7, MTP off: "... so it is 8"; MTP on: "... so it is 9"',
    ),
    "evaluated without a source, and served": (
        "The source was not evaluated, so there is no difference to show.",
    ),
    "benched": (
        "[Speed over k by load, as repetitions spread: 1 at once: k=0 1.00, k=1 1.44, k=2 1.70, "
        "k=3 1.82, k=4 1.53; 8 at once: k=0 1.00, k=1 0.87, k=2 0.76, k=3 0.64, k=4 0.53]",
    ),
    "benched on a copy, once": (
        "1 at once: no k is recommended: one repetition has no spread: measure with --repeat 3.",
    ),
}
"""Lines of each page that are not on the whole card (tests/printed/card.md), as a reader sees them."""


@pytest.mark.parametrize("name", SAID)
def test_a_page_says_what_was_found(name, pages):
    lines = lines_of(render(pages[name]).replace(str(reports.MODEL.parent), "models"))
    assert [line for line in SAID[name] if line not in lines] == [], "\n".join(lines)


def test_the_sentence_on_top_is_one(pages):
    for name, full in pages.items():
        assert full.verdict.ok == (full.verdict.label != "Not ready")
        if name not in HOSTILE:
            assert full.verdict.says.endswith(".") and "\n" not in full.verdict.says


# --- report.json ----------------------------------------------------------------------------------


def test_a_report_read_back_is_the_same_and_renders_the_same(pages, tmp_path):
    for full in pages.values():
        path = write_whole(tmp_path / "deep" / "folder" / "report.json", text_of(full))
        assert read_json(path) == full
        assert json_of(path)["schema"] == 8
        assert list(path.parent.iterdir()) == [path], "nothing partial is left"
    assert render(read_json(path)) == render(full)


def keys(part: Any, path: str = "") -> set[str]:
    """Every value of a file by its path."""
    if isinstance(part, list):
        return set().union(*(keys(each, path) for each in part)) or {path}
    if not isinstance(part, dict):
        return {path}
    return set().union(*(keys(each, f"{path}.{name}") for name, each in part.items())) or {path}


def test_version_8_is_what_it_was(pages):
    """Other fields are another version: change `schema`, what reads it, and the stored list, in one
    change. A field that goes is none, where older files are still read (`Fact.dropped`).
    """
    found = keys([full.model_dump(mode="json", by_alias=True) for full in pages.values()])
    printed("report_fields.txt", "\n".join(sorted(found)) + "\n")


def test_a_field_that_went_is_passed_over():
    told = reports.summary()
    told["candidates"][0] |= {"needed_slots": 812}
    assert calibration_fact(told, reports.SETTINGS) == calibration_fact(
        reports.summary(), reports.SETTINGS
    )


@pytest.mark.parametrize(
    "written, other, says",
    [
        ('"schema": 8', '"schema": 7', "schema"),
        ('"schema": 8', '"schema": 8, "colour": "red"', "colour"),
        ('"verdict": {', '"sentence": {', "verdict"),
    ],
)
def test_another_version_is_refused(written, other, says, pages, tmp_path):
    path = write_whole(tmp_path / "report.json", text_of(pages["bare"]))
    path.write_text(path.read_text().replace(written, other))
    with pytest.raises(CheckpointError, match=rf"version 8; got {says}.*Run the check again"):
        read_json(path)


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_files():
    rows = sizes_by_group(open_source(reports.MODEL))
    held, mtp = 0, 0
    for file in reports.MODEL.glob("*.safetensors"):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        held += len(raw) - start
        for name, entry in json.loads(raw[8:start]).items():
            if name.startswith("model.layers.3."):
                first, end = entry["data_offsets"]
                mtp += end - first
    assert sum(row.num_bytes for row in rows) == held
    assert sum(row.num_bytes for row in rows if row.part == "mtp") == mtp > 0
    assert {row.num_bytes_before for row in rows} == {None}


def test_a_group_that_is_gone_is_still_a_row(tmp_path):
    config, tensors = source_layout("glm-4.7")
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
        write_checkpoint(folder, *source_layout("glm-4.7"))
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
    printed("calibration.txt", re.sub(" +$", "", console.export_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    "written, other, where",
    [
        ('"perplexity": 3.2101', '"perplexity": NaN', "rows.0.perplexity"),
        ('"bytes": 1800000', '"bytes": 1HUGE', "candidates.0.bytes"),
        ('"candidates": [{', '"candidates": [MANY{', "candidates"),
        (
            '"2": [0.925, 0.80012], "3": [0.925, 0.80012, 0.6321]',
            '"2": [0.925, 0.80012], "3": [0.1, 0.1, 1.1]',
            "by_position.3.2",
        ),
        (
            '"2": [0.925, 0.80012], "3": [0.925, 0.80012, 0.6321]',
            '"3": [0.925, 0.80012, 0.6321]',
            "rows.1.acceptance",
        ),
        ('"processes": 2', '"processes": 2, "colour": "red"', "colour"),
    ],
)
def test_figures_that_nobody_measured_are_not_shown(written, other, where, tmp_path):
    account = reports.summary()
    record = json.dumps(measured.recorded(summary=account, calibration=reports.SETTINGS))
    assert written in record
    many = (json.dumps(account["candidates"][0]) + ", ") * 139
    other = other.replace("MANY", many).replace("HUGE", "0" * 400)
    found, why = recorded(tmp_path / "odd", record.replace(written, other))
    assert found is None and where in why


@pytest.mark.parametrize(
    "record, why",
    [
        (measured.recorded(), "None: every value was computed from the weights alone"),
        ("{", "Not read: "),
        ("[" * 100_000, "Not read: "),
        ({}, "Not read: keepmtp.json is not as this keepmtp writes it (keepmtp.json: must be"),
        (measured.recorded(summary={}, calibration=None), "Not read: "),
        (measured.recorded(summary={}), "Not read: "),
        (measured.recorded(summary={}, calibration=reports.SETTINGS), "mtp: Field required"),
    ],
)
def test_a_record_that_says_nothing_is_no_error(record, why, tmp_path):
    found, told = recorded(tmp_path / "odd", record)
    assert found is None and why in told and told.endswith(".")


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("width, is_dark", [(390, True), (1280, False)])
@pytest.mark.parametrize("name", ["whole", "hostile", "calibrated", "evaluated", "benched"])
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
    assert seen.counts.get("table", 0) == render(full).count("<table")
    assert full.verdict.label in seen.text and full.verdict.says in seen.text
    assert all(reason.replace("`", "") in seen.text for reason in full.absent.values())
    dim = min(contrast(ink, probe["sheet"]) for ink in probe["inks"])
    assert dim >= 4.5, "WCAG AA for text"
    assert (contrast(probe["sheet"], "rgb(0, 0, 0)") < 4) == is_dark


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
    assert any("no" in line for line in seen.console) and seen.probe["empty"] == 2
    assert min(contrast(ink, seen.probe["sheet"]) for ink in seen.probe["inks"]) < 4.5


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strangers_words_stay_words(name, pages):
    """Without a browser: nothing that a checkpoint may choose opens an element, in text, attributes
    or charts.
    """
    html = render(pages[name])
    assert "<script" not in html and "<img src=x" not in html
    assert html.count("&lt;script&gt;") > 20


# --- the card's pictures --------------------------------------------------------------------------


def test_pictures_of_equal_reports_are_equal_bytes_and_name_no_date(pages):
    first = charts(pages["evaluated"])["acceptance"]
    assert first == charts(pages["evaluated"])["acceptance"]
    picture = Image.open(io.BytesIO(first.png))
    assert picture.format == "PNG" and set(picture.info) <= {"dpi"}
    assert picture.width == 1100 and picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    other = reports.judged(evaluation=evaluation(checkpoint={"shares": (0.5, 0.4, 0.3)}))
    assert charts(other)["acceptance"].png != first.png
    assert charts(pages["bare"]) == charts(benched(cells=(benches.cell(0, [5.0, 6.0]),))) == {}


def test_one_position_shows_source_checkpoint_and_limit():
    """k=1 is eval's default: none of the three lies under another one."""
    one = {"shares": (0.8,)}
    fact = evaluation(protocol={"k": 1}, source=one, checkpoint=one)
    chart = charts(reports.judged(evaluation=fact))["acceptance"]
    picture = Image.open(io.BytesIO(chart.png)).convert("RGB")
    counts = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
    seen = {name: counts.get(ImageColor.getrgb(name), 0) for name in (_SOURCE, _OWN, _LIMIT)}
    assert seen[_SOURCE] > 10_000 and seen[_OWN] > 10_000 and seen[_LIMIT] > 500, seen


@pytest.mark.parametrize("name", ["markdown-it-py", "matplotlib"])
def test_without_the_extra_it_is_one_sentence(name, pages, monkeypatch, tmp_path):
    known = extras.version

    def version(asked: str) -> str:
        if asked == name:
            raise extras.PackageNotFoundError(name)
        return known(asked)

    monkeypatch.setattr(extras, "version", version)
    says = rf"got no {name}\. Run \S+ -m pip install 'keepmtp\[report\]'\.$"
    with pytest.raises(RecipeError, match=says):
        write_html(tmp_path, pages["bare"])
    assert not list(tmp_path.iterdir())


# --- from the command line, and in the wheel ------------------------------------------------------


@pytest.mark.full
def test_a_page_is_made_again_from_its_json(pages, tmp_path):
    path = write_whole(tmp_path / "report.json", text_of(pages["broken"]))
    assert keepmtp("report", path, status=0).stdout == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text() == render(pages["broken"])
    path.write_text("{")
    done = keepmtp("report", path, status=2)
    assert done.stderr.startswith(f"error: {path}: ")
    assert done.stderr.count("\n") == 1


def test_save_writes_both_even_for_what_cannot_be_read(tmp_path):
    checked = examine(reports.MODEL)
    page = save(
        tmp_path / "good", checked.data, vllm="0.32.0", opened=checked.source, source=checked.source
    )
    assert "experts" in page.read_text() and read_json(page.with_name("report.json")).verdict.ok
    (tmp_path / "empty").mkdir()
    page = save(tmp_path / "bad", check(tmp_path / "empty"), vllm="0.32.0")
    assert "could not be read" in page.read_text()
    assert not read_json(page.with_name("report.json")).verdict.ok
    config, tensors = source_layout("glm-4.7")
    folder = write_checkpoint(tmp_path / "odd", config | {"model_type": "odd"}, tensors)
    checked = examine(folder)
    page = save(tmp_path, checked.data, vllm="0.32.0", opened=checked.source)
    assert re.search("No sizes: .*odd", read_json(page.with_name("report.json")).absent["sizes"])
