"""A pretended GPU: values are computed on the CPU, under the rules about devices that CUDA has.

In: a process of its own, since PyTorch cannot forget a device. Out: `pretended_gpu()`, a context
with a `GPU`. A tensor there computes what it would compute on the CPU, with the same kernels and
the same bits. An operation that mixes devices raises `MixedDevices`, which names the operation, the
shapes, and the line of keepmtp that called it.

It finds: a tensor left on the CPU, a number that an operation in place would have to write back, a
device tensor that is pinned, a generator of the wrong device, and the bytes that tensors hold on
the device (`GPU.peak_bytes`).

It cannot find: what CUDA's own kernels compute, lack or refuse (dtypes, alignment), races between
streams, time, memory that an operation needs inside, and code that asks whether a device's type is
"cuda", for this one's type is "gpu". For those there is `make gpu`.

Easy to get wrong: CUDA takes some CPU tensors: one number beside a tensor, and indices. What it
takes is listed here, everything else is a mix.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keepmtp
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
CPU = torch.device("cpu")
_ROOT = str(Path(keepmtp.__file__).parent)
_PACKAGES = ("recipes", "checkpoints", "quantize", "validate", "cli")

_aten = torch.ops.aten
# They move values between devices; everything else stays on one.
_MOVES = (_aten.copy_.default, _aten._to_copy.default)
# Their list of indices may be on the CPU.
_INDEXED = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._unsafe_index.Tensor,
)
# They make a Python number, for which the CPU waits.
_WAITS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)


class MixedDevices(RuntimeError):
    """An operation with tensors on two devices, which CUDA refuses."""


@dataclass(slots=True)
class GPU:
    """State: what happened on the pretended GPU so far.

    Attributes:
        device: to be given to code under test.
        memory_bytes: how much fits; more is `torch.OutOfMemoryError`.
        failure: what its operations raise, once it has failed.
        num_waits: operations for whose result the CPU waits: a number, a copy to the CPU.
        bytes_now: that tensors hold on it.
        peak_bytes: the most that they held at one time.
        mixes: messages of all `MixedDevices`, those included that a library has caught.
    """

    device: torch.device
    memory_bytes: int = 80 * 2**30
    failure: Exception | None = None
    num_waits: int = 0
    bytes_now: int = 0
    peak_bytes: int = 0
    mixes: list[str] = field(default_factory=list)
    _holders: Counter[int] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.RLock)

    def hold(self, owner: "OnGPU") -> None:
        """Count the storage of a tensor as long as any tensor uses it."""
        storage = owner.held.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        with self._lock:
            if not self._holders[key]:
                if self.bytes_now + num_bytes > self.memory_bytes:
                    raise torch.OutOfMemoryError(
                        f"out of memory. Tried to allocate {num_bytes} bytes"
                    )
                self.bytes_now += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.bytes_now)
            self._holders[key] += 1
        weakref.finalize(owner, self._release, key, num_bytes).atexit = False

    def _release(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.bytes_now -= num_bytes


_gpu = None


def _active() -> GPU:
    assert _gpu is not None, "outside `with pretended_gpu()`"
    return _gpu


@contextmanager
def pretended_gpu() -> Iterator[GPU]:
    """The device for the time of the context; once in a process, which keeps the device
    afterwards.
    """
    global _gpu
    _setup_privateuseone_for_python_backend(NAME)
    _gpu = gpu = GPU(device=torch.device(NAME, 0))
    own = {
        "max_memory_allocated": lambda *_: gpu.peak_bytes,
        "memory_allocated": lambda *_: gpu.bytes_now,
        "memory_reserved": lambda *_: gpu.bytes_now,
        "max_memory_reserved": lambda *_: gpu.peak_bytes,
        "reset_peak_memory_stats": lambda *_: setattr(gpu, "peak_bytes", gpu.bytes_now),
        "empty_cache": lambda *_: None,
        "synchronize": lambda *_: None,
    }

    def free(*_: object) -> tuple[int, int]:
        return gpu.memory_bytes - gpu.bytes_now, gpu.memory_bytes

    with (
        patch.multiple(torch.accelerator, get_memory_info=free, **own),
        patch.multiple(torch.cuda, mem_get_info=free, **own),
        # The modes below are of one thread.
        patch.object(threading.Thread, "run", _run_with_modes),
        _Factories(),
        _Operations(),
    ):
        yield gpu


_run = threading.Thread.run


def _run_with_modes(thread: threading.Thread) -> None:
    with _Factories(), _Operations():
        _run(thread)


# --- tensors --------------------------------------------------------------------------------------


class OnGPU(Tensor):
    """A tensor of the pretended GPU; `held` has its values, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None:  # a library makes a parameter like this one
            return torch.nn.Parameter(real, requires_grad)
        made = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            layout=real.layout,
            device=_active().device,
        )
        made.held = real
        _active().hold(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({self.held})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, OnGPU):
            raise _mixed("set_data", [self, value])
        if value.shape != self.shape or value.dtype != self.dtype:
            raise NotImplementedError(
                f"data of another shape or dtype: {_described(self)} and {_described(value)}"
            )
        self.held = value.held
        _active().hold(self)

    def tolist(self) -> Any:
        _active().num_waits += 1
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {NAME} device type tensor to numpy")
        return self.held.numpy(force=True)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()


def _held(value: Any) -> Any:
    """An argument of an operation with the values in place of the tensors."""
    if isinstance(value, OnGPU):
        return value.held
    return [_held(member) for member in value] if isinstance(value, list | tuple) else value


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, which are arguments themselves or members of a list."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [member for member in value if isinstance(member, Tensor)]
    return found


# --- operations -----------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Sees operations that make a tensor of none, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Tensors that PyTorch makes of Python numbers, and moves where no operation is seen: they are
    moved here.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            place = args[1]
            place = (
                tuple(map(_as_indices, place)) if isinstance(place, tuple) else _as_indices(place)
            )
            return func(args[0], place, *args[2:])
        if func in (torch.tensor, torch.as_tensor) and _is_gpu(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _as_indices(place: Any) -> Any:
    return torch.tensor(place) if isinstance(place, list) else place


def _compute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One operation on the values, once its devices are found to fit."""
    gpu, kwargs = _active(), dict(kwargs)
    tensors = _tensors((*args, *kwargs.values()))
    here = {id(value.held): value for value in tensors if isinstance(value, OnGPU)}
    if func is _aten._to_copy.default:
        return _moved(func, args, kwargs)
    if func is _aten.is_pinned.default:
        return False
    if func in (_aten._pin_memory.default, _aten.pin_memory.default):
        if here:
            raise _mixed(str(func), tensors)
        return args[0].clone()
    asked = kwargs.get("device")
    if here and gpu.failure is not None:
        raise gpu.failure
    _check(func, args, kwargs, tensors)
    if func is _aten.copy_.default and here:
        gpu.num_waits += not isinstance(args[0], OnGPU)
    elif func in _WAITS and here:
        gpu.num_waits += 1
    if asked is not None:
        kwargs["device"] = CPU if _is_gpu(asked) else asked
    outputs = func(*map(_held, args), **{name: _held(value) for name, value in kwargs.items()})
    if not (_is_gpu(asked) or (asked is None and here and func is not _aten.copy_.default)):
        return args[0] if func is _aten.copy_.default else outputs
    if isinstance(outputs, Tensor):
        return _wrapped(outputs, here, func)
    return tree_map(lambda value: _wrapped(value, here, func), outputs)


def _wrapped(value: Any, here: Mapping[int, OnGPU], func: Any) -> Any:
    """An output as a tensor of the GPU: an argument again, where the operation is in place."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    same = here.get(id(value))
    if same is None:
        return OnGPU(value)
    # An empty `out` is made larger; its next reader gets the values all the same.
    if same.shape != value.shape and same.numel():
        raise NotImplementedError(f"{func} changes its argument's shape in place")
    return same


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`tensor.to(...)`: a copy on another device, or in another dtype."""
    source, asked = args[0], kwargs.pop("device", None)
    target = source.device if asked is None else torch.device(asked)
    kwargs.pop("non_blocking", None)
    _active().num_waits += source.device.type == NAME and target.type == "cpu"
    copy = func(_held(source), device=CPU if target.type == NAME else target, **kwargs)
    return OnGPU(copy) if target.type == NAME else copy


def _check(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]
) -> None:
    """Refuse what CUDA refuses."""
    generator = kwargs.get("generator")
    if _is_gpu(kwargs.get("device")) and generator is not None and generator.device.type == "cpu":
        raise _mixed(str(func), tensors, why="and a generator of the CPU")
    if func in _MOVES or not any(isinstance(value, OnGPU) for value in tensors):
        return
    written = [args[index] for index in _written(func) if index < len(args)]
    lists = [member for value in args if isinstance(value, list | tuple) for member in value]
    for value in tensors:
        if isinstance(value, OnGPU):
            continue
        if (
            func in _INDEXED
            and _is_in(value, args[1] or ())
            and isinstance(args[0], OnGPU)
            and not value.is_meta
        ):
            continue
        # One number on the CPU goes along with a kernel, but not into a list, and nothing is
        # written to it.
        if (
            value.device.type != "cpu"
            or value.ndim
            or _is_in(value, lists)
            or _is_in(value, written)
        ):
            raise _mixed(str(func), tensors)


@cache
def _written(func: Any) -> tuple[int, ...]:
    """Positions of arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        index
        for index, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    )


def _is_in(value: Tensor, values: Any) -> bool:
    return any(value is each for each in values)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


# --- messages -------------------------------------------------------------------------------------


def _mixed(operation: str, tensors: list[Tensor], *, why: str = "") -> MixedDevices:
    """The error, which is noted as well: a library may catch it."""
    found = " and ".join(
        [*dict.fromkeys(_described(value) for value in tensors), *[why] * bool(why)]
    )
    message = f"{operation} must have all tensors on one device; got {found}, in {_place()}"
    _active().mixes.append(message)
    return MixedDevices(message)


def _described(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device.type}".removeprefix("torch.")


def _place() -> str:
    """The line of keepmtp that called, or that called the library that did."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.removeprefix(f"{_ROOT}/")
        if path.startswith(_PACKAGES) and not frame.f_code.co_name.startswith("__torch"):
            return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "no line of keepmtp"
