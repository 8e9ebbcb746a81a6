"""Reports as the stations would give them, in real values of their own types: for report.json and
the page.
"""

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benches import bench_fact, cell
from closenesses import closeness
from keepmtp.checkpoints.identity import Identity
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.check.check import check, examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.benched import BenchFact
from keepmtp.validate.facts.dry_load import (
    GPU,
    DryLoad,
    KernelUse,
    LoadAccount,
    LoadedModel,
    LoadFailure,
    Misfit,
    ModelAccount,
)
from keepmtp.validate.facts.findings import Finding
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.facts.served import Output, Parting, Run, ServeCheck, Served
from keepmtp.validate.report.check_data import calibration_fact, check_data
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.report import assemble
from pydantic import BaseModel

MODEL = Path(__file__).parent.parent.parent / "models" / "tiny-glm4-moe"
AT = "2030-01-02 03:04:05 UTC"
VLLM = "0.32.0"
LIMITS = Gates(min_acceptance=0.9)
"""A recipe's that the drafts of `served` are enough for."""
SHARED = ("model.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
CAST = Misfit(
    param="model.layers.3.mtp_block.mlp.shared_experts.down_proj.weight",
    given="bfloat16",
    tensor="model.layers.3.mlp.shared_experts.down_proj.weight",
    wanted="float8_e4m3fn",
)
WARNED = Finding(
    origin="static",
    rule="old",
    severity="warning",
    where="config.json",
    says="older versions want aliases",
    cure="Add",
)


def account(
    gpu: GPU, tp: int, *, failure: LoadFailure | None = None, casts: tuple[Misfit, ...] = ()
) -> LoadAccount:
    kernels = (
        KernelUse(
            layer="RoutedExperts",
            method="CompressedTensorsW4A4Nvfp4MoEMethod",
            kernel="MarlinExperts" if gpu == "sm90" else "FlashInferExperts",
            count=92,
            where="model.layers.1.mlp.experts",
            outcome="not judged: the post-load step reads values",
        ),
        KernelUse(
            layer="LinearBase",
            method="CompressedTensorsW8A8Fp8",
            kernel="CutlassFP8ScaledMMLinearKernel",
            count=460,
            where="model.layers.0.self_attn.qkv_proj",
            outcome="ok",
        ),
    )
    target = LoadedModel(
        cls="Glm4MoeForCausalLM", num_params=1312, num_written=1312, kernels=kernels
    )
    parts = {"cls": "Glm4MoeMTP", "num_written": 1310, "shared": SHARED, "kernels": kernels[1:]}
    load = DryLoad(
        vllm=VLLM,
        gpu=gpu,
        tp=tp,
        k=1,
        ok=failure is None,
        error=f"{failure.tensor}: {failure.type}" if failure else "",
        failure=failure,
        runner="v2",
        peak_mib=740,
        target=target,
        draft=LoadedModel() if failure else target.model_copy(update=parts),
        seconds=31.1,
    )
    written = ModelAccount() if failure else ModelAccount(misfits=casts)
    return LoadAccount(path=str(MODEL), load=load, draft=written)


REFUSED = LoadFailure(
    stage="load",
    role="draft",
    type="KeyError",
    words="'model.layers.3.eh_proj.weight_scale'",
    at="vllm/model_executor/models/glm4_moe_mtp.py:301",
    tensor="model.layers.3.eh_proj.weight_scale",
)


NEAR = Parting(prompt=1, at=17, plain_token=311, token=902, gap=0.0625)


def run(
    k: int,
    *,
    shares: tuple[float, ...] = (),
    tok_s: float = 40.0,
    speed_up: float | None = None,
    partings: tuple[Parting, ...] | None = None,
    num_drafts: int = 1000,
) -> Run:
    """What one server did; `shares` of its drafts are accepted up to each position."""
    accepted = tuple(round(share * num_drafts) for share in shares)
    last = NEAR.token if partings == (NEAR,) else NEAR.plain_token
    return Run(
        k=k,
        loaded=True,
        seconds_to_health=21.0 + k,
        tokens_per_second=tok_s,
        drafts=min(k, 1) * num_drafts,
        draft_tokens=k * num_drafts,
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        speed_up=speed_up,
        outputs=(
            Output(token_ids=(1, 2, 3), text="one\ntwo"),
            Output(token_ids=(*(4,) * 17, last), text="three"),
        ),
        partings=partings,
        log="/tmp/server.log",
    )


def runs(shares: tuple[float, ...], *rates: float) -> tuple[Run, ...]:
    """A server for each k from 0, of so many tokens a second; with the last a near-tie flips."""
    first, *others = rates
    drafting = [
        run(
            k,
            shares=shares[:k],
            tok_s=rate,
            speed_up=rate / first,
            partings=(NEAR,) * (k == len(others)),
        )
        for k, rate in enumerate(others, 1)
    ]
    return run(0, tok_s=first), *drafting


def served(*, is_copy: bool = True, is_dead: bool = False) -> ServeCheck:
    """A server's report: k = 0 to 3, a near-tie, the checkpoint on a BF16 copy or natively, its
    draft alive or dead.
    """
    source = Served(
        role="source",
        path="models/tiny-glm4-moe",
        as_served="native",
        reason="",
        dtype="plain",
        num_bytes=6_400_000,
        runs=runs((0.93, 0.81, 0.64), 40, 61.2, 74, 79.2),
    )
    shares = (0.00092, 0.0008, 0.000625) if is_dead else (0.92, 0.80, 0.625)
    checkpoint = Served(
        role="checkpoint",
        path="out/tiny-glm4-moe.nvfp4a16",
        num_bytes=2_300_000,
        dtype="nvfp4, plain",
        as_served="BF16 copy of the same weights" if is_copy else "native",
        reason="vLLM's CPU build has no kernel for NVFP4 experts; packed kernels are not judged."
        * is_copy,
        runs=runs(shares, 41, 60, 73, 78),
    )
    return ServeCheck(
        checkpoint=checkpoint,
        source=source,
        prompts=("What is 2 + 2?", "Line\none"),
        max_tokens=128,
        environment={"vllm": VLLM, "device": "CPU: Xeon, 2 cores"},
        seconds=312.0,
    )


def accepting(mine: int, theirs: int, of: int) -> ServeCheck:
    """Servers with k=1 of checkpoint and source that accepted so many of these drafts."""
    found, changed = served(is_copy=False), {}
    for role, kept in (("checkpoint", mine), ("source", theirs)):
        drafting = run(1, shares=(kept / of,), num_drafts=of, speed_up=1.0, partings=())
        model = getattr(found, role)
        changed[role] = model.model_copy(update={"runs": (run(0), drafting)})
    return found.model_copy(update=changed)


def whole(**choices: bool) -> FullReport:
    """Everything ran; `choices` go to `served`."""
    opened = open_source(MODEL)
    return loaded(
        *[account(gpu, tp) for gpu in ("sm90", "sm100", "sm120") for tp in (1, 4)],
        before=opened,
        serve=served(**choices),
    )


def broken() -> FullReport:
    """The draft is refused on one GPU and wrong in silence on another; no server was run."""
    return loaded(
        account("sm90", 1, casts=(CAST,)),
        account("sm100", 1, failure=REFUSED),
        account("sm100", 4, failure=REFUSED),
    )


def accepted(*rates: float) -> dict[str, Any]:
    """A figure as `quantize/calibrate/mtp/acceptance.py` gives it: `rates` are of the drafts that
    reach a position.
    """
    shares = [round(share, 5) for share in accumulate(rates, mul)]
    return {"num_slots": 1320, "by_position": {str(k): shares[:k] for k in (1, 2, 3)}}


SETTINGS = {"algorithm": "minmax", "sequence_length": 128}
MIXED = {"attention": "FP8_DYNAMIC", "shared_experts": "FP8_DYNAMIC", "experts": "NVFP4"}
TRIED = (
    ("bf16", 1_800_000, 0.995),
    ("FP8_DYNAMIC", 1_250_000, 0.991),
    ({"attention": "bf16", "shared_experts": "bf16", "experts": "NVFP4"}, 1_150_000, 0.985),
    (MIXED, 980_000, 0.978),
    ("W4A16", 0, 0.0),
    ("NVFP4A16", 920_000, 0.961),
    ("NVFP4", 920_000, 0.942),
)


def summary() -> dict[str, Any]:
    """A run's own account, of `mtp: auto`, as keepmtp.json has it."""
    rows = (
        ("source", "source", 3.2101, (0.93, 0.87, 0.8)),
        ("quantized", "source", 3.2922, (0.925, 0.865, 0.79)),
        ("quantized", "quantized", 3.2922, (0.915, 0.855, 0.78)),
    )
    return {
        "data": {
            "dataset": "models/problems.jsonl",
            "dataset_revision": "local",
            "subset": "",
            "split": "train",
            "column": "text",
            "row_numbers_sha256": "a" * 64,
            "ids_sha256": "b" * 64,
            "held_out_ids_sha256": "c" * 64,
            "seed": 42,
            "rows": 80,
            "held_out_rows": 40,
            "blank_rows": 0,
            "tokens": 4096,
            "held_out_tokens": 2048,
        },
        "processes": 2,
        "coverage": {
            "modules": 45,
            "never_routed": [f"model.layers.2.mlp.experts.{expert}.up_proj" for expert in (1, 3)],
            "fewest_tokens": {"module": "model.layers.2.mlp.experts.1.up_proj", "tokens": 0},
        },
        "min_acceptance": 0.97,
        "confidence": 0.95,
        "mtp": MIXED,
        "rows": [
            {
                "backbone": backbone,
                "mtp": mtp,
                "perplexity": perplexity,
                "acceptance": accepted(*rates),
            }
            for backbone, mtp, perplexity, rates in rows
        ],
        "agreement": 0.971,
        "unmeasured": "",
        "candidates": [
            {
                "policy": policy,
                "bytes": num_bytes,
                "kept": kept,
                "refused": "" if kept else "K must be a multiple of 128",
                "chosen": policy is MIXED,
                "acceptance": accepted(0.93 * kept, 0.87 * kept, 0.8 * kept) if kept else None,
            }
            for policy, num_bytes, kept in TRIED
        ],
    }


def calibrated(**changed: Any) -> FullReport:
    """A calibrated checkpoint, checked and no more; `changed` are entries of the run's account."""
    fact = calibration_fact(summary() | changed, SETTINGS)
    data = check_data(check(MODEL)).model_copy(update={"calibration": fact})
    return assemble(data, vllm=VLLM, made_at=AT)


def judged(
    data: CheckData | None = None,
    *,
    gates: Gates = LIMITS,
    identity: Identity | None = None,
    **measured: Any,
) -> FullReport:
    """A report of a static check and of what was measured, with the judgement of both."""
    found = data or check_data(check(MODEL))
    judgement = judge(gates=gates, check=found, **measured)
    return assemble(
        found, vllm=VLLM, judgement=judgement, made_at=AT, identity=identity, **measured
    )


def loaded(*accounts: LoadAccount, before: Source | None = None, **measured: Any) -> FullReport:
    """A real static check, with these dry loads and a warning."""
    checked = with_loads(examine(MODEL), accounts)
    warned = checked.data.model_copy(update={"findings": (*checked.data.findings, WARNED)})
    return judged(check_data(warned, opened=checked.source, source=before), **measured)


def hostile(word: str) -> FullReport:
    """Every part but an evaluation, with a server and a cell that failed, and with `word` for each
    string.
    """
    serve, bench, full = served(), bench_fact(), broken()
    dead = Run(k=4, loaded=False, error="x", notes=("x",), log="x", unwritten=("x",))
    own = serve.checkpoint.model_copy(update={"runs": (*serve.checkpoint.runs, dead)})
    cells = bench.checkpoint.model_copy(update={"cells": (cell(1, (), error="x"),)})
    with TemporaryDirectory() as folder:
        parts: dict[str, Any] = {
            "serve": serve.model_copy(update={"checkpoint": own}),
            "bench": bench.model_copy(update={"checkpoint": cells}),
            "closeness": closeness(Path(folder)),
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
    return assemble(check_data(check(MODEL)), vllm=VLLM, made_at=AT)
