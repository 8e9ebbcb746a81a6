"""What a token takes of the KV cache: by keepmtp's count, and by vLLM's own classes on a pretended GPU."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import releases
from commands import ROOT, captured
from keepmtp.quantize.needs.kv_cache import kv_bytes
from keepmtp.recipes.families import find_view
from keepmtp.validate.facts.dry_load import GPU
from real_vllm import NEEDS_VLLM, QUIET, VLLM_PYTHON

pytestmark = NEEDS_VLLM
# Every kind of attention that is counted, at full size: grouped-query; latent, also two of them in a layer and with
# an indexer in all layers or in some; sliding windows, also with other heads; and linear attention of five kinds.
MODELS = (
    *("glm-4.7", "ernie-4.5-21b", "deepseek-r1", "glm-4.7-flash", "longcat-flash-chat"),
    *("deepseek-v3.2", "hy4-preview", "k-exaone-236b", "exaone-4.5-33b", "mimo-v2.5"),
    *("qwen3.5-27b", "qwen3-next-80b", "nemotron-3-super", "ring-2.5-1t", "ling-3.0-flash"),
    "kimi-k3-mtp",
)
LENGTH = 32768


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """Each model without drafts or with two, in turn; and split over four GPUs, or with an FP8 cache."""
    jobs = []
    for number, model in enumerate(MODELS):
        config, _ = releases.source_layout(model, size="full")
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))
        drafts = (0, 2)[number % 2]
        more = [(4, 1, {}), (1, 1, {"kv_cache_dtype": "fp8"})][number % 2]
        for tp, k, further in ((1, drafts, {}), more):
            # The draft of EXAONE has a cache in BF16, whatever is asked for: vLLM's groups are of one layer then.
            if further and "exaone" in model:
                continue
            place = {"folder": str(folder / model), "tp": tp, "k": k, "further": further}
            jobs.append({**place, "length": LENGTH})
    return jobs


def counted(job: dict[str, Any]) -> int:
    """keepmtp's count."""
    config = json.loads(Path(job["folder"], "config.json").read_text())
    view = find_view(config, job["folder"])
    target, draft = kv_bytes(view, tp=job["tp"], width=1 if job["further"] else 2)
    return target + bool(job["k"]) * draft


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["sm90"])
def test_a_token_takes_what_vllm_counts(gpu: GPU, tmp_path):
    jobs = jobs_of(tmp_path)
    script = ROOT / "tests" / "vllm" / "caches.py"
    environment = os.environ | QUIET | {"VLLM_CACHE_ROOT": str(tmp_path)}
    done = captured(
        [VLLM_PYTHON, "-P", script, ROOT / "validate" / "dryload" / "in_vllm", gpu],
        input="\n".join(map(json.dumps, jobs)) + "\n",
        env=environment,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(jobs), done.stderr[-3000:]
    for job, answer in zip(jobs, answers, strict=True):
        assert "error" not in answer, (job, answer)
        assert counted(job) == answer["a_token"], (job, answer)
