"""The words of the static check: what vLLM builds for a module, which entry decided, and what a dialect must answer.

In and out: values only. A dialect is one way of writing a quantization config; each has a file of its own
(dialects/compressed_tensors.py, dialects/modelopt.py, dialects/fp8.py), and dialects/choose.py picks one.

Easy to get wrong: `Built` is what vLLM registers, not what is on disk; that the two differ is what the check is for.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from ...checkpoints.stored import Form
from ...recipes.family import VLLMName

Kind = Literal["linear", "experts", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The parameters that vLLM registers for a module.

    Attributes:
        form: how the weight is held; "unknown" where this file does not know the scheme.
        leaves: parameter names below the module.
        optional: further leaves that are loaded, or skipped in silence, when there.
        group_size: input channels per scale; None where one scale spans them all.
        block: rows and columns per scale.
        bits: of packed integers.
        scale_ndim: dimensions of the weight's scale where only one number of them loads; 0 where any does.
        renames: what the model's loader makes of a leaf on disk.
    """

    form: Form
    leaves: frozenset[str] = frozenset({"weight"})
    optional: frozenset[str] = frozenset()
    group_size: int | None = None
    block: tuple[int, int] | None = None
    bits: int = 0
    scale_ndim: int = 0
    renames: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """vLLM's answer for one module.

    Attributes:
        built: what it registers.
        entry: the entry of the config that decided; "" where none matched or none is needed.
        error: the exception that the question itself raises; `built` is then meaningless.
    """

    built: Built
    entry: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name or pattern of a quantization config, as written and as vLLM reads it after renaming.

    `by_disk`: it is matched against names on disk, which only DeepSeek-V4's list of MXFP4 experts is.
    """

    where: str
    written: str
    read: tuple[str, ...]
    by_disk: bool = False


class Dialect(Protocol):
    """A quantization config as vLLM reads it."""

    @property
    def name(self) -> str:
        """Which dialect, for messages."""
        ...

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every name and pattern of the config."""
        ...

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """What vLLM builds.

        Args:
            module: the prefix it is constructed with.
            shards: for a fused module the names of its parts; for experts the projections of expert 0.
            kind: which class of vLLM it is.
        """
        ...

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """Whether `entry` alone matches the name `module`."""
        ...


PLAIN = Built(form="plain")
UNKNOWN = Built(form="unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A dialect whose matching is not reproduced here (GPTQ, AWQ, Quark, AutoRound, ...)."""

    name: str
    entries: tuple[Entry, ...] = ()

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """Never known."""
        return Resolution(built=UNKNOWN)

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """By substring, the loosest rule of these dialects."""
        words = (re.sub(r"^(?:re:|[-+]:)", "", word).replace("\\", "").strip(".*^$") for word in entry.read)
        return any(word in module for word in words if word)
