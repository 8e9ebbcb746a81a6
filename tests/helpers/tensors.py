"""Pieces that layouts are put together from: name -> (dtype, shape), as safetensors headers have
it.

In: sizes from a config.json. Out: `Tensors`. Used by tests/helpers/releases.py and the families in
tests/helpers/layouts/.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

Config = dict[str, Any]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
FP8_128 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is known of a release beside its config, from its model card, index, or vLLM's own
    source.

    Attributes:
        draft_stem: prefix that vLLM constructs the tiny model's first draft layer with.
        asks: what the draft asks the quantization config about: paths under `draft_stem`, or whole
            where they start with one of `whole`; a space between two.
        unasked: matrices that the draft builds without a quantization config, spelled the same way.
        whole: prefixes of names that stand outside `draft_stem`.
        num_mtp_layers: MTP layers on disk.
        num_mtp_weights: weights in the MTP block at full size, None where nobody published it.
        billions: parameters, MTP block included, in 1e9; None where nobody published it.
        unsaved: transformers has no class whose save_pretrained writes the published names.
    """

    draft_stem: str
    asks: str
    unasked: str = ""
    whole: tuple[str, ...] = ("mtp.",)
    num_mtp_layers: int = 1
    num_mtp_weights: int | None = None
    billions: float | None = None
    unsaved: bool = False


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one tensor on disk."""
    return ITEM_BYTES[dtype] * math.prod(shape)


@cache
def _tables() -> Mapping[str, Mapping[str, str]]:
    """The tables of the layouts' YAML files by "<file>.<name>"."""
    files = (Path(__file__).parent / "layouts").glob("*.yaml")
    read = {path.stem: yaml.safe_load(path.read_text()).get("tables", {}) for path in files}
    return {f"{stem}.{name}": rows for stem in read for name, rows in read[stem].items()}


def _counted(row: tuple[str, str]) -> str:
    return "".join(re.findall(r"\{(\w+)\}", row[0]))


def table(name: str, config: Config, **more: int) -> Tensors:
    """The tensors of a table: names on disk -> dtype, and the shape in words of the config.

    `{key}` in a name counts from 0 to the key's value; rows with one key next to each other are
    counted together.
    """
    words = dict(config) | more
    for key, value in config.items():
        if isinstance(value, dict):
            words[key] = SimpleNamespace(**value)
    tensors: Tensors = {}
    for counted, rows in groupby(_tables()[name].items(), _counted):
        found: Tensors = {}
        for path, spec in rows:
            dtype, *shape = spec.split()
            found[path] = (dtype, tuple(eval(side, {}, words) for side in shape))
        for number in range(words.get(counted, 1)):
            for path, spec in found.items():
                tensors[path.replace(f"{{{counted}}}", str(number))] = spec
    return tensors


Form = Literal["bf16", "fp8_scale_inv", "fp8_scale", "mxfp4"]


def linear(name: str, n: int, k: int, form: Form = "bf16", *, bias: bool = False) -> Tensors:
    """One nn.Linear [n, k] in the form its release stores: plain, DeepSeek-V3's FP8, DeepSeek-V4's
    FP8 or MXFP4.
    """
    blocks = (math.ceil(n / 128), math.ceil(k / 128))
    stored: Tensors = {
        "bf16": {"weight": ("BF16", (n, k))},
        "fp8_scale_inv": {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("F32", blocks)},
        "fp8_scale": {"weight": ("F8_E4M3", (n, k)), "scale": ("F8_E8M0", blocks)},
        "mxfp4": {"weight": ("I8", (n, k // 2)), "scale": ("F8_E8M0", (n, k // 32))},
    }[form]
    return under(f"{name}.", stored | ({"bias": ("BF16", (n,))} if bias else {}))


def vectors(names: Iterable[str], size: int, dtype: str = "BF16") -> Tensors:
    """Norm weights and other 1-D tensors of one length; `names` are whole, with their `.weight`."""
    return dict.fromkeys(names, (dtype, (size,)))


def norms(names: str, size: int) -> Tensors:
    """`<name>.weight` [size] for every name in a space-separated list."""
    return vectors((f"{name}.weight" for name in names.split()), size)


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The same tensors with `prefix` before their names."""
    return {prefix + name: spec for name, spec in tensors.items()}


def gated_mlp(
    name: str,
    hidden: int,
    inner: int,
    form: Form = "bf16",
    names: str = "gate_proj up_proj down_proj",
) -> Tensors:
    """The three linears of a gated MLP; `names` in the order gate, up, down."""
    gate, up, down = (f"{name}.{each}" for each in names.split())
    return (
        linear(gate, inner, hidden, form)
        | linear(up, inner, hidden, form)
        | linear(down, hidden, inner, form)
    )


def experts(
    name: str, count: int, hidden: int, inner: int, form: Form = "bf16", **more: str
) -> Tensors:
    """`count` gated MLPs as `<name>.<e>.*`."""
    return {
        k: v
        for e in range(count)
        for k, v in gated_mlp(f"{name}.{e}", hidden, inner, form, **more).items()
    }


def embeddings(
    config: Config,
    embed: str = "model.embed_tokens",
    head: str = "lm_head",
    norm: str = "model.norm",
) -> Tensors:
    """What stands outside the layers of nearly every model."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    return linear(embed, vocab, hidden) | linear(head, vocab, hidden) | norms(norm, hidden)


def gqa(
    config: Config, *, bias: bool = False, qk_norm: bool = False, gated: bool = False
) -> Tensors:
    """Grouped-query attention; `gated` doubles q_proj for the output gate (Qwen3-Next and
    later).
    """
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return under(
        "self_attn.",
        (
            linear("q_proj", q * (2 if gated else 1), hidden, bias=bias)
            | linear("k_proj", kv, hidden, bias=bias)
            | linear("v_proj", kv, hidden, bias=bias)
            | linear("o_proj", hidden, q)
            | (norms("q_norm k_norm", head) if qk_norm else {})
        ),
    )


def mla(config: Config, form: Form) -> Tensors:
    """Multi-head latent attention, with the sparse-attention indexer where the config has one."""
    hidden, heads, rope = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["qk_rope_head_dim"],
    )
    nope, value, q_rank, kv_rank = (
        config[key] for key in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
    )
    attention = (
        linear("q_a_proj", q_rank, hidden, form)
        | norms("q_a_layernorm", q_rank)
        | linear("q_b_proj", heads * (nope + rope), q_rank, form)
        | linear("kv_a_proj_with_mqa", kv_rank + rope, hidden, form)
        | norms("kv_a_layernorm", kv_rank)
        | linear("kv_b_proj", heads * (nope + value), kv_rank, form)
        | linear("o_proj", hidden, heads * value, form)
    )
    if "index_n_heads" in config:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        attention |= under(
            "indexer.",
            (
                linear("wq_b", index_heads * index_dim, q_rank, form)
                | linear("wk", index_dim, hidden, form)
                | linear("weights_proj", index_heads, hidden)
                | vectors(["k_norm.weight", "k_norm.bias"], index_dim)
            ),
        )
    return under("self_attn.", attention)
