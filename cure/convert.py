"""`keepmtp convert`: a finished checkpoint in the other dialect, compressed-tensors' or modelopt's.

In: a folder and a dialect. Out: a `Conversion`, which says all that will be written before a byte
is; then a new folder. Packed bytes are copied from file to file under their new names; scales of a
module are re-expressed; shards without a quantized weight are hard links.

Easy to get wrong: both ways. 1 / (1 / x) is not x for one F32 in seven, and a config has many
spellings, so keepmtp-convert.json in the new folder keeps both. But who has edited the converted
checkpoint wants his own edits: what is kept counts only where what was written is still there. And
the file may be a stranger's, so that no name and no value in it is taken that a conversion could
not have written.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from .. import __version__
from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.json_file import object_of
from ..checkpoints.source import Source, small_bytes, small_object
from ..checkpoints.values import TORCH_DTYPES, changed, typed
from ..quantize.config.written import config_files, quantization_config, with_quantization
from ..recipes.conventions import (
    CACHE,
    FP8_CACHE,
    Change,
    Format,
    cache_scale_in,
    in_compressed_tensors,
    in_modelopt,
)
from ..recipes.errors import CheckpointError, RecipeError, first_fault
from ..recipes.family import HFName
from ..recipes.schemes import DTYPE_BITS, num_bytes
from ..validate.check.check import examine
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.runtime_view import RuntimeView
from .convert_forms import StoredMatrix, caches_in, dialect_of, matrices_in
from .json_diff import in_form_of
from .new_shards import NewTensor, as_it_was
from .proposal import CONFIG, Proposal
from .rewritten import Rewritten, rewrite

CONVERTED = "keepmtp-convert.json"
_WITHOUT_IT = "Convert a copy of the folder that does not have this file"
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
    """keepmtp-convert.json.

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
        return self.written == {name: _sum(small_bytes(source, name)) for name in _CONFIGS}


@dataclass(frozen=True)
class Conversion:
    """What will be written.

    Attributes:
        proposal: the checkpoint as it will be.
        first: its dialect.
        to: the new one.
        changes: tensors with another name or form, or other bytes.
        is_way_back: the checkpoint was converted before, and becomes the first one again.
    """

    proposal: Proposal
    first: Format
    to: Format
    changes: tuple[NewTensor, ...]
    is_way_back: bool

    @property
    def source(self) -> Source:
        """The finished checkpoint."""
        return self.proposal.source

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards that are written anew."""
        return tuple(self.proposal.shards_again)

    @property
    def num_reexpressed(self) -> int:
        """How many tensors get other bytes; the others of `changes` only another name or shape."""
        return sum(isinstance(tensor.data, bytes) for tensor in self.changes)


def plan_conversion(where: str, to: Format) -> Conversion:
    """Decide everything about a conversion; only scales that are re-expressed are read.

    Args:
        where: a checkpoint's folder.
        to: the dialect that it will have.

    Raises:
        RecipeError: a Hub repository, or the dialect that the checkpoint has already.
        CheckpointError: it does not pass its own check, it is in another dialect, or a tensor has a
            form or a value that the other dialect has no word for.
    """
    runtime = _checked(where)
    source, first = runtime.source, dialect_of(runtime)
    if first == to:
        rule = "a checkpoint is converted into the other dialect"
        raise RecipeError(where, rule, got=f"one in {to} already", cure="There is nothing to do")
    proposal, kept = Proposal(source), _record_of(source)
    if kept is not None and (kept.first != to or not kept.restores(source)):
        kept = None
    why = f"so {to} has it"
    matrices = matrices_in(runtime, to)
    changes, lost = [], {}
    for matrix in (*matrices, *caches_in(runtime)):
        for entry in matrix.parts.values() if matrix.scheme else ():
            was = as_it_was(entry)
            new = _turned(source, matrix, was, to)
            if kept is not None:
                new = _restored(source, matrix, was, kept.tensors.get(entry.name), first) or new
            elif not _is_same(source, _turned(source, matrix, new, first), was):
                raw = b"" if new.data == entry else was.bytes_from(source)
                lost[new.name] = FirstTensor(
                    name=was.name, dtype=was.dtype, shape=was.shape, hex=raw.hex()
                )
            if new != was:
                changes.append(new)
                proposal.retensor(entry, new, why)
    if len(proposal.edits) < len(changes):
        rule = "no tensor must have the name that another one gets"
        got, cure = f"{len(changes) - len(proposal.edits)} that do", "Take it out of the checkpoint"
        raise CheckpointError(where, rule, got=got, cure=cure)
    files: dict[str, bytes | None] = {HF_QUANT_CONFIG: None, CONVERTED: None}
    if kept is not None:
        files |= _first_configs(runtime, kept)
    else:
        files |= _configs(runtime, matrices, to)
        before: dict[_Config, str | None] = dict.fromkeys(_CONFIGS)
        for name in _CONFIGS:
            if small_object(source, name) is not None:  # it must be JSON
                before[name] = (small_bytes(source, name) or b"").decode()
        record = Converted(
            keepmtp=__version__,
            first=first,
            configs=before,
            written={name: _sum(files[name]) for name in _CONFIGS},
            tensors=dict(sorted(lost.items())),
        )
        written = record.model_dump_json(indent=1, exclude_defaults=True)
        files[CONVERTED] = f"{written}\n".encode()
    for name, data in files.items():
        if data is not None or small_bytes(source, name) is not None:
            proposal.put(name, data, why)
    return Conversion(proposal, first, to, tuple(changes), kept is not None)


def convert(
    planned: Conversion, out: Path, *, progress: Callable[[int], None] = lambda count: None
) -> Rewritten:
    """Write the new folder.

    Args:
        planned: what is written.
        out: where; nothing may be there.
        progress: called with numbers of bytes of new shards.

    Raises:
        RecipeError, CheckpointError: see `rewritten.rewrite`.
    """
    return rewrite(planned.proposal, out, made_by=f"convert --to {planned.to}", written=progress)


def _checked(where: str) -> RuntimeView:
    """A checkpoint without an error: then each tensor is stored as vLLM builds its module."""
    checked = examine(where)
    checked.readable()
    errors = [finding for finding in checked.data.findings if finding.severity == "error"]
    if errors or checked.runtime is None:
        first = (errors or checked.data.findings)[0]
        rule = "must pass its own check before it is converted"
        raise CheckpointError(f"{where}: {first.where}", rule, got=first.says, cure=first.cure)
    if checked.runtime.source.folder is None:
        cure = "Download it: `hf download` puts a repository into a folder"
        raise RecipeError(
            where, "what is converted must be a folder here", got="a Hub repository", cure=cure
        )
    return checked.runtime


def _spelled(matrix: StoredMatrix, tensor: NewTensor, to: Format) -> tuple[NewTensor, Change]:
    """Name and form of a tensor in the other dialect, and what becomes of its values."""
    scheme, leaf, form = matrix.scheme, tensor.name.rpartition(".")[2], (tensor.dtype, tensor.shape)
    if to == "modelopt":
        other = in_modelopt(scheme, leaf, *form, of_experts=matrix.is_of_experts)
    else:
        other = in_compressed_tensors(scheme, leaf, *form)
    name = HFName(f"{matrix.module}.{other.leaf}")
    return replace(tensor, name=name, dtype=other.dtype, shape=other.shape), other.change


def _turned(source: Source, matrix: StoredMatrix, tensor: NewTensor, to: Format) -> NewTensor:
    """A tensor of a packed module in the other dialect: the wished dtype, F32 where it cannot hold
    the values.

    Raises:
        CheckpointError: it is re-expressed, and not positive and finite.
    """
    new, change = _spelled(matrix, tensor, to)
    if change == "none":
        return new
    value = typed(
        torch.frombuffer(bytearray(tensor.bytes_from(source)), dtype=torch.uint8),
        tensor.dtype,
        tensor.shape,
    )
    if not bool(((value.float() > 0) & value.float().isfinite()).all()):
        rule, cure = (
            "a scale that is re-expressed must be positive and finite",
            "See `keepmtp check --values`",
        )
        raise CheckpointError(
            f"{source.where}: {tensor.name}", rule, got=f"{value.flatten().tolist()[:4]}", cure=cure
        )
    if change == "dtype" and not torch.equal(
        value.to(TORCH_DTYPES[new.dtype]).float(), value.float()
    ):
        new = replace(new, dtype="F32")
    made = (
        changed(value, change, TORCH_DTYPES[new.dtype]).contiguous().reshape(-1).view(torch.uint8)
    )
    return replace(new, data=made.numpy().tobytes())


def _is_same(source: Source, one: NewTensor, other: NewTensor) -> bool:
    """Whether two tensors have one name, one form and the same bytes."""
    if (one.name, one.dtype, one.shape) != (other.name, other.dtype, other.shape):
        return False
    return one.data == other.data or one.bytes_from(source) == other.bytes_from(source)


def _restored(
    source: Source, matrix: StoredMatrix, was: NewTensor, first: FirstTensor | None, dialect: Format
) -> NewTensor | None:
    """The first checkpoint's tensor; None where the record has none of which the one that is here
    was made.
    """
    if first is None:
        return None
    data = bytes.fromhex(first.hex) or was.data
    tensor = NewTensor(name=HFName(first.name), dtype=first.dtype, shape=first.shape, data=data)
    plain = first.name
    if matrix.scheme == CACHE:
        plain = cache_scale_in("compressed-tensors", first.name)
    is_whole = bool(first.hex) or tensor.num_bytes == was.num_bytes
    if plain.rpartition(".")[0] != matrix.module or not is_whole:
        return None
    return tensor if _is_same(source, _turned(source, matrix, tensor, dialect), was) else None


def _configs(runtime: RuntimeView, matrices: list[StoredMatrix], to: Format) -> dict[str, bytes]:
    """config.json, and for modelopt hf_quant_config.json."""
    source, view = runtime.source, runtime.view
    made = quantization_config(view, matrices, format=to, cache=_cache_scheme(runtime)).value
    files = config_files(source.config, made, view)
    before = {CONFIG: small_bytes(source, CONFIG)}
    return {name: in_form_of(before.get(name), content) for name, content in files.items()}


def _first_configs(runtime: RuntimeView, kept: Converted) -> dict[str, bytes]:
    """The files of the first checkpoint, which may say nothing else than this one but how it is
    quantized.

    Raises:
        CheckpointError: one is no JSON object, or says something else.
    """
    where = f"{runtime.source.where}/{CONVERTED}: configs: "
    files = {name: text.encode() for name, text in kept.configs.items() if text is not None}
    first: Mapping[str, Any] = {}
    for name, raw in files.items():
        found = object_of(raw, f"{where}{name}", cure=_WITHOUT_IT)
        if name == CONFIG:
            first = found
    # NaN and 1.0 are compared as JSON writes them.
    was, now = (
        json.dumps(with_quantization(config, {}, runtime.view), sort_keys=True)
        for config in (first, runtime.source.config)
    )
    if was != now:
        rule = "must be that of this checkpoint but for how it is quantized"
        raise CheckpointError(f"{where}{CONFIG}", rule, got="another", cure=_WITHOUT_IT)
    return {**files}


def _record_of(source: Source) -> Converted | None:
    """The record of a converted checkpoint, if it has one.

    Raises:
        CheckpointError: a file of this name that keepmtp did not write.
    """
    where, rule = f"{source.where}/{CONVERTED}", "must be what `keepmtp convert` wrote"
    try:
        found = small_object(source, CONVERTED)
        return None if found is None else Converted.model_validate(found)
    except ValidationError as error:
        got = first_fault(error)
        raise CheckpointError(where, rule, got=got, cure=_WITHOUT_IT) from error


def _sum(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _cache_scheme(runtime: RuntimeView) -> Any:
    """How the KV cache is quantized: the same key in both dialects, a word in
    hf_quant_config.json.
    """
    given = quantization_of(runtime.source.config)
    if given is not None and "quantization" not in given:
        return given.get("kv_cache_scheme")
    inner = (given or runtime.hf_quant_config or {}).get("quantization") or {}
    word = inner.get("kv_cache_quant_algo")
    if word not in (None, "FP8"):
        where, rule = (
            f"{runtime.source.where}/{HF_QUANT_CONFIG}",
            "both dialects must have a word for the KV cache",
        )
        raise CheckpointError(where, rule, got=word, cure="Quantize the original release anew")
    return dict(FP8_CACHE) if word else None
