"""`keepmtp check`: will vLLM load this checkpoint with method=mtp, and will the draft be real? From headers alone.

In: a folder or Hub id, ours or not: compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound or Quark; and the
servers that are to load it: vLLM, and SGLang if named (sglang/). Out: a `CheckData`. Only JSON files and safetensors
headers are downloaded, and neither server is needed.

Easy to get wrong: a checkpoint that loads can still draft at 0 %. A finding is an error where vLLM 0.32 raises, and
where it stays silent but holds something else than the files. What only older versions or other engines refuse is a
warning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.source import Source, open_source
from ...recipes.errors import CheckpointError, KeepMTPError, NoCheckpointError, RecipeError, printable, shortened
from ...recipes.families import find_view
from ..facts.dry_load import LoadAccount
from ..facts.findings import CheckpointFacts, Finding, Objection, Runtime, errors_first, grouped, objection
from ..facts.results import CheckData
from . import rules_config, rules_dialect, rules_forms, rules_kv, rules_mtp, rules_source, rules_table
from .dialects.choose import quantization_of
from .dialects.methods import Unloadable, unloadable
from .dialects.patterns import time_limit
from .runtime_view import RuntimeView
from .sglang.rules import judge as judge_for_sglang
from .stored_view import StoredView
from .without_family import facts_of, facts_without_family, objections_without_family

Rule = Callable[[RuntimeView], Iterator[Objection]]
RULES: tuple[Rule, ...] = (
    *rules_mtp.RULES,
    *rules_dialect.RULES,
    *rules_forms.RULES,
    *rules_kv.RULES,
    *rules_table.RULES,
    *rules_config.RULES,
)
SOURCE_RULES = rules_source.RULES
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
    source: Source | None
    runtime: RuntimeView | None
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
            raise CheckpointError(first.where, rule, got=got or "what cannot be read", cure=first.cure)
        return self.source


def check(where: str | Path, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE) -> CheckData:
    """Check one checkpoint.

    Args:
        where: a folder or a Hub id.
        source: the release it was made from; kept MTP tensors are then compared with it.
        runtimes: the servers that are to load it.

    Returns: facts and findings; a checkpoint that cannot be opened at all is one finding.
    """
    return examine(where, source=source, runtimes=runtimes).data


def examine(where: str | Path, *, source: Source | None = None, runtimes: Sequence[Runtime] = VLLM_ALONE) -> Checked:
    """`check`, with what it read."""
    try:
        opened = open_source(where)
    except NoCheckpointError as error:
        return Checked(_refused(str(where), "files", error), None, None, refusal=error)
    except OSError as error:
        refusal = NoCheckpointError(
            error.filename or where,
            "must be readable",
            got=error.strerror or str(error),
            cure="Check its permissions and its disk",
        )
        return Checked(_refused(str(where), "files", refusal), None, None, refusal=refusal)
    except CheckpointError as error:
        return Checked(_refused(str(where), "files", error), None, None)
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
    if "vllm" in runtimes and (refused := unloadable(opened.config, quantization_of(opened.config))):
        # Without a source nothing is loaded: every further finding would follow from this one.
        return Checked(_unloadable(opened, refused), None, None)
    try:
        view = find_view(opened.config, opened.where, opened.entries)
        for number in (view.num_layers, view.num_mtp_layers):
            if number < 0:
                raise ValueError(number)
    except RecipeError as error:
        return _without_family(opened, error)
    except CheckpointError as error:
        return Checked(_refused(opened.where, "config", error), opened, None)
    except (KeyError, TypeError, ValueError) as error:
        refusal = CheckpointError(
            f"{opened.where}/config.json",
            "must count its layers",
            got=repr(error),
            cure="Take the original's config.json",
        )
        return Checked(_refused(opened.where, "config", refusal), opened, None)
    runtime = RuntimeView(source=opened, view=view)
    try:
        with time_limit():
            rules = [rule for server in runtimes for rule in RULES_OF[server]]
            found = [objection for rule in rules for objection in rule(runtime)]
    except CheckpointError as error:
        # Without a source nothing is loaded: vLLM would fail on the same entry, or hang.
        return Checked(_refused(opened.where, "config", error), None, None)
    if source is not None:
        original = RuntimeView(source=source, view=find_view(source.config, source.where, source.entries))
        found += [objection for rule in SOURCE_RULES for objection in rule(runtime, original)]
    data = CheckData(path=opened.where, facts=_facts(runtime), findings=errors_first(grouped(found)))
    return Checked(data, opened, runtime)


def _unloadable(opened: Source, refused: Unloadable) -> CheckData:
    """A method that vLLM does not have: one finding, with what there is of an MTP block."""
    facts = facts_without_family(StoredView(source=opened))
    block = (
        f"{facts.num_mtp_tensors:,} tensors are named as those of an MTP block"
        if facts.num_mtp_tensors
        else ("No tensor is named as one of an MTP block")
    )
    says = f"{refused.says}. {block}"
    finding = objection(severity="error", rule="method", where=refused.where, says=says, cure=refused.cure).finding
    return CheckData(path=opened.where, facts=facts, findings=(finding,))


def _without_family(opened: Source, refusal: RecipeError) -> Checked:
    """What can be judged of a checkpoint that keepmtp has no table for."""
    view = StoredView(source=opened)
    try:
        with time_limit():
            found = objections_without_family(view, refusal)
    except CheckpointError as error:
        # Without a source nothing is loaded: vLLM would fail on the same entry, or hang.
        return Checked(_refused(opened.where, "config", error), None, None)
    data = CheckData(path=opened.where, facts=facts_without_family(view), findings=errors_first(grouped(found)))
    return Checked(data, opened, None)


def _refused(path: str, rule: str, refusal: KeepMTPError) -> CheckData:
    """A checkpoint that cannot be read has one finding: the refusal."""
    finding = Finding(
        origin="static",
        severity="error",
        where=shortened(str(refusal.where)),
        says=printable(f"{refusal.rule}; got {shortened(str(refusal.got))}"),
        cure=printable(refusal.way_out),
        rule=rule,
    )
    return CheckData(path=path, facts=CheckpointFacts(), findings=(finding,))


def _facts(runtime: RuntimeView) -> CheckpointFacts:
    mtp = (module for module in runtime.modules if module.part == "mtp")
    num_mtp_tensors = 0
    for name, place in runtime.placed.items():
        if place.part == "mtp":
            num_mtp_tensors += len(runtime.weights[name].parts) if name in runtime.weights else 1
    return facts_of(
        runtime,
        (member.weight for module in mtp for member in module.members),
        num_mtp_tensors=num_mtp_tensors,
        family=runtime.view.family.model_type,
        num_mtp_layers=len(runtime.found),
    )
