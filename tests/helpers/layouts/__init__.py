"""Layouts of released checkpoints, a file a family; a new file is found by itself.

A layout file defines `MODELS` (name -> config.json as published), `TINY` (model_type -> the sizes
that make it tiny), `LAYOUTS` (model_type -> function from config to tensors) and `PUBLISHED` (name
-> what else is known). Names come from published indexes or from transformers' save_pretrained,
never from keepmtp's tables or vLLM's parameters.
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from tensors import Config, Published, Tensors

MODELS: dict[str, Config] = {}
TINY: dict[str, Config] = {}
LAYOUTS: dict[str, Callable[[Config], Tensors]] = {}
PUBLISHED: dict[str, Published] = {}

for _module in sorted(
    pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda module: module.name
):
    _layout = importlib.import_module(f"{__name__}.{_module.name}")
    MODELS |= _layout.MODELS
    TINY |= _layout.TINY
    LAYOUTS |= _layout.LAYOUTS
    PUBLISHED |= _layout.PUBLISHED
