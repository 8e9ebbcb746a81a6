"""Runs in vLLM's environment: a draft class without an engine, where vLLM's attention has no kernel for the CPU.

In: a checkpoint and prompts. Out: what `dump_drafts.py` saves, with noise for the target's hidden states.

vLLM's loader builds vLLM's draft class and fills it. The attention kernels below it, and those of the indexer that
chooses keys, are replaced by the plain ones of this file, in float32, over a list of keys instead of a paged cache.

Easy to get wrong: who says which keys a slot sees. The class asks its indexer, or reuses what the indexer chose in an
earlier step (`set_skip_topk`); a plain kernel sees only what the class hands to it.
"""

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import deepseek_v2

EMBEDDING, HEAD = ("model.embed_tokens.weight", "embed.weight"), ("lm_head.weight", "head.weight")


class Keys:
    """State: what was cached since the first slot of a prompt, a row a slot."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def extended(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """All rows [S, ...] with the new ones at the end, and which of them each new slot may see: [n, S] bool."""
        self.rows.append(new)
        rows = torch.cat(self.rows)
        length, num_new = len(rows), len(new)
        return rows, torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new)


class PlainLatentAttention(nn.Module):
    """In place of `MLAAttention`: keys and values unfolded by `kv_b_proj`, one softmax over the keys that are chosen.

    State: `chosen`, the indexer's buffer [slots, k]; negative where it has fewer than k to choose from.
    """

    def __init__(self, *, scale: float, kv_b_proj: nn.Module, qk_nope_head_dim: int, v_head_dim: int, **others: Any):
        super().__init__()
        self.scale, self.sizes, self.num_heads = scale, (qk_nope_head_dim, v_head_dim), others["num_heads"]
        self.__dict__["unfold"] = kv_b_proj  # its parameters are its parent's
        self.chosen: Tensor | None = others["topk_indices_buffer"] if others["use_sparse"] else None
        self.layer_name, self.keys = others["prefix"], Keys()

    @property
    def impl(self) -> "PlainLatentAttention":
        """Classes speak to the kernel by this name."""
        return self

    def record_logical_topk_ready(self) -> None:
        """Kernels on other streams would wait for the indexer here."""

    def forward(self, query: Tensor, latent: Tensor, rotated: Tensor, **_sizes: Any) -> Tensor:
        """Attention of the new slots.

        Args:
            query: [n, heads, D].
            latent: [n, rank], normed.
            rotated: [n, 1, D'], the part of the keys that is rotated, for all heads.
        """
        rows, sees = self.keys.extended(torch.cat([latent, rotated.squeeze(1)], dim=-1))
        if self.chosen is not None:
            sees = sees & _chosen_of(self.chosen[: len(query)], len(rows))
        unfolded = self.unfold(rows[:, : latent.shape[1]])[0].view(len(rows), self.num_heads, -1)
        plain, values = unfolded.split(self.sizes, dim=-1)
        key = torch.cat([plain, rows[:, None, latent.shape[1] :].expand(-1, self.num_heads, -1)], dim=-1)
        scores = torch.einsum("nhd,shd->nhs", query, key) * self.scale
        weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(dim=-1)
        return torch.einsum("nhs,shd->nhd", weights, values).flatten(1)


class PlainIndexer(nn.Module):
    """In place of `SparseAttnIndexer`: the k best keys by the weighted sum of the heads' scores, without FP8."""

    def __init__(self, _k_cache: Any, _block: int, _fmt: str, num_chosen: int, *sizes: Any):
        super().__init__()
        self.num_chosen, self.chosen, self.keys = num_chosen, sizes[-1], Keys()

    def forward(self, _states: Tensor, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        """Writes the places of the chosen keys.

        Args:
            query: [n, heads, D].
            key: [n, D].
            weights: [n, heads], scales included.
        """
        rows, sees = self.keys.extended(key)
        scores = torch.einsum("nhd,sd->nhs", query, rows).relu()
        scores = torch.einsum("nhs,nh->ns", scores, weights).masked_fill(~sees, float("-inf"))
        best = scores.topk(min(self.num_chosen, len(rows)), dim=-1)
        self.chosen[: len(query)] = -1
        self.chosen[: len(query), : best.indices.shape[1]] = best.indices.masked_fill(best.values.isinf(), -1)
        return self.chosen


def _chosen_of(places: Tensor, length: int) -> Tensor:
    """[n, length] bool from places [n, k], of which negative ones say nothing."""
    marked = torch.zeros(len(places), length + 1, dtype=torch.bool)
    return marked.scatter_(1, places.long().masked_fill(places < 0, length), value=True)[:, :length]


def _unquantized(value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
    return value, torch.ones(len(value), 1)


def plain_kernels() -> None:
    """From here on, classes are built with the plain kernels."""
    mla.MLAAttention = PlainLatentAttention
    deepseek_v2.SparseAttnIndexer = PlainIndexer
    deepseek_v2.per_token_group_quant_fp8 = _unquantized
    torch.accelerator.empty_cache = lambda: None  # the loader calls it; no device is there


def draft_alone(folder: str, prompts: list[list[int]], num_drafts: int) -> dict[str, Tensor]:
    """What the draft class makes of each prompt; the same keys as `dump_drafts.dump` saves."""
    plain_kernels()
    config = EngineArgs(
        model=folder,
        speculative_config={"method": "mtp", "num_speculative_tokens": num_drafts},
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        compilation_config={"custom_ops": ["none"]},
    ).create_engine_config()
    assert config.speculative_config is not None
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:29533", 0, backend="gloo")
            initialize_model_parallel(1)
        model: Any = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        _share(model, load_file(f"{folder}/model.safetensors"))
        noise = torch.Generator().manual_seed(0)
        saved = {}
        for index, prompt in enumerate(prompts):
            for module in model.modules():
                if hasattr(module, "keys") and isinstance(module.keys, Keys):
                    module.keys = Keys()
            for name, value in _drafted(model, config, prompt, num_drafts, noise).items():
                saved[f"{index}.{name}"] = value
    return saved


def _share(model: Any, weights: dict[str, Tensor]) -> None:
    """Embedding and head are the target's, as the proposer sees to."""
    for names, kind in (EMBEDDING, VocabParallelEmbedding), (HEAD, ParallelLMHead):
        value = next(weights[name] for name in names if name in weights)
        found = [module for module in model.modules() if type(module) is kind]
        assert found
        for module in found:
            module.weight = nn.Parameter(value.float(), requires_grad=False)
            # On a CPU what is computed with is a copy in another order.
            module.quant_method.process_weights_after_loading(module)


@torch.inference_mode()
def _drafted(
    model: Any, config: VllmConfig, prompt: list[int], num_drafts: int, noise: torch.Generator
) -> dict[str, Tensor]:
    """vLLM's proposer for one request, by the letter of its `propose`."""
    hf_config = config.speculative_config.draft_model_config.hf_config
    shares = getattr(hf_config, "index_share_for_mtp_iteration", False)
    length = len(prompt)
    states = torch.randn(length, hf_config.hidden_size, generator=noise)
    hidden, positions = states, torch.arange(length)
    ids = [*prompt, int(torch.randint(hf_config.vocab_size, (1,), generator=noise))]
    new, logits = torch.tensor(ids[1:]), []
    for step in range(num_drafts):
        if shares:
            model.model.set_skip_topk(step > 0)
            if step == 1:
                model.model.compact_topk_indices(torch.tensor([length - 1]))
        with set_forward_context(None, config, num_tokens=len(new)):
            result = model(input_ids=new, positions=positions, hidden_states=hidden)
        output, chained = result if isinstance(result, tuple) else (result, result)
        logits.append(model.compute_logits(output))
        new, hidden, positions = logits[-1][-1:].argmax(-1), chained[-1:], positions[-1:] + 1
        ids.append(int(new))
    return {
        "ids": torch.tensor(ids[:-1]),
        "hidden": states,
        "positions": torch.arange(length),
        "first": logits[0],
        "last": torch.cat([each[-1:] for each in logits]),
    }
