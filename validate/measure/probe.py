"""The probe: prompts in twelve scripts and in code, asked alone and after thousands of tokens of
other text. Their answers have faults that English prose hardly shows.

In: a model, and how deep. Out: `Work` for its servers, and a `ProbeFact` for each depth.

Easy to get wrong: a token may be a part of a character. vLLM holds back what is no whole character
yet, and for good if it never becomes one (0.32.0, v1/engine/detokenizer.py). So the tokens of a
whole answer are joined before anything is counted.
"""

import hashlib
import json
import re
import time
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import get_args

from ...checkpoints.json_file import read_lines
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.model_file import find_path
from ...recipes.yaml_file import load_shipped
from ..facts.probed import Fault, ProbeFact
from .harness import Ask, Model, Setup, Work, room_for
from .replies import TokensReply
from .server import Server
from .store import Continuation, LineFile, ProbeHeader, open_lines

_OTHER = "models/docs.jsonl"
# So many tokens of it there are in every vocabulary: it has over seven characters for each.
_MOST = 32_768
_MAX_TOKENS = 128
_OPENED = '{"text": "'
# A text repeats itself where most of its pieces of so many characters are there twice.
_PIECE = 12
# The longest part of JSON but a string that may be cut: \u00e9.
_CUT = 6
_REPLACED = "\ufffd"


@cache
def prompts() -> Mapping[str, tuple[str, str]]:
    """By name the prompt, and the text that says the script of the answer: the text itself, or a
    line of JSON with the text and the beginning of another.
    """
    found = {}
    for script, texts in load_shipped(Path(__file__).with_suffix(".yaml")).items():
        for number, text in enumerate(texts, 1):
            found[f"{script} {number}"] = text, text
            found[f"{script} {number} JSON"] = f'{_OPENED}{text}"}}\n{_OPENED}', text
    return found


def refuse_depth(source: Source, depth: int) -> None:
    """Refuse a depth after which a prompt and its answer do not fit the model.

    Raises:
        RecipeError: says how deep it may be.
    """
    most = source.text_config.get("max_position_embeddings", 2 * _MOST)
    left = min(_MOST, most - _room(source, _MAX_TOKENS))
    if depth > left:
        rule = f"prompt and answer must fit {source.where} after it"
        raise RecipeError("--depth", rule, got=f"{depth:,}", cure=f"Use {left} or less")


def work_of(model: Model, k: int, setup: Setup, *, depth: int, max_tokens: int) -> Work:
    """The probe at one depth for one server, with what is answered already."""
    asked = [prompt for prompt, _ in prompts().values()]
    other = ""
    path = find_path(_OTHER)
    if depth and path:
        other = "\n\n".join([row["text"] for _, row in read_lines(path, cure="Restore it")])
    header = ProbeHeader(
        k=k,
        prompts=tuple(asked),
        max_tokens=min(max_tokens, _MAX_TOKENS),
        num=len(asked),
        depth=depth,
        other_sha256=hashlib.sha256(other.encode()).hexdigest(),
        **setup.asked_of(model),
    )
    name = f"probe.{model.role}.k{k}.{depth}"

    @contextmanager
    def asking(server: Server) -> Iterator[Ask]:
        """Each prompt once, after the same text."""
        before = ""
        if depth:
            sent = {"prompt": other, "add_special_tokens": False}
            tokens = server.post("/tokenize", sent, TokensReply).tokens
            before = server.text_of(tokens[:depth]) + "\n\n"

        def ask(prompt: int) -> Continuation:
            start = time.monotonic()
            output = server.complete(before + asked[prompt], max_tokens=header.max_tokens)
            seconds = time.monotonic() - start
            # The joined text has what was held back, and special tokens.
            joined = server.text_of(output.token_ids)
            text = joined if _REPLACED in joined else output.text
            kept = {"text": text, "token_ids": output.token_ids, "top_logprobs": ()}
            return Continuation(prompt=prompt, seconds=seconds, **kept)

        yield ask

    return Work(
        name=name,
        file=open_lines(setup.out, name, header),
        asking=asking,
        k=k,
        max_model_len=depth + _room(model.source, header.max_tokens),
        concurrency=4,
        unit="prompt",
        task=name,
    )


def counted(file: LineFile[ProbeHeader, Continuation]) -> ProbeFact:
    """What the answers of a finished file have."""
    faults: dict[Fault, list[str]] = {fault: [] for fault in get_args(Fault)}
    lines = file.in_order()
    cut = [line.num_tokens >= file.header.max_tokens for line in lines]
    for name, line, is_cut in zip(prompts(), lines, cut, strict=True):
        for fault in faults_of(name, line.text, is_cut=is_cut):
            faults[fault].append(name)
    return ProbeFact(
        depth=file.header.depth,
        num=len(lines),
        num_empty=[line.text.strip() for line in lines].count(""),
        num_cut=sum(cut),
        num_tokens=sum([line.num_tokens for line in lines]),
        seconds=sum([sitting.seconds for sitting in file.sittings.values()]),
        faults={fault: tuple(names) for fault, names in faults.items()},
    )


def faults_of(name: str, text: str, *, is_cut: bool) -> Iterator[Fault]:
    """The faults of one answer; none where it is empty.

    Args:
        name: of the prompt.
        text: the answer, of joined tokens.
        is_cut: by the limit of tokens, so that a character, or JSON, may lack its end.
    """
    if is_cut:
        text = re.sub(f"{_REPLACED}{{1,3}}$", "", text)
    if not text.strip():
        return
    if _REPLACED in text:
        yield "broken characters"
    if name.endswith("JSON") and _is_broken(_OPENED + text, is_cut=is_cut):
        yield "broken JSON"
    pieces = [text[at : at + _PIECE] for at in range(len(text) - _PIECE + 1)]
    if 2 * len({*pieces}) < len(pieces):
        yield "repetition"
    own = _scripts(prompts()[name][1])
    scripts = _scripts(text)
    strange = [script for script in scripts if script not in own]
    # Names and formulas are in Latin letters everywhere.
    if {*strange} - {"LATIN"} or 2 * len(strange) > len(scripts):
        yield "another script"


def _is_broken(text: str, *, is_cut: bool) -> bool:
    """Whether a text does not begin with a JSON object; of one that is cut, before its end."""
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        is_end = error.msg.startswith("Unterminated") or error.pos >= len(text) - _CUT
        return not (is_cut and is_end)
    return False


def _scripts(text: str) -> list[str]:
    """Of each letter, such as LATIN, and CJK for Chinese characters."""
    return [unicodedata.name(each, "").partition(" ")[0] for each in text if each.isalpha()]


def _room(source: Source, max_tokens: int) -> int:
    """Tokens of the longest prompt and its answer, at most."""
    asked = [prompt for prompt, _ in prompts().values()]
    return room_for(asked, source, is_chat=False, max_tokens=max_tokens)
