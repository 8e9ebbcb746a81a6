"""The plan: one fate for every tensor of the source, decided from headers before any work.

In: a recipe, and a source's config.json and headers. Out: a `Plan`. The writer, the ignore list,
the size estimate, the static check's expectations and the model card all read this one value, so
they cannot disagree.

Easy to get wrong: a decision is per module at *run time*. Modules that vLLM fuses must agree, a
module whose runtime class has no slot for scales must stay plain, and an MTP block promised by
config.json must be there.
"""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.proposal import Proposal
from ...checkpoints.safetensors_file import Entry, total_bytes
from ...checkpoints.source import DONOR_FILES, Source, origin_of, view_of
from ...checkpoints.stored import stored_weights
from ...recipes.conventions import (
    ALGORITHMS,
    CACHE,
    CACHE_LEAVES,
    NOT_FOR_EXPERTS,
    cache_scale_in,
    in_modelopt,
)
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.family import TABLE_ROLES, HFName, VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.frozen import frozen
from ...recipes.schema import AUTO, TUNED, Calibration, Recipe
from ...recipes.schemes import DTYPE_BITS, RESCALING, REWRITES, SCHEMES
from ...recipes.tensor_parallel import Cut, Cuts, cut_of
from .decide import (
    Decisions,
    Origins,
    added_aliases,
    keeps_dialect,
    matching_limit,
    origins_of,
    served_at,
)
from .edited_configs import edited_configs
from .kv_cache import with_cache_scales
from .tables import is_table, refuse_tables
from .tensor_plan import Output, Spelled, TensorPlan, outputs_of, same_output

_CACHE_FILE = "model-kv-scales.safetensors"
_NUMBERS = re.compile(r"(\d+)")
# Those of the target that a block has a copy of, or that are as large; and what no gradient moves.
_NEVER_TRAINED = ("embedding", "head", "state", "vision")
_LOST = (
    "Add --mtp-source with a checkpoint that has the block: the original release, since most "
    "tools drop it, or another "
    "repository where the release has none. llm-compressor quantizes a model that never had one"
)
Unit = tuple[TensorPlan, ...]
"""Tensors that are computed together, and written to one shard."""


@frozen
class Shard:
    """One output file: its units, and its tensors in the order of their bytes."""

    file: str
    units: tuple[Unit, ...]
    outputs: tuple[Output, ...]
    # It is the source's file of this name, which gets a second name.
    is_link: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return total_bytes(self.outputs)

    @property
    def entries(self) -> list[Entry]:
        """The headers of its tensors, as they will be; where their bytes start is left at 0."""
        return [
            Entry(**output._asdict(), file=self.file, start=0, num_bytes=output.num_bytes)
            for output in self.outputs
        ]


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything that will happen, before it does."""

    recipe: Recipe
    source: Source
    view: FamilyView
    tensors: tuple[TensorPlan, ...]
    # Upper bound for an output file, unless one unit alone is larger.
    shard_bytes: int = 5_000_000_000
    # The user lets the checkpoint's own Python run, and travel with the output.
    trust_remote_code: bool = False
    # The recipe as the checkpoint will carry it; "" where only the decisions are asked for.
    recipe_text: str = ""
    # How the names of the output files start.
    file_stem: str = "model"
    # What a server has of the source and of its donors, where they are finished checkpoints.
    origins: Origins = field(default_factory=dict)
    # The checkpoint that a server drafts for with it, where it is a draft alone.
    target: Source | None = None
    # Of a repository, the output gets only what changes.
    changed_only: bool = False

    def __repr__(self) -> str:
        return f"<Plan {self.recipe.name} of {self.source.where}: {len(self.tensors)} tensors>"

    def again(self, recipe: Recipe) -> "Plan":
        """The plan of another recipe for the same source; see `make_plan`."""
        return replace(
            make_plan(recipe, self.source),
            shard_bytes=self.shard_bytes,
            trust_remote_code=self.trust_remote_code,
        )

    @property
    def served(self) -> RuntimeView | None:
        """What a server has of the source; None for a release."""
        return self.origins.get("")

    @property
    def is_draft_alone(self) -> bool:
        """Whether the backbone stays out."""
        return _takes_block_alone(self.recipe, self.view)

    @property
    def companions(self) -> tuple[str, ...]:
        """The source's files, weights apart, that the output gets."""
        if self.changed_only:
            return ()
        if self.trust_remote_code:
            return (*self.source.companions, *self.source.code)
        return self.source.companions

    @cached_property
    def num_bytes_before(self) -> int:
        """Bytes of the source tensors that are consumed."""
        return self.num_bytes_read(tensor for tensor in self.tensors if tensor.fate != "add")

    def num_bytes_read(self, tensors: Iterable[TensorPlan]) -> int:
        """Bytes of the source that these tensors are made from."""
        return sum(total_bytes(self.entries[name] for name in tensor.inputs) for tensor in tensors)

    @cached_property
    def num_outputs(self) -> int:
        """Tensors to be written."""
        return len(outputs_of(self.tensors))

    @cached_property
    def mtp(self) -> list[TensorPlan]:
        """What it says of the MTP block."""
        return [tensor for tensor in self.tensors if tensor.part == "mtp"]

    @property
    def num_bytes_beside(self) -> int:
        """Bytes of config.json and the other files that the output gets."""
        names = (*self.companions, "config.json")
        states = self.source.states
        return sum(states[name].num_bytes for name in names if name in states)

    @cached_property
    def num_bytes_after(self) -> int:
        """Bytes of the tensors to be written."""
        return sum(self.num_bytes_of(tensor) for tensor in self.tensors)

    def num_bytes_of(self, tensor: TensorPlan) -> int:
        """Bytes of a tensor's outputs on disk."""
        return sum(self.on_disk(output).num_bytes for output in tensor.outputs)

    def stays(self, tensor: TensorPlan) -> bool:
        """Whether its tensors keep their names and bytes."""
        if tensor.fate != "keep" or tensor.may_change or tensor.tuned:
            return False
        written = {self.on_disk(output) for output in tensor.outputs}
        return written == {same_output(self.entries[name]) for name in tensor.inputs}

    @cached_property
    def num_bytes_staying(self) -> int:
        """Bytes of the source's own tensors that keep their names and bytes."""
        return self.num_bytes_read(filter(self.is_own, self.tensors))

    def is_own(self, tensor: TensorPlan) -> bool:
        """Whether it stays, and is no donor's."""
        return self.stays(tensor) and not origin_of(self.entries[tensor.inputs[0]])

    @cached_property
    def num_bytes_given(self) -> Mapping[str, int]:
        """Bytes of the tensors from each checkpoint, by what the names of its files begin with."""
        given = Counter[str]()
        for entry in self.entries.values():
            given[origin_of(entry)] += entry.num_bytes
        return given

    @cached_property
    def spelled(self) -> Mapping[HFName, Spelled]:
        """Outputs that the recipe's `format` writes otherwise, by their names in
        compressed-tensors' convention.

        Calibration, packing and `TensorPlan.outputs` know compressed-tensors' names only; the
        writer turns them.
        """
        spelled = dict[HFName, Spelled]()
        if self.recipe.format == "compressed-tensors":
            return spelled
        for tensor in self.tensors:
            served = None
            if tensor.fate == "keep":
                entry = self.entries[tensor.inputs[0]]
                served = served_at(self.origins, entry)
                if keeps_dialect(self.recipe, self.source, self.origins, entry):
                    continue  # its outputs are the source's tensors
            if tensor.name.endswith(CACHE_LEAVES):
                for output in tensor.outputs:
                    name = HFName(cache_scale_in("modelopt", output.name))
                    if served is None or name != output.name:  # vLLM's own stays
                        spelled[output.name] = Spelled(Output(name, "F32", ()), "dtype")
            elif tensor.scheme:
                # `fp8` writes blocks as modelopt those of experts.
                of_experts = tensor.role == "experts" or self.recipe.format == "fp8"
                for name, dtype, shape in tensor.outputs:
                    module, _, leaf = name.rpartition(".")
                    other = in_modelopt(tensor.scheme, leaf, dtype, shape, of_experts=of_experts)
                    written = Output(HFName(f"{module}.{other.leaf}"), other.dtype, other.shape)
                    spelled[name] = Spelled(written, other.change)
        return spelled

    def on_disk(self, output: Output) -> Output:
        """An output by the name, dtype and shape that it has in the finished checkpoint."""
        if output.name in self.spelled:
            return self.spelled[output.name].output
        return output

    @cached_property
    def edited(self) -> Proposal:
        """The config files of a recipe with `keeps_config`, as they will be."""
        return edited_configs(self)

    @cached_property
    def entries(self) -> Mapping[HFName, Entry]:
        """Every source tensor, also those of files that the index does not list."""
        return {**self.source.unindexed, **self.source.entries}

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Tensors to be computed together, in the order they are written."""
        by_unit: dict[str, list[TensorPlan]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.outputs:
                by_unit[tensor.unit].append(tensor)
        return tuple(tuple(tensors) for tensors in by_unit.values())

    @cached_property
    def packed_tables(self) -> list[TensorPlan]:
        """Embedding, head and parts of an n-gram table, where they are packed."""
        found = []
        for tensor in self.tensors:
            if tensor.fate == "quantize" and is_table(tensor.place):
                found.append(tensor)
        return found

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output files, filled in order up to `shard_bytes`; a unit is never split.

        The MTP block has files of its own, the last ones, so that a loader of the draft can leave
        out the backbone's: vLLM 0.32.0 by `is_unused_checkpoint_weight` of its draft class, and
        sglang #35395 by the index. Embedding and head, which target and draft share, stay in the
        first files.
        """
        if self.keeps_shards:
            return tuple(_shards_of_source(self))
        files = list[list[Unit]]()
        part = ""
        room = 0
        for unit in self.units:
            size = sum(self.num_bytes_of(tensor) for tensor in unit)
            if unit[0].part != part or size > room:
                files.append([])
                part = unit[0].part
                room = self.shard_bytes
            files[-1].append(unit)
            room -= size
        shards = []
        for number, units in enumerate(files, start=1):
            name = f"{self.file_stem}-{number:05d}-of-{len(files):05d}.safetensors"
            shards.append(_shard(self, name, units))
        return tuple(shards)

    @property
    def keeps_shards(self) -> bool:
        """Whether the output has the source's files: that of a finished checkpoint, and of a
        release whose groups all stay.
        """
        words = set[str]()
        for group, word in self.recipe.backbone.items():
            if group not in TABLE_ROLES:
                words.add(word)
        keeps = self.served is not None or words == {"source"} or self.recipe.keeps_config
        return keeps and not self.is_draft_alone

    @property
    def written(self) -> list[Shard]:
        """The shards that are no links."""
        return [shard for shard in self.shards if not shard.is_link]

    @property
    def linked(self) -> list[Shard]:
        """The shards of the source that the output has as links."""
        if self.changed_only:
            return []
        return [shard for shard in self.shards if shard.is_link]

    @cached_property
    def cuts(self) -> Cuts:
        """The weights as tensor-parallel ranks cut them, each with the first tensor that is so."""
        cuts = dict[Cut, str]()
        for tensor in self.tensors:
            group = block = None
            if tensor.scheme:
                scheme = SCHEMES[tensor.scheme]
                group = scheme.group_size
                block = scheme.block
            cut = cut_of(tensor.place, tensor.shape, group, block, tensor.scheme)
            if cut and tensor.outputs:
                cuts.setdefault(cut, tensor.name)
        return cuts

    @property
    def needs_calibration(self) -> list[str]:
        """Schemes of this plan that need batches, the KV cache's among them, and the word for a
        tuned MTP block.
        """
        needing = set[str]()
        for tensor in self.tensors:
            if tensor.calibrated:
                needing.add(tensor.scheme or CACHE)
            if tensor.tuned:
                needing.add(f"mtp: {TUNED}")
        return sorted(needing)

    @property
    def needs_batches(self) -> bool:
        """Whether text is run: for a scheme, for an algorithm, or to measure what `auto` or `tuned`
        decide.
        """
        if self.recipe.measures_mtp or self.recipe.is_searched:
            return True
        return bool(self.needs_calibration)

    @property
    def calibration(self) -> Calibration:
        """The recipe's block of a plan that is calibrated."""
        assert self.recipe.calibration is not None, (
            f"{self.recipe.name}: nothing says what to calibrate on"
        )
        return self.recipe.calibration

    @property
    def may_calibrate_mtp(self) -> bool:
        """Whether tensors of the MTP block need batches; with `mtp: auto`, of a candidate."""
        if self.recipe.mtp == AUTO and self.recipe.calibrated_among(self.recipe.mtp_decisions()):
            return True
        return any(tensor.calibrated or tensor.tuned for tensor in self.mtp)


def _shard(plan: Plan, file: str, units: Iterable[Unit]) -> Shard:
    outputs = [plan.on_disk(output) for output in outputs_of(chain(*units))]
    outputs.sort(key=_order_in_file)
    return Shard(file=file, units=tuple(units), outputs=tuple(outputs))


def _shards_of_source(plan: Plan) -> Iterator[Shard]:
    """The shards of a finished checkpoint, each with what becomes of its tensors; what replaces
    nothing has a file of its own.
    """
    units: dict[str, list[Unit]] = defaultdict(list)
    for unit in plan.units:
        first = unit[0]
        if len(unit) > 1 or not plan.stays(first):
            # Scales of the cache are made from no tensor. All other shards may stay links.
            names = first.inputs or (plan.on_disk(first.outputs[0]).name,)
            origin = plan.entries.get(names[0])
            file = _CACHE_FILE
            if origin is not None:
                file = origin.file
            units[file].append(unit)
            continue
        # The parts of a packed weight may be in several files.
        for output in first.outputs:
            name = plan.on_disk(output).name
            part = first._replace(inputs=(name,), outputs=(output,))
            units[plan.entries[name].file].append((part,))
    on_disk = (*plan.entries.values(), *plan.source.replaced.values())
    sizes = Counter(entry.file for entry in on_disk)
    for file, held in sorted(units.items()):
        stays = all(plan.stays(tensor) for tensor in chain(*held))
        name = file.removeprefix(DONOR_FILES).replace("/", "-")
        made = _shard(plan, name, held)
        is_whole = stays and made.file == file and len(made.outputs) == sizes[file]
        yield replace(made, is_link=is_whole)


def _order_in_file(output: Output) -> tuple[int, str]:
    """Widest dtypes first, as safetensors writes them: every tensor then starts aligned."""
    return -DTYPE_BITS[output.dtype], output.name


def make_plan(recipe: Recipe, source: Source) -> Plan:
    """Decide the fate of every tensor.

    Args:
        recipe: what to do with each module group; `mtp: auto` has been resolved to one of its
            candidates.
        source: the released checkpoint's headers.

    Raises:
        RecipeError: the recipe does not fit the model: a group without a decision or without
            modules, a width that a scheme cannot take, fused modules that disagree, a pattern that
            matches nothing.
        CheckpointError: a tensor outside the family table, or a promised MTP block that is absent.
    """
    assert recipe.mtp != AUTO, f"{recipe.name}: a plan is of one candidate"
    view = view_of(source)
    family = view.family
    if recipe.family not in (family.model_type, *family.also):
        raise RecipeError(
            recipe.name,
            f"family must be that of {source.where}",
            got=f"{recipe.family!r} for a {family.model_type}",
            cure="Choose another MODEL, or copy this recipe and change its family",
        )
    is_draft_alone = _takes_block_alone(recipe, view)
    whole = source
    if is_draft_alone:
        source = replace(source, entries=_read_by_draft(source, view))
    entries = with_separate_mtp(source, view)
    origins = origins_of(source, view)
    for served in origins.values():
        if served is not None and not recipe.keeps_config:
            served.refuse_more()
    decisions = Decisions(recipe, source, view, origins)
    tensors = decided(decisions, entries.values())
    refuse_tables(recipe, view, tensors)
    if not is_draft_alone:
        _refuse_lost_layers(view, source, tensors)
    refuse_missing_mtp(view, source, [tensor.name for tensor in tensors])
    tensors += added_aliases(view, entries)
    if is_draft_alone:
        tensors = _without_origins(tensors)
        source = read_alone(whole, tensors)
    _refuse_unmatched(decisions, tensors)
    refuse_unservable(recipe, tensors)
    tensors = _with_calibration(recipe, tensors)
    if recipe.kv_cache is not None:
        tensors = with_cache_scales(recipe, view, tensors)
    tensors.sort(key=plan_order)
    plan = Plan(recipe=recipe, source=source, view=view, tensors=tuple(tensors), origins=origins)
    if recipe.keeps_config:
        _ = plan.edited  # refuses what its dialect cannot say
    return plan


def _takes_block_alone(recipe: Recipe, view: FamilyView) -> bool:
    """A recipe without words for a backbone that is there."""
    return not recipe.backbone and view.num_layers > 0


def _read_by_draft(source: Source, view: FamilyView) -> dict[HFName, Entry]:
    """The tensors of the block, what a draft reads of the backbone, and the origins of copies."""
    origins = {alias.source for alias in view.family.aliases}
    entries = dict[HFName, Entry]()
    for name, entry in source.entries.items():
        place = view.place(name)
        is_read = place is not None and (
            place.part == "mtp" or place.row.is_drafts_own or place.role == "embedding"
        )
        if is_read or name in origins:
            entries[name] = entry
    return entries


def _without_origins(tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
    """Without an embedding that the block has a copy of, and without the target's head."""
    left = {"head"}
    for tensor in tensors:
        if tensor.part == "mtp" and tensor.role == "embedding":
            left.add("embedding")
    return [tensor for tensor in tensors if tensor.part == "mtp" or tensor.role not in left]


def read_alone(source: Source, tensors: Iterable[TensorPlan]) -> Source:
    """The source with the tensors that these are made from, and no others."""
    read = set(chain(*[tensor.inputs for tensor in tensors]))
    entries = {name: entry for name, entry in source.entries.items() if name in read}
    unindexed = {name: entry for name, entry in source.unindexed.items() if name in read}
    return replace(source, entries=entries, unindexed=unindexed)


def with_separate_mtp(source: Source, view: FamilyView) -> dict[HFName, Entry]:
    """The indexed tensors, and MTP tensors of files that the index forgot."""
    entries = dict(source.entries)
    for name, entry in source.unindexed.items():
        if view.is_mtp(name):
            entries[name] = entry
    return entries


def decided(decisions: Decisions, entries: Iterable[Entry]) -> list[TensorPlan]:
    """The fate of each of these tensors.

    Raises:
        RecipeError, CheckpointError: see `Decisions`.
    """
    weights, others = stored_weights(entries)
    with matching_limit():
        tensors = [decisions.weight(weight) for weight in weights.values()]
        tensors += [decisions.other(entry) for entry in others]
    return tensors


# --- recipe and model must fit --------------------------------------------------------------------


def _refuse_lost_layers(view: FamilyView, source: Source, tensors: Iterable[TensorPlan]) -> None:
    """Each layer of the backbone that config.json counts has a tensor: a download that was cut has
    not.
    """
    there = {tensor.layer for tensor in tensors if tensor.part == "backbone"}
    for index in range(view.num_layers):
        if index not in there:
            raise CheckpointError(
                f"{source.where}/config.json",
                f"num_hidden_layers={view.num_layers} promises "
                f"{view.disk_stem('backbone', index)}*",
                got="no such tensor in any file",
                cure="Download the checkpoint again",
            )


def refuse_missing_mtp(view: FamilyView, source: Source, names: Collection[HFName]) -> None:
    """config.json and the tensors' names must agree on the MTP layers, and every module of the
    block must be there.
    """
    promised = view.num_mtp_layers
    there = view.mtp_layers_of(names)
    where = f"{source.where}/config.json"
    key = view.mtp_count_key
    count_cure = "Correct config.json"
    lost_cure = _LOST
    if view.is_number_wrong(there):
        command = f"keepmtp fix {shlex.quote(source.where)} --out NEW"
        count_cure = lost_cure = f"Run `{command}`, and quantize NEW"
    extra = sorted(there - {*range(promised)})
    if extra:
        raise CheckpointError(
            where,
            f"{key} must count the MTP layers on disk",
            got=f"{promised}, but {view.mtp_stem(extra[0])}* exists",
            cure=count_cure,
        )
    if not promised:
        raise CheckpointError(where, f"{key} must promise an MTP block", got=promised, cure=_LOST)
    for index in range(promised):
        if index not in there:
            raise CheckpointError(
                where,
                f"{key}={promised} promises MTP layers {view.mtp_stem(index)}*",
                got="no such tensor in any file",
                cure=lost_cure,
            )
    present = {name.rpartition(".")[0] for name in names} | {*names}
    for module in view.required_mtp_modules(range(promised)):
        if module not in present:
            raise CheckpointError(
                source.where,
                f"the MTP block must have {module}",
                got="no such tensor in any file",
                cure="Get the MTP block from the original release",
            )


def _refuse_unmatched(decisions: Decisions, tensors: Iterable[TensorPlan]) -> None:
    """Every pattern and every module group that the recipe names must be in the model."""
    recipe = decisions.recipe
    patterns = [override.modules for override in recipe.overrides]
    for pattern in (*patterns, *recipe.keep):
        if pattern not in decisions.matched:
            raise RecipeError(
                recipe.name,
                f"pattern {pattern!r} must match a module of the model",
                got="no match",
                cure="Write the whole name as on disk, or `re:` and a regex of the whole name",
            )
    have = {(tensor.part, tensor.role) for tensor in tensors}
    for part, groups in (("backbone", recipe.backbone), ("mtp", recipe.mtp_policy)):
        if isinstance(groups, str):
            continue
        for group in groups:
            if (part, group) not in have:
                raise RecipeError(
                    recipe.name,
                    f"{part} group {group} must match a module of the model",
                    got="no match",
                    cure=f"Remove {group} from {part}",
                )


def refuse_unservable(recipe: Recipe, tensors: Iterable[TensorPlan]) -> None:
    """Refuse what vLLM cannot serve: modules that it fuses in two schemes, input scales for a
    module that it absorbs, and schemes without a word in the recipe's format.

    vLLM 0.32.0 folds latent attention's kv_b_proj into the query and the output, and gets its
    weight by running an identity matrix through the layer (get_and_maybe_dequant_weights in
    quantization/utils/quant_utils.py, called by split_kv_b_proj in
    layers/attention/mla_attention.py). Schemes that scale their inputs on the fly take ones and
    zeros exactly. A static scale s rounds 1 / s to E4M3 (FP8; NVFP4's scale of a group likewise),
    so the whole weight is off by one factor of up to 1/16, and clipped where the inputs of
    calibration were below 1.

    Raises:
        RecipeError: names the module and what to override it with.
    """
    first = dict[VLLMName, TensorPlan]()
    for tensor in tensors:
        scheme = tensor.scheme
        if len(tensor.shape) < 2 or tensor.fate == "drop":
            continue
        other = first.setdefault(tensor.runtime, tensor)
        is_as_served = recipe.keeps_config and tensor.fate == other.fate == "keep"
        if other.scheme != scheme and not is_as_served:
            raise RecipeError(
                recipe.name,
                f"vLLM fuses {other.module} and {tensor.module} into {tensor.runtime}, so they "
                "need one scheme",
                got=f"{other.scheme or 'plain'} and {scheme or 'plain'}",
                cure="Give both the same scheme, or `bf16`",
            )
        is_absorbed = tensor.module.endswith(".kv_b_proj") and tensor.fate == "quantize"
        if is_absorbed and SCHEMES[scheme].needs_calibration:
            raise RecipeError(
                f"{recipe.name}: {tensor.part} {tensor.role}",
                "vLLM reads kv_b_proj through an identity matrix, "
                "which static input scales distort",
                got=f"{scheme} for {tensor.name}",
                cure="Add an override for `re:.*\\.kv_b_proj`: FP8_BLOCK, FP8_DYNAMIC or bf16",
            )
        has_word = scheme in ALGORITHMS
        if tensor.role == "experts":
            has_word = has_word and scheme not in NOT_FOR_EXPERTS
        if recipe.format == "modelopt" and scheme and not has_word:
            words = ", ".join(word for word in ALGORITHMS if word not in NOT_FOR_EXPERTS)
            raise RecipeError(
                f"{recipe.name}: {tensor.part} {tensor.role}",
                f"vLLM's loader of modelopt checkpoints must have a word for {scheme}",
                got=f"none, for {tensor.name}",
                cure=f"Use {words}, or format: compressed-tensors",
            )


# --- what batches give ----------------------------------------------------------------------------


def _with_calibration(recipe: Recipe, tensors: list[TensorPlan]) -> list[TensorPlan]:
    """The tensors, each with what batches give it."""
    algorithm = "minmax"
    if recipe.calibration is not None:
        algorithm = recipe.calibration.algorithm
    marked = [_marked(tensor, recipe, algorithm) for tensor in tensors]
    if algorithm not in RESCALING:
        return marked
    rewritten = set[tuple[str, int | None]]()
    for tensor in marked:
        if tensor.calibrated == "weights" and tensor.layer is not None:
            rewritten.add((tensor.part, tensor.layer))
    for number, tensor in enumerate(marked):
        if tensor.calibrated == "weights" or (tensor.part, tensor.layer) not in rewritten:
            continue
        # The bytes of a stored scheme stay; what is computed anew, or plain, can be rescaled.
        is_free = tensor.fate in ("quantize", "dequantize")
        if tensor.fate == "keep":
            is_free = tensor.form == "plain"
        if is_free and tensor.role != "state":
            reason = f"{tensor.reason}; {algorithm} may rescale it"
            marked[number] = tensor._replace(may_change=True, reason=reason)
    return marked


def _marked(tensor: TensorPlan, recipe: Recipe, algorithm: str) -> TensorPlan:
    """A tensor with how its scales are chosen, what batches give it, and whether it is trained.

    Weights of a tuned block are rounded to nearest, whatever the algorithm.
    """
    tuned = None
    if tensor.part == "mtp":
        tuned = recipe.mtp_tuned
    reason = tensor.reason
    scheme = tensor.scheme
    if tensor.fate == "quantize":
        calibrated = ""
        # Weights of embedding and head are rounded to nearest, whatever the algorithm.
        is_nearest = tensor.role in TABLE_ROLES
        if scheme in REWRITES[algorithm] and tuned is None and not is_nearest:
            calibrated = "weights"
            reason += f"; {algorithm} on calibration data"
        elif SCHEMES[scheme].needs_calibration and tensor.role != "table":
            calibrated = "scales"
            reason += "; input scales from calibration data"
        tensor = tensor._replace(reason=reason, calibrated=calibrated)
    if tuned is None or tensor.role in (*_NEVER_TRAINED, *tuned.frozen) or not _is_weight(tensor):
        return tensor
    return tensor._replace(reason=f"{reason}; tuned", tuned=True)


def _is_weight(tensor: TensorPlan) -> bool:
    """Whether this is a weight or a bias that is written in floating point or packed anew; no
    buffer, no table.
    """
    if not tensor.name.endswith((".weight", ".bias")) and not tensor.stacked:
        return False
    if tensor.fate == "quantize":
        return True
    if tensor.fate not in ("keep", "dequantize"):
        return False
    return all(output.dtype in ("BF16", "F16", "F32") for output in tensor.outputs)


def plan_order(tensor: TensorPlan) -> tuple[bool, int, list[str | int]]:
    """The backbone before the MTP block; in each, layer by layer, and by name with numbers as
    numbers.
    """
    layer = tensor.layer
    if layer is None:
        layer = -1
    natural: list[str | int] = [*_NUMBERS.split(tensor.name)]
    natural[1::2] = map(int, natural[1::2])  # every second part is a number
    return (tensor.part == "mtp", layer, natural)
