"""The KV cache's entry and scales: what the check says is what vLLM 0.32 did in dry loads of every
family.
"""

import json

import pytest
from checkpoint_files import Checkpoint, as_source
from good import cached, ours, outputs_of
from keepmtp.recipes.conventions import Format
from keepmtp.validate.check.check import check_source
from keepmtp.validate.facts.findings import Finding
from modelopt_form import in_hf_quant_config, modelopt

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
MTP = {
    "glm-4.7": "model.layers.3.self_attn",
    "qwen3.5-27b": "mtp.layers.0.self_attn",
    "qwen3-next-80b": "mtp.layers.0.self_attn",
    "deepseek-v3.2": "model.layers.3.self_attn",
    "deepseek-r1": "model.layers.3.self_attn",
}


def about_kv(checkpoint: Checkpoint, tmp_path) -> list[Finding]:
    found = check_source(as_source(checkpoint, tmp_path)).findings
    return [finding for finding in found if finding.rule in ("kv-cache", "kv-scales")]


def compressed(model: str = "glm-4.7", **changes) -> Checkpoint:
    checkpoint = ours(model, "FP8_DYNAMIC")
    checkpoint.quantization["kv_cache_scheme"] = FP8 | changes
    return checkpoint


def test_a_good_entry_is_not_spoken_of(tmp_path):
    assert not about_kv(compressed(), tmp_path)
    assert not about_kv(compressed(strategy="attn_head"), tmp_path)
    checkpoint = modelopt("glm-4.7", "NVFP4", "bf16")
    checkpoint.quantization["kv_cache_scheme"] = FP8
    assert not about_kv(checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("model", "scheme", "severity", "says"),
    [
        ("glm-4.7", FP8 | {"num_bits": 4}, "error", "'num_bits': 4"),
        ("glm-4.7", FP8 | {"type": "int"}, "error", "'type': 'int'"),
        ("glm-4.7", FP8 | {"strategy": "channel"}, "error", "'strategy': 'channel'"),
        ("glm-4.7", FP8 | {"strategy": None}, "error", "'strategy': None"),
        ("glm-4.7", FP8 | {"symmetric": False}, "error", "'symmetric': False"),
        ("glm-4.7", "fp8", "error", "AttributeError"),
        ("deepseek-r1", FP8, "warning", "no effect"),
        ("qwen3.8-flash-next", FP8, "error", "Qwen4Exp QSA does not support KV quantization"),
    ],
)
def test_an_entry_that_vllm_refuses_or_never_asks_for(model, scheme, severity, says, tmp_path):
    checkpoint = compressed(model)
    checkpoint.quantization["kv_cache_scheme"] = scheme
    (finding,) = about_kv(checkpoint, tmp_path)
    assert (
        finding.severity == severity and says in finding.says and "kv_cache_scheme" in finding.where
    )


@pytest.mark.parametrize(
    ("model", "is_taken"), [(m, m not in ("glm-4.7", "deepseek-v3.2")) for m in MTP]
)
def test_scales_in_the_mtp_layer(model, is_taken, tmp_path):
    """Qwen3.5's drafts read them by AutoWeightsLoader; DeepSeek-V3.2's loader stumbles over a name
    that became None.
    """
    checkpoint = ours(model, "FP8_DYNAMIC")
    name = f"{MTP[model]}.k_proj.k_scale"
    checkpoint.tensors[name] = ("F32", ())
    found = about_kv(checkpoint, tmp_path)
    assert [finding.where for finding in found] == ([] if is_taken else [name])


@pytest.mark.parametrize(
    ("build", "name", "shape", "says"),
    [
        (
            lambda: ours("dsv4-flash", "NVFP4"),
            "layers.0.attn.k_scale",
            (),
            "with and without a draft",
        ),
        (
            lambda: modelopt("glm-4.7", "NVFP4", "bf16"),
            "model.layers.0.self_attn.k_proj.k_scale",
            (4,),
            "[4]: vLLM raises ValueError: KV-cache scale expects a scalar weight",
        ),
    ],
    ids=["no parameter in the backbone", "one for each head under modelopt"],
)
def test_a_scale_that_the_class_does_not_take(build, name, shape, says, tmp_path):
    checkpoint = build()
    checkpoint.tensors[name] = ("F32", shape)
    (finding,) = about_kv(checkpoint, tmp_path)
    assert finding.where == name and says in finding.says


def with_scales(model: str = "glm-4.7", format: Format = "compressed-tensors") -> Checkpoint:
    """What keepmtp writes by a recipe with `kv_cache: FP8`."""
    return outputs_of(cached(model, format=format))


@pytest.mark.parametrize(
    "model", ["glm-4.7", "qwen3.5-27b", "nemotron-3-super", "mimo-v2-flash", "ernie-4.5-21b"]
)
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_what_keepmtp_writes_is_not_spoken_of(model, format, tmp_path):
    checkpoint = with_scales(model, format)
    assert len([name for name in checkpoint.tensors if name.endswith(("k_scale", "v_scale"))]) >= 4
    assert not about_kv(checkpoint, tmp_path)


SCALES = {
    "compressed-tensors": (
        "model.layers.1.self_attn.k_scale",
        "model.layers.3.self_attn.attn.v_scale",
    ),
    "modelopt": (
        "model.layers.1.self_attn.k_proj.k_scale",
        "model.layers.3.self_attn.attn.v_scale",
    ),
}


@pytest.mark.parametrize(
    ("format", "name"), [(format, name) for format in SCALES for name in SCALES[format]]
)
def test_a_scale_that_was_dropped(format, name, tmp_path):
    """In the backbone, and in the MTP block under vLLM's own name, the only one that this draft's
    loader takes.
    """
    checkpoint = with_scales(format=format)
    del checkpoint.tensors[name]
    (finding,) = about_kv(checkpoint, tmp_path)
    assert (finding.where, finding.severity) == (name, "error")
    assert ("the other scale" if format == "modelopt" else "takes 1") in finding.says


@pytest.mark.parametrize(
    ("model", "layer", "severity"),
    [
        ("glm-4.7", "model.layers.0", "error"),
        # What a graft leaves: the draft's cache is FP8 all the same, with scales of 1.
        ("qwen3.5-27b", "mtp.layers.0", "warning"),
    ],
)
def test_a_layer_without_its_scales(model, layer, severity, tmp_path):
    checkpoint = with_scales(model)
    for leaf in ("k_scale", "v_scale"):
        del checkpoint.tensors[f"{layer}.self_attn.{leaf}"]
    found = about_kv(checkpoint, tmp_path)
    assert (found[0].rule, found[0].where) == ("kv-scales", f"{layer}.self_attn.k_scale")
    assert found[0].severity == severity


@pytest.mark.parametrize("name", ["model.layers.7.self_attn.k_scale", "model.layers.1.mlp.v_scale"])
def test_a_scale_of_what_has_no_cache(name, tmp_path):
    checkpoint = with_scales()
    checkpoint.tensors[name] = ("BF16", (1,))
    assert [(each.where, each.severity) for each in about_kv(checkpoint, tmp_path)] == [
        (name, "error")
    ]


@pytest.mark.parametrize(
    ("algorithm", "severity"), [("INT3", "warning"), (8, "error"), ("fp8", None), (None, None)]
)
def test_modelopts_algorithm(algorithm, severity, tmp_path):
    checkpoint = in_hf_quant_config(modelopt("glm-4.7", "NVFP4", "bf16"))
    checkpoint.json_files["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] = algorithm
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(checkpoint.json_files["hf_quant_config.json"])
    )
    found = about_kv(checkpoint, tmp_path)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert all(finding.where == "hf_quant_config.json: kv_cache_quant_algo" for finding in found)
