"""keepmtp's MTP blocks against vLLM's draft classes on the CPU: the same inputs, the same logits at
every draft step.

Both compute in BF16, in another order each. How far that may part them is measured, not guessed:
keepmtp's block in float32, over the same weights and inputs, is the truth that both are compared
with, and vLLM may be LEEWAY times as far from it as keepmtp's own BF16 is. What a wrong table makes
is at least three times that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from commands import ROOT
from data_files import cases, table
from decorated_model import CONFIGURATION
from keepmtp.quantize.calibrate.model.skeleton import on_meta
from keepmtp.quantize.calibrate.mtp.mtp_block import MtpBlock, draft_steps
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.families import families
from keepmtp.recipes.find import find_recipe
from real_vllm import NEEDS_VLLM, asked_names, in_vllm
from safetensors.torch import load_file
from torch import Tensor, nn
from writing import changed, filled, lively, plan_over, weights_of

TABLE = table("vllm/test_draft_logits")
NUM_DRAFTS = 3
# Short ones: at position 0 three families zero the embedding, and the fewer slots there are, the
# more it weighs.
PROMPTS = table("vllm/test_draft_logits")["PROMPTS"]
LEEWAY = 3.0
SHIPPED = {"tiny-glm4-moe": "tiny-glm4-moe", "tiny-qwen3_5": "tiny-qwen3_5"}
# CPU kernels of vLLM 0.32.0 want keys and values of one width, and rotary embeddings over a
# multiple of 16 of them.
EVEN = TABLE["EVEN"]
# Release -> recipe of its family; matrices of noise, since these have no trained tiny model.
NOISE = TABLE["NOISE"]
CHANGES = {"mimo-v2-flash": EVEN}
# The attention of these has no kernel for the CPU: `draft_alone.py` runs vLLM's draft class by
# itself, in this dtype. Their indexers choose four keys of at most twelve. DeepSeek-V4's streams
# have kernels for BF16 alone.
ALONE = {
    "deepseek-v3.2": "float32",
    "glm-5": "float32",
    "glm-5, choice kept": "float32",
    "dsv4-flash": "bfloat16",
}
GLM_5 = {"index_topk": 4, "indexer_rope_interleave": True}
CHANGES |= {
    "deepseek-v3.2": {"index_topk": 4},
    "glm-5": GLM_5,
    "glm-5, choice kept": GLM_5 | {"index_share_for_mtp_iteration": True},
    "dsv4-flash": {"num_attention_heads": 8, "o_groups": 4, "sliding_window": 6},
}
# The build of vLLM that runs without AVX512-BF16 has no operator for DeepSeek-V4's streams.
LACKING = {"dsv4-flash"}
if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
    LACKING = set()
FLOAT32_NOISE = 1e-4
UNTRAINED = [*NOISE, *ALONE]
# Their targets need no more than transformers' own class has; of a family's two releases, the
# trained one.
TARGETS = [*SHIPPED, *(name for name in NOISE if name not in ("glm-4.7", "qwen3.5-text"))]
PROOFS = {"vllm": [*SHIPPED, *NOISE], "vllm, attention by a reference": [*ALONE]}

pytestmark = NEEDS_VLLM


@pytest.fixture(autouse=True)
def processor(request):
    if "name" in request.fixturenames and request.getfixturevalue("name") in LACKING:
        pytest.skip("vLLM's build for a processor without AVX512-BF16 lacks an operator of it")


@dataclass(frozen=True)
class Drafted:
    """What vLLM was given and gave for one prompt, and where to find the checkpoint."""

    folder: Path
    plan: Plan
    prompts: list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def drafted(request, tmp_path_factory) -> dict[str, Drafted]:
    """vLLM's drafts by checkpoint; one process for all."""
    made = tmp_path_factory.mktemp("drafted")
    asked = asked_names(request) - LACKING
    folders = {name: ROOT / "models" / name for name in SHIPPED if name in asked}
    for name in asked & {*UNTRAINED}:
        folders[name] = lively(
            made / name, _model_of(name), changes=CHANGES.get(name), is_packed=False
        )
    if "mimo-7b" in folders:
        (folders["mimo-7b"] / "configuration_mimo.py").write_text(CONFIGURATION)
    how = {"prompts": PROMPTS, "num_drafts": NUM_DRAFTS}
    jobs = [
        how | {"folder": str(folder), "alone": ALONE.get(name, ""), "out": str(made / f"{name}.st")}
        for name, folder in folders.items()
    ]
    in_vllm("dump_drafts.py", jobs)
    found = {}
    for name, folder in folders.items():
        values = load_file(made / f"{name}.st")
        prompts = [{} for _ in PROMPTS]
        for key, value in values.items():
            index, _, leaf = key.partition(".")
            prompts[int(index)][leaf] = value
        plan = plan_over(folder, NOISE.get(name, _model_of(name)))
        found[name] = Drafted(folder, plan, prompts)
    return found


def _model_of(name: str) -> str:
    return name.partition(",")[0]


@pytest.fixture(scope="module")
def base(drafted) -> dict[str, list[tuple[float, float]]]:
    """(vLLM's, keepmtp's BF16) distance from float32, by checkpoint and draft step."""
    found = {}
    for name, seen in drafted.items():
        truth, ours = (_logits(seen, seen.plan, dtype) for dtype in (torch.float32, torch.bfloat16))
        pair = _distances(seen, truth, _theirs(seen)), _distances(seen, truth, ours)
        found[name] = list(zip(*pair, strict=True))
    return found


def parted(seen: Drafted, **draft: Any) -> list[float]:
    """vLLM's distance by draft step from a float32 block whose table says something else."""
    return _distances(
        seen, _logits(seen, changed(seen.plan, **draft), torch.float32), _theirs(seen)
    )


def _distances(seen: Drafted, truth: list[list[Tensor]], other: list[list[Tensor]]) -> list[float]:
    """Root mean square distance in units of the logits' spread, by draft step; the median over the
    prompts.

    Step 1 is compared at every slot, the others at the last, where vLLM ran them. The median, since
    rounding may tip a router of noise to another expert, and then one slot is far from where it
    was.
    """
    found = []
    for step in range(NUM_DRAFTS):
        each = []
        for index, prompt in enumerate(seen.prompts):
            length = len(prompt["positions"])
            slots = slice(length - 1, length)
            if step == 0:
                slots = slice(0, length)
            right = truth[index][step][slots]
            wrong = other[index][step][slots]
            each.append(((wrong - right).square().mean().sqrt() / right.std()).item())
        found.append(median(each))
    return found


def _theirs(seen: Drafted) -> list[list[Tensor]]:
    """vLLM's logits in the shape of `_logits`: steps behind the first have their one slot at the
    end.
    """
    found = []
    for prompt in seen.prompts:
        rest = [each.expand(len(prompt["positions"]), -1) for each in prompt["last"][1:]]
        found.append([prompt["first"], *rest])
    return found


def _logits(seen: Drafted, plan: Plan, dtype: torch.dtype) -> list[list[Tensor]]:
    """By prompt and step, [T, V] float32."""
    block = filled(plan, dtype=dtype)
    weights = weights_of(seen.folder)
    draft = plan.view.family.draft
    table, head = (_shared(plan, weights, role).to(dtype) for role in ("embedding", "head"))
    found = []
    for prompt in seen.prompts:
        ids = prompt["ids"][None]
        states = prompt["hidden"].to(dtype)
        hidden = torch.zeros(1, ids.shape[1], states.shape[1], dtype=dtype)
        hidden[0, : len(states)] = states
        if draft.streams:
            hidden = hidden.unflatten(-1, (getattr(block.config, draft.streams), -1))
        with torch.no_grad():
            outputs = draft_steps(
                [block],
                nn.Embedding.from_pretrained(table),
                ids=ids,
                hidden=hidden,
                num_steps=NUM_DRAFTS,
            )
        found.append([(output[0] @ head.T).float() for output in outputs])
    return found


def _shared(plan: Plan, weights: Mapping[str, Tensor], role: str) -> Tensor:
    """The target's embedding or head, [V, H]; a model without a head multiplies by its
    embedding.
    """
    found = {}
    for tensor in plan.tensors:
        if tensor.part == "backbone" and tensor.layer is None:
            found[tensor.role] = tensor.name
    return weights[found.get(role, found["embedding"])]


@pytest.mark.full
@pytest.mark.parametrize("name", [*SHIPPED, *UNTRAINED])
def test_the_block_drafts_as_vllm_does(base, name):
    """A step reads what the one before it drafted, so the noise of each is that of all so far."""
    noise = 2**-8
    for step, (theirs, ours) in enumerate(base[name], start=1):
        noise = max(noise, ours)
        limit = LEEWAY * noise
        if ALONE.get(name) == "float32":
            limit = FLOAT32_NOISE
        assert theirs <= limit, f"{name}, draft step {step}"
        assert ours < 0.1, f"{name}: BF16 alone moves the logits of step {step}"


@pytest.mark.full
@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.parametrize("field", ["hidden_first", "zeroes_first", "chains_normed"])
def test_a_wrong_table_parts_them(drafted, base, name, field):
    """The twin of each fact: turned round, the drafts are no longer vLLM's, at the step where it
    counts.
    """
    draft = drafted[name].plan.view.family.draft
    if field == "chains_normed" and (not draft.final_norm or draft.streams):
        pytest.skip("no norm, so nothing to chain before it or behind; or streams, which have none")
    step = int(field == "chains_normed")
    wrong = {field: not getattr(draft, field)}
    if field == "hidden_first" and len(draft.projections) == 2:
        wrong = {"projections": draft.projections[::-1]}
    apart = parted(drafted[name], **wrong)[step]
    assert apart > 3 * LEEWAY * base[name][step][1]


@pytest.mark.full
@pytest.mark.parametrize("name", UNTRAINED)
def test_a_step_at_the_wrong_place_parts_them(drafted, base, name, monkeypatch):
    """The twin of the positions: each step at the one before it."""
    forward = MtpBlock.forward

    def unmoved(
        self: MtpBlock, embeds: Tensor, hidden: Tensor, positions: Tensor, *args: object
    ) -> object:
        return forward(self, embeds, hidden, torch.arange(len(positions)), *args)

    monkeypatch.setattr(MtpBlock, "forward", unmoved)
    assert parted(drafted[name])[1] > LEEWAY * base[name][1][1]


@pytest.mark.full
@cases
def test_another_choice_of_keys_parts_them(drafted, base, name, key, value):
    """The twin of the indexer, which chooses one key more, and of the window."""
    layer = drafted[name].plan.view.family.draft.layers[0]
    apart = parted(drafted[name], layers=({**layer, key: value},))
    assert min(apart) > LEEWAY * base[name][0][1]


@pytest.mark.full
def test_a_choice_that_is_made_anew_parts_them(drafted, base):
    """The twin of a kept choice: from the second step on, and not before."""
    name = "glm-5, choice kept"
    first, *later = parted(drafted[name], can_keep_choice=False)
    assert first < FLOAT32_NOISE
    assert min(later) > LEEWAY * base[name][1][1]


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_the_target_hands_over_the_state_that_the_table_says(drafted, name):
    """Against transformers' target, the class that calibration runs: the state behind its final
    norm, or before it.
    """
    seen = drafted[name]
    built = on_meta(seen.plan)
    model = (
        type(built)
        .from_pretrained(
            seen.folder, config=built.config, dtype=torch.bfloat16, attn_implementation="eager"
        )
        .get_decoder()
    )
    before = []
    model.norm.register_forward_hook(lambda _module, args, _output: before.append(args[0]))
    for prompt in seen.prompts:
        length = len(prompt["positions"])
        with torch.no_grad():
            normed = model(input_ids=prompt["ids"][None, :length]).last_hidden_state[0]
        # Two engines over a whole model of noise, routing included: near, not equal.
        pair = [
            (each - prompt["hidden"].float()).square().mean() for each in (normed, before.pop()[0])
        ]
        right, wrong = pair if seen.plan.view.family.draft.reads_normed else reversed(pair)
        assert 9 * right < wrong


@pytest.mark.parametrize("proof, names", PROOFS.items())
def test_every_family_said_to_be_proven_by_vllm_is_here(proof, names):
    claimed = {
        family.model_type
        for family in families().values()
        if family.draft and family.draft.proof == proof
    }
    recipes = (find_recipe(NOISE.get(name, _model_of(name)))[0] for name in names)
    assert {families()[recipe.family].model_type for recipe in recipes} == claimed
