"""What vLLM picks on an L40S or an RTX 4090: no FP4 tensor cores, no Machete, no DeepGEMM, no
grouped CUTLASS.
"""

import foreign_form
import pytest
from checkpoint_files import Checkpoint
from good import cached, ours, outputs_of, released
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.dry_load import LoadAccount
from keepmtp.validate.facts.findings import Finding
from modelopt_form import modelopt

pytestmark = [pytest.mark.vllm, pytest.mark.full]

# What is stored -> (kernel of linear modules, back-end of routed experts), read in vLLM 0.32.0's
# kernels/linear/ __init__.py (the order of each list, and is_supported of each kernel) and
# fused_moe/oracle/*.py.
PICKED = {
    "NVFP4": ("MarlinNvFp4LinearKernel", "MARLIN"),
    "NVFP4A16": ("MarlinNvFp4LinearKernel", "MARLIN"),
    "MXFP4": ("MarlinMxFp4LinearKernel", "MARLIN"),
    "FP8": ("CutlassFP8ScaledMMLinearKernel", "TRITON"),
    "FP8_DYNAMIC": ("CutlassFP8ScaledMMLinearKernel", "TRITON"),
    "FP8_BLOCK": ("MarlinFP8ScaledMMLinearKernel", "TRITON"),
    "W4A16": ("MarlinLinearKernel", "MARLIN"),
    "W8A16": ("MarlinLinearKernel", "MARLIN"),
    "W8A8": ("CutlassInt8ScaledMMLinearKernel", "TRITON"),
    "modelopt NVFP4": ("MarlinNvFp4LinearKernel", "MARLIN"),
    "modelopt FP8": ("CutlassFP8ScaledMMLinearKernel", "TRITON"),
    "Quark MXFP4": ("MarlinMxFp4LinearKernel", "MARLIN"),
    "released FP8 blocks": ("MarlinFP8ScaledMMLinearKernel", "TRITON"),
}


def with_cache(checkpoint: Checkpoint, scale: str) -> Checkpoint:
    """compressed-tensors' entry for an FP8 KV cache, and a scale of it in the MTP layer."""
    entry = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    checkpoint.quantization["kv_cache_scheme"] = entry
    checkpoint.tensors[scale] = ("F32", ())
    return checkpoint


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> dict[str, LoadAccount]:
    made = {scheme: ours("glm-4.7", scheme, scheme) for scheme in PICKED if " " not in scheme}
    made |= {
        f"modelopt {scheme}": modelopt("glm-4.7", scheme, scheme) for scheme in ("NVFP4", "FP8")
    }
    made["Quark MXFP4"] = foreign_form.quark_mxfp4(mtp="MXFP4")
    made["released FP8 blocks"] = released("deepseek-r1")
    made["sparse MLA"] = released("deepseek-v3.2")
    made["FP8 cache"] = outputs_of(cached("qwen3.5-27b"))
    made["FP8 cache, MLA"] = with_cache(
        ours("deepseek-r1", "FP8_DYNAMIC"), "model.layers.3.self_attn.k_scale"
    )
    made["own attention"] = released("dsv4-flash")
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


@pytest.mark.parametrize("scheme", PICKED)
def test_the_kernels_of_a_scheme(accounts, scheme):
    linear, experts = PICKED[scheme]
    load = accounts[scheme].load
    assert load.failure is None
    for kernels in (load.target.kernels, load.draft.kernels):
        of_linears = {
            use.kernel
            for use in kernels
            if "Parallel" in use.layer and "LinearKernel" in use.kernel
        }
        assert of_linears == {linear}
        assert [
            experts in use.kernel.split() for use in kernels if use.layer == "RoutedExperts"
        ] == [True]
        assert not any(use.outcome.startswith("refused") for use in kernels)
