"""`keepmtp convert`: a finished checkpoint in the other dialect, compressed-tensors' or modelopt's.

In: a folder and a dialect. Out: a `Conversion`, which says all that will be written before a byte is; then a new
folder. Packed bytes are copied from file to file under their new names; scales of a module are re-expressed; shards
without a quantized weight are hard links.

Easy to get wrong: both ways. What 1 / (1 / x) does not restore is kept in keepmtp-convert.json (`convert_record.py`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.files import within
from ..checkpoints.json_file import object_of
from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import Source, small_bytes
from ..checkpoints.values import TORCH_DTYPES, changed, read_tensor, typed
from ..quantize.config.written import config_files, quantization_config, with_quantization
from ..recipes.conventions import (
    CACHE,
    FP8_CACHE,
    Format,
    Spelling,
    cache_scale_in,
    in_compressed_tensors,
    in_modelopt,
)
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.family import HFName
from ..validate.check.check import examine
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.runtime_view import RuntimeView
from .convert_forms import StoredMatrix, caches_in, dialect_of, matrices_in
from .convert_record import CONVERTED, WITHOUT_IT, Converted, FirstTensor, read_converted, record_of
from .json_diff import in_form_of
from .new_shards import NewTensor, shard_again, write_shard
from .rewritten import Rewrite, Rewritten, rewrite

_OTHER: Mapping[Format, Format] = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}


@dataclass(frozen=True)
class Conversion:
    """What will be written.

    Attributes:
        source: the finished checkpoint.
        first: its dialect.
        to: the new one.
        files: config.json and other small files, with their new bytes.
        left_out: small files that the new folder does not get.
        changes: tensors with another name, or other bytes, by their old names.
        is_way_back: the checkpoint was converted before, and becomes the first one again.
    """

    source: Source
    first: Format
    to: Format
    files: Mapping[str, bytes]
    left_out: frozenset[str]
    changes: Mapping[HFName, NewTensor]
    is_way_back: bool

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards that are written anew."""
        return tuple(sorted({self.source.entries[name].file for name in self.changes}))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the tensors in them."""
        anew = set(self.shards)
        kept = (entry for name, entry in self.source.entries.items() if entry.file in anew and name not in self.changes)
        return sum(entry.num_bytes for entry in kept) + sum(tensor.num_bytes for tensor in self.changes.values())

    @property
    def num_reexpressed(self) -> int:
        """How many tensors get other bytes; the others of `changes` only another name or shape."""
        return sum(isinstance(tensor.data, bytes) for tensor in self.changes.values())


def plan_conversion(where: str, to: Format) -> Conversion:
    """Decide everything about a conversion; only scales that are re-expressed are read.

    Args:
        where: a checkpoint's folder.
        to: the dialect that it will have.

    Raises:
        RecipeError: a Hub repository, or the dialect that the checkpoint has already.
        CheckpointError: it does not pass its own check, it is in another dialect, or a tensor has a form or a value
            that the other dialect has no word for.
    """
    runtime = _checked(where)
    source, first = runtime.source, dialect_of(runtime)
    if first == to:
        rule = "a checkpoint is converted into the other dialect"
        raise RecipeError(where, rule, got=f"one in {to} already", cure="There is nothing to do")
    kept = read_converted(source)
    matrices = matrices_in(runtime, to)
    scaled = [*matrices, *caches_in(runtime)]
    changes = {
        entry.name: _turned(source, matrix, leaf, entry, to, kept)
        for matrix in scaled
        if matrix.scheme
        for leaf, entry in matrix.parts.items()
    }
    if kept is not None and kept.first == to and kept.restores(source):
        files = _first_configs(runtime, kept)
        left_out = frozenset({CONVERTED} | {name for name, text in kept.configs.items() if text is None})
        return Conversion(source, first, to, files, left_out, changes, is_way_back=True)
    files = _configs(runtime, matrices, to)
    lost = {str(new.name): was for new, was in _not_restored(source, scaled, changes, to)}
    files |= {CONVERTED: record_of(source, first, files, lost)}
    left_out = frozenset({HF_QUANT_CONFIG}) - files.keys()
    return Conversion(source, first, to, files, left_out, changes, is_way_back=False)


def convert(planned: Conversion, out: Path, *, progress: Callable[[int], None] = lambda count: None) -> Rewritten:
    """Write the new folder.

    Args:
        planned: what is written.
        out: where; nothing may be there.
        progress: called with numbers of bytes of new shards.

    Raises:
        RecipeError, CheckpointError: see `rewritten.rewrite`.
    """

    def write(folder: Path) -> list[str]:
        return [
            write_shard(
                within(folder, file),
                shard_again(planned.source, file, planned.changes),
                planned.source,
                written=progress,
            )
            for file in planned.shards
        ]

    wanted = Rewrite(
        source=planned.source,
        made_by=f"convert --to {planned.to}",
        files=planned.files,
        left_out=planned.left_out,
        write_shards=write,
        num_shard_bytes=planned.num_bytes,
    )
    return rewrite(wanted, out)


# --- before anything is decided ---------------------------------------------------------------------------------------


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
        raise RecipeError(where, "what is converted must be a folder here", got="a Hub repository", cure=cure)
    return checked.runtime


# --- one tensor -------------------------------------------------------------------------------------------------------


def _turned(
    source: Source, matrix: StoredMatrix, leaf: str, entry: Entry, to: Format, kept: Converted | None
) -> NewTensor:
    """A tensor of a packed module in the other dialect; as it was in the first one, if that is known."""
    other = _spelling(matrix, leaf, entry.dtype, entry.shape, to)
    was = kept.tensors.get(entry.name) if kept is not None and kept.first == to else None
    if was is not None and (restored := _restored(source, matrix, entry, was, to)) is not None:
        return restored
    name = _named(matrix, other)
    if other.change == "none":
        return NewTensor(name=name, dtype=other.dtype, shape=other.shape, data=entry)
    value = read_tensor(source, entry)
    if not bool(((value.float() > 0) & value.float().isfinite()).all()):
        rule, cure = "a scale that is re-expressed must be positive and finite", "See `keepmtp check --values`"
        raise CheckpointError(f"{source.where}: {entry.name}", rule, got=f"{value.flatten().tolist()[:4]}", cure=cure)
    dtype, data = _in_words_of(other, value)
    return NewTensor(name=name, dtype=dtype, shape=other.shape, data=data)


def _in_words_of(other: Spelling, value: torch.Tensor) -> tuple[str, bytes]:
    """The dtype and bytes of a scale in the other dialect: the wished dtype, F32 where it cannot hold the values."""
    dtype = other.dtype
    if other.change == "dtype" and not torch.equal(value.to(TORCH_DTYPES[dtype]).float(), value.float()):
        dtype = "F32"
    return dtype, _raw(changed(value, other.change, TORCH_DTYPES[dtype]))


def _spelling(matrix: StoredMatrix, leaf: str, dtype: str, shape: tuple[int, ...], to: Format) -> Spelling:
    if to == "modelopt":
        return in_modelopt(matrix.scheme, leaf, dtype, shape, of_experts=matrix.role == "experts")
    return in_compressed_tensors(matrix.scheme, leaf, dtype, shape)


def _named(matrix: StoredMatrix, spelling: Spelling) -> HFName:
    return HFName(f"{matrix.module}.{spelling.leaf}")


def _restored(source: Source, matrix: StoredMatrix, entry: Entry, was: FirstTensor, to: Format) -> NewTensor | None:
    """The first checkpoint's tensor, unless this one is no longer what was made of it.

    Raises:
        CheckpointError: what the record calls the first one does not become this one.
    """
    module, _, leaf = was.name.rpartition(".")
    there = _spelling(matrix, leaf, was.dtype, was.shape, _OTHER[to])
    if matrix.scheme == CACHE:
        module = cache_scale_in("compressed-tensors", was.name).rpartition(".")[0]
    if module != matrix.module or _named(matrix, there) != entry.name:
        where, rule = f"{source.where}/{CONVERTED}: tensors: {entry.name}", "must be a tensor of the same module"
        raise CheckpointError(where, rule, got=was.name, cure=WITHOUT_IT)
    if there.shape != entry.shape:
        return None
    if not was.hex:
        tensor = NewTensor(name=HFName(was.name), dtype=was.dtype, shape=was.shape, data=entry)
        return tensor if (there.change, there.dtype) == ("none", entry.dtype) else None
    data = bytes.fromhex(was.hex)
    made = _in_words_of(there, _value(data, was.dtype, was.shape))
    if made != (entry.dtype, _raw(read_tensor(source, entry))):
        return None
    return NewTensor(name=HFName(was.name), dtype=was.dtype, shape=was.shape, data=data)


def _not_restored(
    source: Source, matrices: list[StoredMatrix], changes: Mapping[HFName, NewTensor], to: Format
) -> list[tuple[NewTensor, FirstTensor]]:
    """Tensors that the way back would not make again as they are."""
    found = []
    for matrix in matrices:
        for entry in matrix.parts.values() if matrix.scheme else ():
            new = changes[entry.name]
            other = _spelling(matrix, new.name.rpartition(".")[2], new.dtype, new.shape, _OTHER[to])
            raw, dtype, again = b"", other.dtype, b""
            if not isinstance(new.data, Entry):
                raw = _raw(read_tensor(source, entry))
                dtype, again = _in_words_of(other, _value(new.data, new.dtype, new.shape))
            if (_named(matrix, other), dtype, other.shape, again) != (entry.name, entry.dtype, entry.shape, raw):
                found.append((new, FirstTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, hex=raw.hex())))
    return found


def _value(raw: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return typed(torch.frombuffer(bytearray(raw), dtype=torch.uint8), dtype, shape)


def _raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- the configs ------------------------------------------------------------------------------------------------------


def _configs(runtime: RuntimeView, matrices: list[StoredMatrix], to: Format) -> dict[str, bytes]:
    """config.json, and for modelopt hf_quant_config.json."""
    source, view = runtime.source, runtime.view
    made = quantization_config(view, matrices, format=to, cache=_cache_scheme(runtime)).value
    before = {"config.json": small_bytes(source, "config.json")}
    files = config_files(source.config, made, view)
    return {name: in_form_of(before.get(name), content) for name, content in files.items()}


def _first_configs(runtime: RuntimeView, kept: Converted) -> dict[str, bytes]:
    """The files of the first checkpoint, which may say nothing else than this one but how it is quantized.

    Raises:
        CheckpointError: one is no JSON object, or names what else they say.
    """
    where = f"{runtime.source.where}/{CONVERTED}: configs: "
    files = {name: text.encode() for name, text in kept.configs.items() if text is not None}
    objects = {name: object_of(raw, f"{where}{name}", cure=WITHOUT_IT) for name, raw in files.items()}
    both = objects.get("config.json", {}), runtime.source.config
    was, now = (with_quantization(config, {}, runtime.view) for config in both)
    for key in sorted(was.keys() | now.keys()):
        one, other = ([config[key]] if key in config else [] for config in (was, now))
        if json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
            rule = "must be that of this checkpoint"
            raise CheckpointError(f"{where}config.json", rule, got=f"another {key}", cure=WITHOUT_IT)
    return {**files}


def _cache_scheme(runtime: RuntimeView) -> Any:
    """How the KV cache is quantized: the same key in both dialects, a word in hf_quant_config.json."""
    given = quantization_of(runtime.source.config)
    if given is not None and "quantization" not in given:
        return given.get("kv_cache_scheme")
    inner = (given or runtime.hf_quant_config or {}).get("quantization") or {}
    word = inner.get("kv_cache_quant_algo")
    if word not in (None, "FP8"):
        where, rule = f"{runtime.source.where}/{HF_QUANT_CONFIG}", "both dialects must have a word for the KV cache"
        raise CheckpointError(where, rule, got=word, cure="Quantize the original release anew")
    return dict(FP8_CACHE) if word else None
