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
from ..quantize.config.written import config_of
from ..quantize.plan.mtp_alone import plan_mtp_alone
from ..quantize.plan.plan import Plan
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.family import Family
from ..recipes.family_view import FamilyView
from ..validate.check.check import Checked, examine_source
from ..validate.check.dialects.choose import Unquantized
from ..validate.check.dialects.compressed_tensors import CompressedTensors
from ..validate.check.dialects.fp8 import Fp8
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.vllm_module import Dialect, UnknownDialect
from ..validate.facts.findings import Finding
from .fix import LIST_FIXES, settled
from .fixes_lists import lists_say_what_is_stored
from .graft_fetch import ranges_of
from .graft_refusals import block_entries, refuse_another_model, refuse_untrained_release
from .proposal import CONFIG, Faulty, JSONPath, Proposal

_ABOUT_THE_BLOCK = frozenset(
    {"mtp-missing", "mtp-incomplete", "mtp-not-promised", "mtp-prefix", "draft-head"}
)
_ABOUT_MTP = re.compile(r"mtp|nextn|n_predict", re.IGNORECASE)


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
    refuse_untrained_release(source)
    checked = examine_source(quantized)
    ours, _ = _readable(checked), _readable(examine_source(source))
    refuse_another_model(quantized, source)
    dialect, family = ours.dialect, ours.view.family
    if isinstance(dialect, UnknownDialect):
        rule = (
            "graft writes compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound and Quark"
        )
        cure = "Quantize the release with keepmtp, which keeps its MTP block"
        raise CheckpointError("config.json: quantization_config", rule, got=dialect.name, cure=cure)
    proposal = Proposal(quantized)
    _count_mtp_layers(proposal, source.config, family)
    view = FamilyView(family=family, config=proposal.value(CONFIG, ()))
    runtime = RuntimeView(source=quantized, view=view)
    both = (*quantized.entries.values(), *quantized.unindexed.values())
    old = [
        entry for entry in both if runtime.is_mtp_name(entry.name)
    ]  # whole or not, also under a wrong prefix
    if old and not is_replaced:
        _refuse_good_block(checked)
    word = mtp or (
        "source" if isinstance(dialect, CompressedTensors | Fp8 | Unquantized) else "bf16"
    )
    plan = plan_mtp_alone(
        source, view, word, as_released=word == "source" and isinstance(dialect, Fp8)
    )
    _refuse_unsayable(plan, dialect, word)
    proposal.put_shards(old, _shards_of(plan))
    if proposal.shards_again and quantized.folder is None:
        rule = (
            f"{next(iter(proposal.shards_again))} has tensors of the old block and of the backbone"
        )
        cure = f"Download it: hf download {quantized.where} --local-dir FOLDER"
        raise CheckpointError(
            quantized.where, f"{rule}, and is written again", got="a Hub repository", cure=cure
        )
    if isinstance(dialect, CompressedTensors):
        _name_in_compressed_tensors(proposal, plan)
    checked = proposal.examined()
    # Without a finding too: some schemes of AutoRound and Quark are not judged, and the block must
    # be on the list.
    lists_say_what_is_stored(Faulty(_readable(checked), checked.data.findings, proposal))
    checked, proposal = settled(proposal.examined(), proposal, LIST_FIXES)
    _refuse_broken_block(checked)
    return Graft(plan=plan, proposal=proposal, checked=checked)


def _shards_of(plan: Plan) -> dict[str, list[Entry]]:
    """The headers of the block's files."""
    return {
        shard.file: [
            Entry(
                name=o.name,
                file=shard.file,
                dtype=o.dtype,
                shape=o.shape,
                start=0,
                num_bytes=o.num_bytes,
            )
            for o in shard.outputs
        ]
        for shard in plan.shards
    }


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
            if key in counts or _ABOUT_MTP.search(key):
                proposal.set(CONFIG, (*path, key), value, "the release describes its MTP block so")
            elif _is_cut(proposal.value(CONFIG, (*path, key)), value):
                proposal.set(
                    CONFIG,
                    (*path, key),
                    value,
                    "the release has a value for each layer, MTP layers too",
                )


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
    ignore = [*dict.fromkeys([*(raw.get("ignore") or ()), *made["ignore"]])]
    proposal.set_quantization(
        ("ignore",), ignore, "vLLM builds these modules of the MTP block plain"
    )
    groups = {**(raw.get("config_groups") or {})}
    groups |= {
        f"mtp_{number}": group for number, group in enumerate(made["config_groups"].values())
    }
    # A group without a format of its own has that of the whole.
    for group in groups.values():
        group["format"] = group.get("format") or raw.get("format")
    if {group["format"] for group in groups.values()} != {raw.get("format")}:
        why = "the MTP block has another format than the backbone"
        proposal.set_quantization(("format",), "mixed-precision", why)
    why = "vLLM builds these modules of the MTP block packed"
    proposal.set_quantization(("config_groups",), groups, why)


# --- refusals
# --------------------------------------------------------------------------------------------------


def _readable(checked: Checked) -> RuntimeView:
    """Refuse a checkpoint that the check cannot read, such as a config.json with values of another
    type.
    """
    if checked.runtime is None:
        first = checked.data.findings[0]
        raise CheckpointError(
            first.where, "the check must be able to read it", got=first.says, cure=first.cure
        )
    return checked.runtime


def _refuse_good_block(checked: Checked) -> None:
    """Refuse a checkpoint whose MTP block the check finds nothing wrong with."""
    runtime, facts = checked.runtime, checked.data.facts
    if runtime is None or not runtime.found or runtime.found != {*range(runtime.promised)}:
        return
    if any(_is_about_the_block(each, runtime) for each in checked.data.findings):
        return
    got = (
        f"{facts.num_mtp_tensors:,} tensors in {', '.join(facts.mtp_forms)}, and no finding "
        "about them"
    )
    cure = "Use it as it is, or say --replace to take the release's block all the same"
    rule = "graft gives a block to a checkpoint that lacks a good one"
    raise CheckpointError(checked.data.path, rule, got=got, cure=cure)


def _is_about_the_block(finding: Finding, runtime: RuntimeView) -> bool:
    is_of_block = finding.rule in _ABOUT_THE_BLOCK or runtime.is_mtp_name(finding.where)
    return finding.severity == "error" and is_of_block


def _refuse_unsayable(plan: Plan, dialect: Dialect, word: str) -> None:
    """Refuse a packed block in a dialect that graft has no words for."""
    packed = next((tensor for tensor in plan.tensors if tensor.scheme), None)
    if packed is not None and not isinstance(dialect, CompressedTensors):
        rule = (
            "graft writes a packed MTP block in compressed-tensors only; this checkpoint is "
            f"{dialect.name}"
        )
        raise RecipeError(
            "--mtp",
            rule,
            got=f"{word}, so {packed.scheme} for {packed.name}",
            cure="Use --mtp bf16",
        )


def _refuse_broken_block(checked: Checked) -> None:
    """Refuse a checkpoint whose new block would not load: a broad entry of the old config reaches
    it.
    """
    runtime = _readable(checked)
    for each in checked.data.findings:
        if _is_about_the_block(each, runtime):
            rule = "the new MTP block must be built as it is stored"
            raise CheckpointError(
                each.where, rule, got=each.says, cure=f"{each.cure}, in {checked.data.path}"
            )
