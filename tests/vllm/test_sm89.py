"""What vLLM picks on an L40S or an RTX 4090: no FP4 tensor cores, no Machete, no DeepGEMM, no
grouped CUTLASS.
"""

import foreign_form
import pytest
from checkpoint_files import Checkpoint
from good import cached, ours, outputs_of, released
from keepmtp.recipes.conventions import FP8_CACHE
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.dry_load import LoadAccount
from keepmtp.validate.facts.findings import Finding
from modelopt_form import modelopt
from printed import printed

pytestmark = [pytest.mark.vllm, pytest.mark.full]

OURS = ["NVFP4", "NVFP4A16", "MXFP4", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W8A16", "W8A8"]
OTHERS = ("modelopt NVFP4", "modelopt FP8", "Quark MXFP4", "released FP8 blocks")


def with_cache(checkpoint: Checkpoint, scale: str) -> Checkpoint:
    """compressed-tensors' entry for an FP8 KV cache, and a scale of it in the MTP layer."""
    checkpoint.quantization["kv_cache_scheme"] = dict(FP8_CACHE)
    checkpoint.tensors[scale] = ("F32", ())
    return checkpoint


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> dict[str, LoadAccount]:
    mla = ours("deepseek-r1", "FP8_DYNAMIC")
    made = {scheme: ours("glm-4.7", scheme, scheme) for scheme in OURS} | {
        "modelopt NVFP4": modelopt("glm-4.7", "NVFP4", "NVFP4"),
        "modelopt FP8": modelopt("glm-4.7", "FP8", "FP8"),
        "Quark MXFP4": foreign_form.quark_mxfp4(mtp="MXFP4"),
        "released FP8 blocks": released("deepseek-r1"),
        "sparse MLA": released("deepseek-v3.2"),
        "FP8 cache": outputs_of(cached("qwen3.5-27b")),
        "FP8 cache, MLA": with_cache(mla, "model.layers.3.self_attn.k_scale"),
        "own attention": released("dsv4-flash"),
    }
    return dry_loaded(made, "sm89")


def findings(account: LoadAccount) -> tuple[Finding, ...]:
    return with_loads(examine(account.path), [account], "0.32.0").data.findings


def test_an_entry_for_an_fp8_cache_reaches_the_draft(accounts):
    """FlashInfer reads it there, and the scale itself is read."""
    account = accounts["FP8 cache"]
    for model in (account.load.target, account.load.draft):
        assert "FLASHINFER kv=fp8" in {use.kernel for use in model.kernels}
    assert findings(account) == ()


def test_latent_attention_keeps_its_cache_and_leaves_the_scale_unread(accounts):
    account = accounts["FP8 cache, MLA"]
    assert "TRITON_MLA" in {use.kernel for use in account.load.draft.kernels}
    found = {finding.rule: finding for finding in findings(account)}
    assert {finding.severity for finding in found.values()} == {"warning"}
    assert (
        "no effect" in found["kv-cache"].says
        and found["kv-scales"].where == "model.layers.3.self_attn.k_scale"
    )


def test_a_model_with_attention_of_its_own_that_this_gpu_has_no_kernel_for(accounts):
    """DeepSeek-V4 names its own backend: vLLM builds it on every GPU, and fails at the first
    token.
    """
    [first, *_] = findings(accounts["own attention"])
    assert (first.rule, first.severity) == ("no-kernel", "error") and "8.9" in first.says
    assert "another GPU" in first.cure


def test_sparse_attention_has_no_kernel_there_and_the_cure_does_not_speak_of_schemes(accounts):
    [finding] = findings(accounts["sparse MLA"])
    assert "No valid attention backend found" in finding.says and finding.where == "config.json"
    assert "newer GPU" in finding.cure and "scheme" not in finding.cure


def test_the_kernels_of_each_scheme(accounts):
    """The order of each list in vLLM 0.32.0's kernels/linear/__init__.py, is_supported of each
    kernel, and fused_moe/oracle/*.py.
    """
    lines = []
    for name in (*OURS, *OTHERS):
        load = accounts[name].load
        assert load.failure is None
        for role, model in (("target", load.target), ("draft", load.draft)):
            lines.append(f"{name}, {role}")
            assert not any(use.outcome.startswith("refused") for use in model.kernels)
            lines += sorted({f"  {use.layer}: {use.kernel}" for use in model.kernels if use.kernel})
    printed("kernels_sm89.txt", "\n".join(lines) + "\n")
