"""`keepmtp check --gpu`: the static check, then vLLM's own classes and loaders on a GPU that is not
there.

In: checkpoints, vLLMs, pretended GPUs, TP sizes, a number of drafts. Out: a `Checked` for each
checkpoint, with what both found. vLLM's processes start first: they import while the headers are
read.

Easy to get wrong: a checkpoint with findings is loaded all the same, because people search for
vLLM's own words. Only a checkpoint whose files cannot be read is not loaded. A model that never had
an MTP block is loaded without a draft. And rules that were read from one vLLM say little of
another: where none of those that loaded it is known, the dry load decides.
"""

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

from ...recipes.errors import RecipeError, VLLMError
from ...recipes.families import has_dspark
from ...recipes.frozen import Say, silent
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.vllm import KNOWN, NEWEST, is_known, parsed
from ...recipes.tensor_parallel import Split
from ..check.check import VLLM_ALONE, Checked, examine
from ..check.pair import opened_draft, with_draft
from ..facts.dry_load import GPU, DryLoad, LoadAccount, by_version, listed, places
from ..facts.findings import Finding, Objection, by_cause, errors_of
from ..facts.vllm_env import VLLM
from .failures import cures_in_vllm
from .loader import DryLoader, Job, headers_of
from .verdict_findings import DEFECT, defect_of, objections

Case = tuple[Job, Checked]
"""What is loaded, and its static check."""


def check_on(
    paths: Sequence[str],
    *,
    vllms: Sequence[VLLM],
    gpus: Sequence[GPU],
    splits: Sequence[Split] = (Split(),),
    num_drafts: int = 1,
    draft: str = "",
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    progress: Say = silent,
) -> Iterator[Checked]:
    """Check and load checkpoints, one after the other, on every GPU at every TP size.

    Args:
        paths: folders or Hub ids.
        vllms: the versions that load them.
        gpus: GPUs to pretend; without any nothing is loaded.
        splits: how ranks share it; rank 0 of each is built.
        num_drafts: num_speculative_tokens.
        draft: folder or Hub id of a draft model with a checkpoint of its own.
        runtimes: the servers of the static check, whose rules are those of the newest version.
        progress: gets a line that says what is done now.

    Yields: what was found for each path, in order; a draft without its target has a refusal.

    Raises:
        VLLMError: vLLM's process cannot be started; of several versions, not one of them.
        CheckpointError: the separate draft cannot be read.
    """
    # The static check has the rules of one version, the newest that loads.
    rules = max([vllm.version for vllm in vllms], key=parsed, default=NEWEST)
    with ExitStack() as stack:
        # vLLM's processes import while the headers are read.
        loaders = defaultdict[VLLM, list[DryLoader]](list)
        for vllm, gpu in product(vllms, gpus):
            loaders[vllm].append(stack.enter_context(DryLoader(vllm, gpu=gpu)))
        separate = None
        draft_folder = None
        if draft:
            separate = opened_draft(draft, vllm=rules)
        if separate is not None and gpus:
            draft_folder = stack.enter_context(headers_of(separate.readable()))
        for path in paths:
            progress(f"{path}: static check")
            checked = examine(path, runtimes=runtimes, vllm=rules, splits=splits)
            source = checked.source
            if separate is not None and source is not None:
                # With a draft's own checkpoint the target needs no family's table.
                checked = with_draft(checked, separate)
            # vLLM would fail on its files as well, or keepmtp knows no draft of it.
            is_dspark = source is not None and has_dspark(source.config, source.entries)
            is_unknown = not draft and is_dspark and checked.runtime is None
            if source is None or is_unknown or not gpus:
                yield checked
                continue
            if checked.runtime is not None and checked.runtime.is_draft_alone:
                cure = f"Check the target: `keepmtp check TARGET --draft {shlex.quote(path)}`"
                rule = "a draft is loaded beside its target"
                yield checked._replace(refusal=RecipeError(path, rule, got="no target", cure=cure))
                continue
            # With method=mtp vLLM would refuse a model that never had a block, and nothing would be
            # known of it.
            family = [each for each in checked.data.findings if each.rule == "family"]
            has_none = not draft and [each.severity for each in family] == ["warning"]
            k = num_drafts
            if has_none:
                k = 0
            with headers_of(source) as folder:
                job = Job(folder=folder, num_drafts=k, method=checked.method, draft=draft_folder)
                cases = list[Case]()
                for size, whole_experts in splits:
                    own = replace(job, tp=size, whole_experts=whole_experts)
                    cases.append((own, checked))
                accounts = list[LoadAccount]()
                refused = list[VLLMError]()
                unknown = list[VLLMError]()
                for vllm, own_loaders in loaders.items():
                    try:
                        for loader in own_loaders:
                            progress(f"{path}: dry load on {loader.gpu}, vLLM {vllm.version}")
                            loads = load_with_cures(loader, cases)
                            error = _over_others(vllm, checked, loads)
                            if error is None:
                                accounts += loads
                            else:
                                unknown.append(error)
                    except VLLMError as error:
                        refused.append(error)
                if len(refused) == len(vllms):
                    raise refused[0]
            # The folder that vLLM read may be one of headers alone.
            named = [account.model_copy(update={"path": path}) for account in accounts]
            yield with_loads(checked, named)._replace(unjudged=(*refused, *unknown))


def load_with_cures(loader: DryLoader, cases: Sequence[Case]) -> list[LoadAccount]:
    """What this vLLM does as it is; where that ends in a defect of its own, it loads again with the
    cures of the family, and an account says so where they help.
    """
    accounts = loader.load_all([job for job, _ in cases])
    again = dict[int, Job]()
    for number, (job, checked) in enumerate(cases):
        account = accounts[number]
        runtime = checked.draft or checked.runtime
        cures = ()
        if runtime is not None:
            cures = cures_in_vllm(runtime, account.load.vllm)
        # Findings of a large checkpoint take seconds; the caller makes them anyway.
        if cures and DEFECT in [error.rule for error in _errors(checked, [account])]:
            again[number] = replace(job, cures=",".join(cures))
    for number, account in zip(again, loader.load_all([*again.values()]), strict=True):
        if not _errors(cases[number][1], [account]):
            accounts[number] = accounts[number].with_cures(account.load.cures)
    return accounts


def _errors(checked: Checked, loads: Sequence[LoadAccount]) -> list[Finding]:
    """Of dry loads alone."""
    findings = with_loads(checked, loads).data.findings
    return [error for error in errors_of(findings) if error.origin == "dry"]


def _over_others(vllm: VLLM, checked: Checked, loads: Sequence[LoadAccount]) -> VLLMError | None:
    """Why nobody knows what is wrong: this vLLM stops over packages that it is not made for, and
    neither the static check nor a known defect says why.
    """
    if not vllm.unmet or not checked.data.ok:
        return None
    # What stops there may be the fault of those packages as well as the checkpoint's.
    for finding in _errors(checked, loads):
        if finding.rule not in (DEFECT, "family"):
            return VLLMError(
                f"vLLM {vllm.version}",
                f"requires {vllm.unmet}, to be judged",
                got=f"{finding.where}: {finding.says}",
                cure="Set VLLM_PYTHON to an environment made for it",
            )
    return None


def with_loads(checked: Checked, accounts: Sequence[LoadAccount]) -> Checked:
    """A static check with dry loads."""
    judged = list[LoadAccount]()
    objected = list[tuple[DryLoad, list[Objection]]]()
    for account in accounts:
        own = objections(account, checked)
        findings = errors_of(finding for finding, *_ in own)
        errors = [f"{finding.where}: {finding.says}" for finding in findings]
        name = ""
        defect = defect_of(account, checked)
        if defect is not None:
            name = defect.name
        judged.append(account.judged(errors, name))
        objected.append((account.load, own))
    dry = tuple(account.load for account in judged)
    facts = checked.data.facts
    if any(load.target.cls for load in dry):  # vLLM has built the towers
        facts = facts.model_copy(update={"num_unjudged": 0})
    # Findings stay as they are: people search for vLLM's own words next to those of the rules.
    static = _bound(checked.data.findings, {load.vllm for load in dry})
    checked = checked.with_findings(*static, *_once(objected), dry=dry, facts=facts)
    return checked._replace(accounts=tuple(judged))


def _once(objected: Sequence[tuple[DryLoad, Sequence[Objection]]]) -> Iterator[Finding]:
    """A finding for each cause, with every place that has it, and the largest count."""
    of_cause: dict[tuple[str, str, str], list[tuple[DryLoad, Finding]]] = defaultdict(list)
    for load, own in objected:
        for cause, finding in by_cause(own).items():
            of_cause[cause].append((load, finding))
    versions = {load.vllm for load, _ in objected}
    for seen in of_cause.values():
        loads = [load for load, _ in seen]
        where = f"on {places(loads)}"
        if len(versions) > 1:
            where = _by_whom(loads)
        first = seen[0][1]
        count = max(finding.count for _, finding in seen)
        yield first.model_copy(update={"says": f"{where}: {first.says}", "count": count})


def _bound(static: Iterable[Finding], versions: Collection[str]) -> Iterator[Finding]:
    """Findings of the static check with the versions that they hold for, where another was
    tried.
    """
    others = [version for version in sorted(versions) if not is_known(version)]
    for finding in static:
        if others and finding.runtime == "vllm":
            says = (
                f"{finding.says} (a rule read from vLLM {KNOWN[0]} to {KNOWN[-1]}; of "
                f"{listed(others)} the dry load tells)"
            )
            finding = finding.model_copy(update={"says": says})
            # Rules that were read from none of the versions cannot fail a checkpoint: it was
            # loaded.
            if len(others) == len(versions):
                finding = finding.model_copy(update={"severity": "warning"})
        yield finding


def _by_whom(loads: Iterable[DryLoad]) -> str:
    """`vLLM 0.29.0 and 0.31.0 on sm90 at TP 1`."""
    versions_at: dict[str, list[str]] = defaultdict(list)
    for version, own in by_version(loads).items():
        versions_at[places(own)].append(version)
    return listed([f"vLLM {listed(of)} on {where}" for where, of in versions_at.items()])
