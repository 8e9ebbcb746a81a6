"""`keepmtp check --gpu`: the static check, then vLLM's own classes and loaders on a GPU that is not there.

In: checkpoints, pretended GPUs, TP sizes, a number of drafts. Out: one `Report` a checkpoint, with what both found.
vLLM's processes are started first: they import while the headers are read.

Easy to get wrong: a checkpoint with findings is loaded all the same, since vLLM's own words are what people search for;
only one whose files cannot be read is not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from ..quantize.source import Source, open_source
from .dry import GPU, DryLoader, Job, Verdict, headers_of
from .evidence import Evidence
from .findings import Report, grouped
from .rules_dry import findings
from .static import examine
from .vllm_env import VLLM


class Checked(NamedTuple):
    """A report and what it was made from: headers (None if unreadable), evidence (None without a family's table)."""

    report: Report
    source: Source | None
    evidence: Evidence | None


def check_on(
    paths: Sequence[str], *, vllm: VLLM, gpus: Sequence[GPU], tps: Sequence[int] = (1,), num_drafts: int = 1,
    draft: str = "", watch: Callable[[str], None] = lambda doing: None,
) -> Iterator[Checked]:  # fmt: skip
    """Judge checkpoints, one after the other, on every GPU at every TP size.

    Args:
        paths: folders or Hub ids.
        vllm: the environment that judges.
        gpus: GPUs to pretend.
        tps: tensor-parallel sizes; rank 0 of each is built.
        num_drafts: num_speculative_tokens.
        draft: folder or Hub id of a draft model with a checkpoint of its own.
        watch: told what is being done, for a progress line.

    Yields: what was found for each path, in order.

    Raises:
        VLLMError: vLLM's process cannot be started.
        CheckpointError: the separate draft cannot be read.
    """
    with ExitStack() as stack:
        loaders = [stack.enter_context(DryLoader(vllm, gpu=gpu)) for gpu in gpus]
        for path in paths:
            watch(f"{path}: static check")
            report, source, evidence = examine(path)
            if source is None:
                yield Checked(report, None, None)
                continue
            with headers_of(source) as folder, ExitStack() as drafts:
                own = drafts.enter_context(headers_of(open_source(draft))) if draft else None
                jobs = [Job(folder=folder, tp=tp, num_drafts=num_drafts, draft=own) for tp in tps]
                verdicts: list[Verdict] = []
                for loader in loaders:
                    watch(f"{path}: dry load on {loader.gpu}")
                    verdicts += loader.judge_all(jobs)
            told = [replace(verdict, path=path) for verdict in verdicts]
            yield Checked(with_verdicts(report, evidence, told, vllm.version), source, evidence)


def with_verdicts(report: Report, evidence: Evidence | None, verdicts: Sequence[Verdict], version: str) -> Report:
    """A static check's report with what dry loads found."""
    found = [
        finding for verdict in verdicts
        for finding in findings(verdict, evidence, version=version, static=report.findings)
    ]  # fmt: skip
    return replace(report, findings=grouped([*report.findings, *found]), dry=tuple(verdicts))
