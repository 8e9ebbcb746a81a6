"""Stubs for the Python packages and compiled operators of vLLM's CUDA wheel, for a machine without
a GPU.

In: nothing, or a compute capability. Out: importable packages that accept every call, and operators
that answer what vLLM asks while it builds and loads a model. The operators refuse to compute.

Easy to get wrong: a package that looks installed changes which kernel vLLM chooses. PACKAGES is
what the CUDA wheels of vLLM 0.31.0 to 0.33.0 hold or require, and no more: without `humming`, vLLM
would choose Marlin on sm90. transformers also asks importlib.metadata, where a stub is absent.
Operators may appear only after the import of `vllm._custom_ops`, because vLLM registers a fake
implementation for each operator that it finds.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

PACKAGES = (
    "flashinfer",
    "cutlass",
    "cuda",
    "quack",
    "tilelang",
    "tokenspeed_mla",
    "torchvision",
    "triton_kernels",
    "humming",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._flashkda_C",
    "vllm._deepselect_C",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn.cute",
    "vllm.vllm_flash_attn.layers",
    "vllm.vllm_flash_attn.ops",
    "vllm.third_party.deep_gemm",
    "vllm.third_party.triton_kernels",
    "vllm.third_party.fmha_sm100",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.third_party.tml_fa4",
)
OP_NAMESPACES = frozenset(
    {
        "_C",
        "_moe_C",
        "_C_cache_ops",
        "_C_custom_ar",
        "_vllm_fa2_C",
        "_vllm_fa3_C",
        "_C_stable_libtorch",
        "_moe_C_stable_libtorch",
        "_qutlass_C",
        "_flashmla_C",
        "_flashmla_extension_C",
        "_flashkda_C",
        "deep_select",
    }
)


class Calls:
    """How often a stub gave an answer: an exception after such an answer says nothing about the
    checkpoint.
    """

    count = 0


def install_packages() -> None:
    """Make every submodule of PACKAGES importable; an installed package comes first, but for vLLM's
    own: its Python files may be there alone, and `deep_gemm` asserts one *.so.
    """
    of_vllm = [name for name in PACKAGES if name.startswith("vllm.")]
    sys.meta_path.insert(0, _Finder(of_vllm))
    sys.meta_path.append(_Finder(PACKAGES))


def install_operators(capability: int) -> Callable[[], None]:
    """Let unknown `*_support*` operators answer for `capability` (major * 10 + minor).

    Returns: a function that lets all operators appear. Call it after the import of
    `vllm._custom_ops`.
    """
    original = torch._ops._OpNamespace.__getattr__
    allowed = {"all": False}

    def get(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            known = self.name in OP_NAMESPACES and not name.startswith("__")
            if known and (allowed["all"] or "support" in name):
                return _Operator(f"{self.name}.{name}", capability)
            raise

    torch._ops._OpNamespace.__getattr__ = get  # type: ignore[method-assign]
    return lambda: allowed.update(all=True)


def refuse_dunder(name: str) -> None:
    """An attribute of Python's own must stay missing: a stub would be misread (iteration, copying,
    annotations).
    """
    if name.startswith("__"):
        raise AttributeError(name)


class NotOnMeta(RuntimeError):
    """vLLM called a compiled operator, and nobody can know its result without a GPU."""


class _Operator:
    """One operator of the CUDA build."""

    def __init__(self, name: str, capability: int):
        self.__name__ = self.name = name
        self._capability = capability

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Calls.count += 1
        if "support" in self.name:
            return _supports(self.name, self._capability)
        if "get_cuda_view_from_cpu_tensor" in self.name:
            return args[0]
        if "get_workspace_size" in self.name:
            return 1
        if self.name.endswith(("gptq_marlin_repack", "awq_marlin_repack")):
            size_k, size_n, bits = [value for value in args if type(value) is int][:3]
            return torch.empty(
                size_k // 16, size_n * 16 * bits // 32, dtype=torch.int32, device="meta"
            )
        raise NotOnMeta(f"CUDA operator {self.name} called")

    def __getattr__(self, name: str) -> "_Operator":
        refuse_dunder(name)
        return _Operator(f"{self.name}.{name}", self._capability)


def _supports(name: str, capability: int) -> bool:
    """What vLLM's compiled support queries answer on a GPU of this capability, by csrc of vLLM
    0.31.0 to 0.33.0 (CUDA 13).
    """
    if "supports_fp4" in name:
        return 100 <= capability < 130
    if "mxfp4_experts_quant_supported" in name:
        return 100 <= capability < 120  # mxfp4_experts_quant.cu
    if "group_gemm_supported" in name:
        return 90 <= capability < 110
    if "sparse_scaled_mm_supported" in name:
        return 90 <= capability < 100
    if "supports_block_fp8" in name:
        return capability >= 90
    if "supports_fp8" in name:
        return capability >= 89
    return True  # permuting tokens of experts: any GPU, from CUDA 12 on


class _StubMeta(type):
    """A class that accepts everything: attribute, call, index, union in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        refuse_dunder(name)
        return _stub(f"{cls.__qualname__}.{name}")

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class _Stub(metaclass=_StubMeta):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        Calls.count += 1
        # Used as a decorator, a stub gives the function back; any other call makes an instance.
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __init_subclass__(cls, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        refuse_dunder(name)
        return _stub(f"{type(self).__qualname__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Calls.count += 1
        if len(args) == 1 and callable(args[0]):
            return args[0]
        return self

    def __getitem__(self, item: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> bool:
        return False


def _stub(name: str) -> Any:
    return _StubMeta(
        name.rpartition(".")[2], (_Stub,), {"__qualname__": name, "__module__": "stub"}
    )


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0.0"
        refuse_dunder(name)
        full = f"{self.__name__}.{name}"
        value = sys.modules.get(full) or _stub(full)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of some packages."""

    def __init__(self, packages: Iterable[str]):
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        for package in self._packages:
            if f"{fullname}.".startswith(f"{package}."):
                return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
