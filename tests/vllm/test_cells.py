"""The static check beside vLLM, tensor by tensor: of each kind of tensor one is transposed, halved, stored
in other dtypes, and missing. The static check says what a dry load does.

Easy to get wrong: vLLM forgives some breaks in silence, or finds them where no header shows them, so the
models of the comparison are three whose every break both see.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import releases
from checkpoint_files import Checkpoint, as_source, write
from good import released
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.checkpoints.stored import SCALE_LEAVES
from keepmtp.recipes.family import HFName
from keepmtp.recipes.runtimes.vllm import NEWEST
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.loader import Job
from keepmtp.validate.dryload.verdict_findings import objections
from keepmtp.validate.facts.findings import Finding, errors_of
from keepmtp.validate.facts.vllm_env import find_vllm

MODELS = ("glm-4.7", "deepseek-r1", "mimo-7b")
STEP = 6  # every so many cells of each
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "U8")
OTHER_DTYPES = {
    "F8_E4M3": ("BF16", "U8"),
    "F8_E8M0": ("U8", "F32"),
    "U8": ("F8_E4M3", "I8"),
    "I8": ("F8_E4M3", "U8"),
    "I64": ("I32", "F32"),
    "F32": ("BF16", "F8_E4M3"),
    "BF16": ("F32", "F8_E4M3"),
}


def cells_of(checkpoint: Checkpoint, folder: Path) -> Iterator[tuple[str, Checkpoint]]:
    """A tensor and how it is broken, and the checkpoint with it: of each kind of tensor the first."""
    runtime = RuntimeView.of(as_source(checkpoint, folder))
    kinds = dict[tuple[str, bool], HFName]()
    for name, entry in runtime.source.entries.items():
        place = runtime.view.place(name)
        if entry.num_bytes and (not place or place.role != "vision"):
            kind = re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", name), runtime.is_mtp_name(name)
            kinds.setdefault(kind, name)
    for name in kinds.values():
        dtype, shape = checkpoint.tensors[name]
        specs = {}
        if len(shape) >= 2 and shape[-1] != shape[-2] and 1 not in shape[-2:]:
            specs["transposed"] = (dtype, (*shape[:-2], shape[-1], shape[-2]))
        if shape and shape[0] > 1 and shape[0] % 2 == 0:
            specs["halved"] = (dtype, (shape[0] // 2, *shape[1:]))
        others = OTHER_DTYPES.get(dtype, ("F32", "F8_E4M3"))
        if name.rpartition(".")[2] in SCALE_LEAVES:
            others = SCALE_DTYPES
        for other in others:
            if other != dtype:
                specs[f"as {other}"] = (other, shape)
        rest = {each: spec for each, spec in checkpoint.tensors.items() if each != name}
        yield f"{name} missing", replace(checkpoint, tensors=rest)
        for how, spec in specs.items():
            yield f"{name} {how}", replace(checkpoint, tensors=rest | {name: spec})


def static_errors(checkpoint: Checkpoint, folder: Path, version: str) -> list[Finding]:
    return errors_of(examine(as_source(checkpoint, folder), vllm=version).data.findings)


@pytest.mark.vllm
@pytest.mark.parametrize("model", MODELS)
def test_the_static_check_says_what_vllm_does(model, dry_loader, tmp_path):
    version = find_vllm().version
    base = examine(write(tmp_path / "base", released(model)), vllm=version)
    cells = [*cells_of(released(model), tmp_path / "base")][::STEP]
    hows = {name.partition(" ")[2] for name, _ in cells}
    assert {"transposed", "halved", "missing", "as F8_E4M3"} <= hows
    jobs = []
    for number, (_, checkpoint) in enumerate(cells):
        folder = write(tmp_path / str(number), checkpoint)
        jobs.append(Job(folder=folder, method=base.method))
    loaded = dry_loader("sm90").load_all(jobs)
    for (name, checkpoint), account in zip(cells, loaded, strict=True):
        static = static_errors(checkpoint, tmp_path / "base", version)
        dry = errors_of(finding for finding, *_ in objections(account, base))
        assert bool(static) == bool(dry), (name, static, dry)


FOUND = (
    r"mixer.*(up|down)\.weight [ht]|ngram_heads_.* h|shard_(0.* [ht]|. missing)|qkv_proj.* [ht]"
    r"|qkv_proj\.\w+ as U8|ffn\.gate\.\w+ h|(tid2eid|[og]_proj\.weight|wkv\.weight) transposed"
    r"|engram\.embed\.(\w+ [ht]|scale as [BF])|index_\w+\.weight h|output\.weight missing"
)


@pytest.mark.parametrize("model", releases.MODELS)
def test_what_no_other_layer_shows(model, tmp_path):
    """vLLM 0.33.0 raises on each, or reads other numbers."""
    for name, checkpoint in cells_of(released(model), tmp_path):
        if re.search(FOUND, name):
            assert static_errors(checkpoint, tmp_path, NEWEST), name
