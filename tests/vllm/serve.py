"""Runs in vLLM's environment: serve checkpoints with method=mtp on the CPU, print what was written
and accepted.

    python serve.py '{"folder": ..., "prompts": [...], "num_drafts": 1}' ...

A line each, one engine at a time, all prompts at once. Engines live in this process, so vLLM is
imported once. Prefix caching is off because Qwen3.5's delta nets cannot combine it with drafting on
a CPU.
"""

import json
import sys

from vllm import LLM, SamplingParams


def serve(folder: str, prompts: list[str], num_drafts: int) -> dict[str, object]:
    """Greedy answers as texts and token ids; vLLM's counters of drafted and accepted tokens, also
    by position.
    """
    llm = LLM(
        model=folder,
        speculative_config={"method": "mtp", "num_speculative_tokens": num_drafts},
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    found = {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()
    }
    llm.llm_engine.engine_core.shutdown()
    answers = [output.outputs[0] for output in outputs]
    return {
        "texts": [answer.text for answer in answers],
        "token_ids": [list(answer.token_ids) for answer in answers],
        "drafts": found["drafts"].value,
        "draft_tokens": found["draft_tokens"].value,
        "accepted_tokens": found["accepted_tokens"].value,
        "accepted_per_position": found["accepted_tokens_per_pos"].values,
    }


if __name__ == "__main__":
    for job in map(json.loads, sys.argv[1:]):
        print("RESULT " + json.dumps(serve(**job)), flush=True)
