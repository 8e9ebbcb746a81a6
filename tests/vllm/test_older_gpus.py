"""What vLLM picks without FP4 tensor cores for what no scheme of docs/tables/kernels.md stands for: on an
A100, an L40S or RTX 4090, and an H100.

Before sm90 there is no Machete, no DeepGEMM and no grouped CUTLASS, before sm89 no FP8 tensor cores.
On sm90 Humming, which vLLM's CUDA wheel requires, comes before Marlin.
"""

import re

import foreign_form
import pytest
from checkpoint_files import Checkpoint
from data_files import table
from good import cached, ours, outputs_of, released
from keepmtp.recipes.conventions import FP8_CACHE
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.dry_load import ROLES

pytestmark = [pytest.mark.vllm, pytest.mark.full]

PICKED = table("vllm/test_older_gpus")


def with_cache(checkpoint: Checkpoint, scale: str) -> Checkpoint:
    """compressed-tensors' entry for an FP8 KV cache, and a scale of it in the MTP layer."""
    checkpoint.quantization["kv_cache_scheme"] = dict(FP8_CACHE)
    checkpoint.tensors[scale] = ("F32", ())
    return checkpoint


@pytest.fixture(scope="module")
def made() -> dict[str, Checkpoint]:
    mla = ours("deepseek-r1", "FP8_DYNAMIC")
    return {
        "Quark MXFP4": foreign_form.quark_mxfp4(mtp="MXFP4"),
        "released FP8 blocks": released("deepseek-r1"),
        "sparse MLA": released("deepseek-v3.2"),
        "FP8 cache": outputs_of(cached("qwen3.5-27b")),
        "FP8 cache, MLA": with_cache(mla, "model.layers.3.self_attn.k_scale"),
        "own attention": released("dsv4-flash"),
    }


@pytest.mark.parametrize("gpu", ["sm80", "sm89", "sm90"])
def test_kernels_and_findings(gpu, made, dry_loaded):
    """Kernels by the order of each list in vLLM's kernels/linear/__init__.py, is_supported of each
    kernel, and fused_moe/oracle/*.py. An entry for an FP8 cache reaches the draft, but not
    latent attention, whose scale is left unread. DeepSeek-V4 names its own back-end: vLLM builds it
    on every GPU, and fails at the first token; what it and sparse attention need is another GPU.
    """
    wanted = PICKED[gpu]
    kernels, attention, told = {}, {}, {}
    for name, account in dry_loaded(made, gpu).items():
        uses = [use for role in ROLES for use in account.of(role)[0].kernels]
        uses = [use for use in uses if use.kernel or use.outcome.startswith("refused")]
        of_attention = {use.kernel for use in uses if "Attention" in use.layer}
        kernels[name] = {use.kernel for use in uses if "Attention" not in use.layer}
        attention[name] = ", ".join(sorted(of_attention))
        told[name] = with_loads(examine(account.path), [account]).data.findings
    for name, found in kernels.items():
        if name in wanted["kernels"]:
            assert found == {*wanted["kernels"][name].split(", ")}, name
            assert attention[name] == wanted["attention"].get(name, "FLASH_ATTN"), name
        else:
            assert not found and not attention[name], name
    for name, findings in told.items():
        rows = wanted["findings"].get(name, [])
        assert [(f.rule, f.where) for f in findings] == [(rule, where) for rule, where, _ in rows]
        for finding, (_, _, words) in zip(findings, rows, strict=True):
            assert re.search(words, f"{finding.says} {finding.cure}"), finding
