"""Runs in vLLM's environment: serve checkpoints with method=mtp and print vLLM's counters and token ids, a line each.

    python counters.py '{"folder": ..., "prompts": [...], "num_drafts": 3}' ...

One engine at a time, settings as in serve.py, all prompts at once.
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip

from vllm import LLM, SamplingParams


def count(folder: str, prompts: list[str], num_drafts: int) -> dict[str, object]:
    """Token ids that were written, drafts, and how many of them were accepted at each position."""
    llm = LLM(
        model=folder, speculative_config={"method": "mtp", "num_speculative_tokens": num_drafts}, dtype="bfloat16",
        max_model_len=512, max_num_seqs=16, enable_prefix_caching=False, enforce_eager=True, disable_log_stats=False,
        seed=0,
    )  # fmt: skip
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "accepted": found["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }


if __name__ == "__main__":
    for job in map(json.loads, sys.argv[1:]):
        print("RESULT " + json.dumps(count(**job)), flush=True)
