"""keepmtp-convert.json: what a converted checkpoint needs to become the first one again, byte for
byte.

In: the configs of the first, and the tensors that the way back does not restore by itself. Out: the
file, which the converted checkpoint carries; and from the file, what the way back restores.

Easy to get wrong: 1 / (1 / x) is not x for one F32 in seven, and a config has many spellings, so
both are kept. But who has edited the converted checkpoint wants his own edits: what is kept counts
only where what was written is still there. And the file may be a stranger's, so that no name and no
value in it is taken that a conversion could not have written.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from .. import __version__
from ..checkpoints.json_file import read_object
from ..checkpoints.source import Source, small_bytes, small_file, small_object
from ..recipes.conventions import Format
from ..recipes.errors import CheckpointError, first_fault
from ..recipes.schemes import DTYPE_BITS, num_bytes

CONVERTED = "keepmtp-convert.json"
WITHOUT_IT = "Convert a copy of the folder that does not have this file"
_Config = Literal["config.json", "hf_quant_config.json"]
_CONFIGS: tuple[_Config, ...] = get_args(_Config)


class FirstTensor(BaseModel):
    """A tensor of the first checkpoint; `hex` has its bytes, "" where they are those of the
    converted one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"[^.]$")
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    hex: str = ""

    @model_validator(mode="after")
    def _has_its_bytes(self) -> Self:
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BITS)}")
        if self.hex and len(bytes.fromhex(self.hex)) != num_bytes(self.dtype, self.shape):
            raise ValueError("hex must have the bytes of its shape")
        return self


class Converted(BaseModel):
    """The file.

    Attributes:
        keepmtp: the version that converted.
        first: the dialect of the first checkpoint.
        configs: its config files as they were; null for one that it did not have.
        written: SHA-256 of the config files of the converted one.
        tensors: by name in the converted one, what the way back does not restore by itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keepmtp: str
    first: Format
    configs: Mapping[_Config, str | None]
    written: Mapping[_Config, str]
    tensors: Mapping[str, FirstTensor]

    def restores(self, source: Source) -> bool:
        """Whether the configs are as they were written, so that the first ones take their place."""
        return all(
            _sum(small_bytes(source, name)) == self.written.get(name, "") for name in _CONFIGS
        )


def record_of(
    source: Source,
    first: Format,
    files: Mapping[str, bytes | None],
    tensors: Mapping[str, FirstTensor],
) -> bytes:
    """The file for a checkpoint that gets `files`, made from `source`."""
    before: dict[_Config, str | None] = dict.fromkeys(_CONFIGS)
    for name in _CONFIGS:
        if small_object(source, name) is not None:
            before[name] = (small_bytes(source, name) or b"").decode()
    record = Converted(
        keepmtp=__version__,
        first=first,
        configs=before,
        written={name: _sum(files.get(name)) for name in _CONFIGS},
        tensors=dict(sorted(tensors.items())),
    )
    return (record.model_dump_json(indent=1, exclude_defaults=True) + "\n").encode()


def read_converted(source: Source) -> Converted | None:
    """The file of a converted checkpoint, if it has one.

    Raises:
        CheckpointError: a file of this name that keepmtp did not write.
    """
    path = small_file(source, CONVERTED)
    if path is None:
        return None
    where = f"{source.where}/{CONVERTED}"
    try:
        return Converted.model_validate(read_object(path, where, cure=WITHOUT_IT))
    except (CheckpointError, ValidationError) as error:
        got = error.got if isinstance(error, CheckpointError) else first_fault(error)
        raise CheckpointError(
            where, "must be what `keepmtp convert` wrote", got=got, cure=WITHOUT_IT
        ) from error


def _sum(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()
