"""`keepmtp check --gpu`: the static check, then vLLM's own classes and loaders on a GPU that is not
there.

In: checkpoints, pretended GPUs, TP sizes, a number of drafts. Out: a `Checked` for each checkpoint,
with what both found. vLLM's processes start first: they import while the headers are read.

Easy to get wrong: a checkpoint with findings is loaded all the same, because people search for
vLLM's own words. Only a checkpoint whose files cannot be read is not loaded. A model that never had
an MTP block is loaded without a draft.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ...recipes.errors import RecipeError
from ...recipes.families import has_dspark
from ..check.check import VLLM_ALONE, Checked, examine
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import GPU, DryLoad, LoadAccount, places
from ..facts.findings import Finding, Runtime, by_cause, errors_first
from ..facts.vllm_env import VLLM
from .loader import DryLoader, Job, headers_of
from .verdict_findings import objections


def check_on(
    paths: Sequence[str],
    *,
    vllm: VLLM,
    gpus: Sequence[GPU],
    tps: Sequence[int] = (1,),
    num_drafts: int = 1,
    draft: str = "",
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    progress: Callable[[str], None] = lambda doing: None,
) -> Iterator[Checked]:
    """Check and load checkpoints, one after the other, on every GPU at every TP size.

    Args:
        paths: folders or Hub ids.
        vllm: the environment that loads them.
        gpus: GPUs to pretend.
        tps: tensor-parallel sizes; rank 0 of each is built.
        num_drafts: num_speculative_tokens.
        draft: folder or Hub id of a draft model with a checkpoint of its own.
        runtimes: the servers of the static check.
        progress: gets a line that says what is done now.

    Yields: what was found for each path, in order; a draft without its target has a refusal.

    Raises:
        VLLMError: vLLM's process cannot be started.
        CheckpointError: the separate draft cannot be read.
    """
    with ExitStack() as stack:
        loaders = [stack.enter_context(DryLoader(vllm, gpu=gpu)) for gpu in gpus]
        separate = own = None
        if draft:
            separate = examine(draft, vllm=vllm.version)
            if separate.refusal is not None:
                raise separate.refusal.at("--draft")
            own = stack.enter_context(headers_of(separate.readable()))
        for path in paths:
            progress(f"{path}: static check")
            checked = examine(path, runtimes=runtimes, vllm=vllm.version)
            source, runtime = checked.source, checked.runtime
            if source is None or (own is None and has_dspark(source.config, source.entries)):
                yield checked
                continue
            if runtime is not None and not runtime.view.family.num_layers_key:
                cure = f"Check the target: `keepmtp check TARGET --draft {shlex.quote(path)}`"
                rule = "a draft is loaded beside its target"
                yield checked._replace(refusal=RecipeError(path, rule, got="no target", cure=cure))
                continue
            # A model that never had an MTP block is loaded without a draft.
            k, accounts = num_drafts, list[LoadAccount]()
            for each in checked.data.findings:
                if own is None and (each.rule, each.severity) == ("family", "warning"):
                    k = 0
            with headers_of(source) as folder:
                jobs = [Job(folder=folder, tp=tp, num_drafts=k, draft=own) for tp in tps]
                for loader in loaders:
                    progress(f"{path}: dry load on {loader.gpu}")
                    for account in loader.load_all(jobs):
                        accounts.append(account.model_copy(update={"path": path}))
            if separate is None:
                yield with_loads(checked, accounts, vllm.version)
                continue
            # A target with a separate draft needs no family's table.
            kept = [each for each in checked.data.findings if each.rule != "family"]
            findings = (*kept, *separate.data.findings)
            checked = checked._replace(data=checked.data.model_copy(update={"findings": findings}))
            yield with_loads(checked, accounts, vllm.version, draft=separate.runtime)


def with_loads(
    checked: Checked,
    accounts: Sequence[LoadAccount],
    version: str,
    *,
    draft: RuntimeView | None = None,
) -> Checked:
    """A static check with dry loads; `draft` is the runtime of a draft's own checkpoint."""
    static, counted, dry = checked.data.findings, list[LoadAccount](), list[DryLoad]()
    seen: dict[tuple[str, str, str], list[tuple[DryLoad, Finding]]] = defaultdict(list)
    for account in accounts:
        own = objections(account, checked.runtime, version=version, static=static, draft=draft)
        counted.append(account.counted(sum(each.finding.severity == "error" for each in own)))
        dry.append(counted[-1].load)
        for cause, finding in by_cause(own).items():
            seen[cause].append((account.load, finding))
    # A finding for each cause, with every GPU and TP size that has it, and the largest count.
    merged = [*static]
    for each in seen.values():
        loads, findings = zip(*each, strict=True)
        count = max(finding.count for finding in findings)
        says = f"on {places(loads)}: {findings[0].says}"
        merged.append(findings[0].model_copy(update={"says": says, "count": count}))
    update = {"findings": errors_first(merged), "dry": tuple(dry)}
    return checked._replace(data=checked.data.model_copy(update=update), accounts=tuple(counted))
