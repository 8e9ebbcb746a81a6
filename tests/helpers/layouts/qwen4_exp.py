"""Qwen3.8-Flash-Next (qwen4_exp): delta nets and indexed attention, hyper-connections, an n-gram
table, MTP as `mtp.*`.

Names and shapes of the backbone and the vision tower: transformers 5.17's save_pretrained; experts
are published stacked. The MTP block: a listing of the BF16 release's headers (31 tensors, experts
stacked, hyper-connections as in the backbone). Sizes: the release's text_config as servers pass it
on.
"""

import math

from tensors import (
    Config,
    Tensors,
    gated_mlp,
    gqa,
    linear,
    norms,
    qwen_vision_tower,
    under,
    vectors,
)


def qwen4_exp(config: Config) -> Tensors:
    """Three delta nets to one indexed attention, experts in all; the second layer has the n-gram
    table.
    """
    text = config["text_config"]
    stem = "model.language_model."
    indexed, experts = gqa(text, qk_norm=True, gated=True) | _indexer(text), _experts(text)
    connections = {
        name: spec for part in ("attn", "mlp")
        for name, spec in _hyper_connection(f"{part}_hyper_connection", text).items()
    }  # fmt: skip
    tensors = linear(f"{stem}embed_tokens", text["vocab_size"], text["hidden_size"])
    tensors |= linear("lm_head", text["vocab_size"], text["hidden_size"])
    tensors |= _hyper_connection(f"{stem}hyper_connection_mixer", text, inject=False)
    for layer in range(text["num_hidden_layers"]):
        mixer = _delta_net(text) if text["layer_types"][layer] == "linear_attention" else indexed
        table = _ngram_table(text) if layer + 1 in text["ple_layer_ids"] else {}
        tensors |= under(f"{stem}layers.{layer}.", mixer | experts | connections | table)
    hidden = text["hidden_size"]
    mtp = (
        linear("fc_embedding", hidden, hidden) | linear("fc_hidden", hidden, hidden)
        | norms("pre_fc_norm_embedding", hidden) | norms("pre_fc_norm_hidden", hidden * text["hc_count"])
        | _hyper_connection("hyper_connection_mixer", text, inject=False)
    )  # fmt: skip
    for index in range(text["mtp_num_hidden_layers"]):
        mtp |= under(f"layers.{index}.", indexed | experts | connections)
    return tensors | under("mtp.", mtp) | qwen_vision_tower(config["vision_config"])


def _delta_net(text: Config) -> Tensors:
    hidden, num_heads = text["hidden_size"], text["linear_num_value_heads"]
    key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value = num_heads * text["linear_value_head_dim"]
    return under("linear_attn.", (
        linear("in_proj_qkv", 2 * key + value, hidden) | linear("in_proj_z", value, hidden)
        | linear("in_proj_b", num_heads, hidden) | linear("in_proj_a", num_heads, hidden)
        | linear("out_proj", hidden, value)
        | {"conv1d.weight": ("BF16", (2 * key + value, 1, text["linear_conv_kernel_dim"]))}
        | vectors(["dt_bias", "A_log"], num_heads) | norms("norm", text["linear_value_head_dim"])
    ))  # fmt: skip


def _indexer(text: Config) -> Tensors:
    head = text["indexer_head_dim"]
    rows = (text["indexer_n_heads"] + text["indexer_kv_heads"]) * head
    return under("self_attn.indexer.", (
        linear("index_qk_proj", rows, text["hidden_size"]) | norms("q_layernorm k_layernorm", head)
    ))  # fmt: skip


def _experts(text: Config) -> Tensors:
    hidden, inner, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    return under("mlp.", (
        linear("gate", count, hidden) | linear("shared_expert_gate", 1, hidden)
        | gated_mlp("shared_expert", hidden, text["shared_expert_intermediate_size"])
        | {"experts.gate_up_proj": ("BF16", (count, 2 * inner, hidden)),
           "experts.down_proj": ("BF16", (count, hidden, inner))}
    ))  # fmt: skip


def _hyper_connection(name: str, text: Config, *, inject: bool = True) -> Tensors:
    """A connection of a sublayer; the mixer behind the last layer injects nothing back."""
    streams, rank = text["hc_count"], text["hc_lowrank"]
    width = streams * text["hidden_size"]
    down_up = linear("input_mix_weight_down", rank, width) | linear(
        "input_mix_weight_up", width, rank
    )
    back = linear("block_inject_weight", streams, width) if inject else {}
    return under(f"{name}.", down_up | norms("hc_norm", width) | back)


def _ngram_table(text: Config) -> Tensors:
    """One row for each slot of 16 hash tables, whose sizes are the primes from
    ngram_vocab_size_base on.
    """
    hidden, dim = text["hidden_size"], text["ple_embed_dim"]
    width = hidden * text["hc_count"]
    num_tables = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    primes = _primes_from(text["ngram_vocab_size_base"], num_tables)
    step, parts = text["make_ngram_vocab_size_divisible_by"], text["split_ngram_parts"]
    rows = math.ceil(sum(primes) / step) * step // parts
    table = vectors(["layer_multipliers"], text["ngram_size"], "I64")
    table |= vectors(["ngram_heads_offsets", "ngram_heads_vocab_sizes"], num_tables, "I64")
    for part in range(parts):
        table |= linear(f"ngram_embedding.shard_{part}", rows, dim // num_tables)
    return under("ple.", (
        under("ple_embedding.", table) | linear("key_proj", width, dim) | linear("value_proj", hidden, dim)
        | {"conv1d.weight": ("BF16", (width, 1, text["ple_conv_kernel_size"]))}
        | norms("norm_conv norm_key norm_query", width)
    ))  # fmt: skip


def _primes_from(start: int, count: int) -> list[int]:
    primes: list[int] = []
    number = start
    while len(primes) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return primes


LAYOUTS = {"qwen4_exp": qwen4_exp}
