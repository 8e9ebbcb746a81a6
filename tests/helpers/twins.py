"""Checkpoints broken on purpose that only a real server can tell from good ones."""

import json
from pathlib import Path


def broken(good: Path, folder: Path) -> Path:
    """The same bytes, but the BF16 MTP layer is claimed by the FP8 group: what an ignore list in
    wrong names does.
    """
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["ignore"] = [entry for entry in quantization["ignore"] if "mtp" not in entry]
    for group in quantization["config_groups"].values():
        if group["weights"]["num_bits"] == 8:
            group["targets"].append(r"re:^mtp\.layers\.0\.")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
