"""Runs in vLLM's Python: vLLM's own benchmark of a server, once for each line of standard input.

In: lines of JSON, {"texts": [...], "is_chat": ..., "output_tokens": ..., "concurrency": ...,
"address": ..., "model": ...}. Out: for each a line of JSON on standard output, what it found.
Everything that vLLM prints goes to standard error.

Easy to get wrong: the benchmark is that of `vllm bench serve` (vllm/benchmarks/serve.py of 0.32),
as it is.
"""

import asyncio
import json
import math
import os
import sys
from importlib import import_module


def run(
    texts: list[str], is_chat: bool, output_tokens: int, concurrency: int, address: str, model: str
) -> dict:
    """One benchmark: all requests at once, but for the most in flight."""
    serve = import_module("vllm.benchmarks.serve")
    request = import_module("vllm.benchmarks.datasets").SampleRequest
    # The command takes requests from a dataset of its own, which needs pandas; ours are handed to
    # the function that it calls.
    samples = []
    for number, text in enumerate(texts):
        sample = request(
            prompt=text,
            prompt_len=1,  # the server's own count replaces it
            expected_output_len=output_tokens,
            chat_messages=[{"role": "user", "content": text}] if is_chat else None,
            request_id=f"bench-{number}",
        )
        samples.append(sample)
    backend, path = ("openai-chat", "chat/completions") if is_chat else ("openai", "completions")
    serve.freeze_gc_heap()
    return asyncio.run(
        serve.benchmark(
            task_type=serve.TaskType.GENERATION,
            # It counts tokens where a server does not; ours always does, so it is never asked.
            tokenizer=object(),
            input_requests=samples,
            logprobs=None,
            request_rate=math.inf,
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=["ttft", "tpot"],
            selected_percentiles=[],
            ignore_eos=False,
            goodput_config_dict={},
            lora_modules=None,
            extra_headers=None,
            ready_check_timeout_sec=0,
            endpoint_type=backend,
            api_url=f"{address}/v1/{path}",
            base_url=address,
            model_id=model,
            model_name=model,
            max_concurrency=concurrency,
            # Greedy. Answers end by themselves: a model that is made to write on after its end
            # repeats itself, and a draft guesses that too easily.
            extra_body={"temperature": 0},
        )
    )


def main() -> None:
    """Until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run(**json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
