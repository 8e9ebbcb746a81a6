"""Public quantized releases in the dry load: vLLM's own classes agree with the static verdict on
each.
"""

import pytest
from checkpoint_files import write
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.facts.vllm_env import find_vllm
from real_release import published, real_release

# One of each dialect and producer: modelopt's two files, a mixture by names, experts of GPTQ, `+:`
# for a plain draft.
SOME = (
    "deepseek-v3.1-nvfp4",
    "deepseek-v4-flash-nvfp4",
    "nemotron-3.5-lightning-nvfp4",
    "qwen3.5-397b-a17b-gptq-int4",
    "qwen3.6-35b-a3b-nvfp4",
    "qwen3.8-27b-w4a16-autoround-gptq",
)


@pytest.mark.vllm
def test_vllm_says_of_public_releases_what_the_static_check_says(tmp_path):
    paths = [str(write(tmp_path / name, real_release(name))) for name in SOME]
    for name, checked in zip(SOME, check_on(paths, vllm=find_vllm(), gpus=["sm100"]), strict=True):
        static = [
            [f.severity, f.rule, f.where] for f in checked.data.findings if f.origin == "static"
        ]
        assert static == published(name)["findings"]
        is_refused = any(severity == "error" for severity, *_ in static)
        assert checked.accounts[0].load.ok != is_refused, checked.data.findings
