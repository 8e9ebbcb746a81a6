"""What graft refuses of the two checkpoints: another model, and a release that is known to have no
trained block.

In: their headers. Out: nothing, or a refusal that names the tensor.

Easy to get wrong: a checkpoint whose block is missing cannot be compared by its block. What
quantizing never changes is
compared: the family, the keys of config.json that give widths and depth, and the logical shape of
every weight that both have.
"""

from collections.abc import Mapping

from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import Source
from ..checkpoints.stored import stored_weights
from ..quantize.plan.plan import Plan
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.families import find_view
from ..recipes.family import HFName

# Releases whose config.json promises an MTP block that nobody can draft with, by model_type.
UNTRAINED: Mapping[str, str] = {
    "minimax_m2": (
        "MiniMax-M2 was published with garbage in its MTP weights (MiniMax-M2 #47), later ones "
        "without any"
    ),
}
_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts",
)
_FORMS_WITH_SHAPE = (
    "plain",
    "fp8_block",
    "fp8_channel",
    "fp8_tensor",
    "mxfp4",
    "nvfp4",
    "nvfp4_modelopt",
    "int8",
)
_OTHER_SOURCE = "Name the release that the checkpoint was made from"


def refuse_untrained_release(source: Source) -> None:
    """Refuse a release that is known to have no trained MTP block.

    Raises:
        CheckpointError: says which one, and who found it.
    """
    model_type = str(source.config.get("model_type", ""))
    if words := UNTRAINED.get(model_type):
        rule = "the release must have published a trained MTP block"
        cure = "Serve it without method=mtp; speculators trains drafts for such models"
        raise CheckpointError(source.where, rule, got=f"{model_type}: {words}", cure=cure)


def refuse_another_model(quantized: Source, source: Source) -> None:
    """Refuse a release that the checkpoint was not made from.

    Raises:
        RecipeError: another family, or another width or depth in config.json.
        CheckpointError: names a tensor with another shape.
    """
    ours, theirs = (
        find_view(each.config, each.where, each.entries) for each in (quantized, source)
    )
    rule = f"must be what {quantized.where} was made from"
    if ours.family is not theirs.family:
        got = f"a {theirs.family.model_type}, not a {ours.family.model_type}"
        raise RecipeError(source.where, rule, got=got, cure=_OTHER_SOURCE)
    for key in _KEYS:
        have, want = theirs.text_config.get(key), ours.text_config.get(key)
        if have is not None and want is not None and have != want:
            raise RecipeError(
                source.where, f"{rule}, whose {key} is {want}", got=have, cure=_OTHER_SOURCE
            )
    shapes = _shapes_of(source)
    for name, shape in _shapes_of(quantized).items():
        if name in shapes and shapes[name] != shape and not ours.is_mtp(name):
            got = f"{list(shape)} in {quantized.where} and {list(shapes[name])} in {source.where}"
            raise CheckpointError(name, "both must have one shape", got=got, cure=_OTHER_SOURCE)


def block_entries(plan: Plan) -> list[Entry]:
    """The tensors of the release that the block is made from, in the order of the files."""
    names = {name for tensor in plan.tensors for name in tensor.inputs}
    return sorted(
        (plan.entries[name] for name in names), key=lambda entry: (entry.file, entry.start)
    )


def _shapes_of(opened: Source) -> dict[HFName, tuple[int, ...]]:
    """The logical shape of every weight in a form that says it."""
    weights, others = stored_weights(opened.entries.values())
    found = {
        name: weight.shape for name, weight in weights.items() if weight.form in _FORMS_WITH_SHAPE
    }
    return found | {
        entry.name: entry.shape for entry in others if entry.dtype in ("BF16", "F16", "F32")
    }
