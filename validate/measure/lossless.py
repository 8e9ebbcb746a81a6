"""The station lossless: what people switch MTP off for. The same requests with MTP on and off,
alone and many at once, streamed, and with prefix caching: prompts in twelve scripts and in code,
each as it is and as JSON, whose answers have faults that English prose hardly shows; and
conversations with tools.

In: local checkpoints and a `Setup`. Out: a `LosslessFact`, and a file of answers for each way of
each server; of finished tasks a `DraftingFact`.

Easy to get wrong: a token may be a part of a character. vLLM holds back what is no whole character
yet, and for good if it never becomes one (0.32.0, v1/engine/detokenizer.py). So the tokens of a
whole answer are joined before anything is counted. And another text with drafting is no fault by
itself.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...recipes.frozen import frozen
from ...recipes.yaml_file import load_shipped
from ..facts.binomial import sign_test
from ..facts.evaluated import NOT_EMPTY, DraftingFact, SwitchFact
from ..facts.lossless import AskedFact, AskedModel, InAnswer, LosslessFact
from ..facts.paired import parted
from ..facts.served import Output
from . import tool_calls
from .harness import Ask, Failures, Model, Setup, Work, drafted_by, positions, room_for
from .server import Server
from .store import Answer, Samples, sum_of

# Of an answer, at most.
MAX_TOKENS = 128
AT_ONCE = 32
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


@frozen
class Request:
    """A prompt to go on with, or a conversation to hold."""

    name: str
    prompt: str = ""
    turns: Sequence[tool_calls.Turn] = ()


@frozen
class Way:
    """How requests are asked: streamed, if several at once; so many conversations, as an answer of
    a model that thinks takes a minute.
    """

    name: str
    at_once: int = AT_ONCE
    conversations: int = 120
    words: tuple[str, ...] = ()


@frozen
class Lossless:
    """The station: how to serve, whom, and how they are asked.

    Attributes:
        setup, source, checkpoint: how to serve, and what. The source is asked with MTP off.
        k: tokens drafted a step.
        has_cache: ask a server with prefix caching as well.
        parser: words with which servers read tool calls; without any, no tool is called.
        max_tokens: of an answer to a prompt, at most.
    """

    setup: Setup
    source: Model | None
    checkpoint: Model
    k: int
    has_cache: bool
    parser: tuple[str, ...]
    max_tokens: int = MAX_TOKENS

    @property
    def ways(self) -> Iterator[Way]:
        """The first is the one that the texts of others are compared with."""
        yield Way(name="one at a time", at_once=1, conversations=20)
        yield Way(name=f"{AT_ONCE} at once")
        if self.has_cache:
            yield Way(name="with prefix caching", words=("--enable-prefix-caching",))

    def works(self, model: Model) -> list[Work]:
        """All that one checkpoint is asked.

        Raises:
            CheckpointError: answers that cannot be read.
        """
        return [work for _, work in self._all(model)]

    def fact(self, failures: Failures) -> LosslessFact:
        """What is seen in all answers."""
        return LosslessFact(
            source=self.source and self._asked(self.source),
            checkpoint=self._asked(self.checkpoint),
            environment=self.setup.environment,
        )

    def _asked(self, model: Model) -> AskedModel:
        """What one checkpoint's servers answered."""
        asked = []
        first = list[str]()
        how = {}
        for way, work in self._all(model):
            lines = work.file.in_order()
            texts = [line.text for line in lines]
            first = first or texts
            pairs = [*zip(texts, first, strict=False)]
            seen: dict[InAnswer, tuple[str, ...]] = {}
            for request, line in zip(self._requests(way), lines, strict=True):
                for each in dict.fromkeys(_seen(request, line)):
                    seen[each] = (*seen.get(each, ()), request.name)
            asked.append(
                AskedFact(
                    k=work.k,
                    way=way.name,
                    num=len(texts),
                    num_compared=len(pairs),
                    num_changed=sum([one != other for one, other in pairs]),
                    seen=seen,
                )
            )
            how = work.file.served
        return AskedModel(role=model.role, path=model.source.where, asked=tuple(asked), **how)

    def _all(self, model: Model) -> Iterator[tuple[Way, Work]]:
        ks = {0}
        if model.role == "checkpoint":
            ks.add(drafted_by(model, self.k))
        for k in sorted(ks):
            for way in self.ways:
                yield way, self._work(model, k, way)

    def _requests(self, way: Way) -> list[Request]:
        found = [Request(name=name, prompt=prompt) for name, prompt in PROMPTS.items()]
        if self.parser:
            asked = tool_calls.conversations()[: way.conversations]
            for number, turns in enumerate(asked, 1):
                found.append(Request(name=f"tools {number}", turns=turns))
        return found

    def _work(self, model: Model, k: int, way: Way) -> Work:
        """All requests in one way, for one server."""
        name = f"lossless.{model.role}.k{k}.{way.name.replace(' ', '-')}"
        requests = self._requests(way)
        file = self.setup.answers(
            name,
            Answer,
            model,
            words=self.parser,  # another parser reads another answer
            num=len(requests),
            k=k,
            way=way.name,
            requests_sha256=sum_of(f"{requests} {tool_calls.TOOLS}"),
            max_tokens=self.max_tokens,
        )
        source = model.served[0].source
        room = room_for(PROMPTS.values(), source, is_chat=False, max_tokens=self.max_tokens)
        in_turn = min(tool_calls.MOST_TOKENS, positions(source) // 2)
        if self.parser:
            longest = [tool_calls.longest(each.turns) for each in requests if each.turns]
            held = room_for(longest, source, is_chat=True, max_tokens=in_turn)
            room = max(room, held)

        @contextmanager
        def asking(server: Server) -> Iterator[Ask]:
            def ask(number: int) -> Answer:
                request = requests[number]
                if request.turns:
                    text, num_tokens = tool_calls.held(
                        server, request.turns, max_tokens=in_turn, is_streamed=way.at_once > 1
                    )
                else:
                    output = server.complete(request.prompt, max_tokens=self.max_tokens)
                    text = joined(server, output)
                    num_tokens = len(output.token_ids)
                ended = "stop"
                if not request.turns and num_tokens >= self.max_tokens:
                    ended = "length"
                return Answer(
                    question=number,
                    prompt_sha256=sum_of(f"{request}"),
                    text=text,
                    finish_reason=ended,
                    num_tokens=num_tokens,
                )

            yield ask

        return Work(
            name=name,
            model=model,
            file=file,
            asking=asking,
            k=k,
            max_model_len=room,
            concurrency=way.at_once,
            words=way.words,
            further=self.parser,
            unit="request",
            task=f"lossless {way.name}",
        )


def joined(server: Server, output: Output) -> str:
    """The text of an answer with what vLLM held back; where it held back nothing, it is without
    special tokens, and stays.
    """
    text = server.text_of(output.token_ids)
    if _REPLACED in text:
        return text
    return output.text


def _seen(request: Request, line: Answer) -> Iterator[InAnswer]:
    """What is seen in one answer."""
    if request.turns:
        return tool_calls.seen_in_turns(request.turns, line.text)
    return seen_in(request.prompt, line.text, is_cut=line.finish_reason == "length")


def seen_in(prompt: str, text: str, *, is_cut: bool) -> Iterator[InAnswer]:
    """What is seen in one answer; no fault where it is empty.

    Args:
        prompt: one of `PROMPTS`.
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
