"""The verdict on a checkpoint that keepmtp has no table for: on what it has, from headers and
configs alone.

In: a `StoredView`, and why there is no family. Out: objections of which the first says what was
judged.

Easy to get wrong: most such models have no MTP block and never had one. That is no fault of the
checkpoint, so it is a warning; a block that nobody drafts with, or that keepmtp cannot judge, is an
error as ever.
"""

from collections.abc import Iterator

from ...recipes.errors import KeepMTPError
from ...recipes.families import is_drafted, promises_mtp
from ..facts.findings import Objection, objection
from .rules_config import index_size_is_sane, own_code_is_known
from .rules_forms import schemes_are_known, stored_form_is_what_is_built
from .rules_mtp import files_are_indexed, scales_have_weights
from .stored_view import StoredView

_MOST_LAYERS = 1000


def layers_are_there(view: StoredView) -> Iterator[Objection]:
    """The layers that config.json counts have tensors."""
    count = view.text_config.get("num_hidden_layers")
    if not view.decoder_layers[1] or type(count) is not int:
        return
    stem, held = view.decoder_layers
    for number in range(min(count, _MOST_LAYERS)):
        if number not in held:
            yield objection(
                "layer-missing",
                f"{stem}.{number}.*",
                says=f"num_hidden_layers={count} promises this layer, and no file has it",
                cure="Download or quantize the checkpoint again",
                cause="layer",
            )


RULES = (
    stored_form_is_what_is_built,
    schemes_are_known,
    scales_have_weights,
    layers_are_there,
    files_are_indexed,
    index_size_is_sane,
    own_code_is_known,
)


def objections_without_family(view: StoredView, refusal: KeepMTPError) -> list[Objection]:
    """What the rules that need no family object to, and first why there is none, and what was
    judged.

    Raises:
        CheckpointError: the quantization config has a key of another type than vLLM reads.
    """
    found = [objection for rule in RULES for objection in rule(view)]
    config = view.source.config
    has_no_mtp = not (is_drafted(config) or promises_mtp(config) or view.mtp_names)
    says, cure = f"{refusal.rule}; got {refusal.got}", refusal.way_out
    if has_no_mtp:
        says = (
            f"{config.get('model_type', '')!r} is no family of keepmtp, config.json counts no "
            "MTP layer, and no tensor "
            "is named as one: there is no MTP block, and nothing to draft with"
        )
        cure = (
            "Serve it without method=mtp. A drafter with a checkpoint of its own, such as "
            "EAGLE-3, is another method"
        )
    packed = sum(weight.form != "plain" for weight in view.weights.values())
    known = [module for module in view.modules if module.resolution.built.form != "unknown"]
    judged = sum(module.members[0].weight.form != "plain" for module in known)
    verdict = objection(
        "family",
        str(refusal.where),
        severity="warning" if has_no_mtp else "error",
        says=(
            f"{says}. Judged: {judged:,} of {packed:,} packed weights against {view.dialect.name}, "
            "the layers, scales without weights, the index. Not judged: vLLM's names of modules, "
            "plain weights, and whether vLLM has this model"
        ),
        cure=cure,
    )
    return [verdict, *found]
