"""`keepmtp check`: will vLLM load this checkpoint with method=mtp, and will the draft be real? From
headers alone.

In: a folder or Hub id, ours or not: compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound
or Quark; and the servers that are to load it: vLLM, and SGLang if named (sglang/). Out: a
`CheckData`. Only JSON files and safetensors headers are downloaded, and neither server is needed.

Easy to get wrong: a checkpoint that loads can still draft at 0 %. A finding is an error where vLLM
0.32 raises, and where it stays silent but holds something else than the files. What only older
versions or other engines refuse is a warning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.source import Source, open_source
from ...recipes.errors import (
    CheckpointError,
    KeepMTPError,
    NoCheckpointError,
    RecipeError,
    shortened,
)
from ...recipes.families import find_view
from ..facts.dry_load import LoadAccount
from ..facts.findings import CheckpointFacts, Objection, Runtime, errors_first, grouped, objection
from ..facts.results import CheckData
from . import rules_config, rules_forms, rules_kv, rules_mtp
from .dialects.choose import quantization_of
from .dialects.methods import unloadable
from .dialects.patterns import time_limit
from .runtime_view import RuntimeView
from .sglang.rules import judge as judge_for_sglang
from .stored_view import StoredView
from .without_family import objections_without_family

Rule = Callable[[RuntimeView], Iterator[Objection]]
RULES: tuple[Rule, ...] = (
    *rules_mtp.RULES,
    *rules_forms.RULES,
    *rules_kv.RULES,
    *rules_config.RULES,
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
        refusal: why there was nothing to judge; None if there was.
    """

    data: CheckData
    source: Source | None = None
    runtime: RuntimeView | None = None
    accounts: tuple[LoadAccount, ...] = ()
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
    """Check one checkpoint.

    Args:
        where: a folder or a Hub id.
        source: the release it was made from; kept MTP tensors are then compared with it.
        runtimes: the servers that are to load it.

    Returns: facts and findings; a checkpoint that cannot be opened at all is one finding.
    """
    return examine(where, source=source, runtimes=runtimes).data


def examine(
    where: str | Path, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE
) -> Checked:
    """`check`, with what it read."""
    try:
        opened = open_source(where)
    except OSError as error:
        got, cure = error.strerror or str(error), "Check its permissions and its disk"
        refusal = NoCheckpointError(error.filename or where, "must be readable", got=got, cure=cure)
        return Checked(_refused(str(where), "files", refusal), refusal=refusal)
    except CheckpointError as error:
        nothing = error if isinstance(error, NoCheckpointError) else None
        return Checked(_refused(str(where), "files", error), refusal=nothing)
    return examine_source(opened, source=source, runtimes=runtimes)


def check_source(
    opened: Source, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE
) -> CheckData:
    """`check` for a checkpoint whose headers are already read."""
    return examine_source(opened, source=source, runtimes=runtimes).data


def examine_source(
    opened: Source, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE
) -> Checked:
    """`examine` for a checkpoint whose headers are already read."""
    # Where a finding means that vLLM would fail on the config, or hang, no source goes with it, and
    # nothing is loaded.
    stored = StoredView(source=opened)
    if "vllm" in runtimes and (
        refused := unloadable(opened.config, quantization_of(opened.config))
    ):
        facts = _facts(stored)
        says = (
            f"{refused.says}. {facts.num_mtp_tensors:,} tensors are named as those of an MTP block"
        )
        found = [objection("method", refused.where, says=says, cure=refused.cure)]
        return Checked(_data(opened.where, facts, found))
    try:
        runtime = RuntimeView(
            source=opened, view=find_view(opened.config, opened.where, opened.entries)
        )
        if min(runtime.view.num_layers, runtime.promised) < 0:
            raise ValueError("a number below 0")
    except RecipeError as error:
        runtime = error
    except (KeyError, TypeError, ValueError) as error:
        refusal = error
        if not isinstance(refusal, CheckpointError):
            rule, cure = "must count its layers", "Take the original's config.json"
            refusal = CheckpointError(
                f"{opened.where}/config.json", rule, got=repr(error), cure=cure
            )
        return Checked(_refused(opened.where, "config", refusal), opened)
    try:
        with time_limit():
            if isinstance(runtime, RecipeError):
                found = objections_without_family(stored, runtime)
                return Checked(_data(opened.where, _facts(stored), found), opened)
            rules = [rule for server in runtimes for rule in RULES_OF[server]]
            found = [objection for rule in rules for objection in rule(runtime)]
    except CheckpointError as error:
        return Checked(_refused(opened.where, "config", error))
    if source is not None:
        original = RuntimeView(
            source=source, view=find_view(source.config, source.where, source.entries)
        )
        found += rules_mtp.mtp_is_that_of_the_source(runtime, original)
    return Checked(_data(opened.where, _facts(runtime), found), opened, runtime)


def _data(path: str, facts: CheckpointFacts, found: list[Objection]) -> CheckData:
    return CheckData(path=path, facts=facts, findings=errors_first(grouped(found)))


def _refused(path: str, rule: str, refusal: KeepMTPError) -> CheckData:
    """A checkpoint that cannot be read has one finding: the refusal."""
    says = f"{refusal.rule}; got {shortened(str(refusal.got))}"
    where = shortened(str(refusal.where))
    return _data(path, CheckpointFacts(), [objection(rule, where, says=says, cure=refusal.way_out)])


def _facts(view: StoredView) -> CheckpointFacts:
    """What the checkpoint is; without a family, its MTP tensors are those whose names say so."""
    entries, names = view.source.entries, view.source.entries.keys() & view.mtp_names
    matrices = [
        each for each in view.weights.values() if len(each.shape) >= 2 and names & set(each.names())
    ]
    forms = {weight.weight.dtype if weight.form == "plain" else weight.form for weight in matrices}
    is_known = isinstance(view, RuntimeView)
    return CheckpointFacts(
        family=view.view.family.model_type if is_known else "",
        dialect=shortened(view.dialect.name),
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        num_mtp_tensors=len(names),
        num_mtp_layers=len(view.found) if is_known else 0,
        mtp_forms=tuple(sorted(forms)),
    )
