"""`keepmtp check`: will vLLM load this checkpoint with method=mtp, and will the draft be real? From
headers alone.

In: a folder or Hub id, ours or not: compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound
or Quark; and the
servers that are to load it: vLLM, and SGLang if named (sglang/). Out: a `CheckData`. Only JSON
files and safetensors headers are downloaded, and neither server is needed.

Easy to get wrong: a checkpoint that loads can still draft at 0 %. A finding is an error where the
version of vLLM that is asked about raises, and where it stays silent but holds something else than
the files. What only other versions or other engines refuse is a warning. A version that keepmtp
does not know has the rules of the newest one before it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.dialects.choose import unloadable
from ...checkpoints.dialects.patterns import time_limit
from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import Source, open_source, uncollected
from ...recipes.errors import (
    CheckpointError,
    KeepMTPError,
    NoCheckpointError,
    RecipeError,
    shortened,
)
from ...recipes.families import is_drafted, promises_mtp
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.vllm import NEWEST
from ..facts.dry_load import LoadAccount
from ..facts.findings import (
    CheckpointFacts,
    Objection,
    Objections,
    errors_first,
    grouped,
    objection,
)
from ..facts.results import CheckData
from . import rules_config, rules_forms, rules_kv, rules_mtp
from .runtime_view import RuntimeView, StoredView
from .sglang.rules import judge as judge_for_sglang

Rule = Callable[[RuntimeView], Objections]
RULES: tuple[Rule, ...] = (
    *rules_mtp.RULES,
    *rules_forms.RULES,
    *rules_kv.RULES,
    *rules_config.RULES,
)
WITHOUT_FAMILY: tuple[Callable[[StoredView], Objections], ...] = (
    rules_forms.stored_form_is_what_is_built,
    rules_forms.schemes_are_known,
    rules_mtp.scales_have_weights,
    rules_mtp.counted_layers_are_there,
    rules_mtp.files_are_indexed,
    rules_config.own_code_is_known,
)
VLLM_ALONE: tuple[Runtime, ...] = ("vllm",)
RULES_OF: Mapping[Runtime, tuple[Rule, ...]] = {
    "vllm": RULES,
    "sglang": (judge_for_sglang,),
}


class Checked(NamedTuple):
    """What was found of a checkpoint, and what it was found from.

    Attributes:
        data: facts, findings and dry loads.
        source: the headers; None where they, or the quantization config, cannot be read.
        runtime: None without a family's table.
        accounts: of the dry loads.
        unjudged: why a version did not start, where others did.
        refusal: why there was nothing to judge; None if there was.
    """

    data: CheckData
    source: Source | None = None
    runtime: RuntimeView | None = None
    accounts: tuple[LoadAccount, ...] = ()
    unjudged: tuple[KeepMTPError, ...] = ()
    refusal: KeepMTPError | None = None

    def readable(self) -> Source:
        """The headers, for what needs more than findings.

        Raises:
            KeepMTPError: there is nothing to judge, or its files cannot be read.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.source is None:
            first = self.data.findings[0]
            rule, _, got = first.says.partition("; got ")
            raise CheckpointError(
                first.where, rule, got=got or "what cannot be read", cure=first.cure
            )
        return self.source


def check(
    where: str | Path, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE
) -> CheckData:
    """Check one checkpoint for the newest vLLM.

    Args:
        where: a folder or a Hub id.
        source: the release it was made from; kept MTP tensors are then compared with it.
        runtimes: the servers that are to load it.

    Returns: facts and findings; a checkpoint that cannot be opened at all is one finding.
    """
    return examine(where, source=source, runtimes=runtimes).data


@uncollected()
def examine(
    where: str | Path,
    *,
    source: Source | None = None,
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    vllm: str = NEWEST,
) -> Checked:
    """`check`, with what it read, for the vLLM of a version."""
    try:
        opened = open_source(where)
    except OSError as error:
        got = error.strerror or str(error)
        cure = "Check its permissions and its disk"
        refusal = NoCheckpointError(error.filename or where, "must be readable", got=got, cure=cure)
        return Checked(_refused(str(where), "files", refusal), refusal=refusal)
    except CheckpointError as error:
        nothing = error if isinstance(error, NoCheckpointError) else None
        return Checked(_refused(str(where), "files", error), refusal=nothing)
    return examine_source(opened, source=source, runtimes=runtimes, vllm=vllm)


def check_source(
    opened: Source, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE
) -> CheckData:
    """`check` for a checkpoint whose headers are already read."""
    return examine_source(opened, source=source, runtimes=runtimes).data


def examine_source(
    opened: Source,
    *,
    source: Source | None = None,
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    vllm: str = NEWEST,
) -> Checked:
    """`examine` for a checkpoint whose headers are already read."""
    # Where a finding means that vLLM would fail on the config, or hang, no source goes with it, and
    # nothing is loaded.
    stored = StoredView(opened, vllm=vllm)
    where = opened.where
    refused = unloadable(opened.config, vllm)
    if refused is not None and "vllm" in runtimes:
        key, says, cure = refused
        facts = _facts(stored)
        says += f". {facts.num_mtp_tensors:,} tensors are named as those of an MTP block"
        return Checked(_data(where, facts, [objection("method", key, says, cure)]))
    try:
        runtime = RuntimeView.of(opened, vllm)
        if min(runtime.view.num_layers, runtime.promised) < 0:
            raise ValueError("a number below 0")
    except RecipeError as error:
        runtime = error
    except CheckpointError as error:
        return Checked(_refused(where, "config", error), opened)
    except (KeyError, TypeError, ValueError) as error:
        rule = "must count its layers"
        cure = "Take the original's config.json"
        refusal = CheckpointError(f"{where}/config.json", rule, got=repr(error), cure=cure)
        return Checked(_refused(where, "config", refusal), opened)
    try:
        with time_limit():
            if isinstance(runtime, RecipeError):
                found = objections_without_family(stored, runtime)
                return Checked(_data(where, _facts(stored), found), opened)
            found = list[Objection]()
            for server in runtimes:
                for rule in RULES_OF[server]:
                    found += rule(runtime)
    except CheckpointError as error:
        return Checked(_refused(where, "config", error))
    if source is not None:
        found += rules_mtp.mtp_is_that_of_the_source(runtime, RuntimeView.of(source, vllm))
    return Checked(_data(where, _facts(runtime), found), opened, runtime)


def objections_without_family(view: StoredView, refusal: KeepMTPError) -> list[Objection]:
    """What the rules that need no family object to, and first why there is none, and what was
    judged.

    Most such models have no MTP block and never had one. That is no fault of the checkpoint, so it
    is a warning; a block that nobody drafts with, or that keepmtp cannot judge, is an error as
    ever.

    Raises:
        CheckpointError: the quantization config has a key of another type than vLLM reads.
    """
    found = [objection for rule in WITHOUT_FAMILY for objection in rule(view)]
    config = view.source.config
    severity = "error"
    says = f"{refusal.rule}; got {refusal.got}"
    cure = refusal.way_out
    if not (is_drafted(config, view.vllm) or promises_mtp(config) or view.mtp_names):
        severity = "warning"
        says = (
            f"{config.get('model_type', '')!r} is no family of keepmtp, config.json counts no MTP "
            "layer, and no tensor is named as one: there is no MTP block, and nothing to draft with"
        )
        cure = (
            "Serve it without method=mtp. A drafter with a checkpoint of its own, such as "
            "EAGLE-3, is another method"
        )
    packed = sum(weight.form != "plain" for weight in view.weights.values())
    judged = 0
    for module in view.modules:
        is_packed = module.members[0].weight.form != "plain"
        judged += is_packed and module.resolution.built.form != "unknown"
    says += (
        f". Judged: {judged:,} of {packed:,} packed weights against {view.dialect.name}, the "
        "layers, scales without weights, the index. Not judged: vLLM's names of modules, plain "
        "weights, and whether vLLM has this model"
    )
    return [objection("family", str(refusal.where), says, cure, severity=severity), *found]


def _data(path: str, facts: CheckpointFacts, found: list[Objection]) -> CheckData:
    return CheckData(path=path, facts=facts, findings=errors_first(grouped(found)))


def _refused(path: str, rule: str, refusal: KeepMTPError) -> CheckData:
    """A checkpoint that cannot be read has one finding: the refusal."""
    says = f"{refusal.rule}; got {shortened(str(refusal.got))}"
    where = shortened(str(refusal.where))
    return _data(path, CheckpointFacts(), [objection(rule, where, says, refusal.way_out)])


def _facts(view: StoredView) -> CheckpointFacts:
    """What the checkpoint is; without a family, its MTP tensors are those whose names say so."""
    entries = view.source.entries
    names = entries.keys() & view.mtp_names
    forms = set[str]()
    for weight in view.weights.values():
        if len(weight.shape) >= 2 and not names.isdisjoint(weight.names()):
            forms.add(weight.weight.dtype if weight.form == "plain" else weight.form)
    family = ""
    num_layers = num_unjudged = 0
    if isinstance(view, RuntimeView):
        num_unjudged = view.num_unjudged
        family = view.view.family.model_type
        num_layers = len(view.found)
    return CheckpointFacts(
        family=family,
        dialect=shortened(view.dialect.name),
        num_tensors=len(entries),
        num_bytes=total_bytes(entries.values()),
        num_mtp_tensors=len(names),
        num_mtp_layers=num_layers,
        mtp_forms=tuple(sorted(forms)),
        num_unjudged=num_unjudged,
    )
