"""Reports as the stations would give them, in real values of their own types: for report.json and
the page.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checked import check
from commands import GLM
from data_files import table
from keepmtp.checkpoints.identity import Identity
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.benched import BenchFact
from keepmtp.validate.facts.dry_load import (
    GPU,
    DryLoad,
    LoadAccount,
    LoadedModel,
    LoadFailure,
    Misfit,
    ModelAccount,
)
from keepmtp.validate.facts.findings import CheckpointFacts, Finding
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.facts.served import Parting, Run, ServeCheck, Served
from keepmtp.validate.report.check_data import calibration_fact, check_data
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.report import assemble
from pydantic import BaseModel
from stations import bench_fact, closeness, lossless

UNTRIED = CheckData(path="", facts=CheckpointFacts(), findings=())
"""Good headers that nobody loaded."""

MODEL = GLM
AT = "2030-01-02 03:04:05 UTC"
VLLM = "0.32.0"
LIMITS = Gates(min_acceptance=0.9)
"""A recipe's that the drafts of `served` are enough for."""
FACTS = table("helpers/facts")
CAST = Misfit(**FACTS["cast"])
REFUSED = LoadFailure(**FACTS["refused"])
WARNED = Finding(**FACTS["warned"])
NEAR = Parting(prompt=1, at=17, plain_token=311, token=902, gap=0.0625)
SETTINGS = {"algorithm": "minmax", "sequence_length": 128}


def account(
    gpu: GPU, tp: int, *, failure: LoadFailure | None = None, casts: tuple[Misfit, ...] = ()
) -> LoadAccount:
    load = DryLoad(**FACTS["loads"][gpu], vllm=VLLM, tp=tp)
    if failure:
        stopped = {
            "ok": False,
            "failure": failure,
            "error": f"{failure.tensor}: {failure.type}",
            "draft": LoadedModel(),
        }
        load = load.model_copy(update=stopped)
        casts = ()
    return LoadAccount(path=str(MODEL), load=load, draft=ModelAccount(misfits=casts))


def run(
    k: int,
    *,
    shares: tuple[float, ...] = (),
    partings: tuple[Parting, ...] | None = None,
    num_drafts: int = 1000,
) -> Run:
    """What one server did; `shares` of its drafts are accepted up to each position."""
    accepted = tuple(round(share * num_drafts) for share in shares)
    return Run(
        k=k,
        loaded=True,
        drafts=min(k, 1) * num_drafts,
        draft_tokens=k * num_drafts,
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        partings=partings,
        log="/tmp/server.log",
    )


def runs(*shares: float) -> tuple[Run, ...]:
    """A server for each k from 0; with the last a near-tie flips."""
    drafting = [
        run(k, shares=shares[:k], partings=(NEAR,) * (k == len(shares)))
        for k in range(1, len(shares) + 1)
    ]
    return run(0), *drafting


def served(*, is_copy: bool = True, is_dead: bool = False) -> ServeCheck:
    """A server's report: k = 0 to 3, a near-tie, the checkpoint on a BF16 copy or natively, its
    draft alive or dead.
    """
    source = Served(**FACTS["source"], runs=runs(0.93, 0.81, 0.64))
    shares = (0.00092, 0.0008, 0.000625) if is_dead else (0.92, 0.80, 0.625)
    fields = FACTS["checkpoint"] | FACTS["copy" if is_copy else "native"]
    checkpoint = Served(**fields, runs=runs(*shares))
    return ServeCheck(checkpoint=checkpoint, source=source, **FACTS["served"])


def accepting(mine: int, theirs: int, of: int) -> ServeCheck:
    """Servers with k=1 of checkpoint and source that accepted so many of these drafts."""
    found, changed = served(is_copy=False), {}
    for role, kept in (("checkpoint", mine), ("source", theirs)):
        drafting = run(1, shares=(kept / of,), num_drafts=of, partings=())
        changed[role] = getattr(found, role).model_copy(update={"runs": (run(0), drafting)})
    return found.model_copy(update=changed)


def whole(**choices: bool) -> FullReport:
    """Everything ran; `choices` go to `served`."""
    return loaded(
        *[account(gpu, tp) for gpu in ("sm90", "sm100", "sm120") for tp in (1, 4)],
        serve=served(**choices),
    )


def broken() -> FullReport:
    """The draft is refused on one GPU and wrong in silence on another; no server was run."""
    return loaded(
        account("sm90", 1, casts=(CAST,)),
        account("sm100", 1, failure=REFUSED),
        account("sm100", 4, failure=REFUSED),
    )


def summary() -> dict[str, Any]:
    """A run's own account, of `mtp: auto`, as keepmtp.json has it."""
    return table("helpers/account")


def calibrated(**changed: Any) -> FullReport:
    """A calibrated checkpoint, checked and no more; `changed` are entries of the run's account."""
    fact = calibration_fact(summary() | changed, SETTINGS)
    data = check_data(check(MODEL), None).model_copy(update={"calibration": fact})
    return assemble(data, vllm=VLLM, made_at=AT)


def judged(
    data: CheckData | None = None,
    *,
    gates: Gates = LIMITS,
    identity: Identity | None = None,
    **measured: Any,
) -> FullReport:
    """A report of a static check and of what was measured, with the judgement of both."""
    found = data or check_data(check(MODEL), None)
    judgement = judge(gates=gates, check=found, **measured)
    return assemble(
        found, vllm=VLLM, judgement=judgement, made_at=AT, identity=identity, **measured
    )


def loaded(*accounts: LoadAccount, **measured: Any) -> FullReport:
    """A real static check, with these dry loads and a warning."""
    checked = with_loads(examine(MODEL), accounts)
    warned = checked.data.model_copy(update={"findings": (*checked.data.findings, WARNED)})
    return judged(check_data(warned, checked.source), **measured)


def hostile(word: str) -> FullReport:
    """Every part but an evaluation, with a server that failed, and with `word` for each string."""
    serve, full = served(), broken()
    dead = Run(k=4, loaded=False, error="x", log="x")
    own = serve.checkpoint.model_copy(update={"runs": (*serve.checkpoint.runs, dead)})
    with TemporaryDirectory() as folder:
        parts = {
            "serve": serve.model_copy(update={"checkpoint": own}),
            "bench": bench_fact(),
            "closeness": closeness(Path(folder)),
            "lossless": lossless((), (), ("x",)),
        }
    judged = judge(gates=LIMITS, check=full, **parts)
    parts |= {"judgement": judged, "calibration": calibrated().calibration}
    return strange(full.model_copy(update=parts), word)


def strange(value: Any, word: str) -> Any:
    """`value` with `word` for each of its strings that a stranger's files or server may choose."""
    if isinstance(value, BaseModel):
        changed = {}
        for name, field in type(value).model_fields.items():
            mine = getattr(value, name)
            is_fixed = field.metadata or "Literal" in str(field.annotation)
            if not isinstance(mine, str) or not (is_fixed or mine == LIMITS.filter):
                changed[name] = strange(mine, word)
        return value.model_copy(update=changed)
    if isinstance(value, tuple):
        return tuple(strange(each, word) for each in value)
    if isinstance(value, Mapping):
        return {key: strange(each, word) for key, each in value.items()}
    return word if value and isinstance(value, str) else value


def benched(bench: BenchFact | None = None, gates: Gates = LIMITS) -> FullReport:
    """The static check and a speed matrix."""
    return judged(gates=gates, bench=bench or bench_fact())


def bare() -> FullReport:
    """Only the static check ran."""
    return assemble(check_data(check(MODEL), None), vllm=VLLM, made_at=AT)
