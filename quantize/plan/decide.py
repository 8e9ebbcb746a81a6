"""One fate for each tensor: what the recipe says of it, and whether it can be done.

In: a recipe, a source and its family's names; then a weight or another tensor of the source. Out:
its `TensorPlan`, or a refusal that names the tensor.

Easy to get wrong: "the source's form" has two meanings. A weight whose bytes are already those of
the scheme is kept, whatever the recipe calls the scheme. The word `source` keeps a stored form only
where the runtime loads this module quantized and knows the names of its scales; elsewhere the
weight becomes BF16.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ...checkpoints.dialects.choose import UNQUANTIZED, method_of, quantization_of
from ...checkpoints.dialects.fp8 import Fp8
from ...checkpoints.dialects.runtime_view import RuntimeView, described
from ...checkpoints.source import Entry, Source, origin_of, view_of
from ...checkpoints.source_of import release_of
from ...checkpoints.stored import (
    INPUT_SCALES,
    KV_SCALE_LEAVES,
    OTHER_LEAVES,
    StoredWeight,
)
from ...recipes.conventions import CACHE_LEAVES, cache_scale_in
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.family import HFName
from ...recipes.family_view import FamilyView, Place, unknown_place
from ...recipes.forms import NOT_COMPUTED, TRANSPOSED
from ...recipes.match_clock import SIMPLER, MatchClock
from ...recipes.schema import TUNED, Recipe
from ...recipes.schemes import SCHEMES, Scheme
from .tables import TABLE_WORDS, is_table, refuse_table, table_outputs, table_scale
from .tensor_plan import Fate, Output, TensorPlan, packed_outputs, renamed_outputs, same_output

Origins = Mapping[str, RuntimeView | None]
"""What a server has of a finished checkpoint, by the key "", and of the donors of its groups, by
what the names of their files begin with. None for a release, whose stored forms alone say what its
weights are.
"""
# Each quant_method of a config.json that releases are published with and no tool writes: DeepSeek's
# FP8 and gpt-oss's MXFP4. No form of them is less rounded.
_NATIVE = ("fp8", "mxfp4")
# Buffers that old checkpoints carry and every model class computes itself.
_RECOMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


_clock = MatchClock(
    lambda pattern, got: RecipeError(
        "recipe", f"{pattern} must be matched in a moment", got=got, cure=SIMPLER
    )
)
matching_limit = _clock.limit


@dataclass
class Decisions:
    """State: what every decision reads, and the patterns of the recipe that have matched a name.

    Attributes:
        matched: of the recipe's overrides and keeps.
    """

    recipe: Recipe
    source: Source
    view: FamilyView
    origins: Origins = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)
    _releases: dict[str, str] = field(default_factory=dict)

    def override(self, module: HFName) -> str | None:
        """The scheme of the first override that names this module."""
        for override in self.recipe.overrides:
            if self._matches(override.modules, module):
                return override.scheme
        return None

    def _matches(self, pattern: str, name: HFName) -> bool:
        is_hit = pattern == name
        if pattern.startswith("re:"):
            is_hit = bool(_clock.timed(re.compile(pattern[3:]).fullmatch, pattern, name))
        if is_hit:
            self.matched.add(pattern)
        return is_hit

    def weight(self, weight: StoredWeight) -> TensorPlan:
        """The fate of a weight and its scales.

        Raises:
            RecipeError: the recipe has no word for the module, or a scheme that the module cannot
                take.
            CheckpointError: the family does not know the tensor, or its stored form cannot be read.
        """
        name = HFName(f"{weight.module}.weight")
        served = served_at(self.origins, weight.weight)
        if served is not None:
            shape = served.weights.get(weight.module, weight).shape
            weight = replace(weight, shape=shape, scheme=served.schemes.get(weight.module, ""))
        kept = self._kept(name, tuple(weight.parts.values()), weight.shape)
        if kept is not None:
            return kept
        place = self._place(name)
        if place.leaf != "weight":  # a parameter whose own name ends in .weight
            return self.other(weight.weight)
        is_served = served is not None
        word, reason = self._word(place, is_served=is_served or self.recipe.keeps_config)
        if word == "source" and self._is_carried(weight.weight):
            return self._as_it_is(weight, place, reason)
        if is_served and weight.form != "plain":
            served.refuse_more()
        if place.row.table_scale and weight.weight.dtype in TABLE_WORDS:
            return self._packed_table(weight, place)
        self._refuse_unreadable(weight, place)
        if place.row.interleaved:
            return self._separated(weight, place, reason)
        if word in SCHEMES and is_table(place):
            refuse_table(self.recipe, self.view, place, SCHEMES[word])
        if word in SCHEMES:
            return self._to_scheme(weight, place, SCHEMES[word], reason)
        if weight.form == "plain":
            return _planned(weight, place, "keep", reason, (same_output(weight.weight),))
        if word == "source" and self._can_stay_quantized(weight, place):
            reason = "as in the source"
            if not self._keeps_dialect(weight.weight) and self.recipe.format != "fp8":
                reason += ", scales renamed"
            return self._staying(weight, place, weight.scheme, reason)
        if word == "source" and not place.row.why_kept:
            is_said = not weight.scheme and place.row.loads_quantized
            if self.recipe.keeps_config and is_said:  # or the edit refuses it
                return self._as_it_is(weight, place, reason)
            raise RecipeError(
                self._group(place),
                f"`source` needs a form that {self.recipe.format} can say",
                got=f"{weight.form} in {name}",
                cure=f"Set {place.role}: bf16 or a scheme; or `keepmtp fix` a config that lost it",
            )
        return _planned(weight, place, "dequantize", reason, (Output(name, "BF16", weight.shape),))

    def _is_carried(self, entry: Entry) -> bool:
        """Whether a tensor that stays is not looked at: the config that speaks of it stays too."""
        return self.recipe.keeps_config and self._keeps_dialect(entry)

    def _as_it_is(self, weight: StoredWeight, place: Place, reason: str) -> TensorPlan:
        """A weight with its scales; one that batches run through, or of a donor, must be read."""
        if weight.form != "plain":
            reason = "as in the source"
        is_read = self.recipe.uses_batches() or origin_of(weight.weight)
        if is_read and not place.row.table_scale:
            self._refuse_unreadable(weight, place)
        return _planned(weight, place, "keep", reason, scheme=weight.scheme)

    def _packed_table(self, weight: StoredWeight, place: Place) -> TensorPlan:
        """A part of a table that is packed already, with one scale for all parts or its own."""
        dtype = weight.weight.dtype
        scale = table_scale(place, dtype)
        if scale not in self._source_of(weight.weight).entries:
            raise CheckpointError(
                f"{self.source.where}: {weight.weight.name}",
                f"a table in {dtype} must have its scale {scale}",
                got="no such tensor",
                cure="Check the download",
            )
        asked = self.recipe.backbone.get(place.role, "source")
        if asked != "source":
            raise RecipeError(
                self._group(place),
                "a table that is packed stays as it is",
                got=f"{asked} for {dtype} in {place.module}.weight",
                cure=f"Set {place.role}: source, or quantize a release with a BF16 table",
            )
        reason = "packed rows, which vLLM looks up as they are"
        return _planned(weight, place, "keep", reason)

    def other(self, entry: Entry) -> TensorPlan:
        """The fate of a tensor that is no matrix: a bias, a parameter without a module, a buffer
        that is recomputed.

        Raises:
            CheckpointError: the family does not know the tensor, or it is a scale without its
                weight.
        """
        name = entry.name
        kept = self._cache_scale(entry) or self._kept(name, (entry,), entry.shape)
        if kept is not None:
            return kept
        if _RECOMPUTED.search(name):
            why = "every model class computes it"
            return TensorPlan(name, (name,), "drop", why, entry.shape, (), unknown_place(name))
        place = self._place(name)
        row = place.row
        # A 3-D expert parameter is a weight whose name has no `.weight`.
        if row.stacked and place.leaf == "":
            return self.weight(described(entry))
        is_other = place.leaf in ("weight", *OTHER_LEAVES) or row.role == "vision"
        is_other |= self._is_carried(entry)
        if is_other and not row.stacked:
            why = row.why_kept or "a bias, not a matrix"
            return TensorPlan(name, (name,), "keep", why, entry.shape, (same_output(entry),), place)
        raise CheckpointError(
            f"{self._source_of(entry).where}: {name}",
            f"{place.leaf!r} must belong to a weight of {place.module}",
            got="no such weight",
            cure="Check the download, or add the name to `keep` of the recipe",
        )

    # --- what the recipe says ---------------------------------------------------------------------

    def _kept(
        self, name: HFName, entries: tuple[Entry, ...], shape: tuple[int, ...]
    ) -> TensorPlan | None:
        """A tensor that the recipe's `keep` names; or one that the family does not know, where the
        config stays.
        """
        reason = ""
        place = self.view.place(name)
        if place is None and self._is_carried(entries[0]):
            reason = "as in the source"
        for pattern in self.recipe.keep:
            if self._matches(pattern, name):
                reason = "recipe: keep"
        if not reason:
            return None
        if place is None:
            place = unknown_place(HFName(name.rpartition(".")[0] or name))
        inputs = tuple(entry.name for entry in entries)
        outputs = tuple(map(same_output, entries))
        return TensorPlan(name, inputs, "keep", reason, shape, outputs, place)

    def _cache_scale(self, entry: Entry) -> TensorPlan | None:
        """A scale of a finished checkpoint's KV cache; None for another tensor."""
        name = cache_scale_in("compressed-tensors", entry.name)
        holder, _, leaf = name.rpartition(".")
        if served_at(self.origins, entry) is None or leaf not in KV_SCALE_LEAVES:
            return None
        place = unknown_place(HFName(holder))
        if self.view.is_mtp(entry.name):
            place = replace(place, part="mtp")
        fate: Fate = "keep"
        reason = "a scale of the source's KV cache"
        outputs = (same_output(entry),)
        own = self.origins.get("")
        if self.recipe.kv_cache is not None:
            fate = "drop"
            reason = "the KV cache gets other scales"
            outputs = ()
        elif own is None or (origin_of(entry) and own.kv_cache_scheme is None):
            fate = "drop"
            reason = "the KV cache is not quantized"
            outputs = ()
        elif leaf in CACHE_LEAVES and not (self._keeps_dialect(entry) or holder.endswith(".attn")):
            outputs = (Output(HFName(name), entry.dtype, (1,)),)
        return TensorPlan(entry.name, (entry.name,), fate, reason, entry.shape, outputs, place)

    def _place(self, name: HFName) -> Place:
        place = self.view.place(name)
        if place is None:
            family = self.view.family.model_type
            raise CheckpointError(
                self.source.where,
                f"every tensor must be known to family {family}",
                got=name,
                cure=f"Add it to recipes/families/{family}.yaml, or to `keep` of the recipe",
            )
        return place

    def _group(self, place: Place) -> str:
        """How a refusal names a module group of the recipe."""
        return f"{self.recipe.name}: {place.part} {place.role}"

    def _word(self, place: Place, *, is_served: bool) -> tuple[str, str]:
        """The recipe's word for a module of a finished checkpoint or of a release, and the reason
        to show.
        """
        recipe = self.recipe
        override = self.override(place.module)
        if is_table(place) and place.role in recipe.backbone:
            return recipe.backbone[place.role], f"recipe: backbone {place.role}"
        if place.row.why_kept:
            if override in SCHEMES:
                raise RecipeError(
                    recipe.name,
                    f"{place.module} is never quantized ({place.row.why_kept})",
                    got=override,
                    cure="Remove the override",
                )
            is_of_source = is_served and override is None
            if place.part == "mtp" and recipe.mtp_policy in ("source", "bf16"):
                is_of_source = recipe.mtp_policy == "source"
            if is_of_source:
                return "source", place.row.why_kept
            return "bf16", place.row.why_kept
        if override is not None:
            return override, "override of the recipe"
        word = {"backbone": recipe.backbone, "mtp": recipe.mtp_policy}[place.part]
        if not isinstance(word, str):
            word = word.get(place.role)
        if word is None:
            raise RecipeError(
                recipe.name,
                f"{place.part} must say what happens to {place.role}",
                got=f"nothing, but the model has {place.module}",
                cure=f"Add `{place.role}: source` or a scheme",
            )
        return word, f"recipe: {place.part} {place.role}"

    # --- what can be done -------------------------------------------------------------------------

    def _keeps_dialect(self, entry: Entry) -> bool:
        return keeps_dialect(self.recipe, self.source, self.origins, entry)

    def _source_of(self, entry: Entry) -> Source:
        """The checkpoint that a tensor is read from."""
        return self.source.others.get(origin_of(entry), self.source)

    def _staying(self, weight: StoredWeight, place: Place, scheme: str, reason: str) -> TensorPlan:
        """A weight whose bytes are those of a scheme. In the source's dialect its tensors stay as
        they are, but for scales of inputs that another scheme has no use for.
        """
        outputs = renamed_outputs(weight, scheme)
        if self._keeps_dialect(weight.weight):
            kept = list[Output]()
            for leaf, entry in weight.parts.items():
                if scheme == weight.scheme or leaf not in INPUT_SCALES:
                    kept.append(same_output(entry))
            outputs = tuple(kept)
        return _planned(weight, place, "keep", reason, outputs, scheme)

    def _refuse_unreadable(self, weight: StoredWeight, place: Place) -> None:
        is_foreign_integer = weight.form == "int_packed" and not weight.scheme
        if "weight_g_idx" in weight.parts:  # which says how wide it is, and what group a column has
            is_foreign_integer = False
        is_sliced = weight.form == "fp8_sliced" and not place.row.interleaved
        is_unknown = weight.form in NOT_COMPUTED
        if weight.form in TRANSPOSED and weight.scheme:
            is_unknown = False
        rule = (
            "must be plain, FP8, MXFP4, NVFP4, or integers in an order and in groups that a scheme "
            "has"
        )
        is_other = False
        if weight.scheme and weight.form not in (*TRANSPOSED, "unknown", "plain"):
            rule = f"must be stored as the config says, in {weight.scheme}"
            is_other = not weight.is_of(weight.scheme)
        if is_unknown or is_foreign_integer or is_sliced or is_other:
            stored = list[str]()
            for leaf, entry in weight.parts.items():
                stored.append(f"{leaf} {entry.dtype}{list(entry.shape)}")
            raise CheckpointError(
                f"{self._source_of(weight.weight).where}: {place.module}.weight",
                rule,
                got=", ".join(stored),
                cure="Start from the original release",
            )

    def _separated(self, weight: StoredWeight, place: Place, reason: str) -> TensorPlan:
        """q, k and v in three matrices, each with its rows in order: vLLM takes those at any number
        of ranks.
        """
        count, *slices = self.view.slices(place)
        if len(weight.shape) != 2 or weight.shape[0] != count * sum(slices):
            raise CheckpointError(
                f"{self.source.where}: {place.module}.weight",
                f"its rows must be {count} slices of {' + '.join(map(str, slices))} rows of q, k "
                "and v, by config.json",
                got=f"shape {list(weight.shape)}",
                cure="Take config.json from the original release",
            )
        dtype = "BF16"
        if weight.form == "plain":
            dtype = weight.weight.dtype
        outputs = list[Output]()
        for path, rows in zip(place.row.interleaved, slices, strict=True):
            name = HFName(f"{place.stem}{path}.weight")
            outputs.append(Output(name, dtype, (count * rows, weight.shape[1])))
        made = _planned(weight, place, "dequantize", reason, tuple(outputs))
        return made._replace(slices=tuple(slices))

    def _to_scheme(
        self, weight: StoredWeight, place: Place, scheme: Scheme, reason: str
    ) -> TensorPlan:
        is_tuned = place.part == "mtp" and self.recipe.mtp == TUNED
        if _same_bytes(weight.scheme, scheme.name) and not is_tuned:
            reason = f"the source stores {scheme.name} already"
            return self._staying(weight, place, scheme.name, reason)
        self._refuse_second_rounding(weight, place, scheme)
        for rule, got, otherwise in self._misfits(weight, place, scheme):
            raise RecipeError(
                self._group(place), rule, got=got, cure=f"Set {place.role}: {otherwise}"
            )
        outputs = packed_outputs(place, scheme.name, weight.shape)
        if place.role == "table":
            outputs = table_outputs(place, scheme, weight.shape)
        return _planned(weight, place, "quantize", reason, outputs, scheme.name)

    def _refuse_second_rounding(self, weight: StoredWeight, place: Place, scheme: Scheme) -> None:
        """What a tool has rounded is not rounded into another scheme: both errors would be in the
        output.
        """
        stored = SCHEMES.get(weight.scheme)
        is_same = stored is not None and stored.weights == scheme.weights
        if weight.form == "plain" or is_same or self.recipe.requantize:
            return
        source = self._source_of(weight.weight)
        if source.where not in self._releases:
            native = (*_NATIVE, self.view.family.released_as)
            self._releases[source.where] = release_of(source, native)
        release = self._releases[source.where]
        if release:
            raise RecipeError(
                self._group(place),
                f"{source.where} is quantized already, and a weight is rounded once",
                got=f"{weight.scheme or weight.form} in {place.module}.weight, for {scheme.name}",
                cure=f"Quantize {release}, or add --requantize to round it a second time",
            )

    def _misfits(
        self, weight: StoredWeight, place: Place, scheme: Scheme
    ) -> Iterator[tuple[str, str, str]]:
        """Why a module cannot take a scheme: the rule, the value, and what its group can have
        instead.
        """
        shape = weight.shape
        row = place.row
        name = scheme.name
        tensor = f"{place.module}.weight"
        num_dimensions = 2
        if row.stacked:
            num_dimensions = 3
        if len(shape) != num_dimensions:
            yield f"{name} needs a matrix", f"shape {list(shape)} in {tensor}", "source"
            return
        if scheme.has_tensor_scale and not row.takes_tensor_scale:
            into = f"{place.runtime.rpartition('.')[2]} of this family"
            rule = f"vLLM cannot load one scale a tensor into {into}"
            yield rule, f"{name} for {tensor}", "FP8_DYNAMIC, FP8_BLOCK or bf16"
        rows = shape[-2] // max(1, len(row.stacked))
        columns = shape[-1]
        if columns % scheme.k_multiple():
            rule = f"K divisible by {scheme.k_multiple()}"
            otherwise = "bf16, or override this module"
            yield f"{name} needs {rule}", f"K={columns} in {tensor}", otherwise
        number = f"N={rows} in {tensor}"
        if rows % scheme.n_multiple():
            rule = f"N divisible by {scheme.n_multiple()}: zero points of so many rows are one word"
            yield f"{name} needs {rule}", number, "W4A16, or override this module"
        # vLLM 0.32.0 (fp8_utils.validate_fp8_block_shape) lets only the last shard of a fused
        # module end in a part block.
        may_be_ragged = row.path in self.view.last_shards and row.role != "experts"
        if scheme.block and rows % scheme.block[0] and not may_be_ragged:
            rule = f"N divisible by {scheme.block[0]} where modules are fused"
            yield f"{name} needs {rule}", number, "FP8_DYNAMIC or bf16"

    def _can_stay_quantized(self, weight: StoredWeight, place: Place) -> bool:
        """Whether the runtime loads this module quantized, and its loader knows the names of the
        scales.
        """
        if served_at(self.origins, weight.weight) is not None:
            return bool(weight.scheme) and place.role != "vision"  # a server builds it so
        if not weight.scheme or not place.row.loads_quantized:
            return False
        known = self.view.family.loader.mtp_leaves
        if place.part == "backbone" or not known:
            return True
        for output in renamed_outputs(weight, weight.scheme):
            if output.name.rpartition(".")[2] not in known:
                return False
        return True


def added_aliases(view: FamilyView, entries: Mapping[HFName, Entry]) -> list[TensorPlan]:
    """Copies that the MTP block needs under its own names, where the source has the origin but not
    the copy.
    """
    plans = []
    for index in range(view.num_mtp_layers):
        for alias in view.family.aliases:
            name = HFName(view.mtp_stem(index) + alias.path)
            origin = entries.get(HFName(alias.source))
            if name in entries or origin is None:
                continue
            place = view.place(name)
            assert place is not None, f"alias {name} has no row in family {view.family.model_type}"
            outputs = (Output(name, origin.dtype, origin.shape),)
            plans.append(
                TensorPlan(name, (origin.name,), "add", alias.reason, origin.shape, outputs, place)
            )
    return plans


def served_at(origins: Origins, entry: Entry) -> RuntimeView | None:
    """What a server has of the checkpoint that a tensor is from."""
    return origins.get(origin_of(entry))


def keeps_dialect(recipe: Recipe, source: Source, origins: Origins, entry: Entry) -> bool:
    """Whether a tensor is spelled in the output as in the checkpoint that it is from."""
    origin = origin_of(entry)
    served = origins.get(origin)
    if served is not None and served.dialect.name == recipe.format:
        return True
    if not origin or not recipe.keeps_config:
        return recipe.keeps_config
    theirs = quantization_of(source.others[origin].config)
    return method_of(quantization_of(source.config)) == method_of(theirs)


def origins_of(source: Source, view: FamilyView) -> Origins:
    """What a server has of a checkpoint, and of the donors of its groups."""
    origins = {"": served_view(source, view)}
    for start, donor in source.others.items():
        origins[start] = served_view(donor, view_of(donor))
    return origins


def served_view(source: Source, view: FamilyView) -> RuntimeView | None:
    """What a server has of a finished checkpoint; None for a release, whose stored forms alone say
    what its weights are.
    """
    served = RuntimeView(source=source, view=view)
    dialect = served.dialect
    native = (UNQUANTIZED.name, *_NATIVE, view.family.released_as)
    if isinstance(dialect, Fp8) or dialect.name in native:
        return None
    return served


@cache
def _same_bytes(stored: str, wanted: str) -> bool:
    """Whether a weight in one scheme has the bytes that another would write; scales may be called
    otherwise.
    """
    if not stored or SCHEMES[stored].weights != SCHEMES[wanted].weights:
        return False
    stored_suffixes = {spec.suffix for spec in SCHEMES[stored].tensors(128, 128)}
    return all(spec.suffix in stored_suffixes for spec in SCHEMES[wanted].tensors(128, 128))


def _planned(
    weight: StoredWeight,
    place: Place,
    fate: Fate,
    reason: str,
    outputs: tuple[Output, ...] | None = None,
    scheme: str = "",
) -> TensorPlan:
    """A weight with its scales; without outputs they are as they are."""
    if outputs is None:
        outputs = tuple(map(same_output, weight.parts.values()))
    shares = ""
    if fate == "quantize" and SCHEMES[scheme].has_tensor_scale:
        shares = place.shares
    return TensorPlan(
        name=HFName(f"{place.module}.weight"),
        inputs=weight.names(),
        fate=fate,
        reason=reason,
        shape=weight.shape,
        outputs=outputs,
        place=place,
        scheme=scheme,
        form=weight.form,
        block=weight.block,
        shares=shares,
    )
