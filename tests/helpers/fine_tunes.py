"""A fine-tune of a shipped model, as training code writes it."""

from pathlib import Path

from json_files import json_of, put_json
from keepmtp.checkpoints.source import INDEX
from real_vllm import GLM
from safetensors.torch import load_file, save_file

BLOCK = "model.layers.3."


def fine_tune(folder: Path, *, has_block: bool) -> Path:
    """The shipped model as training code writes it: its config.json promises the block in any case."""
    tune = folder / "my-fine-tune"
    tune.mkdir()
    for path in GLM.iterdir():
        (tune / path.name).write_bytes(path.read_bytes())
    if not has_block:
        for file in tune.glob("*.safetensors"):
            tensors = load_file(file)
            for name in [*filter(lambda name: name.startswith(BLOCK), tensors)]:
                del tensors[name]
            save_file(tensors, file, metadata={"format": "pt"})
        index = json_of(tune / INDEX)
        for name in [*index["weight_map"]]:
            if name.startswith(BLOCK):
                del index["weight_map"][name]
        put_json(tune / INDEX, index)
    return tune
