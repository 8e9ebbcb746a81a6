"""Scales of an FP8 KV cache in vLLM's own classes: which families take them, and how its operator
rounds by them.
"""

from pathlib import Path

import pytest
import releases
import torch
from good import cached, outputs_of
from keepmtp.quantize.calibrate.layers.caches import e4m3_by
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.conventions import FORMATS
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.dry_load import LoadAccount
from real_vllm import HAS_AVX512, NO_AVX512, computed

pytestmark = pytest.mark.vllm
TWINS = ("glm-4.5-air", "qwen3.5-text", "mimo-v2.5", "exaone-4.5-33b")
# vLLM 0.32.0 builds neither of their drafts: docs/mtp.md.
NOT_BUILT = ("step-3.5-flash", "step-3.7-flash")
# Its attention has one kernel on sm100, of FlashAttention, which takes an FP8 cache on sm90 alone
# (vLLM 0.32.0 v1/attention/backends/flash_attn.py).
HOPPER_ALONE = "mimo-v2-flash"
# A draft whose loader leaves scales alone: its cache has 1.
WITHOUT = ("mimo-v2-flash",)

ROUND = """
import sys
import torch
from safetensors.torch import load_file, save_file
from vllm import _custom_ops as ops

states = load_file(sys.argv[1])["states"]
tokens, heads, width = states.shape
keys, values = (torch.zeros(1, heads, tokens, width, dtype=torch.uint8) for _ in range(2))
ops.cpu_attn_reshape_and_cache(states, states, keys, values, torch.arange(tokens), "vec", 0.03, 1.0, "fp8")
keys = keys[0].reshape(heads, width, tokens).transpose(1, 2)  # a block of keys is transposed
save_file({"k": keys.transpose(0, 1).contiguous(), "v": values[0].transpose(0, 1).contiguous()}, sys.argv[2])
"""


def plans() -> dict[str, Plan]:
    """Every family that keepmtp plans a cache for, in the two dialects by turns."""
    found = {}
    for model in releases.MODELS:
        if model in (*TWINS, *NOT_BUILT):
            continue
        for format in FORMATS[:: (-1) ** len(found)]:
            try:
                found[f"{model} {format}"] = cached(model, format=format)
                break
            except RecipeError:
                continue
    return found


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> dict[str, tuple[Plan, LoadAccount]]:
    made = plans()
    accounts = dry_loaded({name: outputs_of(plan) for name, plan in made.items()})
    return {name: (made[name], account) for name, account in accounts.items()}


def test_every_scale_is_read_by_target_and_draft(accounts):
    assert len({name.partition(" ")[0] for name in accounts}) >= 9
    for name, (plan, account) in accounts.items():
        if name.startswith(HOPPER_ALONE):
            assert account.load.failure and "kv-cache on this device" in account.load.failure.words
            continue
        assert account.load.failure is None, name
        scales = [tensor for tensor in plan.tensors if tensor.calibrated == "cache"]
        has_own = any(tensor.part == "mtp" for tensor in scales)
        assert has_own == (name.partition(" ")[0] not in WITHOUT), name
        on_disk = {plan.on_disk(output).name for tensor in scales for output in tensor.outputs}
        assert len(on_disk) == len(scales) >= 4 and not on_disk & {*account.unconsumed}, name
        assert {
            use.kernel.rpartition(" kv=")[2][:3]
            for use in account.load.target.kernels
            if "kv=" in use.kernel
        } == {"fp8"}, name
        findings = with_loads(examine(account.path), [account]).data.findings
        assert [finding for finding in findings if finding.rule.startswith("kv-")] == [], name


@pytest.mark.parametrize(
    "model, says",
    [
        ("deepseek-r1", "latent attention"),
        ("dsv4-flash", "without these parameters"),
        ("qwen3.8-flash-next", "stops at every entry"),
        ("inkling", "no attention layer with a projection of keys"),
    ],
)
def test_a_family_without_a_place_is_refused(model, says):
    with pytest.raises(
        RecipeError, match=f"kv_cache: vLLM must have a place for scales .* got .*{says}"
    ):
        cached(model, "FP8_BLOCK")


@pytest.mark.full
@pytest.mark.skipif(not HAS_AVX512, reason=NO_AVX512)
def test_keys_and_values_have_the_codes_of_vllms_operator(tmp_path: Path):
    """Its operator for CPUs cuts off what GPUs and we round to the nearest: each code is ours, or
    the one below it.

    Loud ones are cut off at 448 scales.
    """
    states = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    states[3] *= 4096
    states[5] /= 512
    made = computed(ROUND, {"states": states}, tmp_path)
    for leaf, scale in (("k", 0.03), ("v", 1.0)):
        ours = (e4m3_by(scale, states).float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        theirs = made[leaf]
        assert torch.equal(ours & 0x80, theirs & 0x80), "signs"
        above = (ours & 0x7F).int() - (theirs & 0x7F).int()
        assert above.min() == 0 and above.max() == 1 and 0.3 < above.float().mean() < 0.6, leaf
        assert (ours[3] & 0x7F).max() == (theirs[3] & 0x7F).max() == 0x7E, "448"
