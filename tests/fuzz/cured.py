"""What cures start from: one model with its release, converted, without its block, and with an
index that leaves the block out.

In: a folder and a dialect. Out: `release`, `first` in that dialect, `there` converted to the other
one, `lost` and `broken` in it. It is called in a process of its own: packing starts threads, and
the campaign's process is forked.
"""

import shutil
from pathlib import Path

from calibrated import in_both_formats
from cures import OTHER
from data_files import json_of, put_json
from keepmtp.checkpoints.source import INDEX
from keepmtp.cure.convert import convert, plan_conversion
from written_values import drop_block


def make(folder: Path, first: str) -> None:
    """Write them."""
    made = in_both_formats(
        folder / "made", mtp="bf16", experts="NVFP4", rest="FP8_DYNAMIC", shared_experts="FP8"
    )
    (folder / "made" / "source").rename(folder / "release")
    made[first][1].rename(folder / "first")
    shutil.rmtree(folder / "made")
    convert(plan_conversion(str(folder / "first"), OTHER[first]), folder / "there")
    drop_block(folder / "first", folder / "lost")
    shutil.copytree(folder / "first", folder / "broken")
    index = json_of(folder / "first" / INDEX)
    weight_map = index["weight_map"]
    index["weight_map"] = {
        name: weight_map[name] for name in weight_map if ".layers.3." not in name
    }
    put_json(folder / "broken" / INDEX, index)
