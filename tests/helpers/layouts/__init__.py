"""Layouts of released checkpoints, two files a family; new ones are found by themselves.

`<model_type>.yaml` has `models` (name -> config.json as published), `tiny` (model_type -> the sizes
that make it tiny), `published` (name -> what else is known, `Published`) and `tables` of blocks
(`tensors.table`). `<model_type>.py` has
`LAYOUTS` (model_type -> function from config to tensors). Names come from published indexes or from
transformers' save_pretrained, never from keepmtp's tables or vLLM's parameters.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

import yaml
from tensors import Config, Published, Tensors

MODELS: dict[str, Config] = {}
TINY: dict[str, Config] = {}
LAYOUTS: dict[str, Callable[[Config], Tensors]] = {}
PUBLISHED: dict[str, Published] = {}

for _path in sorted(Path(__file__).parent.glob("*.yaml")):
    _raw = yaml.safe_load(_path.read_text())
    MODELS |= _raw["models"]
    TINY |= _raw["tiny"]
    PUBLISHED |= {model: Published(**known) for model, known in _raw["published"].items()}
    if _raw["models"]:
        LAYOUTS |= importlib.import_module(f"{__name__}.{_path.stem}").LAYOUTS
