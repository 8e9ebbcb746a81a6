"""What cures start from: one model with its release, converted, without its block, and with a fault in its index.

In: a folder and a dialect. Out: `release`, `first` in that dialect, `there` converted to the other one, `lost` and
`broken` in it. It is called in a process of its own: packing starts threads, and the campaign's process is forked.
"""

import json
import shutil
from pathlib import Path

from calibrated import in_both_formats
from cures import OTHER
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.cure.convert import convert, plan_conversion
from keepmtp.recipes.families import find_view
from safetensors.torch import load_file, save_file


def make(folder: Path, first: str) -> None:
    """Write them."""
    made = in_both_formats(folder / "made", mtp="bf16", experts="NVFP4", rest="FP8_DYNAMIC", shared_experts="FP8")
    (folder / "made" / "source").rename(folder / "release")
    made[first][1].rename(folder / "first")
    shutil.rmtree(folder / "made")
    convert(plan_conversion(str(folder / "first"), OTHER[first]), folder / "there")
    _without_block(folder / "first", folder / "lost")
    shutil.copytree(folder / "first", folder / "broken")
    index = json.loads((folder / "first" / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / "broken" / INDEX).write_text(json.dumps(index))


def _without_block(first: Path, lost: Path) -> None:
    shutil.copytree(first, lost)
    opened = open_source(first)
    view = find_view(opened.config, first)
    kept = {name: entry.file for name, entry in opened.entries.items() if not view.is_mtp(name)}
    for file in {entry.file for entry in opened.entries.values()}:
        tensors = {name: value for name, value in load_file(lost / file).items() if name in kept}
        (lost / file).unlink()
        if tensors:
            save_file(tensors, lost / file)
    (lost / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
