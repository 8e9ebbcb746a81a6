"""What type each key of config.json must have, for the keys that keepmtp reads.

In: a parsed config.json. Out: nothing, or a refusal that names the key. Whoever reads a key after
that may rely on its
type: the families' tables, the plan, the check.

Easy to get wrong: a key may be in `text_config` too, and null means that it is not given. A count
has an upper limit, because names are made for every layer and expert that config.json promises, and
a file may be anybody's.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from .errors import CheckpointError, first_fault
from .families import families

CURE = "Take config.json from the original release"
_MAX_LAYERS = 2_000
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Layers = Annotated[int, Field(ge=0, le=_MAX_LAYERS)]
_MtpLayers = Annotated[int, Field(ge=0, le=100)]
_Experts = Annotated[int, Field(ge=0, le=20_000)]
_Text = Annotated[str, Field(max_length=500)]
_KINDS: dict[str, Any] = {
    **dict.fromkeys(
        ("text_config", "llm_config", "quantization_config", "compression_config"), dict[str, Any]
    ),
    **dict.fromkeys(("model_type", "expert_dtype"), _Text),
    **dict.fromkeys(("architectures", "layer_types", "indexer_types"), list[_Text]),
    "hybrid_layer_pattern": list[_Count],
    "vocab_size": _Count,
    "hidden_size": _Count,
    "num_hidden_layers": _Layers,
    "max_position_embeddings": _Count,
    "q_lora_rank": _Count,
    "layer_group_size": _Count,
    "linear_attn_config.kda_layers": list[_Count],
    # One number, or one for each modality.
    **dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts"), _Experts | list[_Experts]
    ),
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


def refuse_wrong_types(config: Mapping[str, Any], where: object) -> None:
    """Refuse a config.json with a key that keepmtp reads and that has another type, or a number out
    of its range.

    Args:
        config: the file, parsed.
        where: its name in messages.

    Raises:
        CheckpointError: names the key.
    """
    try:
        _form().model_validate(config)
    except ValidationError as error:
        got = repr(error.errors()[0]["input"])
        raise CheckpointError(where, first_fault(error), got=got, cure=CURE) from error


@cache
def _form() -> type[BaseModel]:
    """Every key that is read, those that the families' tables name too."""
    kinds: dict[str, Any] = {}
    listed = Annotated[list[_Text], Field(max_length=_MAX_LAYERS)]
    for family in families().values():
        kinds |= dict.fromkeys(family.mtp_count_keys, _MtpLayers)
        kinds |= dict.fromkeys((*family.mtp_parts_keys, *family.layer_list_keys), _Text | listed)
        if family.draft and family.draft.streams:
            kinds[family.draft.streams] = _Layers
        if family.num_layers_key:
            kinds[family.num_layers_key] = _Layers
        for row in family.block:
            words = [word for word in " ".join(row.sides).split() if word.isidentifier()]
            kinds = dict.fromkeys(words, _Count | list[Any]) | kinds
    fields: dict[str, Any] = {}
    for key, kind in (kinds | _KINDS).items():
        outer, _, inner = key.partition(".")
        if inner:
            kind = _model({inner: kind})
        fields[outer] = kind
    text = _model(fields)
    return _model(fields | {"text_config": text, "llm_config": text})


def _model(fields: Mapping[str, Any]) -> type[BaseModel]:
    optional: dict[str, Any] = {key: (kind | None, None) for key, kind in fields.items()}
    return create_model("config.json", __base__=_Strict, **optional)
