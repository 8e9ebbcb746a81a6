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
    gqa,
    linear,
    norms,
    table,
    under,
    vectors,
)


def qwen4_exp(config: Config) -> Tensors:
    """Three delta nets to one indexed attention, experts in all; the second layer has the n-gram
    table.
    """
    text = config["text_config"]
    stem = "model.language_model."
    indexed, experts = (
        gqa(text, qk_norm=True, gated=True) | table("qwen4_exp.indexer", text),
        table("qwen4_exp.experts", text),
    )
    connections = {
        name: spec for part in ("attn", "mlp")
        for name, spec in _hyper_connection(f"{part}_hyper_connection", text).items()
    }  # fmt: skip
    tensors = linear(f"{stem}embed_tokens", text["vocab_size"], text["hidden_size"])
    tensors |= linear("lm_head", text["vocab_size"], text["hidden_size"])
    tensors |= _hyper_connection(f"{stem}hyper_connection_mixer", text, inject=False)
    for layer in range(text["num_hidden_layers"]):
        mixer = (
            table("qwen4_exp.delta_net", text)
            if text["layer_types"][layer] == "linear_attention"
            else indexed
        )
        ngram = _ngram_table(text) if layer + 1 in text["ple_layer_ids"] else {}
        tensors |= under(f"{stem}layers.{layer}.", mixer | experts | connections | ngram)
    hidden = text["hidden_size"]
    mtp = (
        linear("fc_embedding", hidden, hidden) | linear("fc_hidden", hidden, hidden)
        | norms("pre_fc_norm_embedding", hidden) | norms("pre_fc_norm_hidden", hidden * text["hc_count"])
        | _hyper_connection("hyper_connection_mixer", text, inject=False)
    )  # fmt: skip
    for index in range(text["mtp_num_hidden_layers"]):
        mtp |= under(f"layers.{index}.", indexed | experts | connections)
    return tensors | under("mtp.", mtp) | table("qwen.vision_tower", config["vision_config"])


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
    found = vectors(["layer_multipliers"], text["ngram_size"], "I64")
    found |= vectors(["ngram_heads_offsets", "ngram_heads_vocab_sizes"], num_tables, "I64")
    for part in range(parts):
        found |= linear(f"ngram_embedding.shard_{part}", rows, dim // num_tables)
    return under("ple.", (
        under("ple_embedding.", found) | linear("key_proj", width, dim) | linear("value_proj", hidden, dim)
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
