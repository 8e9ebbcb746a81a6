"""Runs in vLLM's environment: let a real draft class draft on the CPU and save what went in and
what came out.

    python dump_drafts.py '{"folder": ..., "prompts": [[ids], ...], "num_drafts": 3, "out":
                            "x.safetensors", "alone": ""}' ...

For prompt p: `p.ids` [T + num_drafts] (prompt, the target's next token, the drafts but the last),
`p.hidden` [T, H] from the target, `p.positions` [T], `p.first` [T, V] logits of draft step 1 at
every slot, `p.last` [num_drafts, V] logits of each step at the last slot. With a dtype for "alone",
the draft class runs without an engine in it (`draft_alone.py`); it may be left out.
"""

import json
import sys
from typing import Any

import torch
from draft_alone import draft_alone
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

# Classes are inspected in this process: a second one would import vLLM once more for each
# architecture.
registry._run_in_subprocess = lambda function: function()

# vLLM 0.32.0's CPU kernel of rotary embeddings takes the heads of latent attention's queries for
# tokens. Its plain form in the same class, which `-` chooses, does not.
PLAIN_ROTARY = ["all", "-rotary_embedding"]


class Watch:
    """State: the calls of one draft model since it was cleared."""

    def __init__(self, drafter: Any):
        self.model = drafter.model
        self.calls = []
        self.returns_tuple = drafter.model_returns_tuple()
        self.forward = self.model.forward
        self.model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {name: value.clone() for name, value in kwargs.items() if torch.is_tensor(value)}
        result = self.forward(*args, **kwargs)
        output = result[0] if self.returns_tuple else result
        self.calls.append(call | {"logits": self.model.compute_logits(output.clone()).float()})
        return result


def dump(folder: str, prompts: list[list[int]], num_drafts: int) -> dict[str, torch.Tensor]:
    """One engine, one request at a time."""
    llm = LLM(
        model=folder,
        speculative_config={"method": "mtp", "num_speculative_tokens": num_drafts},
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=2,
        enable_prefix_caching=False,
        enforce_eager=True,
        seed=0,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        language_model_only=True,
        compilation_config={"custom_ops": PLAIN_ROTARY},
    )
    watch = Watch(llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter)
    saved = {}
    for index, prompt in enumerate(prompts):
        watch.calls.clear()
        choice = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}], choice, use_tqdm=False)
        first, *rest = watch.calls[:num_drafts]
        length = len(prompt)
        shifted, *drafts = [call["input_ids"] for call in (first, *rest)]
        ids = [prompt[0], *shifted[:length].tolist(), *(int(each[0]) for each in drafts)]
        assert ids[:length] == prompt
        saved |= {
            f"{index}.ids": torch.tensor(ids),
            f"{index}.hidden": first["hidden_states"][:length],
            # [3, T] where the family has positions by axis; for text they are equal.
            f"{index}.positions": first["positions"].reshape(-1, first["positions"].shape[-1])[
                0, :length
            ],
            f"{index}.first": first["logits"][:length],
            f"{index}.last": torch.stack(
                [first["logits"][length - 1], *(call["logits"][0] for call in rest)]
            ),
        }
    llm.llm_engine.engine_core.shutdown()
    return saved


if __name__ == "__main__":
    # Those alone come last: from the first of them on, plain kernels stand in for vLLM's.
    for job in sorted(map(json.loads, sys.argv[1:]), key=lambda job: job.get("alone", "")):
        out = job.pop("out")
        dtype = job.pop("alone", "")
        found = draft_alone(**job, dtype=dtype) if dtype else dump(**job)
        save_file({name: value.contiguous() for name, value in found.items()}, out)
        print("RESULT " + json.dumps(out), flush=True)
