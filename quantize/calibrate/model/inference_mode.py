"""Model code that computes under `torch.inference_mode`: found before calibration, then refused or unwrapped.

In: a model, and one batch it can be called with. Out: `guard`, a context in which no forward of the model makes
inference tensors; CheckpointError where that cannot be had.

Easy to get wrong: look at the class, through everything that a forward wraps. Calibration replaces `module.forward` on
each instance, and llm-compressor's own warning, which looks at the instance, is silent in the pipeline that crashes.
Weights that are loaded inside such a forward are inference tensors, and GPTQ's write to them fails hours later, at the
first decorated layer: "Inplace update to inference tensor outside InferenceMode" (llm-compressor #2745). A decorator is
visible on the class; `with torch.inference_mode()` inside a forward is visible only when the forward runs.

Source: torch 2.13 utils/_contextlib.py (`context_decorator`: the context factory is a closure cell), compressed-tensors
0.19.0 offload/cache/base.py (`__setitem__`, the write that fails) and offload/module.py (the replaced forward),
llm-compressor 0.14.0.1 utils/transformers.py (`warn_inference_mode_forwards`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ....recipes.errors import CheckpointError
from .hooks import hooked

_RULE = (
    "must not compute under torch.inference_mode: calibration cannot write the weights that were loaded in it "
    "(llm-compressor #2745)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceForward:
    """A class whose forward computes under inference mode.

    Attributes:
        modules: where in the model; "" is the model itself.
        cls: file and class, "modeling_mimo.MiMoDecoderLayer".
    """

    modules: tuple[str, ...]
    cls: str


def decorated_forwards(model: nn.Module) -> list[InferenceForward]:
    """Each class in the model whose forward has @torch.inference_mode around it; other wrappers are harmless.

    A forward that a subclass replaces is looked at too if the subclass may call it: `super().forward(...)`.
    """
    names: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        if any(_inference_cells(module)):
            names.setdefault(type(module), []).append(name)
    return _findings(names)


@contextmanager
def unwrap_forwards(model: nn.Module) -> Iterator[None]:
    """The model without inference mode around its forwards, until the context ends; `no_grad` takes its place.

    The decorator's own closure is changed, because only that reaches every holder of the function: subclasses, other
    decorators around it, the forwards that llm-compressor puts on instances, before or after this. A forward on the
    instance would not: `super().forward` and llm-compressor's wrapper look it up on the class (checked against torch
    2.13, compressed-tensors 0.19.0 offload/module.py). Other models of the same classes are unwrapped for as long.
    """
    cells = {id(cell): cell for module in model.modules() for cell in _inference_cells(module)}
    before = {key: cell.cell_contents for key, cell in cells.items()}
    for cell in cells.values():
        # Either the context itself, entered again and again, or what makes one for each call.
        is_context = isinstance(cell.cell_contents, torch.inference_mode)
        cell.cell_contents = torch.no_grad() if is_context else torch.no_grad
    try:
        yield
    finally:
        for key, cell in cells.items():
            cell.cell_contents = before[key]


def probe(model: nn.Module, batch: Mapping[str, Any]) -> list[InferenceForward]:
    """Run the model once and name the modules in whose forward inference mode begins, in the order met.

    Args:
        model: with weights for whatever the batch reaches.
        batch: the model's keyword arguments, [1, S] is enough.

    Returns: a finding for each class; empty if all tensors are ordinary. A module that only holds an inference tensor
        (a table built under inference mode) counts as one.
    """
    finder = _InferenceModeFinder(model)
    with torch.no_grad(), finder.hooked(), finder:
        model(**batch)
    return _findings(finder.begun)


@contextmanager
def guard(
    model: nn.Module, batch: Mapping[str, Any] | None, *, policy: Literal["refuse", "unwrap"]
) -> Iterator[list[InferenceForward]]:
    """The context to calibrate in: in it, no forward of the model computes under inference mode.

    Args:
        model: as it will be calibrated.
        batch: one sample for `probe`; None looks at decorators only, which needs no weights.
        policy: the recipe's `calibration.decorated_forward`. What begins inside a forward is refused by either.

    Yields: the decorators that are unwrapped meanwhile.

    Raises: CheckpointError naming classes and modules.
    """
    decorated = decorated_forwards(model)
    if decorated and policy == "refuse":
        cure = f"Set calibration.decorated_forward: unwrap, or take the decorator out of {_files(decorated)}"
        raise CheckpointError(
            _where(decorated), _RULE, got=f"@torch.inference_mode at {_modules(decorated)}", cure=cure
        )
    with unwrap_forwards(model):
        within = probe(model, batch) if batch is not None else []
        if within:
            cure = (
                f"No setting takes this out: write torch.no_grad() instead in {_files(within)}, or set "
                "calibration.model_code: transformers if transformers has this architecture"
            )
            got = f"inference mode begun inside forward at {_modules(within)}"
            raise CheckpointError(_where(within), _RULE, got=got, cure=cure)
        yield decorated


class _InferenceModeFinder(TorchFunctionMode):
    """State: the modules being run, and those that began inference mode.

    Every call of a torch function is seen, so a `with` block is found even if what leaves it is cloned, and a module's
    parameters are found however they are used.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.begun: dict[type, list[str]] = {}
        self._running: list[tuple[str, nn.Module, bool]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks on every module that note which are running, and whether inference mode was on when they began."""

        def enter(name: str) -> Callable[..., None]:
            return lambda module, _: self._running.append((name, module, torch.is_inference_mode_enabled()))

        def leave(*_: Any) -> None:
            self._running.pop()

        modules = dict(self.model.named_modules())
        hooks = [module.register_forward_pre_hook(enter(name), prepend=True) for name, module in modules.items()]
        hooks += [module.register_forward_hook(leave, always_call=True) for module in modules.values()]
        with hooked(hooks):
            yield

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Once a module is named, inference tensors may come from it; before that, one is the running module's own.
        leaves = [] if self.begun else pytree.tree_leaves((args, kwargs, result))
        is_any = any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves)
        if torch.is_inference_mode_enabled() or is_any:
            outside = [(name, module) for name, module, is_on in self._running if not is_on]
            name, module = outside[-1] if outside else ("", self.model)
            where = self.begun.setdefault(type(module), [])
            if name not in where:
                where.append(name)
        return result


def _forwards(module: nn.Module) -> list[object]:
    """What may run when the module is called: the instance's forward, the class's, and those it may call by super."""
    found: list[object] = [vars(module)["forward"]] if "forward" in vars(module) else []
    for cls in type(module).__mro__:
        if "forward" in vars(cls):
            found.append(vars(cls)["forward"])
            # super().forward and Parent.forward are both an attribute of that name.
            if not any("forward" in layer.__code__.co_names for layer in _layers(found[-1])):
                break
    return found


def _layers(forward: object) -> Iterator[FunctionType]:
    """A function and all it wraps, by `__wrapped__` or by having it in its closure, outermost first."""
    seen: set[int] = set()
    queue = deque([forward])
    while queue:
        layer = queue.popleft()
        layer = getattr(layer, "__func__", layer)
        if isinstance(layer, FunctionType) and id(layer) not in seen:
            seen.add(id(layer))
            yield layer
            queue += [getattr(layer, "__wrapped__", None), *(cell.cell_contents for cell in _cells(layer))]


def _cells(function: FunctionType) -> list[CellType]:
    filled = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # for an empty cell
            cell.cell_contents  # noqa: B018
            filled.append(cell)
    return filled


def _inference_cells(module: nn.Module) -> Iterator[CellType]:
    """The closure cells, in a module's forwards and all they wrap, from which inference mode is entered."""
    for layer in (layer for forward in _forwards(module) for layer in _layers(forward)):
        for cell in _cells(layer):
            # torch's decorator holds `clone` of the context that was written in the source.
            context = getattr(cell.cell_contents, "__self__", cell.cell_contents)
            if context is torch.inference_mode or (isinstance(context, torch.inference_mode) and context.mode):
                yield cell


def _findings(names: Mapping[type, Sequence[str]]) -> list[InferenceForward]:
    return [
        InferenceForward(modules=tuple(where), cls=f"{cls.__module__.rpartition('.')[2]}.{cls.__qualname__}")
        for cls, where in names.items()
    ]


def _where(findings: list[InferenceForward]) -> str:
    return ", ".join(f"{finding.cls}.forward" for finding in findings)


def _modules(findings: list[InferenceForward]) -> str:
    names = [name or "the model itself" for finding in findings for name in finding.modules]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _files(findings: list[InferenceForward]) -> str:
    return ", ".join(sorted({finding.cls.partition(".")[0] + ".py" for finding in findings}))
