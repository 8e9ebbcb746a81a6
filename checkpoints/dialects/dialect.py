"""What vLLM builds for a module, which entry of the config decides it, and what each dialect must
answer.

In and out: values only. A dialect is one way to write a quantization config. Each has a file of its
own in this folder, which says how it is read, what is built by it, and how it leaves a module
alone; compressed_tensors.py and modelopt.py also write it. choose.py picks one.

Easy to get wrong: a `VLLMModule` is what vLLM registers, not what is on disk. The check compares
the two.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import ClassVar, Literal, NamedTuple

from ...recipes.family import VLLMName
from ...recipes.frozen import Raw
from ...recipes.renamer import Renamer
from ..stored import Form

Kind = Literal["linear", "experts", "head", "embedding"]
Refusal = Literal["", "order", "inputs", "shards", "projections", "parts", "algorithms", "target"]
"""Why a server raises as it resolves a module, for who cures it; people read the exception.

order: GPTQ's desc_act. inputs: a config group does not say how they are quantized. shards: a list
names some of a fused module's. projections: those of an expert differ. parts: AutoRound's entries
for a fused module differ. algorithms: modelopt's for one do. target: none matches. "": another
reason.
"""


class VLLMModule(NamedTuple):
    """The parameters that vLLM registers for a module.

    Attributes:
        form: how the weight is held; "unknown" where the check does not know the scheme.
        leaves: parameter names below the module.
        optional: more leaves; vLLM loads them or skips them in silence.
        group_size: input channels per scale; None where one scale spans them all.
        block: rows and columns per scale.
        bits: of packed integers.
        scale_ndim: the only number of dimensions that the weight's scale may have; 0 where it may
            have any.
        scales: dtypes that the weight's scale may have; () for those of the form.
        renames: leaf on disk -> leaf after the model's loader has renamed it.
    """

    form: Form
    leaves: Set[str] = frozenset({"weight"})
    optional: Set[str] = frozenset()
    group_size: int | None = None
    block: tuple[int, int] | None = None
    bits: int = 0
    scale_ndim: int = 0
    scales: tuple[str, ...] = ()
    renames: Mapping[str, str] = {}


PLAIN = VLLMModule(form="plain")
UNKNOWN = VLLMModule(form="unknown")


class Resolution(NamedTuple):
    """vLLM's answer for one module.

    Attributes:
        built: what it registers.
        entry: the entry of the config that decided; "" where none matched or none is needed.
        error: the exception that vLLM raises while it resolves the module; `built` then has no
            meaning.
        refusal: what kind of exception that is.
    """

    built: VLLMModule
    entry: str = ""
    error: str = ""
    refusal: Refusal = ""


_UNKNOWN = Resolution(UNKNOWN)


class ConfigEntry(NamedTuple):
    """One name or pattern of a quantization config, as written and as vLLM reads it after
    renaming.
    """

    where: str
    written: str
    read: tuple[str, ...]


class Exceptions(NamedTuple):
    """How the tool that wrote a config says that modules are left alone.

    Attributes:
        keys: where it says so; the first one with entries counts, and the first where none has any.
        of_name: the entry for one module; `{}` is its name, escaped where there is a `^`.
        of_stem: the entry for all names that start so; "" where there are whole names only.
        of_experts: the entry for all routed experts of a layer, where `of_name` reaches none.
        may_be_on_disk: where a mapper of vLLM's spoils its own name, the name on disk may do.
        parts_come_first: vLLM looks for the parts of a fused module before it tries `of_stem`.
        value: what an entry has where it is a key of a mapping; None where it is an item of a list.
    """

    keys: tuple[str, ...]
    of_name: str = "{}"
    of_stem: str = ""
    of_experts: str = ""
    may_be_on_disk: bool = False
    parts_come_first: bool = False
    value: Raw | None = None


def entry_for(template: str, name: str) -> str:
    """An entry of `Exceptions`, which is a regular expression where it has an anchor."""
    if "^" in template:
        name = re.escape(name)
    return template.format(name)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A quantization config as vLLM reads it; by itself the same for every module: none, one that
    the server raises on, or that it drops.

    Attributes:
        name: of the dialect, for messages.
        answer: for every module, where it has an error or no class says more.
        listed: the names and patterns of the config's lists, as written, by key.
        rename: the mapper of the class that reads it.
        exceptions: how the config leaves modules alone; None where keepmtp does not know.
    """

    name: str
    listed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rename: Renamer = field(default_factory=Renamer)
    answer: Resolution = _UNKNOWN
    exceptions: ClassVar[Exceptions | None] = None

    @cached_property
    def entries(self) -> tuple[ConfigEntry, ...]:
        """What is listed, as vLLM compares it with its names."""
        entries = list[ConfigEntry]()
        for where, words in self.listed.items():
            for word in words:
                entries.append(ConfigEntry(where, word, self.reads(word)))
        return tuple(entries)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All that vLLM reads of the lists."""
        return tuple(chain(*[entry.read for entry in self.entries]))

    def reads(self, word: str) -> tuple[str, ...]:
        """A name or pattern, as the mapper of vLLM's class leaves it."""
        return (self.rename.name(word),)

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """What vLLM builds.

        Args:
            module: the prefix it is constructed with.
            shards: for a fused module the names of its parts; for experts the projections of expert
                0.
            kind: which class of vLLM it is.
        """
        return self.answer

    def hits(self, read: Sequence[str], name: str) -> bool:
        """Whether one entry alone, as `reads` gives it, matches a name: by substring, the loosest
        rule of these dialects, where none is known.
        """
        for word in read:
            bare = re.sub(r"^(?:re:|[-+]:)|\\", "", word).strip(".*^$")
            if bare and bare in name:
                return True
        return False


class UnknownDialect(Dialect):
    """A dialect whose matching keepmtp does not know (torchao, humming, ...)."""
