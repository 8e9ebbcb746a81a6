"""The station lossless: what people switch MTP off for. The tasks with MTP on against off; and the
probe, prompts in twelve scripts and in code, each as it is and as JSON, whose answers have faults
that English prose hardly shows.

In: finished files of answers; for the probe a server, and how much other text comes first. Out: a
`DraftingFact`; that text, and a `ProbeFact`.

Easy to get wrong: a token may be a part of a character. vLLM holds back what is no whole character
yet, and for good if it never becomes one (0.32.0, v1/engine/detokenizer.py). So the tokens of a
whole answer are joined before anything is counted. And another text with drafting is no fault by
itself.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.yaml_file import load_shipped
from ..facts.binomial import sign_test
from ..facts.evaluated import NOT_EMPTY, DraftingFact, SwitchFact
from ..facts.paired import parted
from ..facts.probed import InAnswer, ProbeFact
from ..facts.served import Output
from .harness import room_for
from .replies import TokensReply
from .server import Server
from .store import Answer, Continuation, LineFile, ProbeHeader, Samples
from .texts import held_out

# Of an answer, at most.
MAX_TOKENS = 128
# What comes before the prompts: documentation of Python, with seven characters for each of `_MOST`
# tokens, which is more than tokens of English have.
OTHER = held_out(Path(__file__).parents[2] / "models" / "docs.jsonl", None)
_MOST = 32_768
_OPENED = '{"1": "'
# A text repeats itself where most of its pieces of so many characters are there twice.
_PIECE = 12
# The longest part of JSON that is cut without an opened string: a word or an escape.
_CUT = 6
_REPLACED = "\ufffd"

# By name each text, and a line of JSON with it before the beginning of another: no letters but its
# own, which say in what script the answer must be.
PROMPTS = dict[str, str]()
for _script, _texts in load_shipped(Path(__file__).with_suffix(".yaml")).items():
    for _number, _text in enumerate(_texts, 1):
        _line = json.dumps({"1": _text}, ensure_ascii=False)
        PROMPTS[f"{_script} {_number}"] = _text
        PROMPTS[f"{_script} {_number} JSON"] = f"{_line}\n{_OPENED}"


def refuse_depth(source: Source, depth: int) -> None:
    """Refuse a depth after which a prompt and its answer do not fit the model.

    Raises:
        RecipeError: says how deep it may be.
    """
    most = source.text_config.get("max_position_embeddings")
    most = min(_MOST, most) if isinstance(most, int) else _MOST
    room = room_for(PROMPTS.values(), source, is_chat=False, max_tokens=MAX_TOKENS)
    if depth and depth + room > most:
        rule = f"with prompt and answer it must be {most:,} tokens of {source.where} at most"
        cure = f"Use --depth {max(0, most - room)} or less"
        raise RecipeError("--depth", rule, got=f"{depth:,} and {room:,}", cure=cure)


def text_before(server: Server, depth: int) -> str:
    """Other text, of so many tokens by the server's own tokenizer; "" for none."""
    if not depth:
        return ""
    sent = {"prompt": "\n\n".join(map(str, OTHER.texts)), "add_special_tokens": False}
    tokens = server.post("/tokenize", sent, TokensReply).tokens
    return server.text_of(tokens[:depth]) + "\n\n"


def joined(server: Server, output: Output) -> Output:
    """An answer with what vLLM held back; where it held back nothing, its text is without special
    tokens, and stays.
    """
    text = server.text_of(output.token_ids)
    return output.model_copy(update={"text": text}) if _REPLACED in text else output


def counted(file: LineFile[ProbeHeader, Continuation]) -> ProbeFact:
    """What is seen in the answers of a finished file."""
    seen: dict[InAnswer, tuple[str, ...]] = dict.fromkeys(get_args(InAnswer), ())
    for (name, prompt), line in zip(PROMPTS.items(), file.in_order(), strict=True):
        is_cut = line.num_tokens >= file.header.max_tokens
        for each in seen_in(prompt, line.text, is_cut=is_cut):
            seen[each] += (name,)
    return ProbeFact(depth=file.header.depth, seen=seen)


def seen_in(prompt: str, text: str, *, is_cut: bool) -> Iterator[InAnswer]:
    """What is seen in one answer; no fault where it is empty.

    Args:
        prompt: of the probe.
        text: the answer, of joined tokens.
        is_cut: by the limit of tokens, so that a character, or JSON, may lack its end.
    """
    if is_cut:
        yield "cut"
        text = re.sub(f"{_REPLACED}{{1,3}}$", "", text)
    if not text.strip():
        yield "empty"
        return
    if _REPLACED in text:
        yield "characters"
    if prompt.endswith(_OPENED) and _is_broken(_OPENED + text, is_cut=is_cut):
        yield "JSON"
    pieces = [text[at : at + _PIECE] for at in range(len(text) - _PIECE + 1)]
    if 2 * len({*pieces}) < len(pieces):
        yield "repetition"
    scripts = _scripts(text)
    own = _scripts(prompt)
    strange = [script for script in scripts if script not in own]
    # Names and formulas are in Latin letters everywhere.
    if {*strange} - {"LATIN"} or 2 * len(strange) > len(scripts):
        yield "script"


def _is_broken(text: str, *, is_cut: bool) -> bool:
    """Whether a text does not begin with a JSON object; of one that is cut, before its end."""
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        is_end = error.msg.startswith("Unterminated") or error.pos >= len(text) - _CUT
        return not (is_cut and is_end)
    except (RecursionError, ValueError):  # deeper, or a longer number, than Python reads
        return True
    return False


def _scripts(text: str) -> list[str]:
    """Of each letter, such as LATIN, and CJK for Chinese characters; signs such as 々 and µ, and
    full-width letters, are in no script of their own.
    """
    letters = [each for each in text if each.isalpha() and unicodedata.category(each) != "Lm"]
    own = [each for each in letters if not unicodedata.decomposition(each).startswith("<")]
    return [unicodedata.name(each, "").partition(" ")[0] for each in own]


def drafting(plain: Samples, drafted: Samples, filters: Sequence[str]) -> DraftingFact:
    """What drafting changed.

    Args:
        plain: finished answers with MTP off.
        drafted: finished answers with MTP on, to the same questions.
        filters: lm-eval's, of the task.
    """
    # A fault is one way of serving that is right more often than chance gives. vLLM issue 43559:
    # 20 % fewer right answers with prefix caching; issue 43650: 18 of 39 against 39 of 39, many
    # answers empty.
    off = plain.in_order()
    on = drafted.in_order()
    switches = []
    for name in (*filters, NOT_EMPTY):
        before = [_is_right(answer, name) for answer in off]
        after = [_is_right(answer, name) for answer in on]
        only_plain, only_drafting = parted(before, after)
        switches.append(
            SwitchFact(
                reads=name,
                only_plain=only_plain,
                only_drafting=only_drafting,
                chance=sign_test(only_plain, only_drafting),
            )
        )
    # Greedy decoding promises the same text, but only up to rounding: a step of one token and a
    # step of several are computed by other kernels, and where two tokens are nearly as likely, the
    # last digit decides. So another text is counted, and is no fault by itself.
    num_changed = sum([before.text != after.text for before, after in zip(off, on, strict=True)])
    return DraftingFact(switches=tuple(switches), num_changed=num_changed)


def _is_right(answer: Answer, name: str) -> bool:
    """By one filter; or whether there is any text."""
    if name == NOT_EMPTY:
        return bool(answer.text.strip())
    return answer.correct[name]
