"""Serve a tiny checkpoint with vLLM, with and without its MTP block, and report what vLLM accepts.

    python models/train/measure_vllm.py models/tiny-glm4-moe
    python models/train/measure_vllm.py models/tiny-docs --texts models/docs_held_out.jsonl

In: a checkpoint folder, in an environment that has vLLM. Out: JSON with, for 0 to 3 speculative
tokens, the number of held-out problems answered right, how many texts equal those without drafting,
and vLLM's own draft counters. With `--texts` it is asked to go on with texts, and nothing is right
or wrong.

The easy thing to get wrong is to read equal texts as a sign of a working draft. Verification keeps
the texts equal however bad the drafts are; only the accepted counts tell. Prefix caching is off
because the gated delta net of Qwen3.5 cannot combine it with drafting on a CPU (vLLM 0.32).
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read when vllm is imported

import vllm
from problems import HELD_OUT_SEED, distinct_problems, read_answer
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Vector

MAX_NUM_DRAFTS = 3
MAX_NEW_TOKENS = 96
BEGINNING_CHARACTERS = 300
_COUNTER_PREFIX = "vllm:spec_decode_"


def serve(folder: Path, *, prompts: list[str], num_drafts: int) -> tuple[list[str], dict[str, Any]]:
    """Greedy texts of all prompts and vLLM's `spec_decode` counters (empty without drafting)."""
    speculative = {"method": "mtp", "num_speculative_tokens": num_drafts} if num_drafts else None
    llm = LLM(
        model=str(folder),
        speculative_config=speculative,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
    )
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS), use_tqdm=False
    )
    counters = {
        metric.name.removeprefix(_COUNTER_PREFIX): metric.values
        if isinstance(metric, Vector)
        else metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(_COUNTER_PREFIX)
    }
    llm.llm_engine.engine_core.shutdown()
    return [output.outputs[0].text for output in outputs], counters


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=64, help="held-out problems (default 64)")
    parser.add_argument(
        "--texts", type=Path, help="JSON lines of `text`, whose beginnings are the prompts instead"
    )
    args = parser.parse_args()
    items = distinct_problems(args.problems, held_out=True, seed=HELD_OUT_SEED)
    report: dict[str, Any] = {
        "vllm": vllm.__version__,
        "num_held_out_problems": args.problems,
        "by_num_drafts": {},
    }
    prompts = [item.prompt for item in items]
    if args.texts:
        lines = args.texts.read_text().splitlines()[: args.problems]
        prompts = [json.loads(line)["text"][:BEGINNING_CHARACTERS] for line in lines]
    plain: list[str] = []
    for num_drafts in range(MAX_NUM_DRAFTS + 1):
        texts, counters = serve(args.folder, prompts=prompts, num_drafts=num_drafts)
        plain = plain or texts
        num_right = sum(
            read_answer(text) == str(item.answer) for text, item in zip(texts, items, strict=True)
        )
        report["by_num_drafts"][num_drafts] = {
            **({} if args.texts else {"num_right": num_right}),
            "num_equal_to_plain": sum(a == b for a, b in zip(texts, plain, strict=True)),
            **counters,
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    _main()
