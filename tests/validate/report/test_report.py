"""report.json says what was found, once and for all."""

import io
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import evaluations
import measured
import pytest
import reports
import stations
from checked import check
from data_files import json_of
from evaluations import COPY, Answers, evaluation
from keepmtp.checkpoints.files import write_whole
from keepmtp.checkpoints.identity import Identity
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.cli.measured import calibrated as calibration_found
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.check.check import examine
from keepmtp.validate.facts.dry_load import LoadedModel
from keepmtp.validate.facts.findings import CheckpointFacts, errors_of
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report.charts import _LIMIT, _OWN, _SOURCE, acceptance
from keepmtp.validate.report.check_data import (
    calibration_fact,
    calibration_of,
    check_data,
)
from keepmtp.validate.report.report import assemble, read_json, text_of, write
from PIL import Image, ImageColor
from releases import source_layout, write_checkpoint
from rich.console import Console

SCRIPT = (
    '<script>document.title="hit"</script><img src=x onerror=\'document.title="hit"\'>$x^2$ & '
    '"quoted"'
)
HOSTILE = ("hostile", "strange")
BAD = Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
DIED = reports.account("sm90", 1, failure=reports.REFUSED).load.model_copy(
    update={"target": LoadedModel()}
)


def benched(**own: Any) -> FullReport:
    """A speed matrix of the checkpoint alone."""
    bench = stations.bench_fact(with_source=False)
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
    near = stations.closeness(tmp_path_factory.mktemp("near"))
    answered = stations.lossless((), (), ("Thai 1",))
    native, cells = reports.served(is_copy=False), stations.benched().cells[:2]
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
            gates=Gates(max_worst_drop=0.02),
        ),
        "near": calibrated.model_copy(update={"closeness": near, "lossless": answered}),
        "benched": reports.benched(gates=Gates(min_speedup=1.2)),
        "benched, at fewer k": benched(cells=cells),
        "benched on a copy, once": benched(
            as_served=COPY, reason="no kernel.", cells=(stations.cell(1, [5.0]),)
        ),
        "hostile": reports.hostile(SCRIPT),
        "strange": evaluations.hostile(SCRIPT),
    }


def save(folder: Path, found: CheckData, opened: Source | None = None) -> Path:
    """report.json of a check alone."""
    data = check_data(found, opened)
    return write(folder, assemble(data, vllm=reports.VLLM, made_at=reports.AT))


def test_the_sentence_on_top_is_one(pages):
    for name, full in pages.items():
        if name not in HOSTILE:
            assert full.judgement.says.endswith(".") and "\n" not in full.judgement.says


# --- report.json ----------------------------------------------------------------------------------


def test_a_report_read_back_is_the_same(pages, tmp_path):
    for full in pages.values():
        path = write_whole(tmp_path / "deep" / "folder" / "report.json", text_of(full))
        assert read_json(path) == full
        assert json_of(path)["schema"] == 12
        assert list(path.parent.iterdir()) == [path], "nothing partial is left"


def keys(part: Any, path: str = "") -> set[str]:
    """Every value of a file by its path."""
    if isinstance(part, list):
        return set().union(*(keys(each, path) for each in part)) or {path}
    if not isinstance(part, dict):
        return {path}
    return set().union(*(keys(each, f"{path}.{name}") for name, each in part.items())) or {path}


def test_version_12_is_what_it_was(pages):
    """Other fields are another version: change `schema`, what reads it, and this digest, in one
    change. A field that goes is none, where older files are still read (`Fact.dropped`).
    """
    found = keys([full.model_dump(mode="json", by_alias=True) for full in pages.values()])
    digest = sha256("\n".join(sorted(found)).encode()).hexdigest()
    assert digest[:16] == "7793f29a3636b709", sorted(found)


def test_a_field_that_went_is_passed_over():
    told = reports.summary()
    told["candidates"][0] |= {"needed_slots": 812}
    assert calibration_fact(told, reports.SETTINGS) == calibration_fact(
        reports.summary(), reports.SETTINGS
    )


@pytest.mark.parametrize(
    "written, other, says",
    [
        ('"schema": 12', '"schema": 11', "schema"),
        ('"schema": 12', '"schema": 12, "colour": "red"', "colour"),
        ('"judgement": {', '"sentence": {', "judgement"),
    ],
)
def test_another_version_is_refused(written, other, says, pages, tmp_path):
    path = write_whole(tmp_path / "report.json", text_of(pages["bare"]))
    path.write_text(path.read_text().replace(written, other))
    with pytest.raises(CheckpointError, match=rf"version 12; got {says}.*Run the check again"):
        read_json(path)


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
    page = save(tmp_path / "page", checked.data, opened=checked.source)
    assert read_json(page.with_name("report.json")).calibration == found
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*calibration_found(found))
    text = " ".join(console.export_text().split())
    for says in (
        "released model 3.21 - 93.00 % 80.91 % 64.73 % 3.39 ",
        "quantized backbone, quantized MTP block 3.29 - 91.50 % 78.23 % 61.02 % 3.31 ",
        "candidates for the MTP block; 97.0% must be kept, at 95% confidence",
        "experts: NVFP4 0.9 MiB 97.80 % - 3.29 chosen; keeps enough",
        "W4A16 - - - - does not fit: K must be a multiple of 128",
        "NVFP4 0.9 MiB 94.20 % - 3.14 keeps too little",
        "Coverage: 45 modules calibrated on 4,096 tokens.",
        "the quantized backbone keeps 98.8 ± 0.4 %, and of that its MTP block 97.9 ± 0.6 %",
        "the router sent no token to 2 expert modules",
    ):
        assert says in text, text


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


# --- the card's pictures --------------------------------------------------------------------------


def test_pictures_of_equal_reports_are_equal_bytes_and_name_no_date(pages):
    first = acceptance(pages["evaluated"])
    assert first == acceptance(pages["evaluated"])
    picture = Image.open(io.BytesIO(first.png))
    assert picture.format == "PNG" and set(picture.info) <= {"dpi"}
    assert picture.width == 1100 and picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    other = reports.judged(evaluation=evaluation(checkpoint={"shares": (0.5, 0.4, 0.3)}))
    assert acceptance(other).png != first.png
    assert acceptance(pages["bare"]) is acceptance(pages["benched"]) is None


def test_one_position_shows_source_checkpoint_and_limit():
    """k=1 is eval's default: none of the three lies under another one."""
    one = {"shares": (0.8,)}
    fact = evaluation(protocol={"k": 1}, source=one, checkpoint=one)
    chart = acceptance(reports.judged(evaluation=fact))
    picture = Image.open(io.BytesIO(chart.png)).convert("RGB")
    counts = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
    seen = {name: counts.get(ImageColor.getrgb(name), 0) for name in (_SOURCE, _OWN, _LIMIT)}
    assert seen[_SOURCE] > 10_000 and seen[_OWN] > 10_000 and seen[_LIMIT] > 500, seen


def test_what_cannot_be_read_has_a_report_too(tmp_path):
    checked = examine(reports.MODEL)
    path = save(tmp_path / "good", checked.data, opened=checked.source)
    assert not errors_of(read_json(path).findings)
    (tmp_path / "empty").mkdir()
    path = save(tmp_path / "bad", check(tmp_path / "empty"))
    assert "could not be read" in read_json(path).absent["calibration"]
    assert errors_of(read_json(path).findings)
