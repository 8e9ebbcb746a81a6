"""What type each key of config.json must have, for the keys that keepmtp reads.

In: a parsed config.json. Out: nothing, or a refusal that names the key. Whoever reads a key after
that may rely on its
type: the families' tables, the plan, the check.

Easy to get wrong: a key may be in `text_config` too, and null means that it is not given. A count
has an upper limit, because names are made for every layer and expert that config.json promises, and
a file may be anybody's.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .errors import CheckpointError
from .families import families

CURE = "Take config.json from the original release"
_TEXT_CONFIG = "text_config"
_LLM_CONFIG = "llm_config"
_MAX_LAYERS = 2_000
_MAX_MTP_LAYERS = 100
_MAX_EXPERTS = 20_000
_MAX_SIZE = 2**31 - 1
_MAX_TEXT = 500


_Kind = tuple[str, Callable[[Any], bool]]
"""What a message calls a type of value, and whether a value has it."""


def _whole(most: int = _MAX_SIZE) -> _Kind:
    def fits(value: object) -> bool:
        return type(value) is int and 0 <= value <= most

    return f"a whole number from 0 to {most}", fits


def _list_of(kind: _Kind, words: str, most: int = _MAX_SIZE) -> _Kind:
    _, item_fits = kind

    def fits(value: object) -> bool:
        return isinstance(value, list) and len(value) <= most and all(map(item_fits, value))

    return words, fits


def _either(one: _Kind, other: _Kind) -> _Kind:
    words, fits = one
    other_words, other_fits = other
    return f"{words} or {other_words}", lambda value: fits(value) or other_fits(value)


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


_OBJECT: _Kind = ("an object", lambda value: isinstance(value, dict))
_TEXT: _Kind = ("a short text", _is_short)
_TEXTS = _list_of(_TEXT, "a list of short texts")
_LAYERS = _list_of(_TEXT, f"a list of at most {_MAX_LAYERS} short texts", _MAX_LAYERS)
_EXPERTS = _whole(_MAX_EXPERTS)
_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_KINDS = {
    _TEXT_CONFIG: _OBJECT,
    _LLM_CONFIG: _OBJECT,
    "architectures": _TEXTS,
    "model_type": _TEXT,
    "quantization_config": _OBJECT,
    "compression_config": _OBJECT,
    "expert_dtype": _TEXT,
    "vocab_size": _whole(),
    "hidden_size": _whole(),
    "num_hidden_layers": _whole(_MAX_LAYERS),
    "max_position_embeddings": _whole(),
    "q_lora_rank": _whole(),
    "layer_group_size": _whole(),
    "layer_types": _TEXTS,
    "linear_attn_config": _OBJECT,
    "linear_attn_config.kda_layers": _list_of(_whole(), "a list of whole numbers"),
    # One number, or one for each modality.
    **dict.fromkeys(_NUM_EXPERTS, _either(_EXPERTS, _list_of(_EXPERTS, "a list of such numbers"))),
}


def refuse_wrong_types(config: Mapping[str, Any], where: object) -> None:
    """Refuse a config.json with a key that keepmtp reads and that has another type, or a number out
    of its range.

    Args:
        config: the file, parsed.
        where: its name in messages.

    Raises:
        CheckpointError: names the key.
    """
    holders: dict[str, Any] = {"": config}
    for key in (_TEXT_CONFIG, _LLM_CONFIG):
        holders[f"{key}."] = config.get(key)
    for key, (words, fits) in _kinds().items():
        for prefix, value in holders.items():
            for part in key.split("."):
                if not isinstance(value, dict):
                    value = None
                    break
                value = value.get(part)
            if value is not None and not fits(value):
                raise CheckpointError(
                    where, f"{prefix}{key} must be {words}", got=repr(value), cure=CURE
                )


@cache
def _kinds() -> Mapping[str, _Kind]:
    """The kind of every key, those that the families' tables name too; an object comes before what
    is in it.
    """
    kinds: dict[str, _Kind] = {}
    for family in families().values():
        for key in family.mtp_count_keys:
            if "." in key:
                kinds[key.partition(".")[0]] = _OBJECT
            kinds[key] = _whole(_MAX_MTP_LAYERS)
        kinds |= dict.fromkeys(
            (*family.mtp_parts_keys, *family.layer_list_keys), _either(_TEXT, _LAYERS)
        )
        if family.draft and family.draft.streams:
            kinds[family.draft.streams] = _whole(_MAX_LAYERS)
        if family.num_layers_key:
            kinds[family.num_layers_key] = _whole(_MAX_LAYERS)
    return kinds | _KINDS
