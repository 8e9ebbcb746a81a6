"""A recipe: everything that a person decides about one quantized checkpoint.

In: a flat mapping: a flat recipe file, or one variant of a model file (`find`). Out: a frozen
`Recipe`. Nothing that changes numbers has a default: a recipe that does not say what happens to a
module group is refused.

Easy to get wrong: `source` means "as the released checkpoint stores it". For an FP8 release that is
FP8, not BF16.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)

from .budget import Budget, read_budget
from .conventions import ALGORITHMS, Format
from .errors import RecipeError, allowed_words, cure_of_key, did_you_mean, folded, plain_rule
from .family import QUANTIZABLE_ROLES
from .frozen import Json, Raw
from .knobs import (
    KNOBS,
    AutoRoundKnobs,
    AWQKnobs,
    Contradiction,
    Fraction,
    Frozen,
    GPTQKnobs,
    Positive,
)
from .model_file import USUAL_AUTO, summary_of
from .protocol import Evaluation, Evaluations, Gates, listed
from .schemes import REWRITES, SCHEMES, SEARCHES, SWEEPS, meant_scheme

KEEP_WORDS = ("source", "bf16")
"""`source`: stored as released. `bf16`: dequantized if the release is quantized, else as
released.
"""
AUTO = "auto"
"""For the MTP block: the cheapest of the candidates that keeps enough acceptance, measured during
the run. For module groups of the backbone: what a search finds under the recipe's `budget`, unit by
unit, and then the block's units too.
"""
TUNED = "tuned"
"""For the MTP block only: trained on what the quantized backbone computes, if that is shown to
raise acceptance.
"""


# What a recipe loses when a search has chosen, or a scheme is named instead.
_NO_SEARCH: Json = {"budget": None, "backbone_auto": None}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _one_of(
    known: Collection[str], rule: str, otherwise: str = "See `keepmtp ls schemes`"
) -> Callable[[str], str]:
    """A validator of words, with the nearest one as the cure."""

    def check(word: str) -> str:
        if word in known:
            return word
        raise RecipeError(
            "",
            f"{rule} {', '.join(known)}",
            got=repr(word),
            cure=meant_scheme(word, known, otherwise=otherwise),
        )

    return check


def _plain_name(name: str) -> str:
    """A name that is part of a file's name: it must not lead to another folder."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    raise RecipeError(
        "",
        "must be a plain name of letters, digits, dots, hyphens and underscores",
        got=repr(name),
        cure="Rename it",
    )


def _name_or_regex(written: str) -> str:
    """What names tensors or modules: a name, or `re:` and a regex of the whole name."""
    try:
        if written.startswith("re:"):
            re.compile(written.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(
            "",
            "must be a name, or re: and a regex",
            got=f"{written}, of which Python says: {error}",
            cure="Correct it",
        ) from error
    return written


def _all_groups(written: object) -> object:
    """`backbone: auto` means `auto` for every group that a model may have."""
    if written == AUTO:
        return dict.fromkeys(QUANTIZABLE_ROLES, AUTO)
    return written


def _budget(written: str) -> str:
    read_budget(written)
    return written


Name = Annotated[str, AfterValidator(_plain_name)]
NameOrRegex = Annotated[str, AfterValidator(_name_or_regex)]
_WORDS = (*KEEP_WORDS, *SCHEMES)
_Policy = Annotated[str, AfterValidator(_one_of((*_WORDS, AUTO, TUNED), "must be one of"))]
Decision = Annotated[str, AfterValidator(_one_of(_WORDS, "must be one of"))]
_IN_GROUPS = _one_of(
    QUANTIZABLE_ROLES, "must be one of the module groups", otherwise="Name one of them"
)
Group = Annotated[str, AfterValidator(_IN_GROUPS)]


def _branch(value: object) -> str:
    """The tag of the branch that a value's type chooses, so that an error is about the written
    value, not about the other branch.
    """
    if isinstance(value, dict):
        return "groups"
    return "word"


_BY_TYPE = Discriminator(_branch)
_ByGroup = Annotated[dict[Group, Decision], Tag("groups")]
Candidate = Annotated[Annotated[Decision, Tag("word")] | _ByGroup, _BY_TYPE]
BackbonePolicy = Annotated[dict[Group, _Policy], BeforeValidator(_all_groups)]
MtpPolicy = Annotated[Annotated[_Policy, Tag("word")] | _ByGroup, _BY_TYPE]


def _different(candidates: tuple[Any, ...]) -> tuple[Any, ...]:
    for index, candidate in enumerate(candidates):
        if candidate in candidates[:index]:
            raise RecipeError(
                "", "candidates must differ", got=f"{candidate!r} twice", cure="Remove one"
            )
    return candidates


class MtpSource(Frozen):
    """Where the MTP block of a release without one is: a Hub id or a folder, and its revision
    ("local" for folders).
    """

    source: Annotated[str, Field(min_length=1)]
    revision: Annotated[str, Field(min_length=1)]


class Override(Frozen):
    """An exception to the group's scheme: modules by name on disk, or by `re:` and a regex of the
    whole name.
    """

    modules: NameOrRegex
    scheme: Decision


_Text = Annotated[str, Field(min_length=1)]


class Texts(Frozen):
    """Where texts to calibrate on are from."""

    # Hub id, a local .jsonl, .json or .parquet file, or a folder with a copy of a Hub dataset.
    dataset: _Text
    # Hub revision; "local" for files and folders.
    dataset_revision: _Text
    # The configuration of a dataset that has several; null for its default.
    subset: _Text | None = None
    # The split of the dataset; "train" for a single file.
    split: _Text
    # Texts, or conversations as lists of {role, content}, which go through the model's chat
    # template.
    column: _Text
    # Texts that users wrote; each comes directly before its text of `column`. Calibration uses
    # them, but acceptance counts only what a model writes. Null where a text is not an answer.
    prompt_column: _Text | None = None
    # Whether prompt and text become two turns, which go through the model's chat template.
    chat: bool = False

    @property
    def title(self) -> str:
        """What a table calls it."""
        if self.subset is None:
            return self.dataset
        return f"{self.dataset}, {self.subset}"

    def contradictions(self) -> Iterator[Contradiction]:
        if self.chat and self.prompt_column is None:
            yield "chat needs a prompt_column", "none", "Name it, or leave out chat"


class TextsOfMix(Texts):
    """One of several datasets; `share` is its part of the sequences."""

    share: Fraction


class Calibration(Texts):
    """Everything that is needed to repeat a calibrated run."""

    # Whose code observes activations and chooses scales, for either `format`: llm-compressor's, or
    # NVIDIA's modelopt, which needs the extra `modelopt`.
    backend: Literal["llmcompressor", "modelopt"] = "llmcompressor"
    # `minmax` observes activations only; the others also rewrite the weights of the schemes in
    # `schemes.REWRITES`. What they do not rewrite is rounded to nearest.
    algorithm: Literal[
        "minmax", "gptq", "awq", "smoothquant", "autoround", "mse", "four-over-six", "local-hessian"
    ]
    # Other datasets, with their shares; what they leave is the first one's.
    also: tuple[TextsOfMix, ...] = ()
    # Sequences to calibrate on.
    samples: Positive
    # Other sequences, from other rows, to measure acceptance and perplexity on.
    held_out: Positive
    # Who writes the held-out answers: `dataset`, or `model`, the released model itself, if memory
    # holds all of it. On its own text every slot counts for acceptance, as on a server.
    held_out_by: Literal["dataset", "model"] = "dataset"
    # Tokens in each sequence; rows follow each other without padding. The last position has no next
    # token to judge: one token alone gives neither perplexity nor acceptance.
    sequence_length: Annotated[int, Field(gt=1, lt=2**31, strict=True)]
    # Sequences in one batch, on each rank.
    batch_size: Positive
    # The seed for the order of the rows.
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)]
    # `checkpoint` lets the checkpoint's own Python build the model and encode conversations.
    model_code: Literal["transformers", "checkpoint"] = "transformers"
    # The algorithm's knobs; without them, its defaults.
    gptq: GPTQKnobs | None = None
    awq: AWQKnobs | None = None
    autoround: AutoRoundKnobs | None = None

    @property
    def knobs(self) -> Json:
        """What the recipe says to the algorithm's modifier; empty for its own defaults."""
        knobs: Frozen | None = None
        match self.algorithm:
            case "gptq":
                knobs = self.gptq
            case "awq":
                knobs = self.awq
            case "autoround":  # whose defaults are ours
                knobs = self.autoround or AutoRoundKnobs()
        if knobs is None:
            return {}
        return knobs.model_dump()

    @property
    def mix(self) -> tuple[TextsOfMix, ...]:
        """Every dataset with its share; a single one with all of it."""
        own = self.model_dump(include={*Texts.model_fields})
        # Not validated: a single dataset has the share 1.
        first = TextsOfMix.model_construct(**own, share=1 - self._other_shares)
        return (first, *self.also)

    @property
    def _other_shares(self) -> float:
        return sum(part.share for part in self.also)

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        algorithm = self.algorithm
        for key in KNOBS:
            if key != algorithm and getattr(self, key) is not None:
                cure = f"Remove {key}, or set algorithm: {key}"
                yield f"{key} must come with algorithm: {key}", f"algorithm: {algorithm}", cure
        if self.backend == "modelopt" and algorithm not in {"minmax", *SWEEPS}:
            cure = "Use algorithm: minmax, mse, four-over-six or local-hessian; or remove backend"
            yield f"{algorithm} is llm-compressor's", "backend: modelopt", cure
        if self.backend != "modelopt" and algorithm in SWEEPS:
            cure = "Set backend: modelopt, or use another algorithm"
            yield f"{algorithm} is modelopt's", f"backend: {self.backend}", cure
        if self._other_shares >= 1:
            rule = "the shares in also must leave some for the first dataset"
            yield rule, f"{self._other_shares:g}", "Lower one"


class MtpAuto(Frozen):
    """How `mtp: auto` chooses."""

    # Part of the released model's acceptance that the block must keep on held-out text, at the
    # confidence of the recipe's gates. No text shows that all of it is kept.
    min_acceptance: Fraction
    # Policies, tried in this order. The smallest that is shown to keep enough acceptance is chosen.
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1), AfterValidator(_different)]


class BackboneAuto(Frozen):
    """What the search of `backbone: auto` may choose, and what counts."""

    # Words for a unit: schemes, `source` or `bf16`.
    candidates: Annotated[tuple[Decision, ...], Field(min_length=1), AfterValidator(_different)]
    # How much a nat by which the drafts' distribution moves counts against a nat of the answers'
    # one.
    draft_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    # Part of the released model's acceptance that the plan must keep on held-out text, as for
    # `mtp_auto`; without it none is asked for.
    min_acceptance: Fraction | None = None
    # Of the calibration text, on which sensitivities are measured.
    tokens: Positive = 8192


class MtpTuned(Frozen):
    """How `mtp: tuned` trains the block."""

    # How the block is stored and computed with, while it is trained and afterwards: a word or a
    # mapping by group. Without `source`: a tuned block has no stored form of the release's.
    mtp: Candidate
    # Steps of the optimizer.
    steps: Positive
    # Sequences of the calibration text in each step, those of all processes together.
    batch_size: Positive
    # AdamW's highest; it rises over the first tenth of the steps and falls to 0 at the last.
    learning_rate: Fraction | None = None
    # In place of it, as a part of each matrix's root mean square. 1.0e-3 is 0.014 of a spread of
    # 0.07.
    relative_rate: Fraction | None = None
    # The seed of the order of the sequences.
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)]
    # Of a draft against the target's distribution; `tuning.losses` says what each is.
    loss: Literal["tv", "nla", "lk_hybrid", "kl_div", "ce"]
    # How many tokens ahead the block is run, each step on what the one before computed.
    draft_steps: Annotated[int, Field(ge=1, le=3, strict=True)]
    # The weight of each further draft step, as a part of the one before.
    decay: Annotated[float, Field(gt=0, le=1)]
    # Module groups that are not trained, such as experts where memory is short.
    frozen: tuple[Group, ...] = ()
    # Datasets that it is judged on besides the held-out text, one by one, and never trained on.
    guard: tuple[Texts, ...] = ()
    # How far the written weights are on the way from the released ones to the trained ones. null:
    # as far as is best over all kinds of held-out text, and all the way where there is one kind.
    share: Annotated[float, Field(gt=0, le=1)] | None = None

    def contradictions(self) -> Iterator[Contradiction]:
        if (self.learning_rate is None) == (self.relative_rate is None):
            got = "both"
            if self.learning_rate is None:
                got = "neither"
            yield "one of learning_rate and relative_rate must be given", got, "Give one"
        if "source" in words_of(self.mtp):
            cure = "Use bf16, which is the same for a BF16 release, or a scheme"
            yield "a tuned block is written anew", "mtp: source", cure


def words_of(policy: str | Mapping[str, str]) -> set[str]:
    """The words of a policy, which is one word or a mapping by group."""
    if isinstance(policy, str):
        return {policy}
    return {*policy.values()}


DEFAULT_AUTO = MtpAuto.model_validate(USUAL_AUTO)
"""What `--mtp auto` tries where the recipe has no `mtp_auto`."""


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
    budget: Annotated[str, AfterValidator(_budget)] | None = None
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
    # Whose names, scales and config the checkpoint has; the packed bytes are the same.
    format: Format = "compressed-tensors"
    # FP8 gives each attention layer scales for an FP8 cache, from calibration; null leaves the
    # cache alone.
    kv_cache: Literal["FP8"] | None = None
    # How scales of weights are chosen: `mse` takes those of least squared error, `four-over-six`
    # the better of two for each NVFP4 group, `imatrix` is `mse` with errors that count by the mean
    # square of their input channels; null takes what the largest magnitude asks for.
    search: Literal["mse", "four-over-six", "imatrix"] | None = None
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
    def size_limit(self) -> Budget:
        """What `budget` says."""
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
        """The backbone with another word for the groups that have one of these."""
        backbone = dict(self.backbone)
        for group, word in self.backbone.items():
            if word in words:
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
        return self.calibrated_among(self.decisions())

    def calibrated_among(self, words: set[str]) -> list[str]:
        """Those among some words, such as `mtp_decisions`."""
        calibrated = {name for name in words & SCHEMES.keys() if SCHEMES[name].needs_calibration}
        if self.calibration is not None:
            calibrated |= words & REWRITES[self.calibration.algorithm]
        if self.search == "imatrix":
            calibrated |= words & SEARCHES["imatrix"]
        return sorted(calibrated)

    def contradictions(self) -> Iterator[Contradiction]:
        """Blocks without their word and words without their block; then what has no meaning."""
        if self.is_searched and self.mtp_auto is not None:
            cure = "Remove it: the units of the block have the candidates of backbone_auto"
            yield "mtp_auto must be left out where backbone is auto", "both", cure
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
        yield from self._against_search()
        words = sorted(self.decisions() & SCHEMES.keys())
        wordless = {*words} - ALGORITHMS.keys()
        if self.format == "modelopt" and wordless:
            cure = "Use one of these: vLLM loads no other of modelopt's; or remove format"
            yield f"format: modelopt is for {', '.join(ALGORITHMS)}", ", ".join(wordless), cure
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

    def _against_search(self) -> Iterator[Contradiction]:
        if self.search is None:
            return
        if self.calibration is not None and self.calibration.algorithm != "minmax":
            rule = f"search: {self.search} chooses the scales of weights that are rounded"
            rule += " to nearest"
            got = f"calibration.algorithm {self.calibration.algorithm}, which has scales of its own"
            yield rule, got, "Remove search, or set algorithm: minmax"
        if self.search == "imatrix" and self.is_searched:
            rule = "search: imatrix must come with a word for every group"
            cure = "Use search: mse, or imatrix in the recipe that is found, OUT/recipe.yaml"
            yield rule, "backbone: auto", cure
        schemes = SEARCHES[self.search]
        if not self.is_searched and not schemes & self.decisions():
            rule = f"search: {self.search} must come with {', '.join(sorted(schemes))}"
            got = ", ".join(sorted(self.decisions() & SCHEMES.keys())) or "no scheme"
            yield rule, got, "Use one of these schemes, or remove search"

    def _against_calibration(self, words: list[str]) -> Iterator[Contradiction]:
        if self.calibration is None:
            reasons = {
                f"mtp: {self.mtp}": self.measures_mtp,
                "backbone: auto": self.is_searched,
                f"kv_cache: {self.kv_cache}": self.kv_cache is not None,
                "search: imatrix": self.search == "imatrix",
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
        calibration: Calibration | None = None,
        batches: Calibration | None = None,
    ) -> "Recipe":
        """This recipe with what a command line chooses.

        Weights of `scheme` are rounded to nearest, unless `calibration` names an algorithm that
        rewrites them. The result has no calibration if nothing in it needs batches.

        Args:
            scheme: for every quantized group.
            mtp: policy for the MTP block.
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
                nearest = {"algorithm": "minmax", **dict.fromkeys(KNOBS)}
                changed["calibration"] = self.calibration.model_copy(update=nearest)
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
    "guard": Texts,
    **KNOBS,
    "overrides": Override,
    "mtp_auto": MtpAuto,
    "backbone_auto": BackboneAuto,
    "mtp_tuned": MtpTuned,
    "mtp_source": MtpSource,
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
        raise RecipeError(
            where,
            f"{'.'.join([*path, str(unknown)])} is not a key of a recipe",
            got=repr(first["input"]),
            cure=cure_of_key(str(unknown), owner.model_fields),
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
