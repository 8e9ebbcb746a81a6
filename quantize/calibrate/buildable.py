"""Whether a model can be calibrated here: known from its config.json and headers, before a weight
is downloaded.

In: a plan, over a folder or over headers from the Hub. Out: nothing, or the refusal that
calibration would end with. transformers' own class is built without weights, and a decoder layer of
each kind is bound to the names on disk.

Easy to get wrong: a class that exists may still not fit the checkpoint. Only binding every name
shows that.
"""

from ...recipes.errors import CheckpointError, RecipeError
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan
from .model.binding import Names, bind
from .model.experts import linear_experts
from .model.skeleton import decoder_layers, on_meta


def backbone_refusal(plan: Plan) -> RecipeError | CheckpointError | None:
    """Why the backbone cannot be calibrated; None if it can, or if only the checkpoint's own code
    knows.
    """
    calibration = plan.recipe.calibration
    if (
        plan.source.folder is None
        and calibration is not None
        and calibration.model_code == "checkpoint"
    ):
        return None
    try:
        model = on_meta(plan)
        linear_experts(model)
        names, layers = Names.of(model), decoder_layers(model, plan)
        for index, tensors in _a_layer_of_each_kind(plan).items():
            bind(
                layers[index],
                tensors,
                lambda tensor: names.in_layer(tensor.name),
                plan.source.where,
            )
    except (RecipeError, CheckpointError) as error:
        return error
    return None


def _a_layer_of_each_kind(plan: Plan) -> dict[int, list[TensorPlan]]:
    """The first decoder layer with each set of names and shapes."""
    layers: dict[int, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        if tensor.part == "backbone" and tensor.layer is not None and tensor.fate != "drop":
            layers.setdefault(tensor.layer, []).append(tensor)
    kinds: dict[frozenset[tuple[str, tuple[int, ...]]], int] = {}
    for index in sorted(layers):
        stem = plan.view.disk_stem("backbone", index)
        kinds.setdefault(
            frozenset((t.name.removeprefix(stem), t.shape) for t in layers[index]), index
        )
    return {index: layers[index] for index in kinds.values()}
