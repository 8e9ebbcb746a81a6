"""Reports as the stations would give them, in real values of their own types: for report.json and
the page.
"""

import math
from pathlib import Path
from typing import Any

from benches import bench_fact, cell
from closenesses import hostile_closeness
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
from keepmtp.validate.facts.findings import CheckpointFacts, Finding
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.facts.served import Drafts, Output, Parting, Run, ServeCheck, Served, counters
from keepmtp.validate.report.check_data import calibration_fact, check_data, sizes_by_group
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.report import assemble

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


def model(
    cls: str, *, shared: tuple[str, ...] = (), kernels: tuple[KernelUse, ...] = ()
) -> LoadedModel:
    return LoadedModel(
        cls=cls, num_params=1312, num_written=1312 - len(shared), shared=shared, kernels=kernels
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
    load = DryLoad(
        gpu=gpu,
        tp=tp,
        k=1,
        ok=failure is None,
        failure=failure,
        runner="v2",
        peak_mib=740,
        target=model("Glm4MoeForCausalLM", kernels=kernels),
        draft=LoadedModel() if failure else model("Glm4MoeMTP", shared=SHARED, kernels=kernels[1:]),
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


def written(partings: tuple[Parting, ...] | None) -> tuple[int, ...]:
    """What a server writes after the second prompt: another last token where it parts as `NEAR`
    does.
    """
    return (*(4,) * 17, 902 if partings and partings[0] == NEAR else 311)


def run(
    k: int,
    *,
    shares: tuple[float, ...] = (),
    tok_s: float = 40.0,
    speed_up: float | None = None,
    partings: tuple[Parting, ...] | None = None,
    num_drafts: int = 1000,
) -> Run:
    accepted = tuple(round(share * num_drafts) for share in shares)
    drafts = (
        Drafts(
            drafts=num_drafts,
            draft_tokens=k * num_drafts,
            accepted_tokens=sum(accepted),
            accepted_per_position=accepted,
        )
        if k
        else Drafts()
    )
    return Run(
        k=k,
        loaded=True,
        seconds_to_health=21.0 + k,
        tokens_per_second=tok_s,
        **counters(drafts),
        speed_up=speed_up,
        outputs=(
            Output(token_ids=(1, 2, 3), text="one\ntwo"),
            Output(token_ids=written(partings), text="three"),
        ),
        partings=partings,
        log="/tmp/server.log",
    )


def served(*, is_copy: bool = True, is_dead: bool = False) -> ServeCheck:
    """A server's report: k = 0 to 3, a near-tie, the checkpoint on a BF16 copy or natively, its
    draft alive or dead.
    """
    near = (NEAR,)
    source = Served(
        role="source",
        path="models/tiny-glm4-moe",
        as_served="native",
        reason="",
        dtype="plain",
        num_bytes=6_400_000,
        runs=(
            run(0),
            run(1, shares=(0.93,), tok_s=61.2, speed_up=61.2 / 40, partings=()),
            run(2, shares=(0.93, 0.81), tok_s=74, speed_up=74 / 40, partings=()),
            run(3, shares=(0.93, 0.81, 0.64), tok_s=79.2, speed_up=79.2 / 40, partings=near),
        ),
    )
    alive = 0.001 if is_dead else 1.0
    checkpoint = Served(
        role="checkpoint",
        path="out/tiny-glm4-moe.nvfp4a16",
        num_bytes=2_300_000,
        dtype="nvfp4, plain",
        as_served="BF16 copy of the same weights" if is_copy else "native",
        reason="vLLM's CPU build has no kernel for NVFP4 experts; packed kernels are not judged."
        if is_copy
        else "",
        runs=(
            run(0, tok_s=41),
            run(1, shares=(0.92 * alive,), tok_s=60, speed_up=60 / 41, partings=()),
            run(2, shares=(0.92 * alive, 0.80 * alive), tok_s=73, speed_up=73 / 41, partings=()),
            run(
                3,
                shares=(0.92 * alive, 0.80 * alive, 0.625 * alive),
                tok_s=78,
                speed_up=78 / 41,
                partings=near,
            ),
        ),
    )
    return ServeCheck(
        checkpoint=checkpoint,
        source=source,
        prompts=("What is 2 + 2?", "Line\none"),
        max_tokens=128,
        environment={"vllm": VLLM, "device": "CPU: Xeon, 2 cores"},
        seconds=312.0,
    )


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
    shares = [round(math.prod(rates[: step + 1]), 5) for step in range(len(rates))]
    ks = range(1, len(rates) + 1)
    return {
        "num_slots": 1320,
        "by_position": {str(k): shares[:k] for k in ks},
    }


SETTINGS = {"algorithm": "minmax", "sequence_length": 128}
MIXED = {"attention": "FP8_DYNAMIC", "shared_experts": "FP8_DYNAMIC", "experts": "NVFP4"}


def summary(word: str = "") -> dict[str, Any]:
    """A run's own account, of `mtp: auto`, as keepmtp.json has it; with `word`, all its strings are
    that.
    """

    def tried(
        policy: object, num_bytes: int, kept: float, *, refused: str = "", chosen: bool = False
    ) -> object:
        figures = None if refused else accepted(0.93 * kept, 0.87 * kept, 0.8 * kept)
        return {
            "policy": word or policy,
            "bytes": num_bytes,
            "kept": kept,
            "refused": refused and (word or refused),
            "chosen": chosen,
            "acceptance": figures,
        }

    told = {
        key: word or value
        for key, value in {
            "dataset": "models/problems.jsonl",
            "dataset_revision": "local",
            "subset": "",
            "split": "train",
            "column": "text",
            "row_numbers_sha256": "a" * 64,
            "ids_sha256": "b" * 64,
            "held_out_ids_sha256": "c" * 64,
        }.items()
    }
    counts = {
        "seed": 42,
        "rows": 80,
        "held_out_rows": 40,
        "blank_rows": 0,
        "tokens": 4096,
        "held_out_tokens": 2048,
    }
    rows = (
        ("source", "source", 3.2101, (0.93, 0.87, 0.8)),
        ("quantized", "source", 3.2922, (0.925, 0.865, 0.79)),
        ("quantized", "quantized", 3.2922, (0.915, 0.855, 0.78)),
    )
    return {
        "data": told | counts,
        "processes": 2,
        "coverage": {
            "modules": 45,
            "never_routed": [
                word or f"model.layers.2.mlp.experts.{expert}.up_proj" for expert in (1, 3)
            ],
            "fewest_tokens": {
                "module": word or "model.layers.2.mlp.experts.1.up_proj",
                "tokens": 0,
            },
        },
        "min_acceptance": 0.97,
        "confidence": 0.95,
        "mtp": word or MIXED,
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
        "unmeasured": word,
        "candidates": [
            tried("bf16", 1_800_000, 0.995),
            tried("FP8_DYNAMIC", 1_250_000, 0.991),
            tried(
                {"attention": "bf16", "shared_experts": "bf16", "experts": "NVFP4"},
                1_150_000,
                0.985,
            ),
            tried(MIXED, 980_000, 0.978, chosen=True),
            tried("W4A16", 0, 0.0, refused="K must be a multiple of 128"),
            tried("NVFP4A16", 920_000, 0.961),
            tried("NVFP4", 920_000, 0.942),
        ],
    }


def calibrated(**changed: Any) -> FullReport:
    """A calibrated checkpoint, checked and no more; `changed` are entries of the run's account."""
    fact = calibration_fact(summary() | changed, SETTINGS)
    data = check_data(check(MODEL)).model_copy(update={"calibration": fact})
    return assemble(data, vllm=VLLM, made_at=AT)


def loaded(
    *accounts: LoadAccount, before: Source | None = None, serve: ServeCheck | None = None
) -> FullReport:
    """A real static check, with these dry loads and a warning; with what servers did, judged by
    `LIMITS`.
    """
    checked = with_loads(examine(MODEL), accounts, VLLM)
    assert checked.source is not None
    warned = checked.data.model_copy(update={"findings": (*checked.data.findings, WARNED)})
    data = check_data(warned, opened=checked.source, source=before)
    judged = serve and judge(gates=LIMITS, check=data, serve=serve, evaluation=None)
    return assemble(data, vllm=VLLM, serve=serve, judgement=judged, made_at=AT)


def hostile(word: str) -> FullReport:
    """Every string that a stranger's checkpoint or server may choose is `word`."""
    found = Finding(origin="static", rule=word, severity="error", where=word, says=word, cure=word)
    kernel = KernelUse(
        layer=word, method=word, kernel=word, count=1, where=word, outcome=f"refused: {word}"
    )
    bad = LoadFailure(stage="load", role="draft", type=word, words=word, at=word, tensor=word)
    built = LoadedModel(cls=word, num_params=1, num_written=1, shared=(word,), kernels=(kernel,))
    load = DryLoad(
        gpu="sm90", tp=1, k=1, ok=False, num_errors=1, failure=bad, target=built, draft=built
    )
    model = Served(
        role="checkpoint",
        path=word,
        as_served="native",
        reason=word,
        dtype=word,
        num_bytes=1,
        runs=(
            run(
                1,
                shares=(0.5,),
                partings=(Parting(prompt=0, at=0, plain_token=1, token=2, gap=None),),
            ),
            Run(k=2, loaded=False, error=word, notes=(word,), log=word, unwritten=(word,)),
        ),
    )
    server = ServeCheck(
        checkpoint=model,
        source=None,
        prompts=(word,),
        max_tokens=1,
        environment={word: word},
        seconds=1.0,
    )
    facts = CheckpointFacts(family=word, dialect=word, mtp_forms=(word,))
    sizes = [row.model_copy(update={"group": word}) for row in sizes_by_group(open_source(MODEL))]
    checked = check_data(CheckData(path=word, findings=(found,), facts=facts, dry=(load,)))
    fact = calibration_fact(summary(word), SETTINGS | {"algorithm": word})
    data = checked.model_copy(update={"sizes": tuple(sizes), "calibration": fact})
    judged = judge(gates=LIMITS, check=data, serve=server, evaluation=None)
    bench = bench_fact()
    own = bench.checkpoint.model_copy(
        update={"path": word, "reason": word, "cells": (cell(1, (), error=word),)}
    )
    bench = bench.model_copy(
        update={"checkpoint": own, "prompts": word, "environment": {word: word}}
    )
    near = hostile_closeness(word)
    return assemble(
        data, vllm=word, serve=server, bench=bench, closeness=near, judgement=judged, made_at=AT
    )


def benched(bench: BenchFact | None = None, gates: Gates = LIMITS) -> FullReport:
    """The static check and a speed matrix."""
    found, plain = bench or bench_fact(), bare()
    data = CheckData(
        path=plain.path, facts=plain.facts, findings=plain.findings, absent=plain.absent
    )
    judged = judge(gates=gates, check=data, serve=None, evaluation=None, bench=found)
    return assemble(data, vllm=VLLM, bench=found, judgement=judged, made_at=AT)


def bare() -> FullReport:
    """Only the static check ran."""
    return assemble(check_data(check(MODEL)), vllm=VLLM, made_at=AT)
