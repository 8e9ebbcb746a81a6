"""Rules on the MTP block: what people met, and what else each one finds."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from broken_case import Case, case, finds, met
from checked import check
from checkpoint_files import as_source, config, elsewhere, lose, rename, retype, tensor, write
from good import ours, released
from good_checkpoints import GOOD
from keepmtp.cure.fix import proposed
from keepmtp.pipeline import plan_for
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.validate.facts.findings import errors_of
from without_mtp import llama

FLASH = partial(ours, "dsv4-flash", "W4A16")


test_promised_layers_exist = finds(
    "mtp-missing",
    met(
        "F1 dropped, count kept",
        "glm-5 nvfp4",
        lose(r"model\.layers\.3\..*"),
        where="model.layers.3.",
        says="weights missing from checkpoint",
    ),
    met(
        "F3 dropped in silence",
        "next nvfp4",
        lose(r"mtp\..*"),
        where="mtp.layers.0.",
        says="without a word",
    ),
    met("F5 only the glue exported", "next nvfp4", lose(r"mtp\.layers\..*"), where="mtp.layers.0."),
    met(
        "F9 count removed",
        "mimo fp8",
        config("num_nextn_predict_layers", None),
        rule="mtp-not-promised",
        where="num_nextn_predict_layers",
        says="ZeroDivisionError",
    ),
    met(
        "M7 count zero",
        "glm fp8",
        config("num_nextn_predict_layers", 0),
        rule="mtp-not-promised",
        where="num_nextn_predict_layers",
        says="ZeroDivisionError",
    ),
    met(
        "M7 count removed in V4",
        "dsv4 bf16",
        config("num_nextn_predict_layers", None),
        rule="mtp-not-promised",
        where="num_nextn_predict_layers",
        says="AttributeError",
    ),
    met("F10 vision-language, stripped", "qwen vl fp8", lose(r"mtp\..*"), where="mtp.layers.0."),
    met(
        "R1 neither promised nor there",
        "glm fp8",
        lose(r"model\.layers\.3\..*"),
        config("num_nextn_predict_layers", 0),
        where="num_nextn_predict_layers",
    ),
    met(
        "M9 one layer too many",
        "glm fp8",
        config("num_hidden_layers", 2),
        rule="mtp-not-promised",
        where="model.layers.3.",
    ),
    met(
        "M9 the MTP layer is counted as a decoder layer",
        "glm fp8",
        config("num_hidden_layers", 4),
        where="model.layers.3.",
    ),
    met(
        "M9 two layers promised, one there",
        "glm fp8",
        config("num_nextn_predict_layers", 2),
        where="model.layers.4.",
    ),
    case("a stage of DSpark lost", "dspark bf16", lose(r"mtp\.1\..*"), where="mtp.1.", among=True),
    case("a stage of V4.1's lost", "v41 bf16", lose(r"mtp\.1\..*"), where="mtp.1.", among=True),
)


test_files_are_indexed = finds(
    "unindexed",
    met("F4 in a file without index", "next nvfp4", elsewhere(r"mtp\..*"), where="mtp."),
)


def test_files_are_indexed_or_all_are_read(tmp_path):
    folder = write(tmp_path / "it", GOOD["next nvfp4"]())
    index = (folder / "model.safetensors.index.json").read_text()
    (folder / "model.safetensors.index.json").unlink()
    outcome = proposed(str(folder))
    (found,) = outcome.before.data.findings
    assert (found.severity, found.rule) == ("warning", "unindexed") and "transformers" in found.says
    assert outcome.after.data.findings == ()
    written = outcome.proposal.files()["model.safetensors.index.json"]
    assert json.loads(written)["weight_map"] == json.loads(index)["weight_map"]


test_mtp_glue_is_complete = finds(
    "mtp-incomplete",
    met(
        "F2 norm lost",
        "glm fp8",
        lose(r"model\.layers\.3\.hnorm\.weight"),
        where="model.layers.3.hnorm",
    ),
    met(
        "M1 eh_proj lost",
        "v3 nvfp4",
        lose(r"model\.layers\.3\.eh_proj\.weight"),
        where="model.layers.3.eh_proj",
    ),
    met(
        "E7 hyper-connection of the draft lost",
        "dsv4 bf16",
        lose(r"mtp\.0\.hc_head_fn"),
        where="mtp.0.hc_head_fn",
    ),
    met(
        "R7 scale without weight",
        "glm fp8",
        lose(r"model\.layers\.3\.eh_proj\.weight"),
        where="model.layers.3.eh_proj",
    ),
    case(
        "#52111 the projection of DSpark's first stage lost",
        "dspark bf16",
        lose(r"mtp\.0\.main_proj\..*"),
        where="mtp.0.main_proj",
        among=True,
    ),
    case(
        "DSpark's confidence head lost",
        "dspark bf16",
        lose(r"mtp\.2\.confidence_head\..*"),
        found=[],
    ),
    case(
        "the Markov head of DSpark's last stage lost",
        "dspark block",
        lose(r"mtp\.2\.markov_head\.markov_w1\.weight"),
        where="mtp.2.markov_head.markov_w1",
        among=True,
    ),
    case(
        "V4.1's Markov head has names of its own",
        "v41 block",
        lose(r"mtp\.2\.markov_head\.embed\.weight"),
        where="mtp.2.markov_head.embed",
        among=True,
    ),
    case(
        "a latent projection that no decoder layer has under this name",
        "released longcat-flash-chat",
        lose(r"model\.mtp\.layers\.0\.self_attn\.o_proj\.weight"),
        where="model.mtp.layers.0.self_attn.o_proj",
    ),
    case(
        "a router of a draft whose layers are in a module of their own",
        "released minimax-m3",
        lose(r".*\.mtp\.layers\.0\..*block_sparse_moe\.gate\.weight"),
        where="language_model.model.mtp.layers.0.transformer_layer.block_sparse_moe.gate",
    ),
)


test_lacking = finds(
    "mtp-incomplete",
    met(
        "F8 o_proj of the draft lost",
        "next nvfp4",
        lose(r"mtp\.layers\.0\.self_attn\.o_proj\.weight"),
        where="mtp.layers.0.self_attn.o_proj",
    ),
    met(
        "F2 bias of the draft lost",
        "mimo w4a16",
        lose(r"model\.mtp_layers\.0\.self_attn\.k_proj\.bias"),
        where="model.mtp_layers.0.self_attn.k_proj.bias",
    ),
    met(
        "F2 correction bias of the draft lost",
        "glm fp8",
        lose(r"model\.layers\.3\.mlp\.gate\.e_score_correction_bias"),
        where="model.layers.3.mlp.gate.e_score_correction_bias",
    ),
    met(
        "M1 norm of a decoder layer lost",
        "glm fp8",
        lose(r"model\.layers\.1\.self_attn\.q_norm\.weight"),
        rule="layer-incomplete",
        where="model.layers.1.self_attn.q_norm",
    ),
    case(
        "attention without low-rank queries is another layout",
        "released deepseek-r1",
        config("q_lora_rank", None),
        lose(r"model\.layers\.\d\.self_attn\.(q_a_proj|q_a_layernorm)\..*"),
        rename(r"(.*\.self_attn\.)q_b_proj(\..*)", r"\1q_proj\2"),
        found=[],
    ),
    case(
        "up of the only dense layer",
        "glm nvfp4",
        lose(r"model\.layers\.0\.mlp\.up_proj\..*"),
        rule="layer-incomplete",
        where="model.layers.0.mlp.up_proj.weight",
    ),
    case(
        "one of an indexer's",
        "glm-5 nvfp4",
        lose(r"model\.layers\.1\.self_attn\.indexer\.wk\..*"),
        rule="layer-incomplete",
        where="model.layers.1.self_attn.indexer.wk.weight",
    ),
)


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        ("nemotron-3-super", r"backbone\.layers\.0\.mixer\.D"),
        ("kimi-k3-mtp", r".*\.layers\.3\.self_attn\.kv_b_proj\.weight"),
        ("glm-5.3-flash", r".*\.layers\.3\.self_attn\.q_a_layernorm\.weight"),
        ("glm-5.3-flash", r".*\.layers\.3\.self_attn\.indexer\.k_norm\.bias"),
        ("minimax-m3", r".*\.layers\.1\.self_attn\.index_k_norm\.weight"),
        ("dsv4-flash", r"layers\.0\.ffn\.gate\.weight"),
        ("dsv4-flash", r"layers\.1\.attn\.indexer\.compressor\.ape"),
        ("dsv4.1-flash", r"layers\.1\.attn\.compressor\.wgate\.weight"),
        ("mimo-v2.5", r"model\.layers\.2\.self_attn\.attention_sink_bias"),
        ("dsv4.1-flash", r"layers\.1\.engram\.q_weight"),
        ("dsv4.1-flash", r"layers\.1\.attn\.indexer\.k_norm\.weight"),
        ("qwen3.8-flash-next", r".*\.layers\.1\.ple\.conv1d\.weight"),
        ("inkling", r".*\.layers\.0\.mlp\.global_scale"),
        ("ernie-4.5-21b", r"model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight"),
        ("dsv4-flash-0731", r"mtp\.2\.hc_head_fn"),
    ],
)
def test_a_layer_has_all_of_a_unit(model, lost, tmp_path):
    """Also where no other layer has it."""
    checkpoint = released(model)
    (name,) = [name for name in checkpoint.tensors if re.fullmatch(lost, name)]
    del checkpoint.tensors[name]
    (error,) = errors_of(check(as_source(checkpoint, tmp_path)).findings)
    assert name.startswith(error.where.removesuffix("*"))


@pytest.mark.parametrize("name", ["layers.1.ffn.gate.bias_vl", "mtp.1.attn.attn_sink"])
def test_a_parameter_without_a_module_has_its_own_name(name, tmp_path):
    good = GOOD["released dsv4.1-flash"]()
    tensors = dict(good.tensors)
    del tensors[name]
    folder = write(tmp_path / "it", replace(good, tensors=tensors))
    places = {found.where for found in proposed(str(folder)).before.data.findings}
    assert name in places


test_layers_have_what_config_gives = finds(
    "config",
    case(
        "a dense layer more than the files hold",
        "glm fp8",
        config("first_k_dense_replace", 2),
        where="config.json: first_k_dense_replace",
        says="leaves out model.layers.1.mlp.",
    ),
    case(
        "experts in a layer that is dense",
        "released deepseek-r1",
        config("first_k_dense_replace", 0),
        where="config.json: first_k_dense_replace",
        says="leaves out model.layers.0.mlp.",
    ),
    case(
        "experts in every other layer",
        "released deepseek-r1",
        config("moe_layer_freq", 2),
        where="config.json: first_k_dense_replace",
    ),
    case(
        "a list of them",
        "released mimo-v2.5",
        config("moe_layer_freq", [0, 0, 1]),
        where="config.json: moe_layer_freq",
    ),
    case(
        "words for them",
        "released hy4-preview",
        config("mlp_layer_types", ["dense", "dense", "sparse"]),
        where="config.json: mlp_layer_types",
    ),
    case(
        "their numbers",
        "released step-3.5-flash",
        config("moe_layers_enum", "3"),
        where="config.json: moe_layers_enum",
    ),
    case(
        "biases that nobody reads",
        "glm fp8",
        config("attention_bias", False),
        where="config.json: attention_bias",
        says="self_attn.k_proj.bias",
    ),
    case(
        "norms that nobody reads",
        "glm fp8",
        config("use_qk_norm", False),
        where="config.json: use_qk_norm",
    ),
    case(
        "a layer after the last",
        "released qwen3.5-397b",
        config("text_config/num_hidden_layers", 3),
        where="config.json: num_hidden_layers",
        among=True,
    ),
    case(
        "a layer after the last of a pattern",
        "released nemotron-3-super",
        config("hybrid_override_pattern", "ME*"),
        where="config.json: hybrid_override_pattern",
    ),
    case(
        "sinks of sliding layers",
        "released mimo-v2.5",
        config("add_swa_attention_sink_bias", False),
        where="config.json: add_swa_attention_sink_bias",
    ),
)


test_needed_by_config = finds(
    "layer-incomplete",
    case(
        "biases that config.json promises",
        "released exaone-4.5-33b",
        config("text_config/attention_bias", True),
        where="self_attn.k_proj.bias",
        among=True,
    ),
    case(
        "norms that it promises",
        "released glm-4.5-air",
        config("use_qk_norm", True),
        where="self_attn.k_norm.weight",
        among=True,
    ),
)


test_layers_are_complete = finds(
    "layer-missing",
    met(
        "E8 decoder layer lost",
        "glm fp8",
        lose(r"model\.layers\.1\..*"),
        where="model.layers.1.",
    ),
)


test_ends_are_complete = finds(
    "layer-incomplete",
    case("a norm", "glm fp8", lose(r"model\.norm\.weight"), where="model.norm"),
    case("an embedding", "next fp8", lose(r"model\.embed_tokens\.weight"), where="model.embed"),
    case("a head that is not tied", "glm nvfp4", lose(r"lm_head\.weight"), where="lm_head"),
    case("a state", "dsv4 bf16", lose(r"hc_head_base"), where="hc_head_base"),
)


test_counted_layers_are_there = finds(
    "layer-missing",
    case(
        "a layer lost, of no family",
        partial(llama, "awq"),
        lose(r"model\.layers\.2\..*"),
        found=[{"where": "model.layers.2."}, {"rule": "family", "severity": "warning"}],
    ),
)


test_experts_are_complete = finds(
    "experts",
    met(
        "E2 experts of one rank only",
        "glm nvfp4",
        lose(r"model\.layers\.1\.mlp\.experts\.[23]\..*"),
        where="model.layers.1.mlp.experts.2",
    ),
    met(
        "E2 one expert of the draft",
        "glm fp8",
        lose(r"model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight"),
        where="model.layers.3.mlp.experts.2.up_proj",
    ),
)


test_scales_have_weights = finds(
    "unknown-tensor",
    met(
        "R7 orphan scale",
        "glm fp8",
        tensor("model.layers.3.mlp.shared_experts.w9.weight_scale", "F32", 1),
        where="model.layers.3.mlp.shared_experts.w9.weight_scale",
    ),
)


test_names_are_known = finds(
    "unknown-tensor",
    met(
        "R7 a scale the draft's loader does not rename",
        "released longcat-flash-chat",
        tensor("model.mtp.layers.0.self_attn.o_proj.weight_scale", "F32", 256, 1),
        where="model.mtp.layers.0.self_attn.o_proj.weight_scale",
        says="KeyError",
    ),
    case(
        "a norm of a classic block among V4.1's stages",
        "v41 bf16",
        tensor("mtp.0.enorm.weight", "BF16", 512),
        where="mtp.0.enorm.weight",
    ),
    case(
        "DSpark's projection in a classic block, whatever config.json says",
        "dsv4 bf16",
        config("dspark_target_layer_ids", [0, 1, 2]),
        tensor("mtp.0.main_proj.weight", "BF16", 512, 1536),
        where="mtp.0.main_proj.weight",
        says="KeyError",
    ),
)


test_unknown = finds(
    "unknown-tensor",
    met(
        "F37 vision-language prefix",
        "qwen vl fp8",
        rename(r"(mtp\..*)", r"language_model.\1"),
        rule="mtp-prefix",
        where="language_model.mtp.",
    ),
    met(
        "E7 transformers' names in the draft",
        "dsv4 bf16",
        rename(r"mtp\.0\.hc_attn_base", "mtp.0.attn_hc.base"),
        where="mtp.0.attn_hc.base",
    ),
    met(
        "E9 copies under another name",
        "dsv4 bf16",
        rename(r"mtp\.0\.emb\.tok_emb\.weight", "mtp.0.embed.weight"),
        where="mtp.0.embed.weight",
    ),
    met(
        "F7 tensors of another model",
        "glm fp8",
        tensor("vision_model.encoder.weight", "BF16", 4, 4),
        where="vision_model.encoder.weight",
        severity="warning",
    ),
)


test_aliases_are_present = finds(
    "alias",
    met(
        "E10 copies missing",
        "dsv4 bf16",
        lose(r"mtp\.0\.(emb\.tok_emb|head)\.weight"),
        where="mtp.0.emb.tok_emb",
        says="0 %",
        severity="warning",
    ),
)


test_mtp_is_that_of_the_source = finds(
    "source",
    case(
        "C3 parameter lost",
        FLASH,
        lose(r"mtp\.0\.ffn\.gate\.bias"),
        where="mtp.0.ffn.gate.bias",
        says="source's MTP block",
        among=True,
    ),
    case(
        "C3 weight lost",
        FLASH,
        lose(r"mtp\.0\.attn\.wq_b\.weight"),
        where="mtp.0.attn.wq_b.weight",
        says="source's MTP block",
        among=True,
    ),
    case(
        "E4 float32 lost",
        FLASH,
        retype(r"mtp\.0\.hc_attn_fn", "BF16"),
        where="mtp.0.hc_attn_fn",
        severity="warning",
        says="in the source F32",
    ),
    case(
        "E8 another shape",
        FLASH,
        tensor("mtp.0.attn.q_norm.weight", "BF16", 129),
        among=True,
        where="mtp.0.attn.q_norm.weight",
        says="128",
    ),
    source=as_source(released("dsv4-flash"), Path("/nonexistent")),
)


NAMES = {
    "the class of the model with a tower": (
        partial(released, "qwen3.5-27b"),
        [
            lose(r"model\.visual\..*"),
            rename(r"model\.language_model\.(.+)", r"model.\1"),
        ],
        'Set it to ["Qwen3_5ForCausalLM"]',
        "config.json: architectures",
    ),
    "a wrapper's prefix": (
        "glm fp8",
        [rename(r"(.+)", r"module.\1")],
        "Rename them to model.layers.*",
        "module.model.layers.*",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_layers_have_known_names(name, tmp_path):
    """It is no draft alone, nothing else is said of each name, and fix renames."""
    base, changes, cure, where = NAMES[name]
    checkpoint = Case(name, base, tuple(changes), ()).build()
    outcome = proposed(str(write(tmp_path / "it", checkpoint)))
    (finding,) = (each for each in outcome.before.data.findings if each.rule == "names")
    assert cure in finding.cure and finding.where == where
    assert {each.rule for each in outcome.before.data.findings} <= {"names", "mtp-missing"}
    assert outcome.after.data.findings == ()


def test_layers_of_unknown_names_are_not_quantized_as_a_draft(tmp_path):
    _, changes, *_ = NAMES["the class of the model with a tower"]
    checkpoint = Case("it", partial(released, "qwen3.5-27b"), tuple(changes), ()).build()
    with pytest.raises(KeepMTPError, match=r"Run `keepmtp fix .*it`"):
        plan_for(str(write(tmp_path / "it", checkpoint)), scheme="fp8-dynamic")
