"""`keepmtp graft`: the MTP block of the release, put into a checkpoint that lost it.

In: the opened checkpoint, the opened release, and one word for the block. Out: a `Graft`: the plan
of the block, and the checkpoint as it will be. `graft_write.py` writes it.

The packing is that of `keepmtp quantize`: a plan with the block alone
(`quantize/plan/mtp_alone.py`). Lists of modules are those of `keepmtp fix`: with the block in its
place, they say what is stored. What the new checkpoint will be is checked from headers before a
byte is written.

Easy to get wrong: vLLM reads whole files that the index names. So tensors of an old block must
leave their files: a file with nothing else is left out, and one with tensors of the backbone is
written again without them. In config.json, lists with one value for each layer: the release's have
the MTP layers at their end, and a tool that drops the block cuts them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import Source
from ..checkpoints.source_of import refuse_stranger
from ..checkpoints.stored import FLOATS, stored_weights
from ..quantize.config.written import config_of
from ..quantize.plan.mtp_alone import plan_mtp_alone
from ..quantize.plan.plan import Plan
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.families import find_view
from ..recipes.family import Family, HFName
from ..recipes.family_view import FamilyView
from ..validate.check.check import Checked, examine_source
from ..validate.check.dialects.choose import Unquantized
from ..validate.check.dialects.compressed_tensors import CompressedTensors
from ..validate.check.dialects.fp8 import Fp8
from ..validate.check.reading import joined
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.vllm_module import UnknownDialect
from ..validate.facts.findings import Finding
from .fix import LIST_FIXES, settled
from .fixes_lists import lists_say_what_is_stored
from .proposal import CONFIG, Faulty, JSONPath, Proposal

# Releases whose config.json promises an MTP block that nobody can draft with, by model_type.
UNTRAINED: Mapping[str, str] = {
    "minimax_m2": "MiniMax-M2 was published with garbage in its MTP weights (MiniMax-M2 #47), "
    "later ones without any",
}
_ABOUT_THE_BLOCK = frozenset(
    {"mtp-missing", "mtp-incomplete", "mtp-not-promised", "mtp-prefix", "draft-head"}
)
_ABOUT_MTP = re.compile(r"mtp|nextn|n_predict", re.IGNORECASE)
_FORMS_WITH_SHAPE = (
    "plain",
    "fp8_block",
    "fp8_channel",
    "fp8_tensor",
    "mxfp4",
    "nvfp4",
    "nvfp4_modelopt",
    "int8",
)


@dataclass(frozen=True)
class Graft:
    """What will be written, and why.

    Attributes:
        plan: of the block alone; its source is the release.
        proposal: the checkpoint with the block.
        checked: what the check finds of it, from headers.
    """

    plan: Plan
    proposal: Proposal
    checked: Checked

    @property
    def quantized(self) -> Source:
        """The checkpoint that gets the block."""
        return self.proposal.source

    @property
    def entries(self) -> list[Entry]:
        """The tensors of the release that the block is made from, in the order of the files."""
        names = {name for tensor in self.plan.tensors for name in tensor.inputs}
        entries = (self.plan.entries[name] for name in names)
        return sorted(entries, key=lambda entry: (entry.file, entry.start))

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the release that are read; from the Hub, with the gaps between neighbours."""
        return sum(stretch.num_bytes for stretch in joined(self.plan.source, self.entries))

    @property
    def num_requests(self) -> int:
        """Range requests for them; 0 for a release on this machine."""
        if self.plan.source.folder is not None:
            return 0
        return sum(stretch.num_requests for stretch in joined(self.plan.source, self.entries))


def plan_graft(
    quantized: Source, source: Source, *, mtp: str | None = None, is_replaced: bool = False
) -> Graft:
    """Decide everything from headers, and check the result.

    Args:
        quantized: the checkpoint that lacks its MTP block, or whose block is broken.
        source: the release that it was made from.
        mtp: `source`, `bf16` or a scheme; None for `source` where the checkpoint's dialect can say
            it, else `bf16`.
        is_replaced: take the release's block also in place of one that is good.

    Raises:
        RecipeError: another family or another width; a word that is not possible.
        CheckpointError: a tensor with another shape, a block that is there and good, no block in
            the release, an unknown dialect, or a result that would not load.
    """
    if words := UNTRAINED.get(model_type := str(source.config.get("model_type", ""))):
        rule = "the release must have published a trained MTP block"
        cure = "Serve it without method=mtp; speculators trains drafts for such models"
        raise CheckpointError(source.where, rule, got=f"{model_type}: {words}", cure=cure)
    checked = examine_source(quantized)
    ours, _ = _readable(checked), _readable(examine_source(source))
    refuse_another_model(quantized, source)
    dialect, family = ours.dialect, ours.view.family
    if isinstance(dialect, UnknownDialect):
        rule = "graft writes dialects that keepmtp knows"
        cure = "Quantize the release with keepmtp, which keeps its MTP block"
        raise CheckpointError("config.json: quantization_config", rule, got=dialect.name, cure=cure)
    proposal = Proposal(quantized)
    _count_mtp_layers(proposal, source.config, family)
    view = FamilyView(family=family, config=proposal.value(CONFIG, ()))
    runtime = RuntimeView(source=quantized, view=view)
    both = (*quantized.entries.values(), *quantized.unindexed.values())
    # Whole or not, also under a wrong prefix.
    old = [entry for entry in both if runtime.is_mtp_name(entry.name)]
    if old and not is_replaced:
        _refuse_good_block(checked, ours)
    word = mtp or "bf16"
    if mtp is None and isinstance(dialect, CompressedTensors | Fp8 | Unquantized):
        word = "source"
    is_released = word == "source" and isinstance(dialect, Fp8)
    plan = plan_mtp_alone(source, view, word, as_released=is_released)
    packed = next((tensor for tensor in plan.tensors if tensor.scheme), None)
    if packed is not None and not isinstance(dialect, CompressedTensors):
        rule = f"a packed MTP block is written in compressed-tensors only, not in {dialect.name}"
        got = f"{word}, so {packed.scheme} for {packed.name}"
        raise RecipeError("--mtp", rule, got=got, cure="Use --mtp bf16")
    proposal.put_shards(old, _shards_of(plan))
    if proposal.shards_again and quantized.folder is None:
        rule = "a shard with tensors of the old block and of the backbone must be here"
        cure = f"Download it: hf download {quantized.where} --local-dir FOLDER"
        got = f"{next(iter(proposal.shards_again))} on the Hub"
        raise CheckpointError(quantized.where, rule, got=got, cure=cure)
    if isinstance(dialect, CompressedTensors):
        _name_in_compressed_tensors(proposal, plan)
    checked = proposal.examined()
    # Without a finding too: some schemes of AutoRound and Quark are not judged, and the block must
    # be on the list.
    lists_say_what_is_stored(Faulty(_readable(checked), checked.data.findings, proposal))
    checked, proposal = settled(proposal.examined(), proposal, LIST_FIXES)
    runtime = _readable(checked)
    for each in checked.data.findings:
        if _is_about_the_block(each, runtime):  # a broad entry of the old config reaches it
            rule = "the new MTP block must be built as it is stored"
            cure = f"{each.cure}, in {checked.data.path}"
            raise CheckpointError(each.where, rule, got=each.says, cure=cure)
    return Graft(plan=plan, proposal=proposal, checked=checked)


def refuse_another_model(quantized: Source, source: Source) -> None:
    """Refuse a release that a checkpoint was not made from. A block that is missing cannot be
    compared; what quantizing never changes is: the family, widths and depth, and the logical shape
    of every weight that both have.

    Raises:
        RecipeError: another family, or another width or depth in config.json.
        CheckpointError: names a tensor with another shape.
    """
    refuse_stranger(quantized, source)
    view = find_view(quantized.config, quantized.where, quantized.entries)
    shapes = _shapes_of(source)
    for name, shape in _shapes_of(quantized).items():
        if shapes.get(name, shape) != shape and not view.is_mtp(name):
            rule, cure = "both must have one shape", "Name the release that it was made from"
            got = f"{[*shape]} in {quantized.where} and {[*shapes[name]]} in {source.where}"
            raise CheckpointError(name, rule, got=got, cure=cure)


def _shapes_of(opened: Source) -> dict[HFName, tuple[int, ...]]:
    """The logical shape of every weight in a form that says it."""
    weights, others = stored_weights(opened.entries.values())
    found = {entry.name: entry.shape for entry in others if entry.dtype in FLOATS}
    for name, weight in weights.items():
        if weight.form in _FORMS_WITH_SHAPE:
            found[name] = weight.shape
    return found


def _shards_of(plan: Plan) -> dict[str, list[Entry]]:
    """The headers of the block's files."""
    found = {}
    for shard in plan.shards:
        found[shard.file] = [
            Entry(
                name=output.name,
                file=shard.file,
                dtype=output.dtype,
                shape=output.shape,
                start=0,
                num_bytes=output.num_bytes,
            )
            for output in shard.outputs
        ]
    return found


def _count_mtp_layers(proposal: Proposal, released: Mapping[str, Any], family: Family) -> None:
    """config.json counts and describes MTP layers as the release's does.

    It may have the language model's keys at top level where the release nests them.
    """
    holders: list[tuple[JSONPath, Mapping[str, Any]]] = [((), released)]
    if isinstance(text := released.get("text_config"), Mapping):
        is_nested = isinstance(proposal.value(CONFIG, ("text_config",)), dict)
        holders.append((("text_config",) if is_nested else (), text))
    counts = {key.partition(".")[0] for key in (*family.mtp_count_keys, *family.mtp_parts_keys)}
    for path, theirs in holders:
        for key, value in theirs.items():
            if key in ("text_config", "quantization_config"):
                continue
            now, why = proposal.value(CONFIG, (*path, key)), ""
            if key in counts or _ABOUT_MTP.search(key):
                why = "the release describes its MTP block so"
            elif _is_cut(now, value):
                why = "the release has a value for each layer, MTP layers too"
            if why:
                proposal.set(CONFIG, (*path, key), value, why)


def _is_cut(value: Any, released: Any) -> bool:
    """Whether a list is the release's without its end."""
    if not (isinstance(value, list) and isinstance(released, list)):
        return False
    return 0 < len(value) < len(released) and released[: len(value)] == value


def _name_in_compressed_tensors(proposal: Proposal, plan: Plan) -> None:
    """The groups and the ignored modules that quantize writes for the block, next to those of the
    backbone.
    """
    raw, made = proposal.quantization(), config_of(plan).value
    if not made["config_groups"]:
        return  # the lists are all that says a plain block
    why = "vLLM builds these modules of the MTP block plain"
    ignore = dict.fromkeys([*(raw.get("ignore") or ()), *made["ignore"]])
    proposal.set_quantization(("ignore",), [*ignore], why)
    groups = {**(raw.get("config_groups") or {})}
    for number, group in enumerate(made["config_groups"].values()):
        groups[f"mtp_{number}"] = group
    # A group without a format of its own has that of the whole.
    for group in groups.values():
        group["format"] = group.get("format") or raw.get("format")
    if {group["format"] for group in groups.values()} != {raw.get("format")}:
        why = "the MTP block has another format than the backbone"
        proposal.set_quantization(("format",), "mixed-precision", why)
    why = "vLLM builds these modules of the MTP block packed"
    proposal.set_quantization(("config_groups",), groups, why)


def _readable(checked: Checked) -> RuntimeView:
    """Refuse a checkpoint that the check cannot read, such as a config.json with values of another
    type.
    """
    if checked.runtime is None:
        first, rule = checked.data.findings[0], "the check must be able to read it"
        raise CheckpointError(first.where, rule, got=first.says, cure=first.cure)
    return checked.runtime


def _refuse_good_block(checked: Checked, runtime: RuntimeView) -> None:
    """Refuse a checkpoint whose MTP block the check finds nothing wrong with."""
    facts, findings = checked.data.facts, checked.data.findings
    is_whole = runtime.found and runtime.found == {*range(runtime.promised)}
    if is_whole and not any(_is_about_the_block(each, runtime) for each in findings):
        rule = "graft gives a block to a checkpoint that lacks a good one"
        got = f"{facts.num_mtp_tensors:,} tensors in {', '.join(facts.mtp_forms)}, and no finding"
        cure = "Use it as it is, or say --replace to take the release's block all the same"
        raise CheckpointError(checked.data.path, rule, got=got, cure=cure)


def _is_about_the_block(finding: Finding, runtime: RuntimeView) -> bool:
    is_of_block = finding.rule in _ABOUT_THE_BLOCK or runtime.is_mtp_name(finding.where)
    return finding.severity == "error" and is_of_block
