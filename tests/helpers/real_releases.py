"""Releases whose keys or forms differ from those of their family's layout: real keys, over tiny
shapes.

In: nothing. Out: a `Checkpoint` each. Where the keys come from stands at each one.
"""

import re

from checkpoint_files import Checkpoint
from good import released

TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
_KINDS = {"M": "mamba", "*": "attention", "E": "moe"}


def nemotron_ultra() -> Checkpoint:
    """NVIDIA-Nemotron-3-Ultra-550B-A55B: `layers_block_type` and `mtp_layers_block_type`, no count,
    no patterns.

    Keys: those that transformers' NemotronHConfig writes since 5.0 (configuration_nemotron_h.py,
    where num_hidden_layers is deprecated), as in nvidia's repositories of Nemotron 3 Ultra and 3.5
    Lightning. Names are those of Super.
    """
    checkpoint = released("nemotron-3-super")
    config = checkpoint.config
    del config["num_hidden_layers"]
    config["layers_block_type"] = [_KINDS[kind] for kind in config.pop("hybrid_override_pattern")]
    config["mtp_layers_block_type"] = [
        _KINDS[kind] for kind in config.pop("mtp_hybrid_override_pattern")
    ]
    return checkpoint


def qwen38_fp8() -> Checkpoint:
    """Qwen/Qwen3.8-Flash-Next-FP8: routed experts in FP8 blocks, the n-gram table in FP8 with one
    scale, the rest BF16.

    Names, dtypes and shapes: what readers of the release's files ask of them (`weight_scale_inv`
    BF16 by 128 x 128; `ngram_embedding.weight_scale` BF16 [1], vllm #53896); the list of exceptions
    has names on disk, whole, as the MTP part of the release's list has them.
    """
    checkpoint = released("qwen3.8-flash-next")
    plain = [
        name.removesuffix(".weight")
        for name, (_, shape) in checkpoint.tensors.items()
        if len(shape) == 2
    ]
    for name, (_, (num_experts, rows, columns)) in checkpoint.take(
        r".*mlp\.experts\.\w+_proj"
    ).items():
        halves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        shape = (rows // len(halves), columns)
        for expert in range(num_experts):
            for half in halves:
                module = f"{name.rpartition('.')[0]}.{expert}.{half}"
                checkpoint.tensors[f"{module}.weight"] = ("F8_E4M3", shape)
                checkpoint.tensors[f"{module}.weight_scale_inv"] = (
                    "BF16",
                    (shape[0] // 128, shape[1] // 128),
                )
    checkpoint.retype(rf"{re.escape(TABLE)}\.shard_\d+\.weight", "F8_E4M3")
    checkpoint.tensors[f"{TABLE}.weight_scale"] = ("BF16", (1,))
    checkpoint.config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [name for name in plain if not name.startswith(TABLE)],
    }
    return checkpoint


def qwen38_nvfp4() -> Checkpoint:
    """The same with the n-gram table in NVFP4.

    Names, dtypes and shapes: vLLM 0.33.0 models/qwen4_exp/nvidia/ngram_embedding.py (load_weights)
    and common/ngram_embedding.py (Qwen4ExpPLENvFp4EmbeddingMethod).
    """
    checkpoint = qwen38_fp8()
    for name, (_, (rows, columns)) in checkpoint.take(rf"{re.escape(TABLE)}\.shard_.*").items():
        checkpoint.tensors[name] = ("U8", (rows, columns // 2))
        checkpoint.tensors[f"{name}_scale"] = ("F8_E4M3", (rows, columns // 16))
    checkpoint.take(rf"{re.escape(TABLE)}\.weight_scale")
    checkpoint.tensors[f"{TABLE}.weight_scale_2"] = ("F32", ())
    checkpoint.config["text_config"]["ple_embedding_dtype"] = "nvfp4"
    return checkpoint


def minimax_halves() -> tuple[Checkpoint, Checkpoint]:
    """MiniMax-M3 as it is released, and the MTP block alone, as vLLM's loader takes it.

    The release has no tensor of the block, though its config.json counts seven modules. Names and
    keys of the block: vLLM 0.32.0 models/minimax_m3/nvidia/mtp.py (_map_checkpoint_name),
    transformers_utils/configs/minimax_m3.py.
    """
    whole = released("minimax-m3")
    block = {
        name: spec
        for name, spec in whole.tensors.items()
        if name.startswith("language_model.model.mtp.")
    }
    release = {name: spec for name, spec in whole.tensors.items() if name not in block}
    text = whole.config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    alone = {name.removeprefix("language_model."): spec for name, spec in block.items()}
    alone |= dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (vocab, hidden))
    )
    config = {
        **text,
        "model_type": "minimax_m3_mtp",
        "architectures": ["MiniMaxM3MTP"],
        "num_mtp_modules": 1,
    }
    return (
        Checkpoint(
            config=whole.config | {"text_config": text | {"num_mtp_modules": 7}}, tensors=release
        ),
        Checkpoint(config=config, tensors=alone),
    )
