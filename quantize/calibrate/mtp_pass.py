"""The MTP pass: the block calibrated on what the backbone leaves, measured, and under `mtp: auto` chosen.

In: a plan and its finished backbone pass. Out: an `MtpPass`: the plan with the MTP policy decided, the statistics of
its block beside those of the backbone, and what every policy that was tried would have cost and kept.

The block is a small model of its own. Its inputs are the hidden states of the calibration batches, which lie on disk
behind the last layer, and the embeddings of the next tokens; so a policy is tried without another backbone pass.

Easy to get wrong: acceptance is lost in two places, by rounding the backbone and by rounding the block. Both are
measured apart, and a policy is judged by both together, against the released model.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.files import complete, partial_path, write_whole
from ...recipes.errors import CheckpointError, GateError, RecipeError
from ...recipes.family import HFName
from ...recipes.schema import AUTO, Candidate, candidates_for
from ..plan import Plan, make_plan
from . import layer as backend
from .backbone import Backbone, Progress, Stream, Watch, fitting, peak_memory, record
from .held_out import Acceptance, Row, Target, acceptance, agreement, block_input, target
from .mtp_block import MtpBlock, bind_block, build_block
from .skeleton import Batch, frozen_in, fused_in, schemes_in
from .statistics import read_metadata

# vLLM 0.32.0 runs the first MTP layer at every step, however many there are (v1/spec_decode/llm_base_proposer.py leaves
# spec_step_idx at 0). For this family alone a proposer takes the next layer at each step (v1/spec_decode/step3p5.py).
_A_LAYER_A_STEP = frozenset({"step3p5"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One policy for the MTP block.

    Attributes:
        policy: as in a recipe.
        num_bytes: of the block's tensors on disk; 0 where it was refused.
        acceptance: behind the quantized backbone; None where it was refused.
        kept: part of the released model's acceptance, see `Acceptance.kept_of`.
        refused: why there is no plan; "" if there is.
        is_chosen: it is what will be written.
    """

    policy: Candidate
    num_bytes: int
    acceptance: Acceptance | None
    kept: float
    refused: str = ""
    is_chosen: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "bytes": self.num_bytes,
            "kept": round(self.kept, 5),
            "refused": self.refused,
            "chosen": self.is_chosen,
            "acceptance": self.acceptance.as_dict() if self.acceptance else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpPass:
    """What is decided and known about the MTP block.

    Attributes:
        plan: with one policy for the block.
        rows: released model, quantized backbone with the block as released, and with the quantized block if it is.
        agreement: share of held-out slots where the quantized backbone chooses what the released one does.
        candidates: of `mtp: auto`, in the recipe's order.
        coverage: module of the block on disk -> tokens that its calibration saw; experts: tokens the router sent them.
        unmeasured: why there is no acceptance; "" if there is.
    """

    plan: Plan
    rows: tuple[Row, ...]
    agreement: float
    candidates: tuple[Tried, ...] = ()
    coverage: Mapping[HFName, int]
    unmeasured: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For reports: JSON values only."""
        return {
            "mtp": self.plan.recipe.mtp,
            "rows": [row.as_dict() for row in self.rows],
            "agreement": round(self.agreement, 5),
            "candidates": [each.as_dict() for each in self.candidates],
            "unmeasured": self.unmeasured,
        }


def refuse_mtp(plan: Plan) -> None:
    """Whether the MTP block can be run, where it must be: known from the headers, before hours of work.

    Raises:
        RecipeError: the block has to be calibrated or chosen, and it cannot be run here, or there is none.
        CheckpointError: likewise, and its tensors are not those of its class.
    """
    why = _why_not(plan)
    if why is not None and (plan.recipe.mtp == AUTO or any(_depends_on_batches(plan))):
        raise why


def mtp_pass(plan: Plan, backbone: Backbone, *, written: Tensor | None = None, watch: Watch | None = None) -> MtpPass:
    """Calibrate, measure, and for `mtp: auto` choose.

    Args:
        plan: what `backbone` was calibrated for; its recipe may still say auto.
        backbone: the finished pass.
        written: see `acceptance`.
        watch: told after each policy.

    Raises:
        RecipeError: see `refuse_mtp`; or under `mtp: auto` the held-out text says nothing about this model.
        CheckpointError: NaN in the block, or a module that is never called.
        GateError: no candidate keeps what the recipe asks for.
    """
    refuse_mtp(plan)
    source, served = target(backbone, "source"), target(backbone, "served")
    same = agreement(backbone, source, served)
    why = _why_not(plan)
    if why is not None:
        _publish(backbone, ())
        rows = _rows(source, served, None, None)
        return MtpPass(plan=plan, rows=rows, agreement=same, coverage={}, unmeasured=str(why))
    run = _Pass(plan=plan, backbone=backbone, source=source, served=served, written=written)
    tried, final, unmeasured = (), plan, ""
    try:
        tried, chosen = _tried(run, watch)
        if plan.recipe.mtp == AUTO:
            _refuse_losses(run, tried, chosen)
        final = chosen or plan
        quantized = (run.measured(final),) if _schemes(final) else ()
        rows = _rows(source, served, run.released(), run.unquantized(), *quantized)
    except _NothingCounts as error:
        if plan.recipe.mtp == AUTO:
            raise
        # No reason to lose hours of work: by then the block is calibrated, and only a figure is missing.
        unmeasured = str(error)
        rows = _rows(source, served, *[None] * (3 if _schemes(plan) else 2))
    files = run.statistics(final) if any(_depends_on_batches(final)) else ()
    _publish(backbone, files)
    coverage = {name: tokens for file in files for name, tokens in json.loads(read_metadata(file)["coverage"]).items()}
    return MtpPass(
        plan=final,
        rows=rows,
        agreement=same,
        coverage=coverage,
        unmeasured=unmeasured,
        candidates=tried if plan.recipe.mtp == AUTO else (),
    )


class _NothingCounts(RecipeError):
    """The held-out text has no slot that acceptance could be told by."""


def _rows(source: Target, served: Target, *acceptances: Acceptance | None) -> tuple[Row, ...]:
    """Released, with the block as released, and with the quantized block if there is a third."""
    sides = (("source", "source", source), ("quantized", "source", served), ("quantized", "quantized", served))
    return tuple(
        Row(backbone=backbone, mtp=mtp, acceptance=found, perplexity=target.perplexity)
        for (backbone, mtp, target), found in zip(sides, acceptances, strict=False)
    )


# --- candidates -----------------------------------------------------------------------------------------------------


def _tried(run: "_Pass", watch: Watch | None) -> tuple[tuple[Tried, ...], Plan | None]:
    """Every policy measured, and the plan of the cheapest that keeps enough."""
    recipe = run.plan.recipe
    if recipe.mtp_auto is None:
        run.measured(run.plan)
        return (), run.plan
    tried: list[tuple[Tried, Plan | None]] = []
    policies = candidates_for(recipe.mtp_auto.candidates, _groups(run.plan))
    started = time.monotonic()
    for policy in policies:
        try:
            plan = make_plan(recipe.resolved(policy), run.plan.source, shard_bytes=run.plan.shard_bytes)
        except RecipeError as error:
            tried.append((Tried(policy=policy, num_bytes=0, acceptance=None, kept=0.0, refused=str(error)), None))
            continue
        found = run.measured(plan)
        kept = found.kept_of(run.released())
        tried.append((Tried(policy=policy, num_bytes=_num_bytes(plan), acceptance=found, kept=kept), plan))
        if watch:
            _tell(watch, run.backbone, len(tried), len(policies), started)
    enough = [pair for pair in tried if pair[1] is not None and pair[0].kept >= recipe.mtp_auto.min_acceptance]
    # Of two that cost the same, the one that keeps more.
    best = min(enough, key=lambda pair: (pair[0].num_bytes, -pair[0].kept), default=None)
    return tuple(replace(each, is_chosen=best is not None and each is best[0]) for each, _ in tried), best and best[1]


def _refuse_losses(run: "_Pass", tried: tuple[Tried, ...], chosen: Plan | None) -> None:
    auto = run.plan.recipe.mtp_auto
    if chosen is not None or auto is None:
        return
    name, rule = run.plan.recipe.name, f"a candidate of mtp: auto must keep {auto.min_acceptance:.1%} of acceptance"
    measured = [each for each in tried if each.acceptance]
    if not measured:
        raise GateError(
            name,
            rule,
            got=f"no candidate that fits the model: {tried[0].refused.removesuffix('.')}",
            cure="Give others in mtp_auto.candidates",
        )
    best = max(measured, key=lambda each: each.kept)
    alone = run.unquantized().kept_of(run.released())
    cure = (
        "Add a gentler one to mtp_auto.candidates (bf16), or lower mtp_auto.min_acceptance"
        if alone >= auto.min_acceptance
        else f"The quantized backbone keeps {alone:.1%} with the block as released: quantize less of it, or lower "
        "mtp_auto.min_acceptance"
    )
    raise GateError(name, rule, got=f"{best.kept:.1%} at best, by {_in_words(best.policy)}", cure=cure)


def _in_words(policy: Candidate) -> str:
    return policy if isinstance(policy, str) else ", ".join(f"{group}: {word}" for group, word in policy.items())


def _groups(plan: Plan) -> set[str]:
    """Module groups of the block that a recipe decides about."""
    places = {
        tensor.role: plan.view.place(tensor.name)
        for tensor in plan.tensors
        if tensor.part == "mtp" and not _is_kept(plan, tensor.name)
    }
    return {role for role, place in places.items() if place is not None}


def _is_kept(plan: Plan, name: HFName) -> bool:
    place = plan.view.place(name)
    return place is None or bool(place.row.why_kept) or place.leaf not in ("weight", "")


def _num_bytes(plan: Plan) -> int:
    return sum(output.num_bytes for tensor in plan.tensors if tensor.part == "mtp" for output in tensor.outputs)


def _schemes(plan: Plan) -> dict[HFName, str]:
    """Tensor of the block -> scheme that it is rounded to."""
    return {t.name: t.scheme for t in plan.tensors if t.part == "mtp" and t.fate == "quantize"}


def _depends_on_batches(plan: Plan) -> Iterator[bool]:
    return (bool(tensor.calibrated) for tensor in plan.tensors if tensor.part == "mtp")


def _why_not(plan: Plan) -> RecipeError | CheckpointError | None:
    """What stands against running the MTP block."""
    count = _num_blocks(plan)
    if not count:
        return RecipeError(
            plan.recipe.name,
            "an MTP block must be there to be calibrated or measured",
            got="none in the source",
            cure="Set mtp: source",
        )
    try:
        for index in range(count):
            bind_block(build_block(plan.view, index), plan)
    except (RecipeError, CheckpointError) as error:
        return error
    return None


def _num_blocks(plan: Plan) -> int:
    return plan.view.num_mtp_layers // plan.view.num_mtp_parts


def _tell(watch: Watch, backbone: Backbone, done: int, total: int, started: float) -> None:
    seconds = (time.monotonic() - started) / done
    tokens = backbone.data.ids.numel() + backbone.data.held_out_ids.numel()
    watch(
        Progress(
            step="mtp",
            done=done,
            total=total,
            tokens_per_second=tokens / seconds,
            eta_seconds=seconds * (total - done),
            memory_gib=peak_memory(backbone.skeleton.device) / 2**30,
        )
    )


# --- one policy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What every policy is measured with. Whatever was found lies in files, so that a killed run repeats one policy."""

    plan: Plan
    backbone: Backbone
    source: Target
    served: Target
    written: Tensor | None

    def released(self) -> Acceptance:
        """Of the released model."""
        return self._kept("released", lambda: self._acceptance("source", self._filled(self.plan)))

    def unquantized(self) -> Acceptance:
        """Of the quantized backbone with the block as released."""
        return self._kept("unquantized", lambda: self._acceptance("served", self._filled(self.plan)))

    def measured(self, plan: Plan) -> Acceptance:
        """Of the quantized backbone with the block as `plan` has it."""
        if not _schemes(plan):
            return self.unquantized()
        return self._kept(_key(plan), lambda: self._acceptance("served", self._calibrated(plan)))

    def statistics(self, plan: Plan) -> tuple[Path, ...]:
        """What was found for a policy that was measured: a file for each block."""
        return tuple(self._folder() / f"{_key(plan)}-{index:05d}.safetensors" for index in range(_num_blocks(plan)))

    def _folder(self) -> Path:
        return self.backbone.folder / "mtp"

    def _kept(self, key: str, measure: Callable[[], Acceptance]) -> Acceptance:
        """A figure from the pass's folder, or measured now and left there for the next run."""
        path = self._folder() / f"{key}.json"
        if path.is_file():
            return Acceptance.read(json.loads(path.read_text()))
        with fitting(self.plan, "the MTP block and a batch", self.backbone.skeleton.device):
            found = measure()
        # Every rank has looked for the file before it took part in the sums behind `found`.
        if self.backbone.ranks.is_first:
            self._folder().mkdir(exist_ok=True)
            write_whole(path, json.dumps(asdict(found)))
        return found

    def _acceptance(self, stream: Stream, blocks: Sequence[MtpBlock]) -> Acceptance:
        own = blocks if self.plan.view.family.model_type in _A_LAYER_A_STEP else blocks[:1]
        target = self.source if stream == "source" else self.served
        try:
            return acceptance(self.backbone, stream, own, target, written=self.written)
        except RecipeError as error:
            raise _NothingCounts(error.where, error.rule, got=error.got, cure=error.cure) from error

    def _filled(self, plan: Plan) -> list[MtpBlock]:
        """The blocks with the released weights."""
        skeleton, blocks = self.backbone.skeleton, []
        for index in range(_num_blocks(plan)):
            block = build_block(plan.view, index)
            skeleton.fill(block, bind_block(block, plan))
            if block.rotary is not None:
                block.rotary.to(skeleton.device)
            blocks.append(block.requires_grad_(False))
        return blocks

    def _calibrated(self, plan: Plan) -> list[MtpBlock]:
        """The blocks rounded as `plan` says, once their statistics are on disk."""
        calibration = plan.recipe.calibration
        assert calibration is not None
        blocks = self._filled(plan)
        for index, (block, file) in enumerate(zip(blocks, self.statistics(plan), strict=True)):
            binding = bind_block(block, plan)
            schemes = schemes_in(binding, "")
            if not schemes:
                continue
            inputs = _Inputs(backbone=self.backbone, blocks=blocks[: index + 1])
            found = backend.calibrate(
                block,
                inputs,
                schemes=schemes,
                algorithm=calibration.algorithm,
                fused=fused_in(binding, ""),
                frozen=frozen_in(binding, ""),
            )
            if self.backbone.ranks.is_first:
                record(file, found, binding, "", fingerprint=(self.backbone.folder / "fingerprint").read_text())
        return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The calibration batches at the door of the last of `blocks`, computed anew as often as asked.

    Block j drafts step j + 1: it is fed the tokens j + 1 slots on and the hidden state that the block before it leaves.
    """

    backbone: Backbone
    blocks: Sequence[MtpBlock]

    def __len__(self) -> int:
        return len(self.backbone.batches("calibration"))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.backbone.batches("calibration"):
            yield self._arguments(batch)

    @torch.no_grad()
    def _arguments(self, batch: Batch) -> dict[str, Tensor]:
        skeleton = self.backbone.skeleton
        embedding, ids = skeleton.model.get_input_embeddings(), batch.ids.to(skeleton.device)
        # The last slots have no next token to be fed.
        length = ids.shape[1] - len(self.blocks)
        hidden, arguments = block_input(self.backbone, self.blocks[0], batch)[:, :length], {}
        for step, block in enumerate(self.blocks, start=1):
            arguments = {
                "inputs_embeds": embedding(ids[:, step : step + length]),
                "hidden": hidden,
                "position_ids": torch.arange(length, device=skeleton.device) + step - 1,
            }
            if block is not self.blocks[-1]:
                with backend.serving(block):
                    hidden = block(**arguments)[1]
        return arguments


def _key(plan: Plan) -> str:
    """What a policy makes of the block, whatever a recipe calls it."""
    return hashlib.sha256(json.dumps(sorted(_schemes(plan).items())).encode()).hexdigest()[:16]


def _publish(backbone: Backbone, files: Sequence[Path]) -> None:
    """Put a policy's statistics beside the backbone's, in place of another's."""
    if backbone.ranks.is_first:
        folder = backbone.folder / "statistics"
        folder.mkdir(exist_ok=True)
        for path in folder.glob("mtp-*"):
            path.unlink()
        for index, file in enumerate(file for file in files if file.is_file()):
            copy = folder / f"mtp-{index:05d}.safetensors"
            shutil.copyfile(file, partial_path(copy))
            complete(copy)
    backbone.ranks.wait()
