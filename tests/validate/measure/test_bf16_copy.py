"""A BF16 copy against compressed-tensors' own decompression, tensor by tensor; and what is
refused.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import GLM, ROOT
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from data_files import json_of
from keepmtp import api
from keepmtp.checkpoints import files
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.measure.bf16_copy import why_no_kernel, write_copy
from keepmtp.validate.measure.harness import Model, Setup, hosting
from real_vllm import CPU, H100
from safetensors.torch import save_file
from writing import weights_of

MADE = {
    "mixed": ("tiny-glm4-moe", {}),
    "nvfp4a16": ("tiny-glm4-moe", {"scheme": "NVFP4A16", "mtp": "NVFP4A16"}),
    "mxfp4": ("tiny-glm4-moe", {"scheme": "MXFP4", "mtp": "MXFP4"}),
    "int8": ("tiny-qwen3_5", {"scheme": "W8A8", "mtp": "W8A16"}),
    "fp8": ("tiny-qwen3_5", {"scheme": "FP8_DYNAMIC", "mtp": "W4A16"}),
}
"""Models and choices."""


@pytest.fixture(scope="module", params=MADE)
def made(request, tmp_path_factory) -> tuple[str, Path, dict[str, str]]:
    """A quantized checkpoint, and module -> scheme of what is packed in it."""
    model, choices = MADE[request.param]
    plan = api.plan(model, source=str(ROOT / "models" / model), **choices)
    folder = api.quantize(plan, tmp_path_factory.mktemp("made") / request.param).out
    return (
        request.param,
        folder,
        {t.name.removesuffix(".weight"): t.scheme for t in plan.tensors if t.scheme},
    )


def test_a_draft_and_its_target_are_copied_together(tmp_path):
    """Where a CPU has no kernel for one of them, vLLM would build the other otherwise."""
    model = str(GLM)
    plan = api.plan("tiny-glm4-moe", source=model, scheme="NVFP4A16", mtp="bf16")
    target = api.quantize(plan, tmp_path / "target").out
    plan = api.plan(model, draft_for=str(target), mtp="bf16")
    draft = api.quantize(plan, tmp_path / "draft").out
    served = [
        Model(role="checkpoint", source=open_source(folder), identity=identify(folder))
        for folder in (target, draft)
    ]
    pair = replace(served[1], target=served[0])
    with hosting(pair, Setup(vllm=CPU, out=tmp_path)) as host:
        assert host.as_served != "native" and host.draft is not None
        for folder in (host.folder, host.draft):
            assert "quantization_config" not in json_of(folder / "config.json")
        assert len(open_source(host.draft).entries) == len(open_source(draft).entries)
    with hosting(pair, Setup(vllm=H100, out=tmp_path)) as host:
        assert (host.as_served, host.folder, host.draft) == ("native", target, draft)


def test_every_weight_is_what_compressed_tensors_reads(made, tmp_path):
    _, folder, packed = made
    copy = write_copy(open_source(folder), tmp_path / "copy")
    before, after = weights_of(folder), weights_of(copy)
    expected = dict(before)
    for module, name in packed.items():
        parts = {
            key.removeprefix(f"{module}."): expected.pop(key)
            for key in before
            if key.startswith(f"{module}.")
        }
        compressor = BaseCompressor.load_from_registry(SCHEMES[name].format)
        read = compressor.decompress(parts, preset_name_to_scheme(name, ["Linear"]))
        expected[f"{module}.weight"] = read["weight"]
        expected |= {f"{module}.{leaf}": value for leaf, value in parts.items() if leaf == "bias"}
    assert after.keys() == expected.keys()
    for name, value in expected.items():
        # Ours multiplies in F32 and rounds to BF16 once; theirs may multiply in BF16: one rounding
        # more, 2**-8.
        assert after[name].shape == value.shape
        difference = (after[name].double() - value.double()).abs()
        assert (difference <= 2**-8 * value.double().abs() + 1e-30).all(), name
    for name in before.keys() & after.keys() - {f"{module}.weight" for module in packed}:
        assert after[name].dtype == before[name].dtype, name
        assert torch.equal(after[name], before[name]), name


def test_the_copy_is_a_checkpoint_without_a_quantization_config(made, tmp_path):
    _, folder, packed = made
    copy = write_copy(open_source(folder), tmp_path / "copy")
    config = json_of(copy / "config.json")
    original = json_of(folder / "config.json")
    assert config == {key: value for key, value in original.items() if key != "quantization_config"}
    opened = open_source(copy)  # headers, sizes and index agree, or this refuses
    assert all(f"{module}.weight" in opened.entries for module in packed)
    assert (copy / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert why_no_kernel(opened, CPU) == ""


def test_why_no_kernel(made):
    name, folder, _ = made
    source = open_source(folder)
    assert why_no_kernel(source, H100) == "", "on a GPU never"
    reason = why_no_kernel(source, CPU)
    wanted = {
        "mixed": "linears in FP8_BLOCK.*routed experts in W4A16",
        "nvfp4a16": "routed experts in NVFP4A16",
        "mxfp4": "linears in MXFP4",
    }.get(name, "^$")
    assert re.search(wanted, reason), reason
    if name == "fp8":
        old = replace(CPU, cpu_features=frozenset({"avx2"}))
        assert "W4A16 without AVX-512" in why_no_kernel(source, old)


def test_a_weight_that_cannot_be_read_is_refused_by_name(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {
        "a.b.weight": torch.zeros(4, 8, dtype=torch.uint8),
        "a.b.weight_scale": torch.ones(3, 5),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"a\.b: must lie in a form that can be dequantized; got weight"
    ):
        write_copy(open_source(folder), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_is_refused_before_a_byte(tmp_path, monkeypatch):
    source = open_source(ROOT / "models" / "tiny-qwen3_5")
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(RecipeError, match="A BF16 copy of"):
        write_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
