"""Checkpoints broken on purpose that only a real server can tell from good ones."""

from pathlib import Path

from json_files import json_of, put_json


def broken(good: Path, folder: Path) -> Path:
    """The same bytes, but the BF16 MTP layer is claimed by the FP8 group: what an ignore list in
    wrong names does.
    """
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json_of(folder / "config.json")
    quantization = config["quantization_config"]
    quantization["ignore"] = [entry for entry in quantization["ignore"] if "mtp" not in entry]
    for group in quantization["config_groups"].values():
        if group["weights"]["num_bits"] == 8:
            group["targets"].append(r"re:^mtp\.layers\.0\.")
    put_json(folder / "config.json", config)
    return folder
