"""`keepmtp check`: will vLLM load this checkpoint with method=mtp, and will the draft be real? From
headers alone.

In: a folder or Hub id, ours or not: compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound
or Quark; and the
servers that are to load it: vLLM, and SGLang if named. Out: a `CheckData`. Only JSON
files and safetensors headers are downloaded, and neither server is needed.

Easy to get wrong: a checkpoint that loads can still draft at 0 %. A finding is an error where the
version of vLLM that is asked about raises, and where it stays silent but holds something else than
the files. What only other versions or other engines refuse is a warning. A version that keepmtp
does not know has the rules of the newest one before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.dialects.choose import unloadable
from ...checkpoints.dialects.patterns import time_limit
from ...checkpoints.dialects.runtime_view import RuntimeView, StoredView
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
from ...recipes.frozen import Raw
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.vllm import NEWEST
from ...recipes.tensor_parallel import Split
from ..facts.dry_load import LoadAccount
from ..facts.findings import (
    CheckpointFacts,
    Finding,
    Objection,
    Objections,
    errors_first,
    errors_of,
    grouped,
    objection,
)
from ..facts.results import CheckData
from . import rules_config, rules_forms, rules_kv, rules_mtp, rules_shapes
from .rules_sglang import SGLANG
from .rules_sglang import judge as judge_for_sglang

Rule = Callable[[RuntimeView], Objections]
RULES: tuple[Rule, ...] = (
    *rules_mtp.RULES,
    *rules_shapes.RULES,
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
SERVERS: Mapping[Runtime, str] = {"vllm": "vLLM {}", "sglang": f"{SGLANG} (not run)"}
"""What they are called, with vLLM's version to be filled in."""


class Checked(NamedTuple):
    """What was found of a checkpoint, and what it was found from.

    Attributes:
        data: facts, findings and dry loads.
        source: the headers; None where they, or the quantization config, cannot be read.
        runtime: None without a family's table.
        draft: of a draft's own checkpoint, where the target has none.
        accounts: of the dry loads.
        unjudged: why a version did not start, where others did.
        refusal: why there was nothing to judge; None if there was.
        unread: why there is no source, where that is a finding.
    """

    data: CheckData
    source: Source | None = None
    runtime: RuntimeView | None = None
    draft: RuntimeView | None = None
    accounts: tuple[LoadAccount, ...] = ()
    unjudged: tuple[KeepMTPError, ...] = ()
    refusal: KeepMTPError | None = None
    unread: CheckpointError | None = None

    def readable(self) -> Source:
        """The headers, for what needs more than findings.

        Raises:
            KeepMTPError: there is nothing to judge, or its files cannot be read.
        """
        if self.source is None:
            raise self.refusal or self.unread or AssertionError
        return self.source

    @property
    def config(self) -> Raw:
        """config.json of the draft; empty where it cannot be read."""
        source = (self.draft or self).source
        return source.config if source else {}

    @property
    def method(self) -> str:
        """How it drafts, in vLLM's word."""
        if self.runtime is None:
            return "mtp"
        return self.runtime.view.family.method

    def with_findings(self, *findings: Finding, **also: object) -> "Checked":
        """With these findings, errors first; `also` are other fields of its data. What must be
        quantized again is, in the MTP block alone, a block that the release has.
        """
        if self.runtime is not None:
            findings = (*_of_the_block(findings, self.runtime),)
        update = {"findings": errors_first(findings), **also}
        return self._replace(data=self.data.model_copy(update=update))


@uncollected()
def examine(
    checkpoint: str | Path | Source,
    *,
    source: Source | None = None,
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    vllm: str = NEWEST,
    splits: Sequence[Split] = (),
) -> Checked:
    """Check one checkpoint, and keep what was read.

    Args:
        checkpoint: a folder or a Hub id, or the headers that were read of one.
        source: the release it was made from; kept MTP tensors are then compared with it.
        runtimes: the servers that are to load it.
        vllm: the version that has the rules.
        splits: how its ranks split it.

    Returns: facts and findings; a checkpoint that cannot be opened at all is one finding.
    """
    try:
        opened = checkpoint
        if not isinstance(opened, Source):
            opened = open_source(opened)
    except OSError as error:
        got = error.strerror or str(error)
        where = error.filename or checkpoint
        cure = "Check its permissions and its disk"
        refusal = NoCheckpointError(where, "must be readable", got=got, cure=cure)
    except CheckpointError as error:
        refusal = error
    else:
        return _examined(opened, source, runtimes, vllm, splits)
    checked = _unread(str(checkpoint), "files", refusal)
    if isinstance(refusal, NoCheckpointError):
        return checked._replace(refusal=refusal)
    return checked


def _examined(
    opened: Source,
    source: Source | None,
    runtimes: Sequence[Runtime],
    vllm: str,
    splits: Sequence[Split],
) -> Checked:
    stored = StoredView(opened, vllm=vllm)
    where = opened.where
    refused = unloadable(opened.config, vllm)
    if refused is not None and "vllm" in runtimes:
        key, says, cure = refused
        facts = facts_of(stored)
        says += f". Tensors named as those of an MTP block: {facts.num_mtp_tensors:,}"
        # No source goes with it, so that nothing is loaded.
        unread = CheckpointError(key, says, got="what cannot be read", cure=cure)
        return Checked(_data(where, facts, [objection("method", key, says, cure)]), unread=unread)
    objected = list[Objection]()
    runtime = None
    try:
        # Regular expressions of a stranger's config may take for ever.
        with time_limit():
            try:
                runtime = RuntimeView.of(opened, vllm)
                _ = runtime.view.num_layers  # which nearly every rule asks for
            except RecipeError as error:
                objected = objections_without_family(stored, error)
                return Checked(_data(where, facts_of(stored), objected), opened)
            except CheckpointError as error:
                return _unread(where, "config", error)._replace(source=opened)
            for server in runtimes:
                for rule in RULES_OF[server]:
                    objected += rule(runtime)
    except CheckpointError as error:
        # vLLM would fail on the config, or hang: nothing is loaded.
        return _unread(where, "config", error)
    if "vllm" in runtimes:
        objected += rules_forms.ranks_get_whole_groups(runtime, splits)
    if source is not None:
        objected += rules_mtp.mtp_is_that_of_the_source(runtime, RuntimeView.of(source, vllm))
    checked = Checked(_data(where, facts_of(runtime), []), opened, runtime)
    return checked.with_findings(*grouped(objected))


def objections_without_family(view: StoredView, refusal: KeepMTPError) -> list[Objection]:
    """What the rules that need no family object to, and first why there is none, and what was
    judged.

    Raises:
        CheckpointError: the quantization config has a key of another type than vLLM reads.
    """
    objected = list[Objection]()
    for rule in WITHOUT_FAMILY:
        objected += rule(view)
    config = view.source.config
    severity = "error"
    says = f"{refusal.rule}; got {refusal.got}"
    cure = refusal.way_out
    if not (is_drafted(config, view.vllm) or promises_mtp(config) or view.mtp_names):
        # Most such models never had an MTP block, which is no fault of the checkpoint.
        severity = "warning"
        says = (
            f"{config.get('model_type', '')!r} is no family of keepmtp, config.json counts no MTP "
            "layer, and no tensor is named as one: there is no MTP block, and nothing to draft with"
        )
        cure = (
            "Serve it without method=mtp. A drafter with a checkpoint of its own, such as "
            "EAGLE-3, is another method"
        )
    packed = [weight for weight in view.weights.values() if weight.form != "plain"]
    built = [module.resolution.built.form for module in view.modules if not module.is_plain]
    says += (
        f". Judged: {len(built) - built.count('unknown'):,} of {len(packed):,} packed weights "
        f"against {view.dialect.name}, "
        "the layers, scales without weights, the index. Not judged: vLLM's names of modules, plain "
        "weights, and whether vLLM has this model"
    )
    return [objection("family", str(refusal.where), says, cure, severity=severity), *objected]


def _of_the_block(findings: Sequence[Finding], runtime: RuntimeView) -> Iterator[Finding]:
    # What is wrong with the backbone as well is wrong in config.json, and a new block would be
    # wrong there too.
    again = [finding for finding in errors_of(findings) if finding.cured_by == "quantize"]
    of_backbone = {finding.rule for finding in again if not runtime.is_mtp_name(finding.where)}
    for finding in findings:
        if finding in again and finding.rule not in of_backbone:
            finding = finding.model_copy(update={"cured_by": "block"})
        yield finding


def _data(path: str, facts: CheckpointFacts, objected: list[Objection]) -> CheckData:
    return CheckData(path=path, facts=facts, findings=errors_first(grouped(objected)))


def _unread(path: str, rule: str, error: CheckpointError) -> Checked:
    """A checkpoint that cannot be read has one finding: why not."""
    says = f"{error.rule}; got {shortened(str(error.got))}"
    finding = objection(rule, shortened(str(error.where)), says, error.way_out)
    return Checked(_data(path, CheckpointFacts(), [finding]), unread=error)


def facts_of(view: StoredView) -> CheckpointFacts:
    """What a checkpoint is; without a family, its MTP tensors are those whose names say so."""
    entries = view.source.entries
    facts = CheckpointFacts(
        dialect=shortened(view.dialect.name),
        num_tensors=len(entries),
        num_bytes=total_bytes(entries.values()),
        num_mtp_tensors=len(entries.keys() & view.mtp_names),
    )
    if not isinstance(view, RuntimeView):
        return facts
    of_family = {
        "family": view.view.family.model_type,
        "num_mtp_layers": len(view.found),
        "num_unjudged": view.num_unjudged,
    }
    return facts.model_copy(update=of_family)
