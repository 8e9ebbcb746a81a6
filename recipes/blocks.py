"""The words of a recipe, and its blocks: text to calibrate on, how a policy is chosen, how a block
is trained.

In: what a person writes. Out: frozen values, or a refusal with the nearest word. `schema.Recipe` is
made of them.

Easy to get wrong: `mtp` and a candidate may be one word or a mapping by group, and a value is
judged as what it was written as.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from .budget import read_budget
from .errors import RecipeError
from .family import QUANTIZABLE_ROLES, TABLE_ROLES
from .frozen import Json
from .knobs import AutoRoundKnobs, Contradiction, Fraction, Frozen, Positive
from .model_file import USUAL_AUTO
from .schemes import SCHEMES, meant_scheme

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


def _chosen_tables(policy: dict[str, str]) -> dict[str, str]:
    """No search chooses for embedding and head, and neither is tuned."""
    for group in TABLE_ROLES:
        word = policy.get(group)
        if word in (TUNED, AUTO):
            raise RecipeError(
                "",
                f"{group} must have a scheme, `source` or `bf16`: no search judges it",
                got=word,
                cure="Choose one",
            )
    return policy


def _budget(written: str) -> str:
    read_budget(written)
    return written


Name = Annotated[str, AfterValidator(_plain_name)]
NameOrRegex = Annotated[str, AfterValidator(_name_or_regex)]
BudgetText = Annotated[str, AfterValidator(_budget)]
_WORDS = (*KEEP_WORDS, *SCHEMES)
_Policy = Annotated[str, AfterValidator(_one_of((*_WORDS, AUTO, TUNED), "must be one of"))]
Decision = Annotated[str, AfterValidator(_one_of(_WORDS, "must be one of"))]
_OTHERWISE = "Name one of them"
_IN_GROUPS = _one_of(QUANTIZABLE_ROLES, "must be one of the module groups", _OTHERWISE)
Group = Annotated[str, AfterValidator(_IN_GROUPS)]
_IN_TABLES = (*QUANTIZABLE_ROLES, *TABLE_ROLES)
_IN_BACKBONE = _one_of(_IN_TABLES, "must be one of the module groups", _OTHERWISE)
_BackboneGroup = Annotated[str, AfterValidator(_IN_BACKBONE)]


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
BackbonePolicy = Annotated[
    dict[_BackboneGroup, _Policy], BeforeValidator(_all_groups), AfterValidator(_chosen_tables)
]
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


def _as_place(written: object) -> object:
    """A name alone is that of a folder, or of a repository at its newest commit."""
    if isinstance(written, str):
        return {"source": written, "revision": "main"}
    return written


Donor = Annotated[MtpSource, BeforeValidator(_as_place)]
_IN_CHECKPOINT = _one_of((*_IN_TABLES, "mtp"), "must be one of", _OTHERWISE)
Donors = dict[Annotated[str, AfterValidator(_IN_CHECKPOINT)], Donor]


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

    # `minmax` observes activations only; the others also rewrite the weights of the schemes in
    # `schemes.REWRITES`. What they do not rewrite is rounded to nearest. Those of `schemes.SWEEPS`
    # are NVIDIA's modelopt, which needs the extra `modelopt`; the others llm-compressor.
    algorithm: Literal[
        "minmax", "gptq", "awq", "smoothquant", "autoround", "mse", "four-over-six", "local-hessian"
    ]
    # Other datasets, with their shares; what they leave is the first one's.
    also: tuple[TextsOfMix, ...] = ()
    # Sequences to calibrate on.
    samples: Positive
    # Other sequences, from other rows, to measure acceptance and perplexity on.
    held_out: Positive
    # Tokens in each sequence; rows follow each other without padding. The last position has no next
    # token to judge: one token alone gives neither perplexity nor acceptance.
    sequence_length: Annotated[int, Field(gt=1, lt=2**31, strict=True)]
    # Sequences in one batch, on each rank.
    batch_size: Positive
    # The seed for the order of the rows.
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)]
    # `checkpoint` lets the checkpoint's own Python build the model and encode conversations.
    model_code: Literal["transformers", "checkpoint"] = "transformers"
    # With `algorithm: autoround`.
    autoround: AutoRoundKnobs | None = None

    @property
    def knobs(self) -> Json:
        """What the algorithm's modifier is built with; empty for its own defaults."""
        if self.algorithm != "autoround":
            return {}
        # Compiled layers have other last bits.
        knobs = {"enable_torch_compile": False}
        own = self.autoround
        if own is None:
            own = AutoRoundKnobs()
        return own.model_dump() | knobs

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
        if self.autoround is not None and algorithm != "autoround":
            cure = "Remove autoround, or set algorithm: autoround"
            yield "autoround must come with algorithm: autoround", f"algorithm: {algorithm}", cure
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
