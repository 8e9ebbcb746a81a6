"""Quantization methods that vLLM does not have: one finding in one sentence; the list is vLLM's
own.
"""

import ast
import os
from pathlib import Path

import pytest
from checkpoint_files import quantization, write
from good import released
from keepmtp.validate.check.check import check, examine
from keepmtp.validate.check.dialects import choose
from without_mtp import llama

VLLM_PYTHON = Path(
    os.environ.get("VLLM_PYTHON", Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python")
)
LIST = "lib/python3*/site-packages/vllm/model_executor/layers/quantization/__init__.py"


def packed(*leaves: str):
    """Weights packed to bytes under names that vLLM does not know."""

    def change(checkpoint):
        for name, (_, shape) in checkpoint.take(
            r"model\.layers\.\d+\.self_attn\..*_proj\.weight"
        ).items():
            for leaf in leaves:
                checkpoint.tensors[f"{name.removesuffix('.weight')}.{leaf}"] = ("U8", shape)

    return change


MLX = {"group_size": 64, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize(
    ("said", "leaves", "where", "says"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            ("weight", "weight.absmax"),
            "quantization_config.quant_method",
            "is bitsandbytes, which vLLM 0.32 does not have",
        ),
        (
            {"quantization_config": {"quant_method": "exl3", "bits": 4.0}},
            ("trellis", "suh", "svh"),
            "quantization_config.quant_method",
            "'Unknown quantization method: exl3'",
        ),
        (
            {"quantization": MLX},
            ("weight", "scales", "biases"),
            "config.json: quantization",
            "is MLX's",
        ),
        (
            {"quantization": MLX, "quantization_config": MLX},
            ("weight", "scales", "biases"),
            "config.json: quantization",
            "is MLX's",
        ),
        (
            {"quantization_config": {"quant_method": "fbgemm_fp8"}},
            ("weight",),
            "quant_method",
            "deprecated",
        ),
    ],
    ids=["bitsandbytes", "exl3", "MLX", "newer MLX", "deprecated"],
)
def test_a_method_that_vllm_does_not_have_is_one_finding(said, leaves, where, says, tmp_path):
    checkpoint = released("glm-4.7")
    packed(*leaves)(checkpoint)
    checkpoint.config |= said
    found = examine(write(tmp_path / "checkpoint", checkpoint))
    (finding,) = found.data.findings
    assert (finding.rule, finding.severity, found.source) == ("method", "error", None)
    assert finding.where.endswith(where) and says in finding.says and finding.cure
    # GLM-4.7's names: the layer after the last is its MTP block.
    block = sum(name.startswith("model.layers.3.") for name in checkpoint.tensors)
    assert f"{block} tensors are named as those of an MTP block" in finding.says
    assert (found.data.facts.num_mtp_tensors, found.data.facts.num_tensors) == (
        block,
        len(checkpoint.tensors),
    )


def test_bitsandbytes_names_its_plugin_and_says_that_the_block_is_gone(tmp_path):
    checkpoint = llama()
    packed("weight", "weight.absmax")(checkpoint)
    quantization(quant_method="bitsandbytes", load_in_4bit=True)(checkpoint)
    (finding,) = check(write(tmp_path / "checkpoint", checkpoint)).findings
    assert (
        "vllm-bnb-plugin (vllm #43529). 0 tensors are named as those of an MTP block"
        in finding.says
    )
    assert "vllm-bnb-plugin" in finding.cure


def test_it_counts_before_the_family(tmp_path):
    checkpoint = released("glm-4.7")
    checkpoint.config |= {"model_type": "never_seen", "architectures": ["NeverSeen"]}
    quantization(quant_method="hqq")(checkpoint)
    assert [
        finding.rule for finding in check(write(tmp_path / "checkpoint", checkpoint)).findings
    ] == ["method"]


def test_the_lists_are_vllms():
    assert choose.DEPRECATED < choose.METHODS and set(choose.ALIASES.values()) <= choose.METHODS
    for source in VLLM_PYTHON.parent.parent.glob(LIST):  # where vLLM is installed
        body = {
            target.id: node.value
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert set(_texts(body["QuantizationMethods"])) == choose.METHODS
        assert set(_texts(body["DEPRECATED_QUANTIZATION_METHODS"])) == choose.DEPRECATED


def _texts(node: ast.AST) -> list[str]:
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
