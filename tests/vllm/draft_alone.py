"""Runs in vLLM's environment: a draft class without an engine, where vLLM's attention has no kernel
for the CPU.

In: a checkpoint and prompts. Out: what `dump_drafts.py` saves, with noise for the target's hidden
states.

vLLM's loader builds vLLM's draft class and fills it. The attention kernels below it, and those of
the indexer that chooses keys, are replaced by the plain ones of this file, over a list of keys
instead of a paged cache.

Easy to get wrong: who says which keys a slot sees. The class asks its indexer, or reuses what the
indexer chose in an earlier step (`set_skip_topk`); a plain kernel sees only what the class hands to
it.
"""

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import deepseek_v2, registry
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.xpu import model as deepseek_v4_model
from vllm.models.deepseek_v4.xpu import mtp as deepseek_v4_mtp

EMBEDDING = ("model.embed_tokens.weight", "embed.weight")
HEAD = ("lm_head.weight", "head.weight")


class Keys:
    """State: what was cached since the first slot of a prompt, a row a slot."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def extended(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """All rows [S, ...] with the new ones at the end, and which of them each new slot may see:
        [n, S] bool.
        """
        self.rows.append(new)
        rows = torch.cat(self.rows)
        length = len(rows)
        num_new = len(new)
        return rows, torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new)


class PlainLatentAttention(nn.Module):
    """In place of `MLAAttention`: keys and values unfolded by `kv_b_proj`, one softmax over the
    keys that are chosen.

    State: `chosen`, the indexer's buffer [slots, k]; negative where it has fewer than k to choose
    from.
    """

    def __init__(
        self,
        *,
        scale: float,
        kv_b_proj: nn.Module,
        qk_nope_head_dim: int,
        v_head_dim: int,
        **others: Any,
    ):
        super().__init__()
        self.scale = scale
        self.sizes = (qk_nope_head_dim, v_head_dim)
        self.num_heads = others["num_heads"]
        self.__dict__["unfold"] = kv_b_proj  # its parameters are its parent's
        self.chosen: Tensor | None = others["topk_indices_buffer"] if others["use_sparse"] else None
        self.layer_name = others["prefix"]
        self.keys = Keys()

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
        key = torch.cat(
            [plain, rows[:, None, latent.shape[1] :].expand(-1, self.num_heads, -1)], dim=-1
        )
        scores = torch.einsum("nhd,shd->nhs", query, key) * self.scale
        weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(dim=-1)
        return torch.einsum("nhs,shd->nhd", weights, values).flatten(1)


class PlainWindowAttention(DeepseekV4Attention):
    """In place of DeepSeek-V4's attention over a window, which its MTP layer has: vLLM's
    projections and norms.

    Keys are values, one head for all queries; what attention gives is turned back by the slot's own
    rotation. A sink takes its share of each softmax.
    """

    backend_cls = None
    keys: Keys

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """No head is added."""
        return num_heads

    def forward(self, positions: Tensor, hidden_states: Tensor, _scaling: None = None) -> Tensor:
        """[n, H] of the new slots."""
        low, latent = self._fused_wqa_wkv_gemm(hidden_states).split(
            [self.q_lora_rank, self.head_dim], dim=-1
        )
        query = self._wq_b_proj(self.q_norm(low)).view(-1, self.n_local_heads, self.head_dim)
        query = self._rotated(_normed(query, 1.0, self.eps), positions)
        key = self._rotated(self.kv_norm(latent)[:, None], positions)[:, 0]
        output = self._attended(query, key)
        output = self._rotated(output, positions, back=True).view(
            len(output), self.n_local_groups, -1
        )
        # Each group has rows of its own; the linear computes those of all groups for each.
        low = self.wo_a(output).unflatten(-1, (self.n_local_groups, -1)).diagonal(dim1=1, dim2=2)
        return self.wo_b(low.transpose(1, 2).flatten(1))

    def _attended(self, query: Tensor, key: Tensor) -> Tensor:
        rows, sees = self.keys.extended(key)
        sees = sees & sees.flip(1).cumsum(1).flip(1).le(self.window_size)
        scores = torch.einsum("nhd,sd->nhs", query, rows).float() * self.scale
        scores = scores.masked_fill(~sees[:, None], float("-inf"))
        sink = self.attn_sink[None, :, None].expand(len(query), -1, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return torch.einsum("nhs,sd->nhd", weights.to(rows.dtype), rows)

    def _rotated(self, value: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """The last part of each head, in pairs of neighbours."""
        cos, sin = self.rotary_emb.cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
        plain, turning = value.split([self.nope_head_dim, 2 * cos.shape[-1]], dim=-1)
        even = turning[..., ::2]
        odd = turning[..., 1::2]
        if back:
            sin = -sin
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
        return torch.cat([plain, turned.to(value.dtype)], dim=-1)

    def forward_mqa(self, *_args: Any) -> None:
        """Not called: `forward` is whole."""
        raise NotImplementedError

    _o_proj = forward_mqa


class PlainIndexer(nn.Module):
    """In place of `SparseAttnIndexer`: the k best keys by the weighted sum of the heads' scores,
    without FP8.
    """

    def __init__(self, _k_cache: Any, _block: int, _fmt: str, num_chosen: int, *sizes: Any):
        super().__init__()
        self.num_chosen = num_chosen
        self.chosen = sizes[-1]
        self.keys = Keys()

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
        self.chosen[: len(query), : best.indices.shape[1]] = best.indices.masked_fill(
            best.values.isinf(), -1
        )
        return self.chosen


def _chosen_of(places: Tensor, length: int) -> Tensor:
    """[n, length] bool from places [n, k], of which negative ones say nothing."""
    marked = torch.zeros(len(places), length + 1, dtype=torch.bool)
    return marked.scatter_(1, places.long().masked_fill(places < 0, length), value=True)[:, :length]


def _unquantized(value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
    return value, torch.ones(len(value), 1)


def _normed(value: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    wide = value.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(value.dtype)


def _normed_inputs(
    embeds: Tensor,
    positions: Tensor,
    states: Tensor,
    of_embeds: Tensor,
    of_states: Tensor,
    eps: float,
    _streams: int,
) -> tuple[Tensor, Tensor]:
    """By the words of vLLM's models/deepseek_v4/common/ops/fused_mtp_input_rmsnorm.py."""
    embeds = torch.where(positions[:, None] == 0, 0.0, embeds)
    return _normed(embeds, of_embeds, eps), _normed(states, of_states, eps)


def _routed(
    *,
    router_logits: Tensor,
    top_k: int,
    e_score_correction_bias: Tensor,
    routed_scaling_factor: float,
    **_others: Any,
) -> tuple[Tensor, Tensor]:
    """By the words of vLLM's fused_moe/router/cpu_router.py, whose kernel is for 64 experts and
    more.
    """
    scores = nn.functional.softplus(router_logits.float()).sqrt()
    chosen = (scores + e_score_correction_bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True) * routed_scaling_factor, chosen.to(
        torch.int32
    )


def plain_kernels() -> None:
    """From here on, classes are built with the plain kernels."""
    registry.ModelRegistry.register_model("DeepSeekV4MTPModel", deepseek_v4_mtp.DeepSeekV4MTP)
    deepseek_v4_model.DeepseekV4XPUAttention = PlainWindowAttention
    cpu_router._sqrtsoftplus_bias_topk = _routed
    deepseek_v4_mtp._FUSED_MTP_INPUT_RMSNORM_KERNEL = _normed_inputs
    deepseek_v4_mtp._MTP_SHARED_HEAD_RMSNORM_KERNEL = _normed
    mla.MLAAttention = PlainLatentAttention
    deepseek_v2.SparseAttnIndexer = PlainIndexer
    deepseek_v2.per_token_group_quant_fp8 = _unquantized
    # No device is there, and nothing waits for it.
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Event = object


def draft_alone(
    folder: str, prompts: list[list[int]], num_drafts: int, dtype: str
) -> dict[str, Tensor]:
    """What the draft class makes of each prompt; the same keys as `dump_drafts.dump` saves."""
    plain_kernels()
    config = EngineArgs(
        model=folder,
        speculative_config={"method": "mtp", "num_speculative_tokens": num_drafts},
        dtype=dtype,
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
        model = get_model(
            vllm_config=config, model_config=config.speculative_config.draft_model_config
        )
        _share(model, load_file(f"{folder}/model.safetensors"))
        noise = torch.Generator().manual_seed(0)
        saved = {}
        for index, prompt in enumerate(prompts):
            for module in model.modules():
                if isinstance(module, PlainLatentAttention | PlainWindowAttention | PlainIndexer):
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
            module.weight = nn.Parameter(value.to(module.weight.dtype), requires_grad=False)
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
    streams = getattr(hf_config, "hc_mult", 1)
    states = torch.randn(length, streams * hf_config.hidden_size, generator=noise).to(
        config.model_config.dtype
    )
    hidden = states
    positions = torch.arange(length)
    ids = [*prompt, int(torch.randint(hf_config.vocab_size, (1,), generator=noise))]
    new = torch.tensor(ids[1:])
    logits = []
    for step in range(num_drafts):
        if shares:
            model.model.set_skip_topk(step > 0)
            if step == 1:
                model.model.compact_topk_indices(torch.tensor([length - 1]))
        with set_forward_context(None, config, num_tokens=len(new)):
            result = model(input_ids=new, positions=positions, hidden_states=hidden)
        output, chained = result if isinstance(result, tuple) else (result, result)
        logits.append(model.compute_logits(output).float())
        new = logits[-1][-1:].argmax(-1)
        hidden = chained[-1:]
        positions = positions[-1:] + 1
        ids.append(int(new))
    return {
        "ids": torch.tensor(ids[:-1]),
        "hidden": states,
        "positions": torch.arange(length),
        "first": logits[0],
        "last": torch.cat([each[-1:] for each in logits]),
    }
