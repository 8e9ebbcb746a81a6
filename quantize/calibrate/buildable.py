"""Whether a model can be calibrated here: known from its config.json and headers, before a weight
is downloaded.

In: a plan, over a folder or over headers from the Hub. Out: nothing, or the refusal that
calibration would end with. transformers' own class is built without weights, and a decoder layer of
each kind is bound to the names on disk.

Easy to get wrong: a class that exists may still not fit the checkpoint. Only binding every name
shows that.
"""

from collections import defaultdict

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
    layers: dict[int, list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        if tensor.part == "backbone" and tensor.layer is not None and tensor.fate != "drop":
            layers[tensor.layer].append(tensor)
    kinds = set[frozenset[tuple[str, tuple[int, ...]]]]()
    try:
        model = on_meta(plan)
        linear_experts(model)
        names, modules = Names.of(model), decoder_layers(model, plan)
        for index, tensors in sorted(layers.items()):
            # The first decoder layer with each set of names and shapes.
            stem = plan.view.disk_stem("backbone", index)
            kind = frozenset((tensor.name.removeprefix(stem), tensor.shape) for tensor in tensors)
            if kind not in kinds:
                kinds.add(kind)
                path_of = lambda tensor: names.in_layer(tensor.name)  # noqa: E731
                bind(modules[index], tensors, path_of, plan.source.where)
    except (RecipeError, CheckpointError) as error:
        return error
    return None
