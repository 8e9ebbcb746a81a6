"""`keepmtp check --modules`: groups of modules, each with its form and the entry that decides."""

import json
from functools import partial
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, ignoring, write
from foreign_form import mixed
from good import llmcompressor, released
from keepmtp.cli import main
from typer.testing import CliRunner


def run(folder: Path, *words: str) -> str:
    return CliRunner().invoke(main.app, ["check", str(folder), "--modules", *words]).stdout


def silent() -> Checkpoint:
    """A BF16 MTP layer that the FP8 group claims."""
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    ignoring(without=r"layers\.3")(checkpoint)
    return checkpoint


def one_layer_plain() -> Checkpoint:
    checkpoint = llmcompressor("qwen3.5-397b", "FP8_DYNAMIC")
    ignoring("model.language_model.layers.3.self_attn.o_proj")(checkpoint)
    return checkpoint


# Of each: rows of the table, and which entry decides.
GROUPS = [
    (
        partial(released, "deepseek-r1"),
        [
            "target attention (12) fp8_block 30 tensors, fp8_block",
            "draft norm (7) plain 7 tensors, BF16",
            "draft experts (1) fp8_block 24 tensors, fp8_block",
        ],
        [
            "Why target embedding, target head, target attention, target dense mlp, target experts, target shared experts, draft attention, draft experts, draft shared experts, draft head: fp8 decides it, and no entry has its name.",
            "Why target norm, target router, draft norm, draft router, draft glue, draft embedding: vLLM builds it without the quantization config.",
        ],
    ),
    (
        partial(mixed, "glm-4.7", "FP8"),
        [
            "target experts (2) fp8_tensor 72 tensors, fp8_tensor",
            "draft experts (1) plain 12 tensors, BF16",
        ],
        [
            "Why target head: exclude has lm_head.",
            "Why target attention: quantized_layers has model.layers.0.self_attn.qkv_proj and 5 more for the others.",
            "Why draft experts, draft shared experts, draft attention, draft head: modelopt decides it, and no entry has its name.",
        ],
    ),
    (
        one_layer_plain,
        [
            "target norm (3) plain 3 tensors, F32",
            "target attention (1) fp8_channel 6 tensors, fp8_channel",
            "target attention (1) plain 2 tensors, fp8_channel",
        ],
        [
            "Why target attention: ignore has model.language_model.layers.3.self_attn.o_proj (vLLM reads language_model.model.layers.3.self_attn.o_proj).",
            r"Why target vision: ignore has re:^visual\..",
            "Why draft glue: ignore has mtp.fc.",
        ],
    ),
    (
        silent,
        [
            "target experts (2) fp8_channel 48 tensors, fp8_channel",
            "draft experts (1) fp8_channel 12 tensors, BF16",
        ],
        ["Why draft head: compressed-tensors decides it, and no entry has its name."],
    ),
]


@pytest.mark.parametrize(("make", "rows", "reasons"), GROUPS)
def test_groups_of_modules(make, rows, reasons, tmp_path):
    shown = run(write(tmp_path / "x", make()))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in rows + reasons:
        assert line in lines, shown


def test_groups_of_modules_for_machines(tmp_path):
    groups = json.loads(run(write(tmp_path / "silent", silent()), "--json"))["modules"]
    assert {group["part"] for group in groups} == {"backbone", "mtp"}
