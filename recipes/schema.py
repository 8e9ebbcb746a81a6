"""A recipe: everything that a person decides about one quantized checkpoint.

In: a flat mapping: a flat recipe file, or one variant of a model file (`find`). Out: a frozen
`Recipe`. Nothing that changes numbers has a default: a recipe that does not say what happens to a
module group is refused.

Easy to get wrong: `source` means "as the released checkpoint stores it". For an FP8 release that is
FP8, not BF16.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .blocks import (
    AUTO,
    DEFAULT_AUTO,
    TUNED,
    BackboneAuto,
    BackbonePolicy,
    BudgetText,
    Calibration,
    Candidate,
    Donors,
    MtpAuto,
    MtpPolicy,
    MtpSource,
    MtpTuned,
    Name,
    NameOrRegex,
    Override,
    TextsOfMix,
    words_of,
)
from .budget import read_budget
from .conventions import Format
from .errors import RecipeError, allowed_words, cure_of_key, did_you_mean, folded, plain_rule
from .family import TABLE_ROLES
from .frozen import Json, Raw
from .knobs import AutoRoundKnobs, Contradiction, Frozen
from .model_file import summary_of
from .protocol import Evaluation, Evaluations, Gates, listed
from .schemes import REWRITES, SCHEMES

# What a recipe loses when a search has chosen, or a scheme is named instead.
_NO_SEARCH: Json = {"budget": None, "backbone_auto": None}
_NONE: Mapping[str, str] = MappingProxyType({})


def candidates_for(
    candidates: Iterable[str | Mapping[str, str]], groups: Collection[str]
) -> tuple[Candidate, ...]:
    """The candidates that are different policies for an MTP block with these module groups, in
    order.

    One list is for every family. A mapping loses the groups that the block lacks. If it then has
    one word for all of the block's groups, it becomes that word.
    """
    different = list[Candidate]()
    for candidate in candidates:
        if not isinstance(candidate, str):
            candidate = {group: word for group, word in candidate.items() if group in groups}
            words = words_of(candidate)
            if len(words) == 1 and candidate.keys() == {*groups}:
                candidate = words.pop()
        if candidate and candidate not in different:
            different.append(candidate)
    return tuple(different)


class Recipe(Frozen):
    """What a person decides about one checkpoint."""

    model_config = ConfigDict(serialize_by_alias=True)

    # The model's name on the command line, the same in all its recipes.
    model: Name
    # Name of this recipe among those of the model.
    variant: Name
    # Whether the bare model name means this recipe.
    default: bool
    # One line for `keepmtp ls MODEL`.
    summary: str
    # The model_type of the family table.
    family: Name
    # Hub id or local folder of the released checkpoint.
    source: str
    # Hub revision; "local" for folders.
    revision: str
    # Module group -> scheme, `source`, `bf16` or `auto`; every group that the model has must be
    # named. The word `auto` alone is that for every group.
    backbone: BackbonePolicy
    # The same for the MTP block: one word for all of it, a mapping by group, `auto` or `tuned`.
    mtp: MtpPolicy
    # How batches are chosen; null for data-free recipes.
    calibration: Calibration | None
    # How `auto` chooses; only with `mtp: auto`, and where no group of the backbone is `auto`.
    mtp_auto: MtpAuto | None = None
    # With groups that are `auto`: how large the checkpoint may become (`budget.py`).
    budget: BudgetText | None = None
    # With groups that are `auto`: what the search may choose.
    backbone_auto: BackboneAuto | None = None
    # How the block is trained, and its schemes; only with `mtp: tuned`.
    mtp_tuned: MtpTuned | None = None
    # Exceptions; the first match wins, and each must match something.
    overrides: tuple[Override, ...] = ()
    # Names (or `re:` regexes) of tensors outside the family table that keepmtp copies as they are.
    keep: tuple[NameOrRegex, ...] = ()
    # Where the MTP block is, for a release that has none of its own; only its MTP tensors are read.
    mtp_source: MtpSource | None = None
    # `from`: group -> the finished checkpoint, of the same model, whose tensors it is made of.
    donors: Donors | None = Field(default=None, alias="from")
    # Whose names, scales and config the checkpoint has; the packed bytes are the same.
    format: Format = "compressed-tensors"
    # The checkpoint's own config is edited, not written anew, and groups with the word `source`
    # stay as they are, in whatever form.
    keeps_config: bool = False
    # FP8 gives each attention layer scales for an FP8 cache, from calibration; null leaves the
    # cache alone.
    kv_cache: Literal["FP8"] | None = None
    # Weights that a tool has quantized may be rounded again, into another scheme.
    requantize: bool = False
    # How the result is scored: one protocol, or a list with one for each task;
    # `protocol.Evaluation` has the defaults.
    evaluation: Evaluations = Evaluation()
    # What the result must keep of its source; `protocol.Gates` has the defaults.
    gates: Gates = Gates()

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The protocol of each task, the first task first."""
        return listed(self.evaluation)

    @property
    def name(self) -> str:
        """`<model>.<variant>`, the recipe's full name."""
        return f"{self.model}.{self.variant}"

    @property
    def before_measuring(self) -> "Recipe":
        """With BF16 as long as `mtp: auto` or a search has not chosen."""
        made = self
        if self.mtp == AUTO:
            made = made.resolved("bf16")
        if self.is_searched:
            made = made.with_words("bf16")
        return made

    @property
    def is_searched(self) -> bool:
        """Whether a search under a budget decides about groups of the backbone."""
        return AUTO in self.backbone.values()

    @property
    def size_limit(self) -> int:
        """What `budget` says, in bytes."""
        assert self.budget is not None, f"{self.name}: nothing is searched"
        return read_budget(self.budget)

    def with_words(self, word: str) -> "Recipe":
        """With one word for all that a search decides about, its block included; not validated
        again.
        """
        changed: Json = {"backbone": self._replaced({AUTO}, word)} | _NO_SEARCH
        if self.mtp == AUTO:
            changed |= {"mtp": word, "mtp_auto": None}
        return self.model_copy(update=changed)

    def _replaced(self, words: Collection[str], other: str) -> dict[str, str]:
        """The backbone with another word for the groups that have one of these. A scheme of
        embedding or head stays: it is theirs alone.
        """
        backbone = dict(self.backbone)
        for group, word in self.backbone.items():
            if word in words and group not in TABLE_ROLES:
                backbone[group] = other
        return backbone

    @property
    def mtp_policy(self) -> str | dict[str, str]:
        """The schemes of the MTP block: its word or mapping, under `mtp: tuned` those that it is
        trained for.
        """
        if self.mtp_tuned is not None:
            return self.mtp_tuned.mtp
        return self.mtp

    @property
    def measures_mtp(self) -> bool:
        """Whether something about the MTP block is decided by measuring its acceptance."""
        return self.mtp in (AUTO, TUNED)

    def decisions(self) -> set[str]:
        """Every word that this recipe uses for a scheme, also those of the candidates of `auto`."""
        words = {*self.backbone.values(), *self._searched_words()} - {AUTO}
        return words | self.mtp_decisions()

    def mtp_decisions(self) -> set[str]:
        """The same for the MTP block alone; an override may name its modules, too."""
        words = {override.scheme for override in self.overrides}
        policies: tuple[Candidate, ...] = (self.mtp_policy,)
        if self.mtp_auto is not None:
            policies = self.mtp_auto.candidates
        for policy in policies:
            words |= words_of(policy)
        if self.mtp == AUTO:
            words.update(self._searched_words())
        return words - {AUTO}

    def _searched_words(self) -> tuple[str, ...]:
        if self.backbone_auto is None:
            return ()
        return self.backbone_auto.candidates

    def calibrated_schemes(self) -> list[str]:
        """The schemes of this recipe with tensors that depend on data: static scales or rewritten
        weights.
        """
        words = {*self._searched_words()}
        of_tables = set[str]()  # whose weights no algorithm rewrites
        for group, word in self.backbone.items():
            if group not in TABLE_ROLES:
                words.add(word)
            elif group != "table" and word in SCHEMES and SCHEMES[word].needs_calibration:
                of_tables.add(word)
        return sorted(of_tables | {*self.calibrated_among(words | self.mtp_decisions())})

    def calibrated_among(self, words: set[str]) -> list[str]:
        """Those among some words, such as `mtp_decisions`."""
        calibrated = {name for name in words & SCHEMES.keys() if SCHEMES[name].needs_calibration}
        if self.calibration is not None:
            calibrated |= words & REWRITES[self.calibration.algorithm]
        return sorted(calibrated)

    def contradictions(self) -> Iterator[Contradiction]:
        """Blocks without their word and words without their block; then what has no meaning."""
        if self.is_searched and self.mtp_auto is not None:
            cure = "Remove it: the units of the block have the candidates of backbone_auto"
            yield "mtp_auto must be left out where backbone is auto", "both", cure
        if self.mtp_source is not None and "mtp" in (self.donors or ()):
            yield "mtp_source must be left out where from names mtp", "both", "Remove one"
        written = f"mtp: {self.mtp}"
        chooses = self.mtp == AUTO and not self.is_searched
        cure = "It holds min_acceptance and candidates"
        yield from self._belongs("mtp_auto", chooses, "mtp", AUTO, written, cure)
        cure = "It holds mtp, steps, learning_rate and loss"
        yield from self._belongs("mtp_tuned", self.mtp == TUNED, "mtp", TUNED, written, cure)
        written = f"backbone: {', '.join({*self.backbone.values()})}"
        cure = "`budget: 96GiB` and `backbone_auto: {candidates: [NVFP4, FP8_DYNAMIC, bf16]}`"
        for key in ("budget", "backbone_auto"):
            yield from self._belongs(
                key, self.is_searched, "backbone", AUTO, written, f"Such as {cure}"
            )
        words = sorted(self.decisions() & SCHEMES.keys())
        if self.format == "fp8" and self.backbone and not self.keeps_config:
            cure = "Remove format: FP8_BLOCK stores the same numbers"
            yield "format: fp8 is for a draft alone", "a backbone", cure
        yield from self._against_calibration(words)

    def _belongs(
        self, block: str, is_wanted: bool, key: str, word: str, written: str, cure: str
    ) -> Iterator[Contradiction]:
        """What is wrong with a block that belongs to one word of a key: it is missing, or one too
        many.
        """
        is_there = getattr(self, block) is not None
        if is_wanted and not is_there:
            yield f"{block} must be given where {key} is {word}", "nothing", cure
        if is_there and not is_wanted:
            yield f"{block} must be left out where {key} is not {word}", written, "Remove it"

    def _against_calibration(self, words: list[str]) -> Iterator[Contradiction]:
        if self.calibration is None:
            reasons = {
                f"mtp: {self.mtp}": self.measures_mtp,
                "backbone: auto": self.is_searched,
                f"kv_cache: {self.kv_cache}": self.kv_cache is not None,
            }
            for what, is_reason in reasons.items():
                if is_reason:
                    rule = f"calibration must be given for {what}"
                    yield rule, "null", "Name a dataset, or choose what needs none"
            for scheme in self.calibrated_schemes():
                cure = f"Name a dataset, or use {SCHEMES[scheme].data_free}, which needs none"
                yield f"calibration must be given for {scheme}", "null", cure
            return
        algorithm = self.calibration.algorithm
        rewritten = sorted(REWRITES[algorithm])
        if algorithm != "minmax" and not {*words} & {*rewritten}:
            rule = (
                f"calibration.algorithm {algorithm} rewrites weights of {', '.join(rewritten)} only"
            )
            got = ", ".join(words) or "no scheme"
            yield rule, got, "Use one of these schemes, or another algorithm"
        if not self.uses_batches():
            yield "calibration must be null where no scheme needs it", "a dataset", "Remove it"

    def resolved(self, mtp: str | dict[str, str]) -> "Recipe":
        """This recipe with a policy for the MTP block that is known, as after `mtp: auto` has
        chosen.

        It is not validated again: perhaps only the choice needed the calibration block.
        """
        return self.model_copy(update={"mtp": mtp, "mtp_auto": None, "mtp_tuned": None})

    def with_choices(
        self,
        *,
        scheme: str | None,
        mtp: str | None,
        changes: Mapping[str, str] = _NONE,
        calibration: Calibration | None = None,
        batches: Calibration | None = None,
    ) -> "Recipe":
        """This recipe with what a command line chooses.

        Weights of `scheme` are rounded to nearest, unless `calibration` names an algorithm that
        rewrites them. The result has no calibration if nothing in it needs batches.

        Args:
            scheme: for every quantized group.
            mtp: policy for the MTP block.
            changes: words for groups of the backbone, and for the keys `kv_cache` and `format`.
            calibration: instead of this recipe's.
            batches: the calibration that is taken where one is needed and this recipe has none.
        """
        changed: Json = {}
        variant = self.variant
        options = list[str]()
        if scheme is not None:
            options.append(f"--scheme {scheme}")
            variant = folded(scheme)
            changed["backbone"] = self._replaced({*SCHEMES, AUTO}, scheme)
            changed |= _NO_SEARCH
            if self.calibration is not None:
                nearest = {"algorithm": "minmax", "autoround": None}
                changed["calibration"] = self.calibration.model_copy(update=nearest)
        for key, word in changes.items():
            options.append(f"--set {key}={word}")
            variant += f"-{folded(key)}-{folded(word)}"
            if key in ("kv_cache", "format"):
                changed[key] = word
                if key == "format":
                    changed["keeps_config"] = False
            else:
                changed["backbone"] = {**changed.get("backbone", self.backbone), key: word}
        if mtp is not None:
            options.append(f"--mtp {mtp}")
            variant += f"-mtp-{folded(mtp)}"
            changed["mtp"] = mtp
            if mtp != TUNED:
                changed["mtp_tuned"] = None
        is_searched = self.is_searched and scheme is None
        changed["mtp_auto"] = None
        if changed.get("mtp", self.mtp) == AUTO and not is_searched:
            changed["mtp_auto"] = self.mtp_auto or DEFAULT_AUTO
        if calibration is not None:
            changed["calibration"] = calibration
        made = self.model_copy(update=changed | {"variant": variant})
        if not made.uses_batches():
            made = made.model_copy(update={"calibration": None})
        elif made.calibration is None:
            made = made.model_copy(update={"calibration": batches})
        summary = summary_of(made.backbone, made.mtp, is_calibrated=made.calibration is not None)
        where = " ".join(options) or self.name
        return validated(made.model_dump() | {"summary": summary}, where)

    def uses_batches(self) -> bool:
        """Whether a run of this recipe computes with text."""
        return (
            self.measures_mtp
            or self.is_searched
            or self.kv_cache is not None
            or bool(self.calibrated_schemes())
        )


_PARTS: Mapping[str, type[BaseModel]] = {
    "calibration": Calibration,
    "also": TextsOfMix,
    "autoround": AutoRoundKnobs,
    "overrides": Override,
    "mtp_auto": MtpAuto,
    "backbone_auto": BackboneAuto,
    "mtp_tuned": MtpTuned,
    "mtp_source": MtpSource,
    "from": MtpSource,
    "evaluation": Evaluation,
    "gates": Gates,
}


def validated(raw: Raw, where: object) -> Recipe:
    """A flat mapping as a `Recipe`; see `read_as`."""
    return read_as(Recipe, raw, where)


# What pydantic adds to the path of a value: branches, and keys of mappings.
_TAGS = ("word", "groups", "number", "[key]")
_Part = TypeVar("_Part", bound=BaseModel)


def read_as(kind: type[_Part], raw: Raw, where: object) -> _Part:
    """A mapping as a recipe, or as a block of one.

    Args:
        kind: what it is.
        raw: its keys.
        where: the file or the options that they are from, for the refusal.

    Raises:
        RecipeError: an unknown key, a missing one, or a value outside its range; names `where` and
            the key.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        faults = error.errors()
    first = faults[0]
    for fault in faults:
        # A misspelled key shows up as unknown and as missing; the first says more.
        if fault["type"] == "extra_forbidden":
            first = fault
            break
    if first["type"] == "extra_forbidden":
        *outer, unknown = first["loc"]  # it may be called as a tag is
        path = [str(part) for part in outer if part not in _TAGS]
        owner: type[BaseModel] = kind
        for part in path:
            owner = _PARTS.get(part, owner)
        keys = [field.alias or name for name, field in owner.model_fields.items()]
        raise RecipeError(
            where,
            f"{'.'.join([*path, str(unknown)])} is not a key of a recipe",
            got=repr(first["input"]),
            cure=cure_of_key(str(unknown), keys),
        )
    path = [str(part) for part in first["loc"] if part not in _TAGS]
    key = ".".join(path) or "recipe"
    if first["type"] == "missing":
        raise RecipeError(
            where,
            f"{key} must be given",
            got="nothing",
            cure="Add it: nothing that changes numbers has a default",
        )
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, RecipeError):
        raise refusal.at(f"{where}: {key}")
    cure = did_you_mean(first["input"], allowed_words(first), otherwise="Correct it")
    raise RecipeError(where, f"{key}: {plain_rule(first)}", got=repr(first["input"]), cure=cure)
