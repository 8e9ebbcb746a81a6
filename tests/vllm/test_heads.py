"""Packed heads and embeddings in vLLM's classes: docs/tables/heads.md sampled anew, which `make docs`
writes whole, and a packed table of n-grams.
"""

import pytest
from good import packed
from heads import DOCS, FORMS, VERSIONS, markdown, places, run
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.conventions import FORMATS
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import find_vllm
from writing import tiny, written

TABLES = {("0.32.0", "FP8"): "", ("0.33.0", "FP8"): "", ("0.33.0", "NVFP4A16"): ""}
TABLES["0.32.0", "NVFP4A16"] = "no module or parameter named 'ngram_embedding.weight_scale_2'"

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.mark.parametrize("version, word", TABLES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_table_of_ngrams_loads(format, version, word, tmp_path):
    """NVFP4 from 0.33 on, whose check and loader agree about 0.32."""
    release = tiny(tmp_path / "release", "qwen3.8-flash-next")
    plan = make_plan(
        packed("qwen3.8-flash-next", "table", word, format).recipe, open_source(release)
    )
    written(plan, tmp_path / "out")
    vllms, _ = had_vllms([version], find_vllm())
    (checked,) = check_on([str(tmp_path / "out")], vllms=vllms, gpus=("sm90", "sm100"))
    says = [finding.says for finding in checked.data.findings]
    if TABLES[version, word]:
        assert "plain, and takes no table" in says[0] and TABLES[version, word] in says[1]
    else:
        assert len(checked.accounts) == 2 and says == []


@pytest.mark.parametrize("model", ["glm-4.7", "mimo-7b"])
def test_the_page_is_what_vllm_does(model):
    vllms, _ = had_vllms(VERSIONS, find_vllm())
    told = run(places([model]), vllms, ("sm90", "sm100"))
    rows = [line for line in markdown(told).splitlines() if line.startswith("| ")]
    written_rows = DOCS.read_text().splitlines()
    assert len(rows[1:]) == 2 and len(FORMS) == 2
    assert [row for row in rows if row not in written_rows] == []
