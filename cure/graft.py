"""`keepmtp graft`: the MTP block of the release, put into a checkpoint that lost it.

In: the opened checkpoint, the opened release, and one word for the block. Out: a `Graft`: the plan of the block, both
config files anew, and what leaves the checkpoint. `graft_write.py` writes it.

The packing is that of `keepmtp quantize`: a plan with the block alone (`quantize/plan/mtp_alone.py`). What the new
checkpoint will be is checked from headers before a byte is written.

Easy to get wrong: vLLM reads whole files that the index names. So tensors of an old block must leave their files: a
file with nothing else is left out, and one with tensors of the backbone is written again without them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.json_file import read_object
from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import INDEX, Source, small_bytes, small_object
from ..quantize.plan.mtp_alone import plan_mtp_alone
from ..quantize.plan.plan import Plan
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.families import find_view
from ..recipes.family_view import FamilyView
from ..validate.check.check import Checked, examine_source
from ..validate.check.runtime_view import RuntimeView
from ..validate.facts.findings import Finding
from .graft_config import NATIVE_FP8, PLAIN_ONLY, Reasons, method_in, with_entries, with_mtp_keys
from .graft_fetch import ranges_of
from .graft_refusals import block_entries, refuse_another_model, refuse_untrained_release
from .json_diff import in_form_of, json_diff
from .rewritten import new_index

CONFIG = "config.json"
_ABOUT_THE_BLOCK = frozenset({"mtp-missing", "mtp-incomplete", "mtp-not-promised", "mtp-prefix", "draft-head"})


@dataclass(frozen=True)
class Graft:
    """What will be written, and why.

    Attributes:
        quantized: the checkpoint that gets the block.
        plan: of the block alone; its source is the release.
        files: config.json and hf_quant_config.json anew, by name; a file that stays is not among them.
        reasons: why each of them changes.
        old: tensors of the checkpoint that the new one does not have.
    """

    quantized: Source
    plan: Plan
    files: Mapping[str, bytes]
    reasons: Mapping[str, Reasons]
    old: tuple[Entry, ...]

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the release that are read; from the Hub, with the gaps between neighbours."""
        entries = block_entries(self.plan)
        if self.plan.source.folder is None:
            return sum(piece.num_bytes for piece in ranges_of(entries))
        return sum(entry.num_bytes for entry in entries)

    @property
    def num_requests(self) -> int:
        """Range requests for them; 0 for a release on this machine."""
        return len(ranges_of(block_entries(self.plan))) if self.plan.source.folder is None else 0

    @cached_property
    def left_out(self) -> frozenset[str]:
        """Files of the checkpoint that hold nothing but its old block."""
        files = {entry.file for entry in self.old}
        return frozenset(files - {entry.file for entry in self._others})

    @cached_property
    def again(self) -> tuple[str, ...]:
        """Files that the index lists, with tensors of the old block and others: they are written without these."""
        indexed = {entry.file for entry in self.old if entry.name in self.quantized.entries}
        return tuple(sorted(indexed - self.left_out))

    @cached_property
    def _others(self) -> tuple[Entry, ...]:
        gone = {(entry.file, entry.name) for entry in self.old}
        both = (*self.quantized.entries.values(), *self.quantized.unindexed.values())
        return tuple(entry for entry in both if (entry.file, entry.name) not in gone)

    @cached_property
    def added(self) -> tuple[Entry, ...]:
        """The tensors of new files, as an index needs them."""
        block = [
            Entry(name=o.name, file=shard.file, dtype=o.dtype, shape=o.shape, start=0, num_bytes=o.num_bytes)
            for shard in self.plan.shards
            for o in shard.outputs
        ]
        return (*block, *(entry for entry in self._others if entry.file in self.again))

    def diff(self) -> list[str]:
        """The changes of small files but the index, for people."""
        return [
            line
            for name, data in self.files.items()
            for line in json_diff(name, small_bytes(self.quantized, name), data, self.reasons[name])
        ]


def plan_graft(quantized: Source, source: Source, *, mtp: str | None = None, is_replaced: bool = False) -> Graft:
    """Decide everything from headers, and check the result.

    Args:
        quantized: the checkpoint that lacks its MTP block, or whose block is broken.
        source: the release that it was made from.
        mtp: `source`, `bf16` or a scheme; None for `source` where the checkpoint's dialect can say it, else `bf16`.
        is_replaced: take the release's block also in place of one that is good.

    Raises:
        RecipeError: another family or another width; a word that is not possible.
        CheckpointError: a tensor with another shape, a block that is there and good, no block in the release, an
            unknown dialect, or a result that would not load.
    """
    refuse_untrained_release(source)
    hf_quant_config = small_object(quantized, HF_QUANT_CONFIG)
    method = method_in(quantized.config, hf_quant_config)
    checked, _ = _readable(quantized), _readable(source)
    refuse_another_model(quantized, source)
    family = find_view(quantized.config, quantized.where, quantized.entries).family
    config, reasons = with_mtp_keys(quantized.config, source.config, family)
    view = FamilyView(family=family, config=config)
    old = _old_block(quantized, view)
    if old and not is_replaced:
        _refuse_good_block(checked)
    word = mtp or ("bf16" if method in PLAIN_ONLY else "source")
    plan = plan_mtp_alone(source, view, word, as_released=word == "source" and method in NATIVE_FP8)
    _refuse_unsayable(plan, method, word)
    runtime = RuntimeView(source=quantized, view=view)
    config, hf_quant_config, more, hf_reasons = with_entries(config, hf_quant_config, plan, runtime)
    made = Graft(
        quantized=quantized,
        plan=plan,
        files=_changed(quantized, {CONFIG: config, HF_QUANT_CONFIG: hf_quant_config}),
        reasons={CONFIG: [*reasons, *more], HF_QUANT_CONFIG: hf_reasons},
        old=old,
    )
    if made.again and quantized.folder is None:
        rule = f"{made.again[0]} has tensors of the old block and of the backbone, and is written again"
        got = "a Hub repository"
        cure = f"Download it: hf download {quantized.where} --local-dir FOLDER"
        raise CheckpointError(quantized.where, rule, got=got, cure=cure)
    _refuse_broken_result(made)
    return made


def foresee(graft: Graft) -> Checked:
    """What the check finds of the checkpoint that will be, from headers."""
    with _as_headers(graft) as opened:
        return examine_source(opened)


# --- what is there ----------------------------------------------------------------------------------------------------


def _old_block(quantized: Source, view: FamilyView) -> tuple[Entry, ...]:
    """The tensors of the checkpoint's own MTP block, whole or not, also those under a wrong prefix."""
    runtime = RuntimeView(source=quantized, view=view)
    both = (*quantized.entries.values(), *quantized.unindexed.values())
    return tuple(entry for entry in both if runtime.is_mtp_name(entry.name))


def _readable(opened: Source) -> Checked:
    """What the check finds of it; a config.json with values of another type is refused here."""
    checked = examine_source(opened)
    if checked.runtime is None:
        first = checked.data.findings[0]
        raise CheckpointError(first.where, "the check must be able to read it", got=first.says, cure=first.cure)
    return checked


def _refuse_good_block(checked: Checked) -> None:
    """Refuse a checkpoint whose MTP block the check finds nothing wrong with."""
    runtime, facts = checked.runtime, checked.data.facts
    if runtime is None or not runtime.found or runtime.found != set(range(runtime.promised)):
        return
    if any(_is_about_the_block(each, runtime) for each in checked.data.findings):
        return
    got = f"{facts.num_mtp_tensors:,} tensors in {', '.join(facts.mtp_forms)}, and no finding about them"
    cure = "Use it as it is, or say --replace to take the release's block all the same"
    rule = "graft gives a block to a checkpoint that lacks a good one"
    raise CheckpointError(checked.data.path, rule, got=got, cure=cure)


def _is_about_the_block(finding: Finding, runtime: RuntimeView) -> bool:
    is_of_block = finding.rule in _ABOUT_THE_BLOCK or runtime.is_mtp_name(finding.where)
    return finding.severity == "error" and is_of_block


def _refuse_unsayable(plan: Plan, method: str, word: str) -> None:
    """Refuse a packed block in a dialect that graft has no words for."""
    packed = next((tensor for tensor in plan.tensors if tensor.scheme), None)
    if packed is None or method == "compressed-tensors":
        return
    rule = f"graft writes a packed MTP block in compressed-tensors only; this checkpoint is {method or 'not quantized'}"
    raise RecipeError("--mtp", rule, got=f"{word}, so {packed.scheme} for {packed.name}", cure="Use --mtp bf16")


def _refuse_broken_result(graft: Graft) -> None:
    """Refuse a checkpoint whose new block would not load: a broad entry of the old config reaches it."""
    checked = foresee(graft)
    if checked.runtime is None:
        raise CheckpointError(
            graft.quantized.where,
            "the checkpoint must be one that vLLM can load",
            got=checked.data.findings[0].says,
            cure=checked.data.findings[0].cure,
        )
    broken = [each for each in checked.data.findings if _is_about_the_block(each, checked.runtime)]
    if broken:
        rule = "the new MTP block must be built as it is stored"
        cure = f"{broken[0].cure}, in {graft.quantized.where}"
        raise CheckpointError(broken[0].where, rule, got=broken[0].says, cure=cure)


@contextmanager
def _as_headers(graft: Graft) -> Iterator[Source]:
    """The checkpoint that will be, opened: small files in a folder for the time being, tensors from the plan."""
    quantized = graft.quantized
    gone = graft.left_out | {entry.file for entry in graft.added}
    kept = {name: entry for name, entry in quantized.entries.items() if entry.file not in gone}
    index = new_index(quantized, left_out=graft.left_out, added=graft.added)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in (CONFIG, HF_QUANT_CONFIG, INDEX):
            data = graft.files.get(file) or (index if file == INDEX else None) or small_bytes(quantized, file)
            if data is not None:
                (folder / file).write_bytes(data)
        yield replace(
            quantized,
            folder=folder,
            config=read_object(folder / CONFIG, f"{quantized.where}/{CONFIG}"),
            entries=kept | {entry.name: entry for entry in graft.added},
            unindexed={},
            states={},
        )


# --- small files ------------------------------------------------------------------------------------------------------


def _changed(quantized: Source, wanted: Mapping[str, Mapping[str, Any] | None]) -> dict[str, bytes]:
    """The files whose values change, in the form of the old ones."""
    found = {}
    for name, value in wanted.items():
        before = small_bytes(quantized, name)
        if value is not None and before is not None and json.loads(before) != value:
            found[name] = in_form_of(before, value)
    return found
