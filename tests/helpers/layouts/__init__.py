"""Layouts of released checkpoints, a file a family; new ones are found by themselves.

`<model_type>.yaml` has `models` (name -> config.json as published), `tiny` (model_type -> the sizes
that make it tiny), `published` (name -> what else is known, `Published`) and `tables`
(`tensors.build`), of which those with a model_type for a name are its tensors. common.yaml has
tables that all may use. Names come from published indexes or from transformers' save_pretrained,
never from keepmtp's tables or vLLM's parameters.
"""

from pathlib import Path

from keepmtp.recipes.yaml_file import load_shipped
from tensors import Config, Published, Tables

MODELS: dict[str, Config] = {}
TINY: dict[str, Config] = {}
TABLES: dict[str, Tables] = {}
PUBLISHED: dict[str, Published] = {}

COMMON = load_shipped(Path(__file__).with_name("common.yaml"))["tables"]
for _path in sorted(Path(__file__).parent.glob("*.yaml")):
    _raw = load_shipped(_path)
    MODELS |= _raw["models"]
    TINY |= _raw["tiny"]
    TABLES |= dict.fromkeys(_raw["tiny"], COMMON | _raw["tables"])
    PUBLISHED |= {model: Published(**known) for model, known in _raw["published"].items()}
