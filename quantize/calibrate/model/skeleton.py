"""The backbone as transformers builds it, with the weights of one decoder layer at a time.

In: a plan over a local source. Out: a `Skeleton`: the model's own class on the meta device, whose
decoder layers are stand-ins without weights. One at a time is made real; the stand-in before it
returns the hidden states that the layer before it computed, so the model's own forward computes
everything around the layer: embedding, rotary embedding, masks, position ids.

Easy to get wrong: llm-compressor's pipelines compute under eager attention. Any other
implementation rounds elsewhere, and GPTQ then rounds other weights up.

Source: transformers 5.17 modeling_utils.py (`_init_weights`, `_keep_in_fp32_modules`),
llm-compressor 0.14.0.1 utils/helpers.py (`calibration_forward_context`, `use_eager_attention`).
"""

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from ....checkpoints.source import read
from ....recipes.errors import CheckpointError, RecipeError, counted
from ....recipes.family import HFName
from ....recipes.frozen import Shape, frozen, without
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan
from .binding import Binding, Names, bind, fill, linear_experts
from .hooks import hooked
from .states import LayerState

_CHUNK_BYTES = 2**24
# Keys of config.json that say which Python builds the model.
_NAMES_OF_CLASSES = frozenset({"model_type", "architectures", "auto_map"})


@frozen
class Batch:
    """Some sequences as inputs of a decoder layer.

    Attributes:
        ids: [B, S] int64.
        state: what the layer before returned; None for the first layer.
        first: the number of its first row in the data.
    """

    ids: Tensor
    state: LayerState | None = None
    first: int = 0


class StandIn(nn.Module):
    """A decoder layer without weights: it returns the states it was given, or its own input.

    Attributes:
        answer: what the layer before has returned.

    Args:
        real: the layer that it replaces.
        like: a list of one number: how many values a layer of this model returns, once one has run.
    """

    def __init__(self, real: nn.Module, like: list[int]):
        super().__init__()
        # In a tuple it is no submodule: its parameters, all meta, must not be found among the
        # model's.
        self._held = (real,)
        self._like = like
        self.answer: LayerState | None = None

    def __getattr__(self, name: str) -> Any:
        """Models read attributes of their layers (`attention_type`) to choose masks."""
        return getattr(self._held[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = self.answer
        if answer is None:  # nobody reads what the first layers return
            answer = (hidden_states, *[None] * (self._like[0] - 1))
        if len(answer) == 1:
            return answer[0]
        return answer


class NoHead(nn.Identity):
    """In place of the head while no logits are needed."""

    weight = torch.empty(0, dtype=torch.bfloat16)  # some classes read its dtype


class Skeleton:
    """State: the model's class, and which decoder layer is real.

    Attributes:
        model: all but the decoder layers and the head have their weights.
        device: where weights go.
        served: values that a server has of packed tables, by name (layers/tables.py).
        given: what calibration found of them, in the names of the finished checkpoint.
    """

    def __init__(self, plan: Plan, *, device: torch.device):
        """Build the class and load everything around the decoder layers.

        Raises:
            RecipeError: transformers has no class for this architecture.
            CheckpointError: names or shapes on disk are not those of the class.
        """
        self.plan = plan
        self.device = device
        self.served = dict[HFName, Tensor]()
        self.given: Mapping[HFName, Tensor] = {}
        self.model = on_meta(plan)
        linear_experts(self.model)
        self.names = Names.of(self.model)
        self._layers = decoder_layers(self.model, plan)
        self.layer_path = path_in(self.model, self._layers)
        self._real = list(self._layers)
        self._like = [1]
        for index, layer in enumerate(self._real):
            self._layers[index] = StandIn(layer, self._like)
        self._head: Any = self.model.get_output_embeddings()
        self.model.set_output_embeddings(NoHead())
        self._fill_top()

    def __len__(self) -> int:
        """Number of decoder layers."""
        return len(self._real)

    def tensors_of(self, index: int) -> list[TensorPlan]:
        """What decoder layer `index` is on disk."""
        return _of_layers(self.plan)[index]

    def bind_layer(self, index: int) -> Binding:
        """What fills decoder layer `index`."""
        layer = self._real[index]
        where = self.plan.source.where
        return bind(layer, self.tensors_of(index), self.names.in_layer, where)

    @contextmanager
    def layer(self, index: int, then: int = -1) -> Iterator[nn.Module]:
        """Decoder layer `index` in its place, with its weights; they are gone afterwards.

        Args:
            index: of the layer.
            then: the layer that is wanted after it, whose files are read meanwhile; -1 for none.
        """
        layer = self._real[index]
        self.fill(layer, self.bind_layer(index))
        self._layers[index] = layer

        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            """A stand-in returns as many values as a layer: some layers return more than hidden
            states.
            """
            self._like[0] = 1
            if isinstance(output, tuple):
                self._like[0] = len(output)

        try:
            with (
                hooked([layer.register_forward_hook(note)]),
                reading_ahead(self.plan, self.tensors_of(then)),
            ):
                yield layer
        finally:
            layer.to("meta")
            self._layers[index] = StandIn(layer, self._like)

    def fill(self, module: nn.Module, binding: Binding) -> None:
        """Weights for a module of this model or of one built like it, and its computed buffers."""
        fill(module, binding, self.plan, device=self.device, dtype_of=self._dtype_of)
        # Buffers that are no part of a checkpoint (rotary frequencies), as `from_pretrained` makes
        # them.
        for part in module.modules():
            is_missing = False
            for name in part._non_persistent_buffers_set:
                buffer = getattr(part, name)
                if buffer.is_meta:
                    setattr(part, name, torch.empty_like(buffer, device=self.device))
                    is_missing = True
            if is_missing:
                self.model._init_weights(part)

    @contextmanager
    def head(self) -> Iterator[None]:
        """The model with its head; without it, "logits" are what the head would have multiplied."""
        tensors = _top(self.plan, "head")
        if not tensors:  # without a head of its own it is tied
            tensors = _top(self.plan, "embedding")

        def path_of(name: HFName) -> tuple[str, int]:
            return name.rpartition(".")[2], 0

        self.fill(self._head, bind(self._head, tensors, path_of, self.plan.source.where))
        self.model.set_output_embeddings(self._head)
        try:
            yield
        finally:
            self.model.set_output_embeddings(NoHead())
            self._head.to("meta")
            for tensor in tensors:
                self.served.pop(tensor.name, None)

    @contextmanager
    def fed(self, index: int, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """The model's arguments for a batch as input of layer `index` (the number of layers: after
        the last one). Inside, the stand-in before that layer returns the batch's states.
        """
        before: Any = self._layers[index - 1]  # of the first layer one that nobody reads
        if index:
            assert batch.state, f"layer {index} needs the states that the layer before it left"
            self._like[0] = len(batch.state)  # a resumed run has not seen a layer return it
            before.answer = batch.state
        yield {"input_ids": batch.ids.to(self.device)}
        # Not in a `finally`: who takes the first batch of an iteration and drops the rest
        # (smoothing.py) goes on to compute with it.
        if index:
            before.answer = None

    def _fill_top(self) -> None:
        """Loads the language model without its layers and its head; a vision tower stays without
        weights.
        """
        decoder = self.model.get_decoder()
        view = self.plan.view
        inside = f"{path_in(self.model, decoder)}."
        # A checkpoint's own code may keep its MTP block in here.
        for path, _ in [*decoder.named_parameters()]:
            name = path.partition(".")[0]
            if view.is_mtp(HFName(f"{inside}{path}".removeprefix("."))):
                setattr(decoder, name, nn.ModuleList())
        state = decoder.state_dict()
        stem = view.layout.layers.disk.partition("layers.")[0]

        def path_of(name: HFName) -> tuple[str, int]:
            path, turn = self.names.rename(name)
            if path.removeprefix(inside) not in state:
                path, turn = self.names.rename(name.removeprefix(stem))
            return path.removeprefix(inside), turn

        tensors = [tensor for tensor in _top(self.plan) if tensor.role != "head"]
        self.fill(decoder, bind(decoder, tensors, path_of, self.plan.source.where))

    def _dtype_of(self, name: str, empty: Tensor, value: Tensor) -> torch.dtype:
        """The dtype transformers computes in: that of the parameter it made, but for what the class
        keeps in F32.

        DeepSeek-V4's class keeps its norms in F32 too, whose outputs its own BF16 linears then
        refuse: what is BF16 on disk stays so.
        """
        if value.dtype == torch.float32:
            for pattern in self.model._keep_in_fp32_modules_strict or ():
                if re.search(pattern, name):
                    return torch.float32
        return empty.dtype


def path_in(model: nn.Module, wanted: nn.Module) -> str:
    """The path of a module in a model; "" for the model itself."""
    for path, module in model.named_modules():
        if module is wanted:
            return path
    raise AssertionError(f"{type(wanted).__name__} is no part of {type(model).__name__}")


def _of_layers(plan: Plan) -> dict[int, list[TensorPlan]]:
    """What each decoder layer is on disk."""
    layers: dict[int, list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        if tensor.part != "backbone" or tensor.layer is None:
            continue
        if tensor.fate != "drop" and tensor.calibrated != "cache":
            layers[tensor.layer].append(tensor)
    return layers


def _top(plan: Plan, role: str = "") -> list[TensorPlan]:
    """Tensors of the language model outside decoder layers and MTP block; of one role, or all."""
    found = []
    for tensor in plan.tensors:
        if tensor.part != "backbone" or tensor.layer is not None:
            continue
        if tensor.fate in ("drop", "add") or tensor.role == "vision":
            continue
        if role in ("", tensor.role) and plan.view.place(tensor.name) is not None:
            found.append(tensor)
    return found


def on_meta(plan: Plan) -> PreTrainedModel:
    """The language model's class, without weights.

    Raises: RecipeError: it cannot be calibrated, or transformers has no class for it.
    """
    calibration = plan.recipe.calibration
    family = plan.view.family
    is_foreign = calibration is not None and calibration.model_code == "checkpoint"
    cure = f"Use a data-free scheme (`keepmtp ls models`: {plan.recipe.model})"
    if family.no_backbone and not is_foreign:
        raise RecipeError(
            plan.source.where,
            "calibration must be able to run the backbone layer by layer",
            got=f"{family.model_type}: {family.no_backbone}",
            cure=cure,
        )
    try:
        model = _from_config(plan, is_foreign=is_foreign)
    except (ValueError, KeyError, ImportError, AttributeError, StrictDataclassError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecipeError(
            plan.source.where,
            "calibration needs a class in transformers for this architecture",
            got=first_line,
            cure=f"{cure}, or calibration.model_code: checkpoint if the checkpoint brings its own",
        ) from error
    return model.eval()


def _from_config(plan: Plan, *, is_foreign: bool) -> PreTrainedModel:
    """The model of config.json, under another model_type where the family's layers are those of a
    class that transformers has.
    """
    values = deepcopy(dict(plan.source.config))  # transformers writes into parts of it
    auto: Any = AutoModelForCausalLM
    if is_foreign:
        config = AutoConfig.from_pretrained(str(plan.source.folder), trust_remote_code=True)
    else:
        model_type = plan.view.family.built_as or values["model_type"]
        config = None
        if model_type in CONFIG_MAPPING:
            own = without(values, *_NAMES_OF_CLASSES)
            config = CONFIG_MAPPING[model_type].from_dict(own)
        if type(config) not in auto._model_mapping:
            auto = AutoModelForImageTextToText
        if type(config) not in auto._model_mapping:
            code = ""
            if "auto_map" in values:
                code = ", only Python of the checkpoint's own"
            raise ValueError(f"no class for model_type {model_type!r} in transformers{code}")
    assert config is not None
    for own in (config, config.get_text_config()):  # the weights will come dequantized
        for key in ("quantization_config", "compression_config"):
            if hasattr(own, key):
                delattr(own, key)
    with torch.device("meta"):
        return auto.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="eager",
            trust_remote_code=is_foreign,
        )


def decoder_layers(model: PreTrainedModel, plan: Plan) -> nn.ModuleList:
    """The list of decoder layers."""
    count = plan.view.num_layers
    for module in model.modules():
        if count and isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise CheckpointError(
        plan.source.where,
        f"calibration needs a backbone, and its decoder layers in {type(model).__name__}",
        got=f"no list of {counted(count, 'layer')}",
        cure="Use a data-free scheme (`keepmtp ls models`)",
    )


def backbone_refusal(plan: Plan) -> RecipeError | CheckpointError | None:
    """Why the backbone cannot be calibrated, by its config.json and headers alone; None if it can,
    or if only the checkpoint's own code knows.

    A class that exists may still not fit the checkpoint: a decoder layer of each kind is bound to
    the names on disk.
    """
    calibration = plan.recipe.calibration
    if (
        plan.source.folder is None
        and calibration is not None
        and calibration.model_code == "checkpoint"
    ):
        return None
    kinds = set[frozenset[tuple[str, Shape]]]()
    try:
        model = on_meta(plan)
        linear_experts(model)
        names = Names.of(model)
        modules = decoder_layers(model, plan)
        for index, tensors in sorted(_of_layers(plan).items()):
            # The first decoder layer with each set of names and shapes.
            stem = plan.view.disk_stem("backbone", index)
            kind = frozenset((tensor.name.removeprefix(stem), tensor.shape) for tensor in tensors)
            if kind not in kinds:
                kinds.add(kind)
                bind(modules[index], tensors, names.in_layer, plan.source.where)
    except (RecipeError, CheckpointError) as error:
        return error
    return None


@contextmanager
def reading_ahead(plan: Plan, tensors: Iterable[TensorPlan]) -> Iterator[None]:
    """A thread reads these, until they are read or the context ends."""
    entries = [plan.entries[name] for tensor in tensors for name in tensor.inputs]
    stop = threading.Event()

    def read_all() -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for entry in entries:
            for offset in range(0, entry.num_bytes, _CHUNK_BYTES):
                if stop.is_set():
                    return
                read(plan.source, entry, buffer[: entry.num_bytes - offset], offset=offset)

    with ThreadPoolExecutor(1, "read-ahead") as pool:
        pool.submit(read_all)  # what fails here, fails again when it is needed
        try:
            yield
        finally:
            stop.set()
