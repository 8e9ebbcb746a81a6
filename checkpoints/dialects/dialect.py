"""What vLLM builds for a module, which entry of the config decides it, and what each dialect must
answer.

In and out: values only. A dialect is one way to write a quantization config. Each dialect has a
file of its own in dialects/; dialects/choose.py picks one.

Easy to get wrong: a `VLLMModule` is what vLLM registers, not what is on disk. The check compares
the two.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from ...recipes.family import VLLMName
from ..stored import Form

Kind = Literal["linear", "experts", "head", "embedding"]


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
        renames: leaf on disk -> leaf after the model's loader has renamed it.
    """

    form: Form
    leaves: frozenset[str] = frozenset({"weight"})
    optional: frozenset[str] = frozenset()
    group_size: int | None = None
    block: tuple[int, int] | None = None
    bits: int = 0
    scale_ndim: int = 0
    renames: Mapping[str, str] = MappingProxyType({})


class Resolution(NamedTuple):
    """vLLM's answer for one module.

    Attributes:
        built: what it registers.
        entry: the entry of the config that decided; "" where none matched or none is needed.
        error: the exception that vLLM raises while it resolves the module; `built` then has no
            meaning.
    """

    built: VLLMModule
    entry: str = ""
    error: str = ""


class ConfigEntry(NamedTuple):
    """One name or pattern of a quantization config, as written and as vLLM reads it after
    renaming.
    """

    where: str
    written: str
    read: tuple[str, ...]


class Dialect(Protocol):
    """A quantization config as vLLM reads it."""

    @property
    def name(self) -> str:
        """Name of the dialect, for messages."""
        ...

    @property
    def entries(self) -> tuple[ConfigEntry, ...]:
        """The names and patterns of the config's lists, as vLLM compares them with its names."""
        ...

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """What vLLM builds.

        Args:
            module: the prefix it is constructed with.
            shards: for a fused module the names of its parts; for experts the projections of expert
                0.
            kind: which class of vLLM it is.
        """
        ...

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """Whether `entry` alone matches a name."""
        ...


PLAIN = VLLMModule(form="plain")
UNKNOWN = VLLMModule(form="unknown")


class UnknownDialect(NamedTuple):
    """A dialect whose matching keepmtp does not know (torchao, humming, ...)."""

    name: str
    entries: tuple[ConfigEntry, ...] = ()

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """It never knows."""
        return Resolution(UNKNOWN)

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """By substring, the loosest rule of these dialects."""
        for word in entry.read:
            bare = re.sub(r"^(?:re:|[-+]:)", "", word).replace("\\", "").strip(".*^$")
            if bare and bare in name:
                return True
        return False
