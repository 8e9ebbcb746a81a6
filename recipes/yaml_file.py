"""A recipe's YAML, read as data of a few plain types, or refused in one sentence.

In: a file. Out: a mapping of texts, numbers, true, false, null, lists and mappings with texts as
keys.

Easy to get wrong: PyYAML follows aliases, so 600 bytes can become gigabytes; it takes the last of
two equal keys; and it recurses as deep as the file says. So the parser's events are looked at
first. They come one by one, and nothing is built from them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .errors import RecipeError

if TYPE_CHECKING:
    from yaml import SafeLoader
else:
    SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MAX_BYTES = 256 * 1024
_MAX_DEPTH = 20
_MAX_NUMBER = 2**53
_RULE = "a recipe is a YAML mapping"
_TEXT = "tag:yaml.org,2002:str"


def load_shipped(path: Path) -> Any:
    """The content of a YAML file of keepmtp, read by the parser in C where there is one."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=SafeLoader)  # noqa: S506 - it is safe


def read_yaml(path: Path) -> tuple[dict[str, Any], str]:
    """The mapping of anybody's YAML file, and the file's text.

    Raises:
        RecipeError: no file, too large, not UTF-8, not YAML, too deep, an alias, a tag, a key
            twice, a value of another type; says on which line.
    """
    text = _text_of(path)
    try:
        _look_through(text)
        content = yaml.load(text, Loader=_OneOfEachKey)  # noqa: S506 - a safe loader
    except RecipeError as error:
        raise error.at(path) from None
    except (yaml.YAMLError, ValueError) as error:
        cure = "Mend that line"
        if "\t" in text:
            cure = "Indent with spaces, not with tabs"
        raise RecipeError(path, _RULE, got=" ".join(str(error).split()), cure=cure) from error
    if not isinstance(content, dict):
        got = type(content).__name__
        if content is None:
            got = "nothing"
        raise RecipeError(
            path, _RULE, got=got, cure="`keepmtp init MODEL --out NEW.yaml` writes one to edit"
        )
    _refuse_odd_numbers(content, "", path)
    return content, text


def on_one_line(value: object) -> str:
    """A value in YAML, on one line. A commit of digits alone gets quotes: it is no number."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise RecipeError(
            path, "a recipe must be a file", got="none", cure="See `keepmtp ls models`"
        )
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise RecipeError(
                path, f"a recipe is at most {_MAX_BYTES} bytes long", got="more", cure="Shorten it"
            )
        return raw.decode("utf-8")
    except OSError as error:
        rule = "be readable"
        got = error.strerror or repr(error)
        cure = "Check its permissions"
    except UnicodeDecodeError as error:
        rule = "be text in UTF-8"
        got = f"{error.reason} at byte {error.start}"
        cure = "Save it as UTF-8"
    raise RecipeError(path, f"a recipe must {rule}", got=got, cure=cure)


class _OneOfEachKey(SafeLoader):
    """Takes no key twice, and none that is no text. What looks like a date stays a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys: set[str] = set()
        for key, _ in node.value:
            where = f"line {key.start_mark.line + 1}"
            if key.tag != _TEXT:
                got = "a list or a mapping"
                if isinstance(key, yaml.ScalarNode):
                    got = key.value
                raise RecipeError(where, "a key must be a text", got=got, cure="Put it in quotes")
            if key.value in keys:
                raise RecipeError(
                    where,
                    f"{key.value} must be given once",
                    got="it twice",
                    cure="Remove one of the two",
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_OneOfEachKey.add_constructor("tag:yaml.org,2002:timestamp", SafeLoader.construct_yaml_str)


def _look_through(text: str) -> None:
    """Refuse what must not be built."""
    depth = 0
    for event in yaml.parse(text, Loader=SafeLoader):
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise RecipeError(
                where, "a recipe has no anchors or aliases", got="one", cure="Write the value out"
            )
        if getattr(event, "tag", None):
            raise RecipeError(where, "a recipe has no tags", got=event.tag, cure="Remove it")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise RecipeError(
                where, f"a recipe is at most {_MAX_DEPTH} levels deep", got="more", cure="Mend it"
            )


def _refuse_odd_numbers(value: Any, place: str, path: Path) -> None:
    """Refuse infinity, and numbers that nothing counts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_odd_numbers(inner, f"{place}{key}.", path)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_odd_numbers(inner, f"{place}{index}.", path)
    elif isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:
        raise RecipeError(
            path,
            f"{place.removesuffix('.')} must be a usual number",
            got=f"one beyond {_MAX_NUMBER}, or none",
            cure="Correct it",
        )
