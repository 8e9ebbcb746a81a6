"""`keepmtp check --modules`: groups of modules, each with its form and the entry that decides."""

import json
import re
from functools import partial
from pathlib import Path

from checkpoint_files import Checkpoint, ignoring, write
from good import llmcompressor, released
from keepmtp.cli import main
from modelopt_form import mixed
from printed import printed
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


PRINTED = {
    "native": partial(released, "deepseek-r1"),
    "mixed": partial(mixed, "glm-4.7", "FP8"),
    "one layer plain": one_layer_plain,
    "silent": silent,
}


def test_groups_of_modules(tmp_path):
    text = ""
    for name, make in PRINTED.items():
        write(tmp_path / name, make())
        shown, _, _ = run(tmp_path / name).partition("\nerror: ")
        text += f"== {name}\n\n{shown}\n"
    printed("modules.txt", re.sub(" +\n", "\n", text.replace(f"{tmp_path}/", "")))
    groups = json.loads(run(tmp_path / "silent", "--json"))["modules"]
    assert {group["part"] for group in groups} == {"backbone", "mtp"}
