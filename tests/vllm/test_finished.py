"""One group of a finished checkpoint, in vLLM's own classes: target and draft are filled.

Of public shapes, each with one change: tensors that stay have their bytes, a shard of them alone is
a link, and of the configs nothing else is another; or one sentence refuses (test_finished.yaml).
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import foreign_form
import good
import numpy as np
import pytest
from checkpoint_files import Checkpoint, write
from data_files import json_of, table
from good import ours, outputs_of, released
from good_checkpoints import GOOD
from keepmtp.pipeline import plan_for
from keepmtp.recipes.conventions import FORMATS
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import Job
from real_releases import real_release
from writing import written
from written_values import tensors_of

pytestmark = pytest.mark.vllm
TABLE = table("vllm/test_finished")
SHAPES = TABLE["shapes"]
CELLS = {}
for shape, row in SHAPES.items():
    cells = dict(zip(TABLE["changes"], row["cells"], strict=True)) | row.get("also", {})
    for change, cell in cells.items():
        if cell:
            CELLS[f"{shape}, {change}"] = (shape, change, cell)
for model in ("glm-4.7", "qwen3.5-27b", "mimo-7b", "deepseek-v3.1"):
    for format in FORMATS:
        for change in ("mtp=NVFP4A16", "mtp=FP8_BLOCK", "attention=FP8_DYNAMIC"):
            CELLS[f"{model} {format}, {change}"] = (f"{model} {format}", change, "")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    home = tmp_path_factory.mktemp("shapes")

    @cache
    def scattered(name: str) -> Path:
        """A shape or a release, with small numbers of each dtype."""
        folder = write(home / name, made(name))
        random = np.random.default_rng(0)
        for path in folder.glob("*.safetensors"):
            data = np.memmap(path, np.uint8, "r+")
            start = 8 + int(data[:8].view(np.uint64)[0])
            data[start:] = random.integers(0x38, 0x40, data.size - start, np.uint8)
            for name, spec in json.loads(bytes(data[8:start])).items():
                if name.endswith(".qzeros"):  # those of symmetric integers
                    data[start:][slice(*spec["data_offsets"])] = 0x88
        return folder

    return scattered


def made(name: str) -> Checkpoint:
    model, _, format = name.partition(" ")
    if format in FORMATS:
        return ours(model, "NVFP4A16", format=format)
    if name not in SHAPES:
        return released(name)
    row = SHAPES[name]
    if "of" in row:
        make = getattr(good, row["of"], None) or getattr(foreign_form, row["of"])
        return make(row["model"], **row.get("with", {}))
    return GOOD[name]() if name in GOOD else real_release(name)


def values(folder: Path) -> dict[str, list]:
    """Those of the config files, by key; of a quantization config by its own keys."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*config.json")):
        for key, value in json_of(path).items():
            inner = value if key.startswith("quantization") else {f"{path.name}: {key}": value}
            for name, one in inner.items():
                found[name].append(one)
    return found


@pytest.mark.few(12, 84)
@pytest.mark.parametrize("name", CELLS)
def test_a_change_says_only_itself(name, place, tmp_path, dry_loader):
    shape, change, cell = CELLS[name]
    row = SHAPES.get(shape, {})
    first = place(shape)
    group = change.partition("=")[0]
    if change.endswith("RELEASE"):
        change = change.replace("RELEASE", str(place(row["model"])))
    if cell in TABLE["refused"]:
        with pytest.raises(KeepMTPError, match=TABLE["refused"][cell]):
            plan_for(str(first), changes=[change])
        return
    plan, _ = plan_for(str(first), changes=[change], requantize=not cell)
    out = tmp_path / "out"
    if plan.needs_calibration:
        write(out, outputs_of(plan))
    else:
        written(plan, out)
        new = tensors_of(out)
        for tensor, value in tensors_of(first).items():
            known = plan.view.place(tensor)
            changes = known and (known.part if group == "mtp" else known.role) == group
            assert changes or new.get(tensor) == value, tensor
        for shard in plan.shards:
            one = first / shard.file
            assert shard.is_link == (one.exists() and one.samefile(out / shard.file)), shard.file
    given, said = values(first), values(out)
    changed = sorted(key for key in given | said if given.get(key) != said.get(key))
    assert not cell or " ".join(changed) == cell.replace("same", "")
    before, checked = examine(first).data.findings, examine(out)
    assert {each.key for each in checked.data.findings} <= {each.key for each in before}
    gpu = ("sm90", "sm100")[len(name) % 2]
    loads = dry_loader(gpu).load_all([Job(folder=out, method=checked.method)])
    found = with_loads(checked, loads).data.findings
    errors = {each.rule for each in found if each.severity == "error"}
    assert errors == {*row.get("faults", ())}, found
