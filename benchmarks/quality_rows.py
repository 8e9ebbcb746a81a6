"""The rows of docs/quality_rows.md: variants of the shipped models, each a recipe of its own, and peers'
own runs.

In: nothing. Out: `ROWS`. A row is a shipped variant with some keys changed; `make quality` writes
the recipe, runs it and judges the folder. A row of a peer is the peer's own command, on the same
calibration text.

Easy to get wrong: a comparison needs a base. A search is compared with the same scheme without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DOCS, GLM, QWEN = "tiny-docs", "tiny-glm4-moe", "tiny-qwen3_5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        key: its name, and that of its files.
        title: what the page calls it.
        variant: of the model file, which `changes` are made in.
        changes: keys of a flat recipe; a mapping changes the keys that it names.
        base: the row that its divergence is compared with; "" for none.
        peer: whose own command makes it; "" for keepmtp's.
        models: which it is run on.
    """

    key: str
    title: str
    variant: str = "nvfp4"
    changes: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    peer: str = ""
    models: tuple[str, ...] = (DOCS, GLM)


ALL = (DOCS, GLM, QWEN)


def _free(scheme: str) -> dict[str, Any]:
    """A scheme for the whole backbone that needs no text."""
    return {"backbone": scheme, "calibration": None}


def _modelopt(algorithm: str) -> dict[str, Any]:
    """Statistics and block scales by NVIDIA's code, plan, packing and file by keepmtp's."""
    return {"calibration": {"backend": "modelopt", "algorithm": algorithm}}


def _budget(budget: str) -> dict[str, Any]:
    candidates = ["NVFP4", "NVFP4A16", "W4A16", "FP8_DYNAMIC", "bf16"]
    return {"backbone": "auto", "budget": budget, "backbone_auto": {"candidates": candidates}}


def _tuned(policy: str) -> dict[str, Any]:
    """An MTP block trained on text of another file than the one that is judged on, behind the same
    NVFP4 backbone.
    """
    tuned = {"mtp": policy, "steps": 200, "batch_size": 4, "learning_rate": 1e-3, "seed": 0, "loss": "lk_hybrid",
             "draft_steps": 3, "decay": 0.6}  # fmt: skip
    text = {"dataset": "models/docs_held_out.jsonl", "samples": 160, "held_out": 32}
    return {"mtp": "tuned", "mtp_tuned": tuned, "calibration": text}


ROWS: tuple[Row, ...] = (
    Row(key="fp8-dynamic", title="FP8, a scale a row", changes=_free("FP8_DYNAMIC"), models=ALL),
    Row(key="fp8", title="FP8, static input scales", variant="fp8", models=ALL),
    Row(key="fp8-kv", title="FP8, KV cache too", variant="fp8", changes={"kv_cache": "FP8"}, base="fp8",
        models=(GLM,)),
    Row(key="nvfp4", title="NVFP4", models=ALL),
    Row(key="nvfp4-dialect", title="NVFP4 in modelopt's dialect", changes={"format": "modelopt"}, base="nvfp4",
        models=(GLM,)),
    Row(key="nvfp4-mtp-nvfp4", title="NVFP4, MTP block too", changes={"mtp": "NVFP4"}, base="nvfp4", models=ALL),
    Row(key="nvfp4-mse", title="NVFP4, search: mse", changes={"search": "mse"}, base="nvfp4", models=(DOCS,)),
    Row(key="nvfp4-imatrix", title="NVFP4, search: imatrix", changes={"search": "imatrix"}, base="nvfp4",
        models=(DOCS,)),
    Row(key="nvfp4-gptq", title="NVFP4 by GPTQ", changes={"calibration": {"algorithm": "gptq"}}, base="nvfp4",
        models=(DOCS,)),
    Row(key="nvfp4-backend", title="NVFP4, modelopt as back-end", changes=_modelopt("minmax"), base="nvfp4",
        models=(GLM,)),
    Row(key="nvfp4-backend-mse", title="NVFP4, modelopt as back-end: mse", changes=_modelopt("mse"), base="nvfp4",
        models=(DOCS,)),
    Row(key="nvfp4-backend-4o6", title="NVFP4, modelopt as back-end: four-over-six", changes=_modelopt("four-over-six"),
        base="nvfp4", models=(DOCS,)),
    Row(key="nvfp4-backend-hessian", title="NVFP4, modelopt as back-end: local-hessian",
        changes=_modelopt("local-hessian"), base="nvfp4", models=(DOCS,)),
    Row(key="nvfp4a16", title="NVFP4, 16-bit inputs", changes=_free("NVFP4A16")),
    Row(key="w4a16", title="W4A16", changes=_free("W4A16"), models=ALL),
    Row(key="w4a16-mse", title="W4A16, search: mse", changes=_free("W4A16") | {"search": "mse"}, base="w4a16",
        models=(DOCS,)),
    Row(key="w4a16-imatrix", title="W4A16, search: imatrix", base="w4a16", models=(DOCS,),
        changes={"backbone": "W4A16", "search": "imatrix"}),
    Row(key="w4a16-g32", title="W4A16, groups of 32", changes=_free("W4A16_G32"), base="w4a16", models=(DOCS,)),
    Row(key="w4a16-asym", title="W4A16, zero points", changes=_free("W4A16_ASYM"), base="w4a16", models=(DOCS,)),
    Row(key="w4a16-gptq", title="W4A16 by GPTQ", variant="w4a16-gptq", base="w4a16", models=ALL),
    Row(key="w4a16-awq", title="W4A16 by AWQ", variant="w4a16-awq", base="w4a16", models=ALL),
    Row(key="w4a16-autoround", title="W4A16 by AutoRound", base="w4a16", models=(DOCS,),
        changes=_free("W4A16") | {"calibration": {"algorithm": "autoround"}}),
    Row(key="budget", title="backbone: auto, bytes of NVFP4", changes=_budget("6.86MiB"), base="nvfp4a16",
        models=(DOCS,)),
    Row(key="budget-more", title="backbone: auto, half way to FP8", changes=_budget("7.26MiB"), base="nvfp4a16",
        models=(DOCS,)),
    Row(key="tuned-nvfp4", title="NVFP4, MTP block NVFP4 and tuned", changes=_tuned("NVFP4"), models=(DOCS,)),
    Row(key="tuned-bf16", title="NVFP4, MTP block BF16 and tuned", changes=_tuned("bf16"), models=(DOCS,)),
    Row(key="llm-compressor-nvfp4", title="llm-compressor: NVFP4", peer="llm-compressor", base="nvfp4"),
    Row(key="llm-compressor-w4a16-gptq", title="llm-compressor: W4A16 by GPTQ", variant="w4a16-gptq",
        peer="llm-compressor", base="w4a16-gptq", models=(GLM,)),
    Row(key="modelopt-nvfp4", title="modelopt: NVFP4", peer="modelopt", base="nvfp4"),
)  # fmt: skip
SHORT_MODEL = DOCS
# Those of docs/quality.md: one for each question that people have first.
SHORT = ("fp8-dynamic", "nvfp4", "nvfp4-mtp-nvfp4", "nvfp4-gptq", "nvfp4a16", "w4a16", "w4a16-gptq", "w4a16-awq",
         "tuned-nvfp4", "llm-compressor-nvfp4")  # fmt: skip
HELD_OUT = {DOCS: 64, GLM: 96, QWEN: 96}
"""Sequences that are judged: those behind the recipe's own held-out text, by which a run may
choose.
"""


def rows_of(model: str) -> list[Row]:
    """The rows that are run on a model, in the order of the table."""
    return [row for row in ROWS if model in row.models]
