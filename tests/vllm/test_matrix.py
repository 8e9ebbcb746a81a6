"""docs/matrix.md tells what vLLM does today: sampled anew, cell by cell. `make matrix` writes all
of it.
"""

import re

import pytest
import releases
from keepmtp.validate.facts.dry_load import GPU
from matrix import DOCS, VARIANTS, Cell, plain, run

BF16 = "compressed-tensors, MTP BF16"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full,
]  # docs/matrix.md; test_dry_corpus.py loads every family as well


@pytest.fixture(scope="module")
def written() -> dict[tuple[str, str, str, int], str]:
    """(model, variant, GPU, TP) -> the cell's text, its number replaced by the reason."""
    text = DOCS.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    columns = [tuple(column.split(" TP")) for column in rows[0][2:]]
    found = {}
    for _, checkpoint, *cells in rows[2:]:
        model, _, variant = checkpoint.partition(", ")
        for (gpu, tp), cell in zip(columns, cells, strict=True):
            found[model, variant, gpu, int(tp)] = (
                reasons[cell[1:-1]] if cell.startswith("[") else cell
            )
    return found


def test_every_family_and_variant_is_there(written):
    wanted = {(model, variant) for model in releases.MODELS for variant in VARIANTS}
    assert {(model, variant) for model, variant, _, _ in written} == wanted


@pytest.mark.parametrize(
    ("gpu", "tps", "variants"),
    [("sm100", (1, 4), tuple(VARIANTS)), ("sm90", (4,), (BF16,)), ("sm120", (4,), (BF16,))],
)
def test_the_matrix_is_what_vllm_does(written, gpu: GPU, tps, variants):
    told: list[Cell] = list(run(releases.MODELS, (gpu,), tps, variants))
    wrong = {
        (cell.model, cell.variant, cell.gpu, cell.tp): plain(cell.text)
        for cell in told
        if written[cell.model, cell.variant, cell.gpu, cell.tp] != plain(cell.text)
    }
    assert not wrong
