"""What vLLM picks on an L40S or an RTX 4090: no FP4 tensor cores, no Machete, no DeepGEMM, no grouped CUTLASS."""

import pytest
from checkpoint_files import write
from good import ours, released
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.facts import LoadAccount
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.serving.vllm_env import find_vllm
from modelopt_form import modelopt

pytestmark = pytest.mark.vllm

# What is stored -> (kernel of linear modules, back-end of routed experts), read in vLLM 0.32.0's kernels/linear/
# __init__.py (the order of each list, and is_supported of each kernel) and fused_moe/oracle/*.py.
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
    "released FP8 blocks": ("MarlinFP8ScaledMMLinearKernel", "TRITON"),
}


@pytest.fixture(scope="module")
def accounts(tmp_path_factory) -> dict[str, LoadAccount]:
    """One process of vLLM judges all."""
    place = tmp_path_factory.mktemp("sm89")
    made = {scheme: ours("glm-4.7", scheme, scheme) for scheme in PICKED if " " not in scheme}
    made |= {f"modelopt {scheme}": modelopt("glm-4.7", scheme, scheme) for scheme in ("NVFP4", "FP8")}
    made["released FP8 blocks"] = released("deepseek-r1")
    made["sparse MLA"] = released("deepseek-v3.2")
    jobs = [Job(folder=write(place / name.replace(" ", "-"), checkpoint)) for name, checkpoint in made.items()]
    with DryLoader(find_vllm(), gpu="sm89") as loader:
        return dict(zip(made, loader.load_all(jobs), strict=True))


def test_sparse_attention_has_no_kernel_there_and_the_cure_does_not_speak_of_schemes(accounts):
    account = accounts["sparse MLA"]
    [finding] = with_loads(examine(account.path), [account], "0.32.0").data.findings
    assert "No valid attention backend found" in finding.says and finding.where == "config.json"
    assert "newer GPU" in finding.cure and "scheme" not in finding.cure


@pytest.mark.parametrize("scheme", PICKED)
def test_the_kernels_of_a_scheme(accounts, scheme):
    linear, experts = PICKED[scheme]
    load = accounts[scheme].load
    assert load.failure is None
    for kernels in (load.target.kernels, load.draft.kernels):
        of_linears = {use.kernel for use in kernels if "Parallel" in use.layer and "LinearKernel" in use.kernel}
        assert of_linears == {linear}
        assert [experts in use.kernel.split() for use in kernels if use.layer == "RoutedExperts"] == [True]
        assert not any(use.outcome.startswith("refused") for use in kernels)
