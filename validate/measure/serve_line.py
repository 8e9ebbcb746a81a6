"""The words that serve a checkpoint: the card prints them, and `keepmtp serve` runs them.

In: what is served, and the number of tokens to draft in a step. Out: words of a command.

Easy to get wrong: vLLM takes drafting as keepmtp's own JSON or as the user's words, not both.
"""

import json
from collections.abc import Mapping, Sequence

from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.families import find_view, has_dspark
from ...recipes.runtimes.vllm import KNOWN, asked
from .room import options_of, refuse_options

CURES = "KEEPMTP_CURES"
_KEY = "--speculative-config."
_DRAFTS = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
_OURS = {
    **dict.fromkeys(("--host", "--port", "--dry-run", "--gpu"), "Name it before `--`"),
    **dict.fromkeys(_DRAFTS, "Leave it out, and use -k; -k 0 serves without drafting"),
}
_LOSSY = "fly"


def draft_settings(words: Sequence[str]) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """What words for `vllm serve` say of drafting, by key; and the other words."""
    settings = dict[str, str]()
    others = list[str]()
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.replace("_", "-").startswith(_KEY):
            key = name[len(_KEY) :].replace("-", "_")
            if not equals:
                value = next(rest, "")
            settings[key] = value
        else:
            others.append(word)
    return settings, tuple(others)


def refuse_our_words(words: Sequence[str]) -> None:
    """Refuse words for `vllm serve` that keepmtp serve says itself.

    Raises:
        RecipeError: names the first such word.
    """
    refuse_options("keepmtp serve", words, _OURS, rule="keepmtp serve says this to vLLM itself")


def refuse_settings(words: Sequence[str], version: str) -> None:
    """Refuse what a vLLM does not take about drafting, or keepmtp says itself.

    Raises:
        RecipeError: names the key, and the versions that take it.
    """
    for key, value in draft_settings(words)[0].items():
        if value not in asked(version).options.get(key, ()):
            having = [known for known in KNOWN if value in asked(known).options.get(key, ())]
            cure = "Leave it out, and use -k"
            if having:
                cure = f"Leave it out, or take one of these versions: {', '.join(having)}"
            rule = f"must be a setting that vLLM {version} takes beside -k"
            raise RecipeError(_KEY + key, rule, got=value or "nothing", cure=cure)


def refuse_lossy(where: str, words: Sequence[str]) -> None:
    """Refuse a way of accepting drafted tokens that changes the answers.

    Raises:
        RecipeError: it is asked for.
    """
    settings, others = draft_settings(words)
    if _LOSSY in settings.values() or any(f'"{_LOSSY}"' in word for word in others):
        rule = "must measure the target's own answers"
        got = f"{_LOSSY}, which accepts drafted tokens that the target would not have chosen"
        raise RecipeError(where, rule, got=got, cure="Leave rejection_sample_method out")


def refuse_pipeline(source: Source, k: int, words: Sequence[str]) -> None:
    """Refuse a pipeline's stages with drafts, where vLLM splits the draft over them too, or leaves
    its embedding empty on the last one if the block has none (dry loads of vLLM 0.31.0 to 0.33.0).

    Raises:
        RecipeError: there are stages, and drafts.
    """
    options = options_of(words)
    stages = options.get("--pipeline-parallel-size") or options.get("-pp", "1")
    if not k or stages == "1":
        return
    view = find_view(source.config, source.where, source.entries)
    places = [place for name in source.entries if (place := view.place(name))]
    embeds = ("mtp", "embedding") in [(each.part, each.role) for each in places]
    if not view.family.pipeline and not (view.num_layers and embeds):
        where = "--pipeline-parallel-size"
        rule = "vLLM must have the whole draft, its embedding too, on the last stage"
        cure = "Use -k 0, or --tensor-parallel-size"
        raise RecipeError(where, rule, got=f"{stages} stages", cure=cure)


def method_words(source: Source) -> tuple[str, ...]:
    """What a model needs besides k that drafts by DSpark."""
    if has_dspark(source.config, source.entries):
        return f"{_KEY}method", "dspark"
    return ()


def separate_draft(place: str) -> tuple[str, ...]:
    """What a target needs besides k whose draft has a checkpoint of its own."""
    return f"{_KEY}model", place


def draft_words(k: int, further: Sequence[str] = ()) -> tuple[str, ...]:
    """The option that drafts `k` tokens a step, none for 0, as the further words have it; and
    these words.
    """
    # What the user's words say of drafting, as `--speculative-config.KEY VALUE`, joins keepmtp's
    # own JSON.
    settings, others = draft_settings(further)
    if not k:
        return others
    config = {"method": "mtp", "num_speculative_tokens": k, **settings}
    return "--speculative-config", json.dumps(config, separators=(",", ":")), *others


def serve_words(model: str, k: int, *further: str, cures: Sequence[str] = ()) -> tuple[str, ...]:
    """`vllm serve` of a folder or Hub id, with `k` tokens drafted a step, and further words at the
    end. With cures, keepmtp is installed next to vLLM.
    """
    words = ("vllm", "serve", model, *draft_words(k, further))
    if cures:
        return "env", setting(cures), *words
    return words


def setting(cures: Sequence[str]) -> str:
    """`KEEPMTP_CURES=step.layer_types`; 0 keeps those that are installed next to vLLM out of it."""
    return f"{CURES}={','.join(cures) or '0'}"
