"""docs/tables/matrix.md tells what vLLM does today: sampled anew, cell by cell. `make docs` writes all
of it.
"""

import itertools
import re

import pytest
import releases
from keepmtp.validate.facts.vllm_env import find_vllm
from matrix import COLUMNS, CURED, DOCS, TPS, VARIANTS, Cells, run

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.fixture(scope="module")
def written() -> Cells:
    text = DOCS.read_text()
    reasons = {
        f"[{number}]": says for number, says in re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE)
    }
    reasons |= {f"{CURED} {number}": f"{CURED}: {says}" for number, says in reasons.items()}
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    columns = [(gpu, tp) for gpu in COLUMNS for tp in TPS]
    assert rows[0][2:] == [f"{gpu} TP{tp}" for gpu, tp in columns]
    found = Cells()
    for _, checkpoint, *cells in rows[1:]:
        model, _, variant = checkpoint.partition(", ")
        for place, cell in zip(columns, cells, strict=True):
            found[model, variant, *place] = reasons.get(cell, cell)
    return found


def test_every_family_and_variant_is_there(written):
    wanted = {(model, variant) for model in releases.MODELS for variant in VARIANTS}
    assert {(model, variant) for model, variant, _, _ in written} == wanted


@pytest.mark.few(1, 1)
@pytest.mark.parametrize("start", range(len(VARIANTS)))
def test_the_matrix_is_what_vllm_does(written, start):
    """Of each model one variant, in turn, at TP 4. At TP 1 test_dry_corpus.py loads each family."""
    variants = [*VARIANTS][start:] + [*VARIANTS][:start]
    told = run(zip(releases.MODELS, itertools.cycle(variants)), COLUMNS, (4,), find_vllm())
    assert {
        place: (text, written[place]) for place, text in told.items() if text != written[place]
    } == {}
