"""Held-out texts from a file, and the refusal of texts that the checkpoint was calibrated on.

In: a .jsonl or .txt file, and the record of the checkpoint. Out: `HeldOut`, the texts in the file's
order.

Easy to get wrong: on its own calibration text a checkpoint is closer to its source than anywhere
else. So a file that was calibrated on is refused, and so is a row of it in another file. A dataset
of the Hub is not read again for that: the result then says that nobody compared.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.json_file import read_lines, read_text
from ...checkpoints.record import Record
from ...recipes.errors import RecipeError
from ...recipes.model_file import find_path

HELD_OUT: Mapping[str, str] = {
    "tiny-docs": "models/docs_held_out.jsonl",
    "tiny-glm4-moe": "models/held_out.jsonl",
    "tiny-qwen3_5": "models/held_out.jsonl",
}
"""The text for a model that ships with keepmtp, by its name in the recipe."""
FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, {"question": ..., "answer": ...}, '
    '{"messages": [...]} or '
    '{"tokens": [...]}'
)
_CURE = f"Give a .txt file, which is one text, or a .jsonl file with {FORMS} a line"

Text = str | tuple[Mapping[str, str], ...] | tuple[int, ...]
"""Plain text; or messages, which go through the model's chat template; or tokens, which are sent as
they are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The texts of one file.

    Attributes:
        path: what the user named.
        sha256: of the file.
        texts: in the file's order, none of them empty.
        against: a sentence on whether they were compared with the text of calibration; "" where
            there was none.
    """

    path: str
    sha256: str
    texts: tuple[Text, ...]
    against: str


def held_out(path: Path | None, record: Record | None) -> HeldOut:
    """Read the texts, and refuse those of calibration.

    Args:
        path: the user's file; None for the one that ships with the model.
        record: the checkpoint's keepmtp.json, if it has one.

    Raises:
        CheckpointError: no regular file, or no JSON; see `json_file.read_lines`.
        RecipeError: no file, no text in it, a line of another form, or a text that the checkpoint
            was calibrated on.
    """
    name, file = text_file(path, record.recipe.model if record else "")
    rows = list(_rows(file))
    if not rows:
        raise RecipeError(name, "must hold a text", got="an empty file", cure=_CURE)
    against = _refuse_calibrated(file, rows, record)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return HeldOut(path=name, sha256=sha256, texts=tuple(text for _, text in rows), against=against)


def text_file(path: Path | None, model: str) -> tuple[str, Path]:
    """What the user named, or the file that ships with a model; and where it is.

    Raises:
        RecipeError: none of both, or no such file.
    """
    name = path or HELD_OUT.get(model)
    if name is None:
        raise RecipeError("--text", "names the held-out text to compare on", got="none", cure=_CURE)
    file = find_path(name)
    if file is None:
        raise RecipeError(name, "must be a file of held-out text", got="no such file", cure=_CURE)
    return str(name), file


def _rows(file: Path) -> Iterator[tuple[str, Text]]:
    """(file:line, text)."""
    if file.suffix not in (".txt", ".jsonl"):
        raise RecipeError(
            file, "must be a .jsonl or a .txt file", got=file.suffix or "no suffix", cure=_CURE
        )
    if file.suffix == ".txt":
        whole = read_text(file, cure="Convert it")
        yield from [(f"{file}:1", whole)] if whole.strip() else []
        return
    for where, row in read_lines(file, cure=_CURE):
        text = _text_of(row) if isinstance(row, dict) else None
        if not text or (isinstance(text, str) and not text.strip()):
            got = json.dumps(row)[:60]
            raise RecipeError(
                where, f"must be an object with {FORMS}", got=got, cure="Mend the line"
            )
        yield where, text


def _text_of(row: Mapping[str, Any]) -> Text | None:
    """The text of a row; None where it has none of the forms."""
    match row:
        case {"text": str(text)}:
            return text
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
        case {"question": str(question), "answer": str(answer)}:
            return f"Question: {question}\nAnswer: {answer}"
        case {"messages": [*turns]} if all(_is_turn(turn) for turn in turns):
            return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)
        case {"tokens": [*ids]} if all(type(each) is int and 0 <= each < 2**31 for each in ids):
            return tuple(ids)
    return None


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and all(
        isinstance(turn.get(key), str) for key in ("role", "content")
    )


# --- calibration ----------------------------------------------------------------------------------


def _refuse_calibrated(file: Path, rows: Sequence[tuple[str, Text]], record: Record | None) -> str:
    """Refuse a text of calibration; else a sentence on what was compared."""
    data = (record.calibration or {}).get("data") if record else None
    if not isinstance(data, dict):
        return ""
    said = []
    for name in [data.get("dataset"), *(each.get("dataset") for each in data.get("also") or ())]:
        used = find_path(str(name))
        if used is None or used.suffix != ".jsonl":
            said.append(
                f"Whether a text is in {name}, which it was calibrated on, was not looked up."
            )
            continue
        _refuse_shared(file, rows, used)
        said.append(f"None of the texts is a row of {name}, which it was calibrated on.")
    return " ".join(said)


def _refuse_shared(file: Path, rows: Sequence[tuple[str, Text]], used: Path) -> None:
    cure = "Name another --text"
    rule = "must be text that the checkpoint was not calibrated on"
    if file.samefile(used):
        raise RecipeError(file, rule, got="the very file that it was calibrated on", cure=cure)
    known = {_sum(text): where for where, text in _rows(used)}
    for where, text in rows:
        if (at := known.get(_sum(text))) is not None:
            raise RecipeError(where, rule, got=f"the text of {at}", cure=cure)


def _sum(text: Text) -> bytes:
    content = text.strip() if isinstance(text, str) else json.dumps(text)
    return hashlib.sha256(content.encode()).digest()
