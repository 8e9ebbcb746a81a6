"""AutoRound on one decoder layer: rounding and clipping learned by gradient, as llm-compressor's
modifier drives it.

In: the modules of a model whose weights are to be rewritten, and the layer's own inputs, batch by
batch. Out: `LayerAutoRound`, an AutoRoundModifier that leaves rounded weights and their scales in
the modules.

Each decoder layer is tuned on its own: its output with rounded weights is drawn to its output
before, for `iters` steps of signed gradient descent. What is not within a decoder layer, such as
the projection of an MTP block, is left to another modifier.

Easy to get wrong: auto-round changes the process that it runs in. It seeds every generator and
switches torch to deterministic algorithms for good; torch's are put back here, so that a resumed
run computes what a whole one does. And its scales may be negative: the largest weight of a group,
whatever its sign, gets the code -8.

Source: llm-compressor 0.14.0.1 modifiers/autoround/base.py, auto-round 0.15.1
compressors/orchestrator.py (`quantize_block`).
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.quantization.calibration import update_qparams
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ....recipes.errors import CheckpointError
from ..model.hooks import hooked_before
from .forwards import without_bars
from .work import LayerWork, observe_weights

# It logs several lines a layer.
logging.getLogger("autoround").setLevel(logging.ERROR)
# The layer's name in the model that llm-compressor wraps around it.
_WRAPPED = "model.layers.0."


@contextmanager
def autoround(model: Any, work: LayerWork) -> Iterator[None]:
    """Keeps the inputs of decoder layers while it lasts, and learns the rounding at its end.

    Args:
        model: its modules have their schemes (`work.attach`).
        work: on the layer; what is not within a decoder layer is rounded to nearest.
    """
    modifier = LayerAutoRound(**work.knobs)
    for layer, names in tuned_layers(model, work.rewritten).items():
        modules = {model.get_submodule(name): name for name in names}
        modifier._layers[model.get_submodule(layer)] = modules
    model.requires_grad_(False)
    modifier._add_temporary_names(model)
    capture = dict.fromkeys(modifier._layers, modifier.input_capture_hook)
    with hooked_before(capture, with_kwargs=True):
        yield
    # A model's name and config say which of auto-round's own models it is; a layer is none of them.
    alone = SimpleNamespace(model=SimpleNamespace(name_or_path="", config=model.config))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    gc.freeze()  # auto-round collects garbage six times a layer
    for layer in modifier._layers:
        with without_bars(), torch.random.fork_rng():
            modifier.apply_autoround(alone, [layer])
        torch.use_deterministic_algorithms(is_deterministic)
        modifier._q_input = None
    gc.unfreeze()
    modifier.post_autoround_cleanup()
    modifier._remove_temporary_names(model)
    tuned = modifier._match_autoround_targets(model)
    update_qparams([each for each in observe_weights(model, work) if each not in tuned], "weight")


def tuned_layers(model: nn.Module, modules: Sequence[str]) -> dict[str, list[str]]:
    """Decoder layer -> those of the modules that are within it; a decoder layer is an entry of the
    outermost list.
    """
    layers = {}
    for name in modules:
        parts = name.split(".")
        for end in range(1, len(parts)):
            if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
                layers.setdefault(".".join(parts[: end + 1]), []).append(name)
                break
    return layers


class LayerAutoRound(AutoRoundModifier):
    """AutoRoundModifier for the layers that are there, with inputs of any batch size.

    0.14.0.1 finds layers by their class, and modules and schemes by patterns; it takes batches of
    one.
    """

    # Decoder layer -> its modules that are tuned, with their names.
    _layers: dict[nn.Module, dict[nn.Module, str]] = PrivateAttr(default_factory=dict)

    def _is_decoding_layer(self, module: nn.Module) -> bool:
        return module in self._layers

    def _match_autoround_targets(self, model: nn.Module) -> set[nn.Module]:
        return set[nn.Module]().union(*self._layers.values())

    def _get_default_quant_scheme(self) -> Any:
        first: Any = next(module for modules in self._layers.values() for module in modules)
        return first.quantization_scheme

    def get_unquantized_layer_names(self, wrapped_model: nn.Module) -> list[str]:
        """Every other linear layer, by its whole name: a part of one would match others."""
        own = self._layers[wrapped_model]
        found = []
        for name, module in wrapped_model.named_modules():
            if isinstance(module, nn.Linear) and module not in own:
                found.append(_WRAPPED + name)
        return found

    def input_capture_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Each sequence for itself, as llm-compressor's loader has them; what all have in common is
        kept once.
        """
        given = args, dict(kwargs)
        size = next(len(x) for x in tree_leaves(given) if isinstance(x, Tensor) and x.ndim > 1)
        found = self._all_module_input.setdefault(str(module._tmp_name), [])

        def of_row(row: int, value: Any) -> Any:
            """One sequence's part of an argument, on the host; what all have is not divided."""
            if not isinstance(value, Tensor):
                return value
            value = value.detach()
            if size > 1 and value.ndim > 1 and value.shape[0] == size:
                value = value[row : row + 1].clone()
            return value.cpu()

        for row in range(size):
            one = tree_map(partial(of_row, row), given)
            if found:
                one = tree_map(_shared, one, found[0])
            found.append(one)

    def _postprocess_qparams(
        self, model: nn.Module, llmc_registered_qparams: dict[str, dict[str, Tensor]]
    ) -> None:
        for module, name in self._layers[model].items():
            if not isinstance(getattr(module, "scale", None), Tensor):
                raise CheckpointError(
                    name,
                    "AutoRound must tune every module that it is given",
                    got="a module that auto-round passed over",
                    cure="Give this module another scheme in overrides, "
                    "or another algorithm to all",
                )
        super()._postprocess_qparams(model, llmc_registered_qparams)


def _shared(value: Any, first: Any) -> Any:
    """The first sequence's tensor where this one's is equal: masks and positions are."""
    if isinstance(value, Tensor) and value.shape == first.shape and value.equal(first):
        return first
    return value
