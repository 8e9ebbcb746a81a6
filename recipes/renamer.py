"""How vLLM rewrites the names in a quantization config before it compares them with its modules.

In: config.json. Out: a `Renamer`: the mapper of the target's model class, which the family file
holds. The check reads foreign entries with it, and what keepmtp writes is chosen so that it stays
itself.

Easy to get wrong: vLLM never renames a regex. The mapper also drops names that the model does not
load, but vLLM keeps such entries since 0.32.

Source: vLLM 0.32.0 quantization/utils/config_utils.py, modelopt.py (apply_vllm_mapper),
model_executor/models/{utils, qwen3_vl,qwen3_5,qwen3_next,mimo}.py,
models/deepseek_v4/nvidia/model.py; compared with the real functions by
tests/checkpoints/dialects/test_dialects.py.
"""

import re
from collections.abc import Iterable

from .families import family_of
from .family import Part, Renames
from .family_view import FamilyView
from .frozen import Raw, frozen
from .runtimes.vllm import NEWEST

_LAYER = re.compile(r"(?<=\.layers\.)\d+")


@frozen
class Renamer:
    """The mapper of a model class, applied to entries; `renames` is None where the class has no
    mapper.

    `mtp_offset` is what the draft's class adds to the layer of `mtp.` entries after that;
    compressed-tensors' paths are spared. `of_regexes`: regular expressions are mapped as well.
    """

    renames: Renames | None = None
    mtp_offset: int = 0
    of_regexes: bool = False

    def name(self, entry: str) -> str:
        """One name: mapped, then renumbered."""
        entry = self._mapped(entry)
        if self.mtp_offset and entry.startswith("mtp."):
            return _LAYER.sub(lambda number: str(int(number[0]) + self.mtp_offset), entry)
        return entry

    def _mapped(self, entry: str) -> str:
        if self.renames is None:
            return entry
        return self.renames.read(entry)

    def before(self, name: str, others: Iterable[str] = ()) -> str | None:
        """A spelling that becomes `name`: itself, one of `others`, or one that a rule turns into
        it, or None.
        """
        spellings = [name, *others]
        if self.renames is not None:
            spellings += self.renames.sources(name)
        for spelling in spellings:
            if self.name(spelling) == name:
                return spelling
        return None

    def path(self, entry: str) -> str:
        """compressed-tensors renames paths, but no class names, and in vLLM no regexes."""
        is_regex = entry.startswith("re:")
        if "." not in entry or (is_regex and not self.of_regexes):
            return entry
        return self._mapped(entry)

    def modelopt(self, entry: str) -> tuple[str, ...]:
        """modelopt splits `x*` into `x` and `x.*` first, but only for classes with a mapper."""
        if self.renames is not None and len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            return self.name(entry[:-1]), self.name(entry[:-1] + ".*")
        return (self.name(entry),)


def renamer(config: Raw, part: Part = "backbone", vllm: str = NEWEST) -> Renamer:
    """The mapper of the class that vLLM serves this config.json with, from its family's table.

    Most drafts get the quantization config that the target's class has already mapped.
    """
    family = family_of(config, vllm)
    if family is None:
        return Renamer()
    view = FamilyView(family=family, config=config)
    if part == "mtp" and view.layout.draft_reads_afresh:
        offset = 0
        if view.layout.draft_renumbers:
            offset = view.num_layers
        return Renamer(renames=view.layout.draft_renames, mtp_offset=offset)
    return Renamer(renames=view.layout.renames)
