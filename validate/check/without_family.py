"""The verdict on a checkpoint that keepmtp has no table for: on what it has, from headers and configs alone.

In: a `Source`, and why there is no family. Out: its facts, and findings of which the first says what was judged.

Easy to get wrong: most such models have no MTP block and never had one. That is no fault of the checkpoint, so it is a
warning; a block that nobody drafts with, or that keepmtp cannot judge, is an error as ever.
"""

from collections.abc import Iterable

from ...checkpoints.stored import StoredWeight
from ...recipes.errors import KeepMTPError, shortened
from ...recipes.families import promises_mtp
from ...recipes.families._drafted import is_drafted
from ..facts.findings import CheckpointFacts, Objection, objection
from .rules_stored import RULES, built_for, names_of_mtp
from .stored_view import StoredView

_OTHER_WAYS = (
    "Serve it without method=mtp. A drafter with a checkpoint of its own, such as EAGLE-3, is another method of vLLM's"
)


def objections_without_family(view: StoredView, refusal: KeepMTPError) -> list[Objection]:
    """What the rules that need no family object to, and first why there is none.

    Raises:
        CheckpointError: the quantization config has a key of another type than vLLM reads.
    """
    found = [objection for rule in RULES for objection in rule(view)]
    return [_verdict(view, refusal), *found]


def facts_without_family(view: StoredView) -> CheckpointFacts:
    """What the checkpoint is; its MTP tensors are those whose names say so."""
    names = view.source.entries.keys() & names_of_mtp(view)
    weights = (weight for weight in view.weights.values() if names & set(weight.names()))
    return facts_of(view, weights, num_mtp_tensors=len(names))


def facts_of(
    view: StoredView,
    mtp: Iterable[StoredWeight],
    *,
    num_mtp_tensors: int,
    family: str = "",
    num_mtp_layers: int = 0,
) -> CheckpointFacts:
    """The facts of a checkpoint, by the weights of its MTP block."""
    matrices = (weight for weight in mtp if len(weight.shape) >= 2)
    forms = {weight.weight.dtype if weight.form == "plain" else weight.form for weight in matrices}
    entries = view.source.entries
    return CheckpointFacts(
        family=family,
        dialect=shortened(view.dialect.name),
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        num_mtp_tensors=num_mtp_tensors,
        num_mtp_layers=num_mtp_layers,
        mtp_forms=tuple(sorted(forms)),
    )


def has_no_mtp(view: StoredView) -> bool:
    """Whether nothing speaks of an MTP block: not the model's type, no key of config.json, no tensor."""
    config = view.source.config
    return not (is_drafted(config) or promises_mtp(config) or names_of_mtp(view))


def _verdict(view: StoredView, refusal: KeepMTPError) -> Objection:
    says, cure = f"{refusal.rule}; got {refusal.got}", refusal.way_out
    if has_no_mtp(view):
        says = (
            f"{view.source.config.get('model_type', '')!r} is no family of keepmtp, config.json counts no MTP layer, "
            "and no tensor is named as one: there is no MTP block, and nothing to draft with"
        )
        cure = _OTHER_WAYS
    return objection(
        rule="family",
        severity="warning" if has_no_mtp(view) else "error",
        where=str(refusal.where),
        says=f"{says}. {_judged(view)}",
        cure=cure,
    )


def _judged(view: StoredView) -> str:
    """What was judged, in numbers, and what was not."""
    packed = [weight for weight in view.weights.values() if weight.form != "plain"]
    answers = [built_for(view, weight.module) for weight in packed]
    judged = sum(answer is not None and answer.built.form != "unknown" for answer in answers)
    return (
        f"Judged: {judged:,} of {len(packed):,} packed weights against {view.dialect.name}, the layers, scales without "
        "weights, the index. Not judged: vLLM's names of modules, plain weights, and whether vLLM has this model"
    )
