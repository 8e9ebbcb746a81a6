"""Packed heads and embeddings, from the recipe to vLLM's classes: bytes of eight families in both
dialects, and docs/tables/heads.md sampled anew. `make docs` writes all of that page.
"""

import pytest
from good import packed
from heads import DOCS, FORMS, VERSIONS, markdown, places, run
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.validate.check.check import check
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.dryload.loader import Job
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import find_vllm
from writing import tiny, written

# Of each family a head in both dialects; and of those that look rows up packed an embedding.
WORDS = {"compressed-tensors": "NVFP4A16", "modelopt": "FP8_DYNAMIC"}
MODELS = ["deepseek-r1", "glm-4.7", "glm-5", "hy3", "inkling", "longcat-flash-chat"]
MODELS += ["qwen3.5-27b", "qwen3.5-397b"]
CASES = [(model, format, "head", word) for model in MODELS for format, word in WORDS.items()]
CASES += [(model, "compressed-tensors", "embedding", "W8A16") for model in ("deepseek-r1", "glm-5")]
TABLES = {("0.32.0", "FP8"): "", ("0.33.0", "FP8"): "", ("0.33.0", "NVFP4A16"): ""}
TABLES["0.32.0", "NVFP4A16"] = "no module or parameter named 'ngram_embedding.weight_scale_2'"

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.mark.few(1, 12)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_what_is_written_loads(case, tmp_path, dry_loader):
    """The check has no word for it, and vLLM fills every parameter of target and draft."""
    model, format, group, word = case
    recipe = packed(model, group, word, format).recipe
    plan = make_plan(recipe, open_source(tiny(tmp_path / "release", model)))
    out = tmp_path / "out"
    written(plan, out)
    assert check(out).findings == ()
    (account,) = dry_loader("sm100").load_all([Job(folder=out)])
    assert account.load.failure is None
    assert (account.target.faults, account.draft.faults, account.unconsumed) == ((), (), ())
    built = {use.method for use in account.load.target.kernels if "VocabParallel" in use.layer}
    built |= {use.method for use in account.load.target.kernels if "LMHead" in use.layer}
    assert any("Unquantized" not in method for method in built)


@pytest.mark.parametrize("version, word", TABLES)
@pytest.mark.parametrize("format", WORDS)
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
