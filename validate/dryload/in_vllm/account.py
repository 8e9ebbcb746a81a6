"""An account of a weight load, independent of what the loader reports: what was written, where, and
from what.

In: a model on the meta device, the checkpoint's tensors, vLLM's own load_weights. Out: for every
parameter how many of its elements were written and from which tensors; for every tensor how much of
it was used.

The account sees aten operators. It knows a tensor by its storage, so it need not follow views. A
computed tensor (dequantized, concatenated, cast) has the sources of the tensors that it was
computed from.

Easy to get wrong: a parameter that nobody wrote may hold a value on purpose. vLLM constructs FP8
scales with the smallest number, so there a value from construction is as wrong as uninitialised
memory. A sink that vLLM pads is right.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .demands import Demands

aten = torch.ops.aten
_WIDE = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
# Operators that keep the storage.
_VIEWS = {
    aten.slice.Tensor,
    aten.select.int,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.detach.default,
    aten.alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.permute.default,
    aten.expand.default,
    aten.as_strided.default,
    aten._unsafe_view.default,
    aten.split.Tensor,
    aten.view.dtype,
}
# Operators that leave no value worth keeping: allocation, views, the random start of nn.Linear.
_NO_VALUE = ("empty", "detach", "view", "alias", "uniform", "normal", "random", "set_")
Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Storage offset, shape and strides, in elements; a contiguous one has one dimension."""


class Construction(TorchDispatchMode):
    """Active while vLLM builds a model: the storages that get a value. All others are uninitialised
    memory.

    Attributes:
        filled: storages with a value, by address.
        padding: regions of a storage that were written apart from the rest, as rows of padding are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.filled: dict[int, torch.UntypedStorage] = {}
        self.padding: dict[int, dict[Region, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.__name__.startswith(_NO_VALUE):
            storage = out.untyped_storage()
            self.filled[storage._cdata] = storage
            if func._schema.is_mutable and out.numel() * out.element_size() < storage.nbytes():
                self.padding.setdefault(storage._cdata, {})[_region(out)] = out.numel()
        return out


@dataclass(slots=True)
class Written:
    """What happened to one parameter.

    Attributes:
        num_expected: elements that a checkpoint must fill; vLLM allocates more where it pads.
        has_value: construction wrote a value to it.
        may_pad: a part of it may keep the value of construction.
        is_optional: a checkpoint need not have it.
        regions: what was written, with its number of elements.
        sources: the checkpoint's tensors that it was written from, each with the elements written.
    """

    name: str
    num_expected: int
    has_value: bool
    may_pad: bool
    is_optional: bool
    regions: dict[Region, int] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)

    def write(self, target: torch.Tensor, names: Iterable[str]) -> None:
        """Note that `target`, a view of the parameter, was written from the tensors `names`."""
        count = target.numel()
        self.regions[_region(target)] = count
        for name in names:
            self.sources[name] = self.sources.get(name, 0) + count

    def as_fault(self) -> dict[str, Any]:
        """As `Fault` in validate/facts/dry_load.py."""
        counts = {"num_written": self.num_written, "num_expected": self.num_expected}
        return {"param": self.name, **counts, "sources": self.sources}

    @property
    def num_written(self) -> int:
        """Distinct elements written."""
        return min(self.num_expected, _covered(self.regions))

    @property
    def status(self) -> str:
        """full, padded, partial, optional, or empty: uninitialised, or construction's value."""
        if self.num_written >= self.num_expected:
            return "full"
        if not self.num_written:
            if self.is_optional:
                return "optional"
            return "empty"
        if self.has_value and self.may_pad:
            return "padded"
        return "partial"


@dataclass(slots=True)
class Read:
    """What was used of one tensor of the checkpoint; all of it if something was computed from it.

    Attributes:
        is_cut: the part that was not read is padding.
    """

    num_elements: int
    regions: dict[Region, int] = field(default_factory=dict)
    is_computed: bool = False
    is_cut: bool = False

    @property
    def num_read(self) -> int:
        if self.is_computed or self.is_cut:
            return self.num_elements
        return min(self.num_elements, _covered(self.regions))


class Account(TorchDispatchMode):
    """Active while load_weights runs.

    Attributes:
        tensors: the checkpoint's tensors that the loader got.
        current: the last tensor that it got, for the message when it raises.
        params: by name. Buffers are followed too, but a checkpoint need not fill them.
        misfits: (parameter, sources, what is on disk, what the parameter has): dtypes where packed
            and wide numbers were mixed, shapes where one value filled many.
    """

    def __init__(self, model: torch.nn.Module, construction: Construction, demands: Demands):
        super().__init__()
        self.tensors: dict[str, Read] = {}
        self.current = ""
        self.misfits: dict[tuple[str, str, str, str], None] = {}
        self.params: dict[str, Written] = {}
        self._param_at: dict[int, Written] = {}
        self._sources: dict[int, tuple[str, ...]] = {}
        self._is_checkpoint: set[int] = set()
        # An address is unique only while its storage lives.
        self._keep: list[torch.UntypedStorage] = []
        learned = {name for name, _ in model.named_parameters()}
        for name, param in [*model.named_parameters(), *model.named_buffers()]:
            storage = param.untyped_storage()
            written = Written(
                name=name,
                num_expected=demands.counts.get(name, param.numel()),
                has_value=storage._cdata in construction.filled,
                may_pad=name in demands.may_pad,
                is_optional=name in demands.optional,
                regions=dict(construction.padding.get(storage._cdata, {})),
            )
            self._keep.append(storage)
            self._param_at.setdefault(storage._cdata, written)
            if param.numel() and name in learned:
                self.params[name] = written

    def hand_over(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Give (name, tensor) pairs to the loader, one at a time, and note each."""
        for name, tensor in weights:
            storage = tensor.untyped_storage()
            address = storage._cdata
            self._keep.append(storage)
            self._sources[address] = (name,)
            self._is_checkpoint.add(address)
            self.tensors[name] = Read(tensor.numel())
            self.current = name
            yield name, tensor
        self.current = ""

    def settle(self, model: torch.nn.Module) -> None:
        """After the load: note parameters that have a new storage, computed from the checkpoint."""
        kept = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }
        for name, written in self.params.items():
            # vLLM removes a module that a checkpoint may lack: DSpark's confidence head.
            written.is_optional |= name not in kept
        for name, param in kept.items():
            address = param.untyped_storage()._cdata
            names = self._sources.get(address, ())
            written = self.params.get(name)
            if names and written is not None and address not in self._param_at:
                written.write(param, names)
                self._use(names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default:
            return self._copy(args[0], args[1])
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            # Not true: vLLM must not refuse a value that nobody can see.
            return int(args[0].dtype != torch.bool)
        if func is aten.equal.default and (args[0].is_meta or args[1].is_meta):
            return False
        device = kwargs.get("device")
        is_from_meta = func is aten._to_copy.default and args[0].is_meta  # a meta tensor stays one
        if device is not None and (device.type == "cuda" or is_from_meta):
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        self._follow(func, args, out)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # without this, torch wraps each call, which costs as much as the operator

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if target.shape != source.shape:
            # Raise what `copy_` raises; the meta device does not.
            try:
                source.expand(target.shape)
            except RuntimeError:
                theirs = f"doesn't match the broadcast shape of {list(source.shape)}"
                raise RuntimeError(f"output with shape {list(target.shape)} {theirs}") from None
        elif not target.is_meta and not source.is_meta:
            aten.copy_.default(target, source)
        address = target.untyped_storage()._cdata
        source_address = source.untyped_storage()._cdata
        names = self._sources.get(source_address, ())
        written = self._param_at.get(address)
        if written is None:
            if names:
                self._inherit(target, names)
            return target
        written.write(target, names)
        if source_address in self._is_checkpoint:
            read = self.tensors[names[0]]
            read.regions[_region(source)] = source.numel()
            # Some releases pad a vector; vLLM reads only its first part.
            read.is_cut = written.may_pad and source.dim() == 1 and source.storage_offset() == 0
        else:
            self._use(names)
        if target.dtype != source.dtype and not _keeps_value(source.dtype, target.dtype):
            self._note(written, names, source.dtype, target.dtype)
        if target.numel() != source.numel():
            self._note(written, names, tuple(source.shape), tuple(target.shape))
        return target

    def _follow(self, func: Any, args: Any, out: Any) -> None:
        names: tuple[str, ...] = ()
        for value in _tensors(args):
            names = _merge(names, self._sources.get(value.untyped_storage()._cdata, ()))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            target = args[0]
            written = self._param_at.get(target.untyped_storage()._cdata)
            if written is not None:
                written.write(target, names)
                self._use(names)
        if names:
            for value in _tensors((out,)):
                if value.untyped_storage()._cdata not in self._param_at:
                    self._inherit(value, names)

    def _inherit(self, value: torch.Tensor, names: tuple[str, ...]) -> None:
        storage = value.untyped_storage()
        known = self._sources.get(storage._cdata, ())
        if known != names:
            self._keep.append(storage)
            self._sources[storage._cdata] = _merge(known, names)

    def _use(self, names: Iterable[str]) -> None:
        for name in names:
            self.tensors[name].is_computed = True

    def _note(self, written: Written, names: tuple[str, ...], *forms: object) -> None:
        given, wanted = [str(form).removeprefix("torch.") for form in forms]
        self.misfits[written.name, ", ".join(names), given, wanted] = None


def _region(view: torch.Tensor) -> Region:
    if view.is_contiguous():
        return view.storage_offset(), (view.numel(),), (1,)
    return view.storage_offset(), tuple(view.shape), view.stride()


def _keeps_value(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast keeps the numbers, or rounds them as any model's weights are rounded.

    Whole numbers may change their sign bit (packed FP4 is int8 on disk, uint8 in vLLM); e8m0 is a
    power of two; int64 holds shapes and tables, never packed weights.
    """
    if given in _WIDE or given == torch.float8_e8m0fnu:
        return wanted in _WIDE
    return given == torch.int64 or (given in _WHOLE and wanted in _WHOLE)


def _covered(regions: dict[Region, int]) -> int:
    """Distinct elements of all regions. It is exact for contiguous ones; strided ones count as if
    none overlapped.
    """
    covered = end = 0
    for (offset, _, stride), count in sorted(regions.items()):
        if stride == (1,):
            covered += max(0, offset + count - max(offset, end))
            end = max(end, offset + count)
        else:
            covered += count
    return covered


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _merge(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    if left == right:
        return right
    return tuple(dict.fromkeys(left + right))
