"""An MTP layer as a module of its own, built from the family's table, and its draft steps over
whole sequences.

In: a family's view of a config.json. Out: an `MtpBlock` on the meta device, around transformers'
own decoder layer, to be bound, filled and calibrated like a small model. `draft_steps` runs filled
blocks as vLLM does token by token. Slot i of draft step k predicts token i + k + 1:

    step 1, slot i: token i+1, hidden state of the target at i,     position i
    step k, slot i: token i+k, hidden state of step k-1 at slot i,  position i+k-1

Easy to get wrong: a family's block may be built with another entry of config.json than the
backbone's layers: its own kind of attention, its own number of heads, norms kept in float32. And
what step k attends to: vLLM's cache has step 1's keys for each token that the target has confirmed;
later steps append their own only. So slot i of step k sees step 1 at slots <= i, and of the later
steps slot i alone. A causal pass over the states of step 2 is what vLLM never runs.

Source: the draft classes of vLLM 0.32.0 that the family files name,
v1/spec_decode/llm_base_proposer.py (`propose`), and v1/spec_decode/step3p5.py for blocks that take
one step each.
"""

import importlib
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import remap_legacy_layer_types
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ....recipes.errors import RecipeError
from ....recipes.family import Draft, HFName
from ....recipes.family_view import FamilyView
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan
from ..model.binding import Binding, Names, bind, linear_experts

# Keys of config.json that say nothing about the computation of a layer, or say it of other classes.
_NOT_THE_LAYER = frozenset({"quantization_config", "architectures", "auto_map", "model_type"})
# Attention of these kinds looks back `sliding_window` tokens.
_SLIDING = frozenset({"sliding_attention"})
# Attention of these kinds caches what its indexer chooses keys by.
_INDEXED = frozenset(
    {
        "deepseek_sparse_attention",
        "indexed_attention",
        "minimax_m3_sparse",
        "qwen_sparse_attention",
    }
)
# The key of config.json by which later draft steps read the keys that step 1 chose. A server's
# `speculative_config` may say otherwise, which nobody knows here.
_KEEPS_CHOICE = "index_share_for_mtp_iteration"


class MtpBlock(PreTrainedModel):
    """One MTP layer: norms, projection, decoder layer, final norm; without embedding, and mostly
    without a head.

    Attributes:
        view: names on disk.
        draft: what it computes.
        index: which MTP layer, counted from 0.
        binding: what its parameters are on disk; nothing before `bound_block`.
        head: the draft's own head; None where it uses the target's.
    """

    config_class = PreTrainedConfig

    def __init__(
        self,
        view: FamilyView,
        draft: Draft,
        index: int,
        config: PreTrainedConfig,
        classes: ModuleType,
    ):
        """Use `build_block`."""
        super().__init__(config)
        self.view = view
        self.draft = draft
        self.index = index
        self.binding: Binding = {}
        # Where config.json describes every MTP layer for itself, each is built by its own entry.
        self._entry = 0
        if getattr(config, "mtp_layer_types", None):
            self._entry = index
        hidden_size = config.hidden_size
        self.embedding_norm = self._norm(classes, hidden_size)
        streams = 1
        if draft.streams and draft.joint_norm:  # one norm over all streams of a slot
            streams = getattr(config, draft.streams)
        self.hidden_norm = self._norm(classes, hidden_size * streams)
        if len(draft.projections) == 1:
            self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        else:
            self.embedding_projection = nn.Linear(hidden_size, hidden_size, bias=False)
            self.hidden_projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.layers = nn.ModuleList()
        for part in range(len(draft.layers)):
            self.layers.append(self._layer(classes, part))
        self.collapse = None
        if draft.collapse:
            kind = getattr(classes, draft.collapse[0])
            options = {}
            # Of the hyper-connections' own class, the one after the last layer gives nothing back.
            if "Residual" in kind.__name__:
                options = {"use_combine": False}
            self.collapse = kind(config, **options)
        self.final_norm = None
        if draft.final_norm:
            self.final_norm = self._norm(classes, hidden_size)
        self.head = None
        if draft.head:
            self.head = nn.Linear(hidden_size, config.vocab_size, bias=False)
        self.rotary: nn.Module | None = None
        self._kept = None
        if draft.can_keep_choice and view.text_config.get(_KEEPS_CHOICE, False):
            self._kept = KeptChoice(self)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_input_embeddings(self) -> Any:
        """None: the target's embedding is applied before the block."""
        return None

    def get_output_embeddings(self) -> nn.Module | None:
        """The draft's own head, if it has one."""
        return self.head

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step over whole sequences.

        Args:
            inputs_embeds: [B, T, H], embeddings of the next tokens.
            hidden: [B, T, H], the target's hidden states at the same slots, or [B, T, C, H] where
                it has C streams.
            position_ids: [T] int64, the same for all rows; 0, 1, ... by default.
            mask: [T, S] bool, True where a slot may attend; causal by default, as in step 1.
            cache: keys of the steps before; this step adds its own.

        Returns: what the head multiplies [B, T, H], and the next step's `hidden`.
        """
        positions_T = position_ids
        if positions_T is None:
            positions_T = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        if mask is None:
            mask = step_mask([positions_T], self.window)
        if self._kept is not None:
            self._kept.begin(mask)
        if self.draft.zeroes_first:
            inputs_embeds = inputs_embeds.masked_fill((positions_T == 0)[None, :, None], 0.0)
        states = self._join(self.embedding_norm(inputs_embeds), hidden)
        lowest = torch.finfo(inputs_embeds.dtype).min
        additive = inputs_embeds.new_zeros(mask.shape).masked_fill(~mask, lowest)[None, None]
        rotated = self._rotated(inputs_embeds, positions_T)
        for layer in self.layers:
            states = layer(
                states,
                attention_mask=additive,
                position_embeddings=rotated,
                position_ids=positions_T.expand(inputs_embeds.shape[0], -1),
                past_key_values=cache,
            )
            if isinstance(states, tuple):  # layers with an indexer return the keys it chose, too
                states = states[0]
        output = states
        if self.collapse is not None:
            output = self.collapse(output)
        if self.final_norm is not None:
            output = self.final_norm(output)
        if self.draft.chains_normed:
            return output, output
        return output, states

    @property
    def window(self) -> int | None:
        """How many tokens back a slot attends, itself counted; None for all."""
        if self.kind not in _SLIDING:
            return None
        return self.config.sliding_window

    @property
    def kind(self) -> str:
        """The decoder layer's kind of attention, as config.json's `layer_types` has it."""
        kinds = getattr(self.config, "layer_types", None)
        if not kinds:
            return "full_attention"
        return kinds[self._entry]

    def owns(self, tensor: TensorPlan) -> bool:
        """Whether a tensor is one of this block's; copies of the target's embedding and head are
        not.
        """
        if tensor.part != "mtp" or tensor.calibrated == "cache":
            return False
        if tensor.role in ("embedding", "head") and tensor.module != self._glue.get("head"):
            return False
        return tensor.layer is None or tensor.layer in self._layers_on_disk

    def path_of(self, name: HFName) -> tuple[str, int]:
        """The parameter that a tensor on disk goes to, and its turn where several are
        concatenated.
        """
        for path, disk in self._glue.items():
            beginning = f"{disk}."
            if path.startswith("collapse."):  # its parameters go on as they like
                beginning = disk
            if name.startswith(beginning):
                return path + name[len(disk) :], 0
        for part, layer in enumerate(self._layers_on_disk):
            stem = self.view.disk_stem("mtp", layer)
            if not name.startswith(stem):
                continue
            rest = name.removeprefix(stem)
            for backbone, disk in self.draft.renames:
                if rest.startswith(disk):
                    rest = backbone + rest[len(disk) :]
                    break
            # The class's rules are for a layer of the backbone: any will do.
            first = self.view.layout.layers.disk.replace("{i}", "0")
            path, turn = self._names.in_layer(first + rest)
            return f"layers.{part}.{path}", turn
        raise AssertionError(f"{name} is no tensor of this block")

    @cached_property
    def _glue(self) -> dict[str, str]:
        """Module outside the decoder layer -> its name on disk."""
        draft = self.draft
        paths = {
            "embedding_norm": draft.embedding_norm,
            "hidden_norm": draft.hidden_norm,
            "final_norm": draft.final_norm,
            "head": draft.head,
        }
        names = ("embedding_projection", "hidden_projection")
        if len(draft.projections) == 1:
            names = ("projection",)
        paths |= zip(names, draft.projections, strict=True)
        if draft.collapse:
            _, path, disk = draft.collapse
            paths[f"collapse.{path}"] = disk
        stem = self.view.disk_stem("mtp", self._layers_on_disk[0])
        glue = {}
        for name, path in paths.items():
            if not path:
                continue
            glue[name] = stem + path
            if any(row.path.startswith(path) for row in self.view.layout.mtp_top):
                glue[name] = path  # it stands above the layers
        return glue

    @cached_property
    def _layers_on_disk(self) -> tuple[int, ...]:
        """Indices on disk of the decoder layers that make up this MTP layer."""
        num_parts = len(self.draft.layers)
        first = num_parts * self.index
        if not self.view.layout.mtp:  # counted on from the backbone's layers
            first += self.view.num_layers
        return tuple(range(first, first + num_parts))

    @cached_property
    def _names(self) -> Names:
        # The rules belong to the model's class; a text model's are sometimes kept with the whole
        # model's type.
        for kind in (self.draft.model_type, self.view.config.get("model_type", "")):
            rules = get_checkpoint_conversion_mapping(kind)
            if rules:
                return Names(transforms=tuple(rules))
        return Names(transforms=())

    def _norm(self, classes: ModuleType, size: int) -> nn.Module:
        eps = getattr(self.config, "rms_norm_eps", None)
        if not eps:
            eps = self.config.layer_norm_epsilon
        return getattr(classes, f"{self.draft.classes}RMSNorm")(size, eps=eps)

    def _layer(self, classes: ModuleType, part: int) -> nn.Module:
        for key, value in self.draft.layers[part].items():
            if key == "layer_types":  # transformers 5.24 has one name for all with an indexer
                value = remap_legacy_layer_types(value)
            setattr(self.config, key, value)
        name = self.draft.decoder or f"{self.draft.classes}DecoderLayer"
        layer = getattr(classes, name)(self.config, self._entry)
        # All parts share one cache, each under its own number.
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = part
        if self.draft.plain_residual:
            return PlainResidual(layer)
        return layer

    def _join(self, tokens_BTH: Tensor, hidden: Tensor) -> Tensor:
        if len(self.draft.projections) == 1:
            pair = [tokens_BTH, self.hidden_norm(hidden)]
            if self.draft.hidden_first:
                pair.reverse()
            return self.projection(torch.cat(pair, dim=-1))
        shape_BTCH = (*tokens_BTH.shape[:2], -1, tokens_BTH.shape[2])
        if self.draft.joint_norm:
            states_BTCH = self.hidden_norm(hidden.flatten(2)).view(shape_BTCH)
        else:
            states_BTCH = self.hidden_norm(hidden.view(shape_BTCH))
        tokens_BTCH = self.embedding_projection(tokens_BTH).unsqueeze(-2)
        return (self.hidden_projection(states_BTCH) + tokens_BTCH).view(hidden.shape)

    def _rotated(self, inputs_embeds: Tensor, positions_T: Tensor) -> Any:
        if self.rotary is None:
            return None
        positions = positions_T.expand(inputs_embeds.shape[0], -1)
        if self.draft.position_axes > 1:
            positions = positions.expand(self.draft.position_axes, -1, -1)
        if not self.draft.rope_types:
            return self.rotary(inputs_embeds, position_ids=positions)
        if self.draft.rope_types == ("own",):
            return self.rotary(inputs_embeds, position_ids=positions, layer_type=self.kind)
        of_kinds = {}
        for kind in self.draft.rope_types:
            of_kinds[kind] = self.rotary(inputs_embeds, position_ids=positions, layer_type=kind)
        return of_kinds


class PlainResidual(nn.Module):
    """A decoder layer's attention and MLP without the hyper-connections around them."""

    def __init__(self, layer: Any):
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, states: Tensor, **kwargs: Any) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class KeptChoice:
    """State: what each indexer of a block chose in step 1, which its later draft steps read again.

    Such a step does not see its own key: step 1 chose among the tokens that the target has
    confirmed, and nobody chooses afterwards.

    Source: vLLM 0.32.0 v1/spec_decode/llm_base_proposer.py and
    v1/worker/gpu/spec_decode/mtp/speculator.py (`index_share_for_mtp_iteration`),
    models/deepseek_v32/nvidia/mtp.py (`set_skip_topk`, `compact_topk_indices`).
    """

    def __init__(self, block: nn.Module):
        """Put hooks on the indexers under `block`."""
        self._chosen: dict[nn.Module, Tensor] = {}
        self._is_first = True
        self._num_keys = 0
        for module in block.modules():
            indexer = getattr(module, "indexer", None)
            if isinstance(indexer, nn.Module):
                indexer.register_forward_hook(self._repeat)

    def begin(self, mask_TS: Tensor) -> None:
        """A step begins; in step 1 there are as many keys as slots."""
        num_slots, self._num_keys = mask_TS.shape
        self._is_first = num_slots == self._num_keys

    def _repeat(self, indexer: nn.Module, _args: Any, output: Tensor) -> Tensor:
        if self._is_first:
            self._chosen[indexer] = output
            return output
        chosen = self._chosen[indexer]
        if not chosen.is_floating_point():  # places of keys; those of step 1 are the first
            return chosen
        added = self._num_keys - chosen.shape[-1]  # a mask to be added to that of attention
        return F.pad(chosen, (0, added), value=torch.finfo(chosen.dtype).min)


# --- draft steps ----------------------------------------------------------------------------------


def draft_steps(
    blocks: Sequence[MtpBlock], embedding: nn.Module, *, ids: Tensor, hidden: Tensor, num_steps: int
) -> list[Tensor]:
    """Head inputs of draft steps 1..num_steps, each [B, T, H]; the last k slots of step k have no
    real target.

    Args:
        blocks: one block that takes every step, or one block a step, as Step-3.5 has them.
        embedding: the target's token embedding.
        ids: [B, T] int64; every step reads the true tokens, as a server does after drafts that were
            accepted.
        hidden: the target's hidden states, see `MtpBlock.forward`.
        num_steps: at most as many as there are blocks, if there are several.
    """
    assert len(blocks) == 1 or num_steps <= len(blocks)
    places_T = torch.arange(ids.shape[1], device=ids.device)
    cache = None
    positions = []
    outputs = []
    for step in range(1, num_steps + 1):
        block = blocks[min(step, len(blocks)) - 1]
        if cache is None or len(blocks) > 1:
            # It holds every key, and the mask decides what a slot may see: the kind of cache for a
            # sliding window would forget keys that step 1 left.
            cache = DynamicCache()
            if block.kind in _INDEXED:  # indexers want one of their own
                cache = DynamicCache(config=block.config)
            positions = []
        positions.append(places_T + step - 1)
        tokens = F.pad(ids[:, step:], (0, step))
        mask = step_mask(positions, block.window)
        output, hidden = block(embedding(tokens), hidden, positions[-1], mask, cache)
        outputs.append(output)
    return outputs


def step_mask(positions: Sequence[Tensor], window: int | None) -> Tensor:
    """[T, steps * T] bool: where slots of the last step may attend; the cache holds the steps one
    after another.

    Args:
        positions: [T] of each step.
        window: how many tokens back a slot sees, itself counted.
    """
    length = len(positions[-1])
    device = positions[-1].device
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=device)
    mask = torch.cat([causal, *[itself] * (len(positions) - 1)], dim=1)
    if window is not None:
        mask &= positions[-1][:, None] - torch.cat(list(positions))[None] < window
    return mask


# --- building -------------------------------------------------------------------------------------


def build_block(view: FamilyView, index: int = 0) -> MtpBlock:
    """An MTP layer on the meta device, its experts single linears; only the rotary embedding is
    real, on the CPU.

    Args:
        view: the family's view of config.json.
        index: which MTP layer, counted from 0.

    Raises:
        RecipeError: the family's block cannot be run here.
    """
    draft = view.family.draft
    if draft is None:
        raise RecipeError(
            f"family {view.family.model_type}",
            "keepmtp must be able to run an MTP block that it calibrates or measures",
            got=f"one that it cannot: {view.family.no_draft}",
            cure="Give `mtp` a word that needs no data (source, bf16, FP8_DYNAMIC, W4A16, ...)",
        )
    # Only the language model's part of a vision-language model's config is read.
    values = {key: value for key, value in view.text_config.items() if key not in _NOT_THE_LAYER}
    config = CONFIG_MAPPING[draft.model_type].from_dict(values).get_text_config()
    if getattr(config, "mtp_layer_types", None):
        config = config.get_mtp_config()
        if config.layer_types[index] in _SLIDING:  # transformers knows it of backbone layers alone
            config.num_attention_heads = config.num_sliding_attention_heads
    # Calibration computes under eager attention, like the backbone's.
    config._attn_implementation = "eager"
    where = CONFIG_MAPPING[draft.model_type].__module__
    classes = importlib.import_module(where.replace("configuration_", "modeling_"))
    with torch.device("meta"):
        block = MtpBlock(view, draft, index, config, classes).eval()
    linear_experts(block)
    dtype = torch.bfloat16
    if isinstance(config.dtype, torch.dtype):
        dtype = config.dtype
    # On meta only: `Skeleton.fill` takes the dtype from these parameters.
    nn.Module.to(block, dtype=dtype)
    if draft.rotary is not None:
        rotary = draft.rotary or f"{draft.classes}RotaryEmbedding"
        block.rotary = getattr(classes, rotary)(config=config)
    return block


def bind_block(block: MtpBlock, plan: Plan) -> Binding:
    """Match the block's parameters with the plan's tensors, one to one.

    Raises:
        CheckpointError: a tensor without a parameter, or a parameter without a tensor, by name.
    """
    tensors = [tensor for tensor in plan.tensors if block.owns(tensor)]
    return bind(block, tensors, block.path_of, plan.source.where)


def bound_block(plan: Plan, index: int) -> MtpBlock:
    """`build_block`, and its binding with it.

    Raises: RecipeError, CheckpointError: see both.
    """
    block = build_block(plan.view, index)
    block.binding = bind_block(block, plan)
    return block
