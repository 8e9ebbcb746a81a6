"""Findings from a dry load, on accounts of our own: no vLLM is needed. tests/vllm/test_dry_corpus.py
has vLLM's own.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from checkpoint_files import as_source
from good import ours
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.validate.check.check import Checked
from keepmtp.validate.dryload.verdict_findings import objections
from keepmtp.validate.facts.dry_load import (
    DryLoad,
    Fault,
    KernelUse,
    LoadAccount,
    LoadedModel,
    LoadFailure,
    Misfit,
    ModelAccount,
    Question,
)
from keepmtp.validate.facts.findings import CheckpointFacts, Finding
from keepmtp.validate.facts.results import CheckData

VERSION = "0.32.0"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@cache
def runtime(model: str = "glm-4.7") -> RuntimeView:
    return RuntimeView.of(as_source(ours(model, "FP8_DYNAMIC"), Path("/nonexistent")), VERSION)


def account(
    *,
    failure: LoadFailure | None = None,
    kernels: Sequence[KernelUse] = (),
    draft: ModelAccount | None = None,
    unconsumed: tuple[str, ...] = (),
    truncated: tuple[tuple[str, int, int], ...] = (),
) -> LoadAccount:
    target = LoadedModel(cls="Target", kernels=tuple(kernels))
    load = DryLoad(
        vllm=VERSION,
        gpu="sm100",
        tp=1,
        k=1,
        ok=True,
        failure=failure,
        target=target,
        draft=LoadedModel(cls="Draft"),
    )
    written = {"target": ModelAccount(), "draft": draft or ModelAccount()}
    seen = {"unconsumed": unconsumed, "truncated": truncated}
    return LoadAccount(path="FOLDER", load=load, **written, **seen)


def found(of: LoadAccount, model: str = "glm-4.7", static: Sequence[Finding] = ()) -> list[Finding]:
    view = runtime(model)
    data = CheckData(path="FOLDER", facts=CheckpointFacts(), findings=tuple(static))
    made = objections(of, Checked(data, view.source, view))
    return [objection.finding for objection in made]


def raised(words: str, **where: str) -> LoadFailure:
    usual = {"stage": "load", "role": "target", "type": "ValueError"}
    return LoadFailure(**(usual | where), words=words)


def test_objections():
    """Nothing of a load that was whole; of one that stopped, what it said and no more."""
    assert found(account()) == []
    lost = account(failure=raised("x", tensor=Q_PROJ), unconsumed=(Q_PROJ,))
    assert len(found(lost)) == 1


@pytest.mark.parametrize(
    "failure, rule, where, says",
    [
        (raised("shapes differ", tensor=Q_PROJ), "dry-load", Q_PROJ, "while loading the target"),
        (
            raised("There is no module or parameter named layers.1.self_attn.qkv_proj"),
            "dry-load",
            "model.layers.1.self_attn.",
            "vLLM 0.32.0 stops",
        ),
        (raised("odd", stage="config", role=""), "dry-load", "FOLDER/config.json", "reading the"),
    ],
)
def test_failed(failure, rule, where, says):
    (finding,) = found(account(failure=failure))
    assert (finding.rule, finding.severity, finding.origin) == (rule, "error", "dry")
    assert where in finding.where and says in finding.says


def test_failed_over_a_defect_of_vllm():
    words = "list index out of range"
    failure = raised(words, role="draft", type="IndexError", at="vllm/models/step3p5.py:421")
    (finding,) = found(account(failure=failure), "step-3.5-flash")
    assert finding.rule == "vllm-defect" and "not of the checkpoint" in finding.says


def unfilled(written: int) -> ModelAccount:
    param = "model.layers.3.mtp_block.mlp.down_proj.weight_scale"
    fault = Fault(param=param, num_written=written, num_expected=8, sources={})
    return ModelAccount(faults=(fault,))


MISFIT = Misfit(param="p", tensor=Q_PROJ, given="F8", wanted="BF16")
REFUSED = KernelUse(
    layer="Linear",
    method="Fp8",
    kernel="",
    count=7,
    where="x.y",
    outcome="refused: too old",
    refused="too old",
)


@pytest.mark.parametrize(
    "written, says",
    [
        (0, "by nothing on disk, in silence; the draft guesses"),
        (4, "in part only (4 of 8 elements)"),
    ],
)
def test_unfilled(written, says):
    (finding,) = found(account(draft=unfilled(written)))
    assert (finding.rule, finding.severity) == ("dry-load", "error") and says in finding.says


def test_misfitted():
    (finding,) = found(account(draft=ModelAccount(misfits=(MISFIT,))))
    assert (finding.rule, finding.severity) == ("dry-load", "error")
    assert "has F8 and vLLM takes it as BF16" in finding.says


def test_without_kernel():
    (finding,) = found(account(kernels=[REFUSED]))
    assert (finding.rule, finding.severity) == ("no-kernel", "error")
    assert "no kernel for Fp8 in the target (7): too old" in finding.says


def test_silence():
    """Each thing that vLLM accepted without a message is a finding of its own."""
    draft = ModelAccount(faults=unfilled(0).faults, misfits=(MISFIT,))
    assert len(found(account(draft=draft, kernels=[REFUSED]))) == 3


def test_unread():
    """What nobody read; what vLLM computes itself is no loss."""
    scale = "model.layers.1.self_attn.k_scale"
    lost, cache_scale = found(account(unconsumed=(Q_PROJ, "a.rotary_emb.inv_freq", scale)))
    assert (lost.where, lost.rule) == (Q_PROJ, "dry-load") and "neither target nor" in lost.says
    assert (cache_scale.rule, cache_scale.severity) == ("kv-scales", "warning")


def test_unused():
    """What was read in part."""
    (cut,) = found(account(truncated=((Q_PROJ, 3, 9),)))
    assert cut.where == Q_PROJ and "only 3 of its 9 elements" in cut.says


def nameless_head() -> LoadAccount:
    head = Question(prefix="", layer="ParallelLMHead", method="Nvfp4", path="lm_head")
    lost = Fault(param="lm_head.weight", num_written=0, num_expected=8, sources={})
    return account(draft=ModelAccount(asked=(head,), faults=(lost,)))


def test_nameless_heads():
    """And what is not filled of the same head is no further finding."""
    (finding,) = found(nameless_head())
    assert (finding.rule, finding.where) == ("vllm-defect", "lm_head.weight")
    assert "builds a head without a name" in finding.says


def test_of_vllm():
    """With the cures that make it load, where there are some."""
    (finding,) = found(nameless_head().with_cures(("heads.k_exaone",)))
    assert finding.says.endswith("with keepmtp's cures it loads (heads.k_exaone)")
    assert "`KEEPMTP_CURES=heads.k_exaone vllm serve PATH`" in finding.cure


def test_wrong():
    """The static check's cure for the same tensor is better than a general one."""
    stem = Q_PROJ.removesuffix(".weight")
    static = Finding(where=stem, says="x", cure="Do this", rule="form")
    (finding,) = found(account(unconsumed=(Q_PROJ,)), static=[static])
    assert finding.cure == "Do this"
    (finding,) = found(account(unconsumed=(Q_PROJ,)))
    assert finding.cure.startswith("Compare its name")
