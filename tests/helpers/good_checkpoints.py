"""Good checkpoints by name: every release, and what each tool writes of some.

In: nothing. Out: GOOD, name -> a function that builds a `Checkpoint`.
"""

from functools import partial

import releases
from checkpoint_files import changed, config, ignoring, lose, pack, quantization, rename, tensor
from data_files import table
from foreign_form import (
    autoround,
    autoround_mxfp4,
    awq,
    block_experts,
    gptq,
    in_hf_quant_config,
    mixed,
    modelopt,
    quark,
    quark_nvfp4,
)
from good import (
    flash_of_three_schemes,
    llmcompressor,
    native_bf16_mtp,
    nvfp4_experts,
    ours,
    plain_delta_nets,
    qwen_fp8,
    released,
)

GOOD = {f"released {model}": partial(released, model) for model in releases.MODELS} | {
    "dsv4 bf16": partial(ours, "dsv4-flash", "NVFP4"),
    "dsv4 block": partial(ours, "dsv4-flash", "FP8_BLOCK", "source"),
    "dspark bf16": partial(ours, "dsv4-flash-0731", "NVFP4"),
    "dspark block": partial(ours, "dsv4-flash-0731", "FP8_BLOCK", "source"),
    "v41 bf16": partial(ours, "dsv4.1-flash", "NVFP4A16"),
    "v41 block": partial(ours, "dsv4.1-flash", "FP8_BLOCK", "FP8_BLOCK"),
    "v41 without a confidence head": partial(
        changed, partial(ours, "dsv4.1-flash", "W4A16_G32"), lose(r"mtp\.2\.confidence_head\..*")
    ),
    # DeepSeek-V4-Flash with NVFP4 experts and FP8 attention, its regexes verbatim.
    "dsv4 published": partial(
        changed,
        flash_of_three_schemes,
        config("quantization_config", table("helpers/good")["published flash"]),
    ),
    "dsv4 nvfp4 experts": nvfp4_experts,
    "v3 native bf16 mtp": native_bf16_mtp,
    "v3 nvfp4": partial(ours, "deepseek-r1", "NVFP4"),
    "v3 block": partial(ours, "deepseek-r1", "FP8_BLOCK", "FP8_BLOCK"),
    "glm w4a16": partial(ours, "glm-4.7", "W4A16", "W4A16"),
    "glm fp8": partial(llmcompressor, "glm-4.7", "FP8_DYNAMIC"),
    # The embedding and the head too, in whose place vLLM puts the target's.
    "glm fp8, the draft's copies too": partial(
        changed,
        partial(llmcompressor, "glm-4.7", "FP8_DYNAMIC"),
        pack(r"model\.layers\.3\.(embed_tokens|shared_head\.head)", "FP8_DYNAMIC"),
    ),
    "glm fp8 static": partial(ours, "glm-4.7", "FP8", "FP8"),
    "glm nvfp4": partial(ours, "glm-4.7", "NVFP4", "NVFP4A16"),
    "glm-5 nvfp4": partial(ours, "glm-5", "NVFP4"),
    "lite fp8": partial(llmcompressor, "glm-4.7-flash", "FP8_DYNAMIC"),
    "next nvfp4": partial(llmcompressor, "qwen3-next-80b", "NVFP4"),
    "next fp8": partial(ours, "qwen3-next-80b", "FP8_DYNAMIC", "FP8_DYNAMIC"),
    # A hand-written recipe: everything by regexes from the start.
    "next red hat": partial(
        changed,
        plain_delta_nets,
        quantization("config_groups/group_0/targets", ["Linear"]),
        quantization(
            "ignore",
            [
                "lm_head",
                "re:.*mlp.gate$",
                "re:.*mlp.shared_expert_gate$",
                "re:.*linear_attn.*",
                "re:mtp.*",
                "re:.*visual.*",
            ],
        ),
    ),
    "qwen vl native fp8": qwen_fp8,
    "qwen vl fp8": partial(llmcompressor, "qwen3.5-27b", "FP8_DYNAMIC"),
    "qwen vl moe nvfp4": partial(llmcompressor, "qwen3.5-397b", "NVFP4"),
    "qwen text int8": partial(llmcompressor, "qwen3.5-text", "W8A8"),
    "qwen text under its vision model's prefix": partial(
        changed,
        partial(llmcompressor, "qwen3.5-text", "W8A8"),
        rename(r"model\.(.*)", r"model.language_model.\1"),
    ),
    "m3 w4a16, its embedding too": partial(
        changed,
        partial(ours, "minimax-m3", "W4A16"),
        pack(r"language_model\.model\.embed_tokens", "W4A16"),
        ignoring(without="embed_tokens"),
        quantization("config_groups/group_0/targets", ["Linear", "Embedding"]),
    ),
    # A packed copy of the head, which the draft's loader skips with all names that it does not know.
    "ring nvfp4, the draft's head too": partial(
        changed,
        partial(ours, "ring-2.5-1t", "NVFP4"),
        tensor("model.layers.4.shared_head.head.weight", "BF16", 512, 256),
        pack(r"model\.layers\.4\.shared_head\.head", "NVFP4"),
    ),
    "mimo w4a16": partial(ours, "mimo-7b", "W4A16"),
    "mimo fp8": partial(llmcompressor, "mimo-7b", "FP8_DYNAMIC"),
    "glm gptq": partial(gptq, dynamic={r"-:^model\.layers\.3\.": {}}),
    "next gptq": partial(gptq, "qwen3-next-80b", "W4A16", dynamic={}),
    "qwen vl moe gptq": partial(gptq, "qwen3.5-397b", dynamic={"-:.*mtp.*": {}}),
    # Of linear modules vLLM reads the headers; an expression with + changes nothing for what is plain
    # there.
    "qwen vl gptq": partial(gptq, "qwen3.5-27b", dynamic={"+:.*mtp.*": {"bits": 4}}),
    "next awq": partial(
        awq, "qwen3-next-80b", modules_to_not_convert=["mtp", "lm_head", "in_proj_ba"]
    ),
    "qwen vl autoround": partial(
        autoround,
        "qwen3.5-27b",
        block_name_to_quantize="model.language_model.layers",
        extra_config={".*in_proj_[ab]$": {"bits": 16}},
    ),
    "glm quark": partial(quark, exclude=[r"re:model\.layers\.3\."]),
    "glm quark nvfp4": partial(quark_nvfp4, exclude=[r"re:model\.layers\.3\."]),
    "glm quark nvfp4, MTP packed": partial(quark_nvfp4, mtp="NVFP4"),
    "glm autoround mxfp4": partial(
        autoround_mxfp4, extra_config={r"model\.layers\.3\.": {"bits": 16}}
    ),
    "v3 modelopt": partial(modelopt, "deepseek-r1"),
    "glm modelopt": partial(modelopt, "glm-4.7", num_hidden_layers=12),
    "glm modelopt file": partial(changed, partial(modelopt, "glm-4.7"), in_hf_quant_config),
    "glm mixed": mixed,
    "glm mixed blocks": block_experts,
    "glm mixed blocks, older name": partial(block_experts, algorithm="FP8_BLOCK_SCALES"),
    "next mixed": partial(modelopt, "qwen3-next-80b", "NVFP4", "FP8"),
    "glm modelopt a16": partial(modelopt, "glm-4.7", "NVFP4A16", "NVFP4A16"),
    "qwen text modelopt blocks": partial(modelopt, "qwen3.5-text", "FP8_BLOCK", "FP8_BLOCK"),
    "mimo modelopt channels": partial(modelopt, "mimo-7b", "FP8_DYNAMIC", "FP8_DYNAMIC"),
    "next modelopt fp8": partial(modelopt, "qwen3-next-80b", "FP8"),
    "qwen vl modelopt": partial(modelopt, "qwen3.5-27b"),
}
