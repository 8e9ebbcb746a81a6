"""Layouts of released checkpoints, a file a family; new ones are found by themselves.

`<model_type>.yaml` has `models` (name -> config.json as published, but long lists by `runs`), `tiny` (model_type -> the sizes
that make it tiny), `published` (name -> what else is known, `Published`) and `tables`
(`tensors.build`), of which those with a model_type for a name are its tensors. common.yaml has
tables that all may use. Names come from published indexes or from transformers' save_pretrained,
never from keepmtp's tables or vLLM's parameters.
"""

from pathlib import Path
from typing import Any

from keepmtp.recipes.yaml_file import load_shipped
from tensors import Config, Published, Tables

MODELS: dict[str, Config] = {}
TINY: dict[str, Config] = {}
TABLES: dict[str, Tables] = {}
PUBLISHED: dict[str, Published] = {}


def _spelled(tree: Any) -> Any:
    """The same with each long list whole: `runs` has [times, items...] for each part of it, where
    `{}` is the number of the time.
    """
    if not isinstance(tree, dict):
        return tree
    if "runs" not in tree:
        return {key: _spelled(value) for key, value in tree.items()}
    items = []
    for times, *repeated in tree["runs"]:
        for number in range(times):
            for item in repeated:
                items.append(item.format(number) if isinstance(item, str) else item)
    return items


COMMON = load_shipped(Path(__file__).with_name("common.yaml"))["tables"]
for _path in sorted(Path(__file__).parent.glob("*.yaml")):
    _raw = load_shipped(_path)
    MODELS |= _spelled(_raw["models"])
    TINY |= _spelled(_raw["tiny"])
    TABLES |= dict.fromkeys(_raw["tiny"], COMMON | _raw["tables"])
    PUBLISHED |= {model: Published(**known) for model, known in _raw["published"].items()}
