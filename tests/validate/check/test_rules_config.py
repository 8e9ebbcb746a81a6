"""Rules on config.json and hf_quant_config.json."""

from functools import partial

from broken_case import case, finds, met
from checkpoint_files import Checkpoint, config, hf_quant_config, ignoring, quantization
from foreign_form import in_hf_quant_config, mixed, mixed_in_two_files
from good import ours

test_quantization_configs_agree = finds(
    "two-configs",
    met(
        "R5 two configs, two algorithms",
        "glm modelopt",
        hf_quant_config("quantization", {"quant_algo": "FP8", "exclude_modules": []}),
        where="quant_algo",
    ),
    # Without quantized_layers in config.json vLLM 0.32 reads all of hf_quant_config.json; with them,
    # none (model_loader/weight_utils, transformers_utils/model_arch_config_convertor).
    case(
        "a mixture whose other list is wrong",
        partial(
            mixed_in_two_files, here=["lm_head", "model.layers.1.self_attn*"], there=["lm_head"]
        ),
        found=[],
    ),
    case(
        "a mixture whose own list is wrong",
        partial(
            mixed_in_two_files, here=["lm_head"], there=["lm_head", "model.layers.1.self_attn*"]
        ),
        rule="form",
        where="model.layers.1.self_attn",
        among=True,
    ),
    case(
        "one algorithm, and a wrong list in the other file",
        "glm modelopt",
        hf_quant_config(
            "quantization",
            {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.1.self_attn*"]},
        ),
        severity="warning",
        says="TensorRT-LLM reads this file",
    ),
    case(
        "one algorithm, and a right list in the other file",
        "glm modelopt",
        ignoring("model.layers.1.self_attn*"),
        hf_quant_config("quantization", {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}),
        rule="form",
        where="model.layers.1",
        among=True,
    ),
)


test_config_has_what_vllm_reads = finds(
    "config",
    met(
        "E5 layer_types counts the MTP layer",
        "qwen vl fp8",
        config(
            "text_config/layer_types",
            [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
                "full_attention",
            ],
        ),
        where="layer_types",
    ),
    met(
        "E6 compress_ratios lost",
        "dsv4 bf16",
        config("compress_ratios", None),
        where="compress_ratios",
    ),
    case(
        "DSpark without the layers that it reads",
        "dspark bf16",
        config("dspark_target_layer_ids", None),
        where="config.json: dspark_target_layer_ids",
    ),
    case(
        "an activation that the class of the layers does not have",
        "glm fp8",
        config("hidden_act", "gelu"),
        where="config.json: hidden_act",
        says="is gelu: vLLM raises ValueError 'Unsupported activation', and takes silu",
    ),
    case(
        "FP8 blocks whose inputs have static scales",
        "v3 native bf16 mtp",
        quantization("activation_scheme", "static"),
        where="config.json: quantization_config",
        says="activation_scheme: must be dynamic with weight_block_size",
    ),
    case("one of two", "released kimi-k3-mtp", config("text_config/hidden_act", "silu"), found=[]),
    case(
        "V4.1's without them",
        "released dsv4.1-flash",
        config("text_config/dspark_target_layer_ids", None),
        where="config.json: dspark_target_layer_ids",
    ),
)


test_architecture_is_known = finds(
    "config",
    case(
        "a letter off",
        "released deepseek-r1",
        config("architectures", ["DeepseekV3ForCausalL"]),
        where="config.json: architectures",
        says="vLLM 0.33 has no class of that name",
        cure="Did you mean DeepseekV3ForCausalLM?",
    ),
    case(
        "none, where vLLM finds the draft by it",
        "released glm-4.7",
        config("architectures", []),
        where="config.json: architectures",
        cure="Take architectures from the original release",
    ),
    case(
        "none, where the model_type is enough",
        "released hy3",
        config("architectures", []),
        found=[],
    ),
)


test_modelopt_is_complete = finds(
    "algorithm",
    met(
        "R7 algorithm vLLM does not load",
        "glm modelopt",
        quantization("quant_algo", "W4A16_AWQ"),
        where="quant_algo",
        says="ModelOpt currently only supports",
    ),
    met(
        "R7 hf_quant_config.json without group_size",
        "glm modelopt file",
        hf_quant_config("quantization/group_size", None),
        where="group_size",
    ),
    met(
        "R7 a mixture in hf_quant_config.json alone",
        partial(mixed, "glm-4.7", "NVFP4"),
        in_hf_quant_config,
        where="quantization.quant_algo",
        says="Unknown ModelOpt quant algo",
    ),
    case(
        "a file of another producer alone",
        "glm modelopt file",
        hf_quant_config("producer", {"name": "other", "version": "1"}),
        where="hf_quant_config.json: producer.name",
        says="builds a plain model",
        among=True,
    ),
    case(
        "a mixture in both files", partial(mixed_in_two_files, here=[], there=["lm_head"]), found=[]
    ),
    case(
        "a mixture in both files, one of another producer",
        partial(mixed_in_two_files, here=[], there=["lm_head"]),
        hf_quant_config("producer", {"name": "other", "version": "1"}),
        where="hf_quant_config.json: producer.name",
        says="Unsupported quantization config",
        among=True,
    ),
)


test_extras_are_present = finds(
    "extras",
    met(
        "Fp4 scale_fmt lost",
        "dsv4 bf16",
        quantization("scale_fmt", None),
        where="scale_fmt",
        severity="warning",
    ),
)


def brings(*files: str):
    """Python of the checkpoint's own."""

    def put(folder):
        for file in files:
            (folder / file).touch()

    def change(checkpoint):
        checkpoint.after = put

    return change


OWN = {"AutoConfig": "configuration_glm.C"}
OTHERS = OWN | {"AutoModel": "somebody/else--modeling_x.Model"}


test_own_code_is_known = finds(
    "own-code",
    case(
        "its own",
        "glm fp8",
        config("auto_map", OWN),
        brings("modeling_glm.py", "configuration_glm.py"),
        severity="warning",
        where="configuration_glm.py",
        says="--trust-remote-code",
        count=2,
    ),
    case(
        "of another repository",
        "glm fp8",
        config("auto_map", OTHERS),
        severity="warning",
        where="auto_map somebody/else--modeling_x.Model",
        says="--trust-remote-code",
        count=1,
    ),
    case("an auto_map without files", "glm fp8", config("auto_map", OWN), found=[]),
)


def other_tool(checkpoint: Checkpoint) -> None:
    """modelopt's file beside a config of compressed-tensors, as where two exports share a folder."""
    inner = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}
    producer = {"name": "modelopt", "version": "0.45.0"}
    checkpoint.json_files["hf_quant_config.json"] = {"producer": producer, "quantization": inner}


test_one_tool_wrote_the_configs = finds(
    "two-tools",
    case("one of them", partial(ours, "glm-4.7", "NVFP4"), found=[]),
    case("modelopt's own two", "glm modelopt file", found=[]),
    case(
        "modelopt's file beside another config",
        partial(ours, "glm-4.7", "NVFP4"),
        other_tool,
        severity="warning",
        where="hf_quant_config.json",
        says="vLLM reads config.json, which says compressed-tensors",
    ),
    about=["two-tools"],
)
