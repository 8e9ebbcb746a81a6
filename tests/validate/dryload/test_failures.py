"""Each failure that the verdict of a dry load knows is found by the text that its public thread or
vLLM's source has.
"""

import time
import tomllib
from pathlib import Path

import pytest
from keepmtp.validate.dryload.failures import (
    Silence,
    known,
    known_defect,
    known_failure,
    silent_defect,
)
from keepmtp.validate.facts.dry_load import LoadFailure

DEFECTS = {row.name: row for row in known().defects}
FAILURES = {row.name: row for row in known().failures}
STEP = "it cuts layer_types to the decoder layers, then looks up the draft's layer behind them"
SAID = tomllib.loads((Path(__file__).parent / "said.toml").read_text())


def lines_of(kind: str) -> list[object]:
    """(name of the failure, where it was read or its version, line), each with its id."""
    found = []
    for name, lines in SAID[kind].items():
        for origin, line in lines.items():
            found.append(pytest.param(name, origin, line, id=f"{name}: {origin}"))
    return found


@pytest.mark.parametrize("name, _, line", [*lines_of("said"), *lines_of("met")])
def test_words_name_the_failure(name, _, line):
    if name in DEFECTS:
        version = _.partition(",")[0].replace("any", "0.32.0")
        families = DEFECTS[name].families or ("",)
        dialects = DEFECTS[name].dialects or ("",)
        said = LoadFailure(stage="load", role="draft", type="", words=line, at="")
        of = {"family": families[0], "dialect": dialects[0], "version": version}
        found = known_defect(said, **of)
        assert found is not None and found.name == name
    else:
        found = known_failure(line)
        assert found is not None and found.name == name


@pytest.mark.parametrize("row", SAID["silent"], ids=lambda row: row["name"])
def test_what_a_dry_load_saw_in_silence_is_known(row):
    silence = Silence.model_validate(row["silence"])
    version = row.get("version", "0.32.0")
    found = silent_defect(silence, family=row["family"], version=version)
    assert found is not None and found.name == row["name"]


@pytest.mark.parametrize("row", SAID["good"], ids=lambda row: row["line"][:20])
def test_what_is_no_such_failure_is_not_called_one(row):
    assert known_failure(row["line"]) is None


def test_every_row_has_words_from_somewhere():
    quoted = {*SAID["said"], *SAID["met"], *(row["name"] for row in SAID["silent"])}
    assert {*DEFECTS, *FAILURES} == quoted


@pytest.mark.parametrize(
    "family, version, says",
    [
        ("step3p5", "0.31.0", STEP),
        ("step3p5", "0.32.0+cpu", STEP),
        ("glm4_moe", "0.32.0", ""),
        ("step3p5", "0.33.0rc1.dev9", "it looks up the heads"),
        ("step3p5", "0.34.0", ""),
    ],
)
def test_a_defect_is_of_its_families_and_of_its_versions(family, version, says):
    place = "vllm/models/step3p5.py:421"
    failure = LoadFailure(stage="load", role="draft", type="IndexError", words="", at=place)
    defect = known_defect(failure, family=family, dialect="", version=version)
    assert (defect is not None) == bool(says)
    if defect:
        assert defect.says.startswith(f"a defect of vLLM {version}, not of the checkpoint: {says}")
        assert defect.cure.endswith("helps; vLLM 0.33.0 does not have it") == says.startswith(
            "it cuts"
        )


@pytest.mark.parametrize("unit", SAID["units"])
def test_no_text_makes_the_table_slow(unit):
    """4,000 bytes of it, a thousand times: no more is kept of an exception."""
    began = time.process_time()
    for _ in range(1000):
        known_failure((unit * 4000)[:4000])
    assert time.process_time() - began < 5
