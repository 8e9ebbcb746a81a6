"""Streams a source through its plan into output shards.

In: a plan over a local source. Out: a folder with shards, index, config.json, tokenizer files, the recipe and a
provenance file, which appears under its final name only when it is whole.

The plan fixes every output's name, dtype and shape, so a shard's header is written first and each tensor straight to
its place: memory is the tensors in flight, whatever the size of shards. A shard is renamed when complete; a killed
run keeps the complete ones and starts the others again, with the same bytes.

Easy to get wrong: safetensors lets tensors lie at any offset, but readers map them, so wider dtypes come first.
"""

import hashlib
import json
import os
import platform
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..recipes.errors import CheckpointError, RecipeError, refuse
from ..recipes.family import HFName
from ..recipes.schemes import SCHEMES
from . import dequantize
from .pack import pack
from .plan import Output, Plan, Shard, TensorPlan
from .quant_config import quantization_config
from .source import INDEX, Entry, file_sizes, read

_STAMP = "plan.sha256"
_COPY_BYTES = 32 * 2**20
_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

Progress = Callable[[int], None]
"""Called with the number of source bytes done since the last call; from several threads."""


def partial_folder(out: Path) -> Path:
    """Where an unfinished output lies."""
    return out.with_name(f"{out.name}.partial")


def refuse_output(plan: Plan, out: Path) -> None:
    """Everything about the output folder that would make a run pointless, before a byte is written.

    Raises:
        RecipeError: it exists, lies inside the source, its disk is too small, or its unfinished part is another run's.
    """
    if out.exists():
        raise RecipeError(refuse(out, "an existing output is never overwritten", "a finished folder",
                                 "Choose another OUT, or remove it"))  # fmt: skip
    folder = plan.source.folder
    if folder is not None and out.resolve().is_relative_to(folder.resolve()):
        raise RecipeError(refuse(out, "the output must lie outside the source", f"a folder in {folder}",
                                 "Choose another OUT"))  # fmt: skip
    partial = partial_folder(out)
    done = sum((partial / s.file).stat().st_size for s in plan.shards if (partial / s.file).is_file())
    missing = plan.num_bytes_after - done
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if missing > free:
        raise RecipeError(refuse(out, f"{missing / 2**30:.1f} GiB must be free on its disk", f"{free / 2**30:.1f} GiB",
                                 "Choose another OUT, or make room"))  # fmt: skip
    stamp = partial / _STAMP
    if folder is not None and stamp.is_file() and stamp.read_text() != fingerprint(plan):
        raise RecipeError(refuse(partial, "an unfinished output can only be resumed with the same recipe, source and "
                                 "keepmtp version", "another plan", "Remove it, or choose another OUT"))  # fmt: skip


def write(plan: Plan, out: Path, *, recipe_text: str, threads: int, progress: Progress | None = None) -> Path:
    """Write everything the plan says, resuming what an earlier run left.

    Args:
        plan: a plan over a local source.
        out: the final folder; nothing appears there yet.
        recipe_text: the recipe file, carried over verbatim.
        threads: workers; one unit of the plan each.
        progress: told about source bytes done.

    Returns:
        The folder with the whole checkpoint, still under its partial name: `publish` gives it the final one.

    Raises:
        CheckpointError: a source weight holds NaN or infinity, or a file ends early.
    """
    partial = partial_folder(out)
    partial.mkdir(parents=True, exist_ok=True)
    _write_text(partial / _STAMP, fingerprint(plan))
    _write_shards(plan, partial, threads=threads, progress=progress or (lambda _: None))
    _write_text(partial / "config.json", json.dumps(output_config(plan), indent=2, ensure_ascii=False) + "\n")
    _write_text(partial / INDEX, json.dumps(_index(plan), indent=2) + "\n")
    assert plan.source.folder is not None
    for name in plan.source.companions:
        (partial / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(plan.source.folder / name, partial / name)
    _write_text(partial / "recipe.yaml", recipe_text)
    _write_text(partial / "keepmtp.json", json.dumps(provenance(plan), indent=2) + "\n")
    return partial


def publish(partial: Path, out: Path) -> None:
    """Give a whole checkpoint its final name."""
    (partial / _STAMP).unlink()
    os.rename(partial, out)
    _sync_folder(out.parent)


def output_config(plan: Plan) -> dict[str, Any]:
    """The source's config.json with the new quantization_config in place of whatever it had."""
    config = {key: value for key, value in plan.source.config.items() if key != "compression_config"}
    if "quantization_config" in (config.get("text_config") or {}):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    return {**config, "quantization_config": quantization_config(plan)}


def fingerprint(plan: Plan) -> str:
    """SHA-256 over everything the output's bytes depend on: recipe, decisions, source files, keepmtp's version."""
    assert plan.source.folder is not None
    files = {name: [size, (plan.source.folder / name).stat().st_mtime_ns] for name, size in file_sizes(plan.source).items()}
    digest = hashlib.sha256()
    for part in (__version__, plan.recipe.model_dump_json(), json.dumps(output_config(plan)), json.dumps(files)):
        digest.update(part.encode() + b"\0")
    for tensor in plan.tensors:
        digest.update(f"{tensor.name} {tensor.fate} {tensor.scheme} {tensor.outputs}\n".encode())
    return digest.hexdigest()


def provenance(plan: Plan) -> dict[str, Any]:
    """What made this checkpoint, without dates: the same input gives the same file."""
    source = plan.source
    counts: dict[str, int] = {}
    for tensor in plan.tensors:
        counts[tensor.fate] = counts.get(tensor.fate, 0) + 1
    return {
        "keepmtp": __version__,
        "recipe": plan.recipe.model_dump(mode="json"),
        "source": {
            "name": source.where if source.revision != "local" else Path(source.where).name,
            "revision": source.revision,
            "files": file_sizes(source),
        },
        "tensors": counts,
        "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
        "versions": {"python": platform.python_version(), **_versions("torch", "numpy", "compressed-tensors")},
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _index(plan: Plan) -> dict[str, Any]:
    weight_map = {output.name: shard.file for shard in plan.shards for output in shard.outputs}
    return {"metadata": {"total_size": plan.num_bytes_after}, "weight_map": dict(sorted(weight_map.items()))}


# --- shards ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenShard:
    """A shard being written: where each tensor goes, and how many units are still to come."""

    path: Path
    descriptor: int
    offsets: Mapping[HFName, int]
    missing: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, name: HFName, data: memoryview | bytearray, *, at: int = 0) -> None:
        position, view = self.offsets[name] + at, memoryview(data)
        while view:
            count = os.pwrite(self.descriptor, view, position)
            view, position = view[count:], position + count

    def unit_done(self) -> None:
        with self.lock:
            self.missing -= 1
            if self.missing:
                return
        os.fsync(self.descriptor)
        os.close(self.descriptor)
        os.rename(self.path, self.path.with_suffix(""))
        _sync_folder(self.path.parent)


def _write_shards(plan: Plan, folder: Path, *, threads: int, progress: Progress) -> None:
    shard_of = {output.name: shard for shard in plan.shards for output in shard.outputs}
    num_units: dict[str, int] = {}
    for unit in plan.units:
        file = shard_of[unit[0].outputs[0].name].file
        num_units[file] = num_units.get(file, 0) + 1
    open_shards: dict[str, _OpenShard] = {}
    running: set[Future[None]] = set()
    devices = _devices()
    with _one_torch_thread_each(threads), ThreadPoolExecutor(threads) as pool:
        try:
            for number, unit in enumerate(plan.units):
                shard = shard_of[unit[0].outputs[0].name]
                if (folder / shard.file).is_file():
                    progress(_source_bytes(plan, unit))
                    continue
                if shard.file not in open_shards:
                    open_shards[shard.file] = _open_shard(folder, shard, num_units[shard.file])
                job = _Job(plan=plan, unit=unit, shard=open_shards[shard.file], device=devices[number % len(devices)])
                running.add(pool.submit(job.run, progress))
                if len(running) >= 2 * threads:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            for future in running:
                future.result()
        except BaseException:
            for future in running:
                future.cancel()
            raise


def _open_shard(folder: Path, shard: Shard, num_units: int) -> _OpenShard:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in shard.outputs:
        header[output.name] = {
            "dtype": output.dtype, "shape": list(output.shape), "data_offsets": [offset, offset + output.num_bytes],
        }  # fmt: skip
        offset += output.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    path = folder / f"{shard.file}.writing"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.pwrite(descriptor, struct.pack("<Q", len(raw)) + raw, 0)
    os.truncate(descriptor, start + offset)
    offsets = {output.name: start + header[output.name]["data_offsets"][0] for output in shard.outputs}
    return _OpenShard(path=path, descriptor=descriptor, offsets=offsets, missing=num_units)


def _source_bytes(plan: Plan, unit: tuple[TensorPlan, ...]) -> int:
    return sum(plan.entries[name].num_bytes for tensor in unit for name in tensor.inputs)


# --- one unit -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One unit of the plan: the only place where weights are read and computed."""

    plan: Plan
    unit: tuple[TensorPlan, ...]
    shard: _OpenShard
    device: torch.device

    def run(self, progress: Progress) -> None:
        if any(tensor.stacked for tensor in self.unit):
            self._quantize_stacked(progress)
        elif self.unit[0].fate == "quantize":
            self._quantize(progress)
        else:
            for tensor in self.unit:
                self._carry(tensor, progress)
        self.shard.unit_done()

    def _quantize(self, progress: Progress) -> None:
        scheme = SCHEMES[self.unit[0].scheme]
        weights = [self._load(tensor).to(self.device) for tensor in self.unit]
        for tensor, packed in zip(self.unit, self._pack(scheme, weights), strict=True):
            self._put(tensor.outputs, packed)
        progress(_source_bytes(self.plan, self.unit))

    def _quantize_stacked(self, progress: Progress) -> None:
        """Experts in one 3-D tensor, an expert at a time: such a tensor alone may be several GiB."""
        for tensor in self.unit:
            entry = self.plan.entries[tensor.inputs[0]]
            num_experts, scheme = tensor.shape[0], SCHEMES[tensor.scheme]
            slice_bytes = entry.num_bytes // num_experts
            num_specs = len(tensor.outputs) // num_experts // len(tensor.stacked)
            for expert in range(num_experts):
                raw = read(self.plan.source, entry, offset=expert * slice_bytes, length=slice_bytes)
                stack_NK = _tensor(raw, entry.dtype, tensor.shape[1:]).to(self.device)
                for number, packed in enumerate(self._pack(scheme, list(stack_NK.chunk(len(tensor.stacked))))):
                    first = (expert * len(tensor.stacked) + number) * num_specs
                    self._put(tensor.outputs[first : first + num_specs], packed)
                progress(slice_bytes)

    def _pack(self, scheme: Any, weights: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        try:
            return pack(scheme, weights)
        except CheckpointError as error:
            names = ", ".join(tensor.name for tensor in self.unit)
            raise CheckpointError(f"{self.plan.source.where}: {names}: {error}") from error

    def _carry(self, tensor: TensorPlan, progress: Progress) -> None:
        entries = [self.plan.entries[name] for name in tensor.inputs]
        if tensor.fate == "dequantize":
            self._put(tensor.outputs, {"weight": self._load(tensor)})
        elif tensor.scheme:
            self._put_renamed(tensor)
        else:
            for entry, output in zip(entries, tensor.outputs, strict=True):
                self._copy(entry, output)
        progress(sum(entry.num_bytes for entry in entries))

    def _copy(self, entry: Entry, output: Output) -> None:
        for offset in range(0, entry.num_bytes, _COPY_BYTES):
            length = min(_COPY_BYTES, entry.num_bytes - offset)
            self.shard.put(output.name, read(self.plan.source, entry, offset=offset, length=length), at=offset)

    def _put_renamed(self, tensor: TensorPlan) -> None:
        """Packed weights keep their bytes; scales get compressed-tensors' names and, exactly, its dtypes."""
        parts = self._parts(tensor)
        for output in tensor.outputs:
            suffix = output.name.rpartition(".")[2]
            if suffix in ("weight", "weight_packed"):
                entry = parts.get("weight_packed") or parts["weight"]
                self._copy(entry, output)
                continue
            entry = parts.get(suffix) or parts.get(f"{suffix}_inv") or parts["scale"]
            value = _tensor(read(self.plan.source, entry), entry.dtype, entry.shape)
            if output.dtype == "U8":
                value = value.view(torch.uint8)
            self._put((output,), {suffix: value.to(_TORCH[output.dtype]).reshape(output.shape)})

    def _load(self, tensor: TensorPlan) -> torch.Tensor:
        """A weight in floating point, dequantized if the source stores it packed."""
        parts = {
            leaf: _tensor(read(self.plan.source, entry), entry.dtype, entry.shape)
            for leaf, entry in self._parts(tensor).items()
        }
        weight = parts.get("weight_packed", parts.get("weight"))
        scale = parts.get("weight_scale_inv", parts.get("weight_scale", parts.get("scale")))
        assert weight is not None
        if tensor.form == "plain":
            return weight
        assert scale is not None
        match tensor.form:
            case "fp8_block":
                assert tensor.block is not None
                return dequantize.fp8_block(weight, scale, tensor.block)
            case "fp8_channel" | "fp8_tensor" | "int8":
                return dequantize.fp8_channel(weight, scale)
            case "mxfp4":
                return dequantize.mxfp4(weight, scale)
            case "nvfp4":
                return dequantize.nvfp4(weight, scale, parts["weight_global_scale"], divisor=True)
            case "nvfp4_modelopt":
                return dequantize.nvfp4(weight, scale, parts["weight_scale_2"], divisor=False)
            case "int_packed":
                bits = 32 * weight.shape[1] // tensor.shape[1]
                return dequantize.int_packed(weight, scale, bits, tensor.shape)
            case form:
                raise AssertionError(f"{tensor.name}: the plan let form {form} through")

    def _parts(self, tensor: TensorPlan) -> dict[str, Entry]:
        return {name.rpartition(".")[2]: self.plan.entries[name] for name in tensor.inputs}

    def _put(self, outputs: tuple[Output, ...], tensors: Mapping[str, torch.Tensor]) -> None:
        for output in outputs:
            value = tensors[output.name.rpartition(".")[2]].cpu().contiguous()
            got = (tuple(value.shape), value.dtype)
            assert got == (output.shape, _TORCH[output.dtype]), f"{output.name}: planned {output}, computed {got}"
            data = value.reshape(-1).view(torch.uint8).numpy()
            self.shard.put(output.name, memoryview(data))


def _tensor(raw: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=_TORCH[dtype]).reshape(shape)


def _devices() -> list[torch.device]:
    """Every GPU in turn, or the CPU."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


@contextmanager
def _one_torch_thread_each(threads: int) -> Iterator[None]:
    """Whole units side by side use the cores better than threads inside one operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_text(path: Path, text: str) -> None:
    """All or nothing: a killed run never leaves half a file under its own name."""
    temporary = path.with_name(f"{path.name}.writing")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
