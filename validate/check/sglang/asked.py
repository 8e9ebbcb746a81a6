"""One module as SGLang asks its quantization config about it, and what a dialect of SGLang's must answer.

In and out: values only.

Easy to get wrong: the answer has the form of vLLM's (`Resolution`), because both servers register parameters by the
same names; what they register may differ, and what SGLang raises does.
"""

from dataclasses import dataclass
from typing import Protocol

from ..vllm_module import UNKNOWN, Kind, Resolution

_ROWS = ("o_proj", "down_proj", "out_proj", "wo_b")
_NAMES = {"qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedModule:
    """A module: the prefix it is constructed with, and which kind of layer it is."""

    name: str
    kind: Kind

    @property
    def last(self) -> str:
        """The last part of its name, by which fused modules are known."""
        return self.name.rpartition(".")[2]

    @property
    def class_name(self) -> str:
        """The class that targets such as `Linear` are compared with."""
        if self.kind != "linear":
            return "FusedMoE" if self.kind == "experts" else "ParallelLMHead"
        return "RowParallelLinear" if self.last in _ROWS else _NAMES.get(self.last, "ColumnParallelLinear")


class SglangDialect(Protocol):
    """A quantization config as SGLang reads it."""

    @property
    def method(self) -> str:
        """SGLang's name for it, such as `modelopt_fp4`; "" where it reads none."""
        ...

    def resolve(self, asked: AskedModule) -> Resolution:
        """What SGLang builds for a module."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A dialect whose matching in SGLang keepmtp does not know."""

    method: str

    def resolve(self, asked: AskedModule) -> Resolution:
        """It never knows."""
        return Resolution(built=UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A config that SGLang raises on, or does not read, before it builds a module."""

    method: str
    error: str

    def resolve(self, asked: AskedModule) -> Resolution:
        """It never comes so far."""
        return Resolution(built=UNKNOWN, error=self.error)
