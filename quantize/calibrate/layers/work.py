"""What is to be done to one decoder layer or MTP block: made from the plan in one place, and handed
on whole.

In: the plan, and the layer's binding. Out: a `LayerWork`: which modules are rounded and how, what a
server runs as one module, what may not change, and by which algorithm.

Easy to get wrong: names here are the model's, with the layer's path before them; `binding` has them
without it.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

from compressed_tensors.quantization import QuantizationScheme, initialize_module_for_quantization
from llmcompressor.modifiers.quantization.calibration import initialize_observer, observe
from llmcompressor.observers.fusion import FusionHandler
from torch import Tensor

from ....recipes.conventions import CACHE_LEAVES
from ....recipes.errors import CheckpointError
from ....recipes.family import HFName
from ....recipes.frozen import Raw, frozen
from ....recipes.schemes import REWRITES, SCHEMES, SWEEPS
from ...plan.plan import Plan
from ..model.binding import EXPERT, Binding, scheme_of
from ..model.hooks import modules_of


@frozen
class LayerWork:
    """The work on one layer or block.

    Attributes:
        schemes: module to be quantized -> its scheme.
        algorithm: of the recipe; it rewrites the schemes of `REWRITES[algorithm]` only.
        knobs: of the algorithm; see `Calibration.knobs`.
        fused: modules that run as one in vLLM and share global scales, those that llm-compressor
            fuses included.
        experts: modules that vLLM gives one input scale, the largest of theirs; others keep their
            own.
        frozen: modules whose bytes come from the source whatever calibration finds.
        caches: attention modules whose cache a server has in FP8 -> its scales on disk; () for
            scales of 1.
        binding: of the layer or block.
        path: its path in the model, with a dot; "" for the model itself.
    """

    schemes: Mapping[str, str]
    algorithm: str
    knobs: Raw = field(default_factory=dict)
    fused: Sequence[tuple[str, ...]] = ()
    experts: Sequence[tuple[str, ...]] = ()
    frozen: Collection[str] = ()
    caches: Mapping[str, tuple[HFName, ...]] = field(default_factory=dict)
    binding: Binding = field(default_factory=dict)
    path: str = ""

    @classmethod
    def of(cls, plan: Plan, binding: Binding, path: str = "") -> "LayerWork":
        """What a plan wants of the layer or block with this binding.

        Source of `experts`: vLLM 0.32.0 fused_moe/oracle/nvfp4.py (FlashInfer and emulation take
        the largest of the experts; CUTLASS and b12x keep one an expert, which may be the same) and
        quantization/utils/fp8_utils.py (process_fp8_input_tensor_strategy_moe, all back-ends).
        """
        frozen = set[str]()
        caches = {}
        fused: dict[object, list[str]] = defaultdict(list)
        experts: dict[object, list[str]] = defaultdict(list)
        for name, pieces in binding.items():
            module = f"{path}{name}".rpartition(".")[0]
            tensor = pieces[0].tensor
            # A rescaled expert could not be put back into its stack alone.
            if not any(
                p.tensor.calibrated or (p.tensor.may_change and p.expert is None) for p in pieces
            ):
                frozen.add(module)
            if not name.endswith("weight"):
                continue
            for piece in pieces:
                if piece.tensor.cache is not None:
                    caches[module.rpartition(".")[0]] = piece.tensor.cache
            scheme = SCHEMES.get(scheme_of(pieces[0]))
            if scheme and scheme.shares_global_scale:
                # Experts of one stack are fused expert by expert, and only gate with up.
                fused[tensor.unit, pieces[0].expert].append(module)
            expert = EXPERT.match(name)
            if scheme and expert and scheme.extra:
                experts[expert["stack"], expert["linear"] == "down_proj"].append(module)
        return cls(
            schemes=schemes_in(binding, path),
            algorithm=plan.calibration.algorithm,
            knobs=plan.calibration.knobs,
            fused=_of_several(fused),
            experts=_of_several(experts),
            frozen=frozen,
            caches=caches,
            binding=binding,
            path=path,
        )

    @property
    def rewritten(self) -> list[str]:
        """Modules whose weights the algorithm rewrites, or whose block scales it sweeps."""
        return [name for name, scheme in self.schemes.items() if scheme in REWRITES[self.algorithm]]

    @property
    def rewrites(self) -> bool:
        """Whether calibration changes weights; if not, the layer computes the same before and
        after.

        A sweep chooses scales, and rounds by them only what is written.
        """
        return self.algorithm not in SWEEPS and bool(self.rewritten)

    @property
    def scaled_caches(self) -> list[str]:
        """Attention modules whose keys and values get scales of an FP8 cache."""
        return [name for name, scales in self.caches.items() if scales]

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[HFName, Tensor]:
        """The layer's statistics, from names in the model to names on disk.

        Args:
            tensors: "<module>.<suffix>" or a parameter's own name, all under `path`.

        Raises:
            CheckpointError: the weight of a module was rewritten, and it is several tensors on
                disk.
        """
        found = {}
        for full, value in tensors.items():
            module, _, suffix = full.rpartition(".")
            if suffix in CACHE_LEAVES:
                found |= {scale: value for scale in self.caches[module] if scale.endswith(suffix)}
                continue
            own = self.binding.get(full.removeprefix(self.path))
            if own and not scheme_of(own[0]):
                found[own[0].tensor.name] = value
                continue
            pieces = self.binding[f"{module.removeprefix(self.path)}.weight"]
            if len(pieces) > 1 and not suffix.startswith("input_"):
                raise CheckpointError(
                    pieces[0].tensor.name,
                    "weights that transformers joins cannot be rewritten",
                    got=module,
                    cure="Set calibration.algorithm: minmax, or override this module",
                )
            found |= {HFName(f"{piece.module}.{suffix}"): value for piece in pieces}
        return found


def schemes_in(binding: Binding, path: str) -> dict[str, str]:
    """Module in the model -> scheme, for the linears under `path` that this run quantizes. No
    observer looks at a table.
    """
    return {
        f"{path}{name.rpartition('.')[0]}": scheme_of(pieces[0])
        for name, pieces in binding.items()
        if name.endswith("weight") and scheme_of(pieces[0]) and pieces[0].tensor.role != "table"
    }


def _of_several(groups: Mapping[object, list[str]]) -> list[tuple[str, ...]]:
    return [tuple(members) for members in groups.values() if len(members) > 1]


def attach(model: Any, work: LayerWork) -> None:
    """Give the modules that are quantized their schemes, and scales yet to be filled: those of
    inputs, and of weights that are rewritten.
    """
    for name, scheme in work.schemes.items():
        module: Any = model.get_submodule(name)
        group = SCHEMES[scheme].config_group()
        # Nobody reads a scale of other weights, and in groups of 16 they take a tenth of a layer.
        if scheme not in REWRITES[work.algorithm]:
            group["weights"] = None
        initialize_module_for_quantization(module, QuantizationScheme(targets=[], **group))
        # compressed-tensors 0.19.0 puts a function before it that asks at every call what to round.
        # Nothing is while a layer is calibrated, and 1,536 of them a batch take as long as it does.
        del module.forward


def observe_weights(model: Any, work: LayerWork) -> list[Any]:
    """Let observers look at the weights that are rewritten, fused ones together; returns these."""
    modules = modules_of(model, work.rewritten)
    for module in modules.values():
        initialize_observer(module, "weight")
    for group in work.fused:
        if group[0] in modules:
            FusionHandler.fuse((modules[name].weight_observer, modules[name]) for name in group)
    observe(modules.values(), "weight")
    return [*modules.values()]
