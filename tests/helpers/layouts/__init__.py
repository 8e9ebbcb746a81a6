"""Layouts of released checkpoints, a file a family; new ones are found by themselves.

`<model_type>.yaml` has `models` (name -> config.json as published, but long lists by `runs`), `tiny` (model_type -> the sizes
that make it tiny, where `narrow` in common.yaml says others), `published` (name -> what else is known, `Published`) and `tables`
(`build`), of which those with a model_type for a name are its tensors. common.yaml has
tables that all may use. Names come from published indexes or from transformers' save_pretrained,
never from keepmtp's tables or vLLM's parameters.

The tensors of a layout are name -> (dtype, shape), as safetensors headers have it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from keepmtp.recipes.schemes import DTYPE_BITS
from keepmtp.recipes.yaml_file import load_shipped

Config = dict[str, Any]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
Tables = Mapping[str, Mapping[str, str | list[str]]]
_COUNTED = re.compile(r"\{(.+?)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is known of a release beside its config, from its model card, index, or vLLM's own
    source.

    Attributes:
        asks: what vLLM's draft of the tiny model asks the quantization config about; a space between two. For the
            releases alone whose draft tests/vllm/test_dry_names.py cannot build and ask.
        unasked: matrices that this draft builds without a quantization config.
        num_mtp_layers: MTP layers on disk.
        num_mtp_weights: weights in the MTP block at full size, None where nobody published it.
        billions: parameters, MTP block included, in 1e9; None where nobody published it.
        unsaved: transformers has no class whose save_pretrained writes the published names.
    """

    asks: str = ""
    unasked: str = ""
    num_mtp_layers: int = 1
    num_mtp_weights: int | None = None
    billions: float | None = None
    unsaved: bool = False


def build(name: str, config: Config, tables: Tables) -> Tensors:
    """The tensors of the table `name`, in its order.

    A row is `paths: spec`, or a list of specs; there is a space between two paths, and `.` is the
    place of the table itself. A spec is a dtype and the sides of a shape, in words of the config,
    or another table and up to three sizes for it, which it calls n, k and m. ` of <key>` behind it
    reads the sizes from that part of the config, ` if <condition>` leaves the spec out where it
    does not hold. `{count}` in a path counts from 0, `{first:count}` from there; conditions and
    sizes know the number as `layer`. Rows with one count next to each other are counted together.
    """

    @cache
    def words_of(key: str) -> Config:
        given = config[key] if key else config
        nested = {word: SimpleNamespace(**v) for word, v in given.items() if isinstance(v, dict)}
        return given | nested | {"config": given, "top": config}

    @cache
    def block(name: str, key: str, sizes: tuple[int, ...]) -> Tensors:
        words = words_of(key) | dict(zip("nkm", sizes, strict=False))
        rows = [
            (path, spec)
            for paths, specs in tables[name].items()
            for path in paths.split()
            for spec in ([specs] if isinstance(specs, str) else specs)
        ]
        tensors: Tensors = {}
        for counted, found in groupby(rows, lambda row: "".join(_COUNTED.findall(row[0]))):
            together = list(found)
            first, count = (eval(side, {}, words) for side in f"0:{counted or 1}".split(":")[-2:])
            for number in range(first, first + count):
                known = {"layer": number, "primes_from": primes_from}
                for path, spec in together:
                    what, _, condition = spec.partition(" if ")
                    if condition and not eval(condition, known, words):
                        continue
                    what, _, other = what.partition(" of ")
                    there = words_of(other) if other else words
                    word, *sides = what.split()
                    shape = tuple(eval(side, known, there) for side in sides)
                    stem = _COUNTED.sub(str(number), path)
                    if word in DTYPE_BITS:
                        tensors[stem] = (word, shape)
                        continue
                    prefix = f"{stem}.".lstrip(".")
                    inner = block(word, other or key, shape)
                    tensors |= {prefix + name: stored for name, stored in inner.items()}
        return tensors

    return dict(block(name, "", ()))


def primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes that are not below `start`."""
    primes: list[int] = []
    number = start
    while len(primes) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return primes


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


_raw = load_shipped(Path(__file__).with_name("common.yaml"))
COMMON = _raw["tables"]
NARROW = _raw["narrow"]
for _path in sorted(Path(__file__).parent.glob("*.yaml")):
    _raw = load_shipped(_path)
    MODELS |= _spelled(_raw["models"])
    TINY |= _spelled(_raw["tiny"])
    TABLES |= dict.fromkeys(_raw["tiny"], COMMON | _raw["tables"])
    PUBLISHED |= {model: Published(**known) for model, known in _raw["published"].items()}
