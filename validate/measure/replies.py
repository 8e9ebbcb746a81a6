"""What a server says, read strictly: so many bytes at most, so long at most, and in one form.

In: an HTTP client and a request, or the bytes of a reply. Out: the bytes; a `Reply`; `Said`;
`Drafts`.

Easy to get wrong: a number that nobody could have measured is no answer.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import httpx
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from ..facts.served import Drafts

MOST_BYTES = 2**24
_COUNTER = "vllm:spec_decode_num_"
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenName = Annotated[str, Field(pattern=r"^token_id:[0-9]{1,9}$")]
_Logprob = Annotated[float, Field(ge=-1e6, le=1e6)]  # logits of --logprobs-mode pass, NaN does not


class Reply(BaseModel):
    """An answer of a server; fields that nobody asks for are left out."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Message(Reply):
    # A reasoning parser leaves no content of an answer that was cut while thinking.
    content: str | None = None


class _Answer(Reply):
    finish_reason: Literal["stop", "length"]
    text: str | None = None
    message: _Message | None = None


class _Usage(Reply):
    completion_tokens: Annotated[int, Field(gt=0, lt=2**63)]


class AnswerReply(Reply):
    """An answer to a text, or to messages."""

    choices: tuple[_Answer]
    usage: _Usage


class _Called(Reply):
    name: str | None = None
    arguments: str | None = None


class _CallPart(Reply):
    function: _Called = _Called()
    index: int | None = None


class _Part(_Message):
    tool_calls: tuple[_CallPart, ...] | None = None


class _SaidChoice(Reply):
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    said: _Part = Field(validation_alias=AliasChoices("message", "delta"))


class SaidReply(Reply):
    """An answer to messages with tools, or one part of it in a stream."""

    choices: tuple[_SaidChoice, ...]
    usage: _Usage | None = None


Said = tuple[str, Sequence[Sequence[str]]] | None
"""Words and calls. A call is a tool's name and its arguments as they came, which may be no JSON.
None: they do not end.
"""


class _Likeliest(Reply):
    top_logprobs: tuple[dict[_TokenName, _Logprob], ...]


class _Continued(Reply):
    text: str
    token_ids: tuple[_TokenId, ...]
    logprobs: _Likeliest


class ContinuationReply(Reply):
    """Tokens, and the likeliest ones in their places."""

    choices: tuple[_Continued]


class _Entry(TypedDict):
    logprob: _Logprob


class _Predicted(Reply):
    prompt_logprobs: tuple[dict[_TokenId, _Entry] | None, ...]


class PredictionsReply(Reply):
    """What was predicted in each place of a prompt but the first."""

    choices: tuple[_Predicted]


class TokensReply(Reply):
    """The tokens of a text."""

    tokens: tuple[_TokenId, ...]


class TextReply(Reply):
    """The text of tokens."""

    prompt: str


def fetched(
    client: httpx.Client,
    path: str,
    *,
    method: str = "GET",
    seconds: float = 5.0,
    most: int = MOST_BYTES,
    **sent: Any,
) -> tuple[int, bytes]:
    """Status and content of a reply.

    Args:
        client: bound to the server's address.
        path, method, sent: the request.
        seconds: until the reply is whole.
        most: bytes of its content.

    Raises:
        httpx.HTTPError: no reply, or one that is too long or takes too long.
    """
    # A server runs a stranger's checkpoint, so what it says may be anything, of any length, a byte
    # a minute.
    deadline = time.monotonic() + seconds
    content = bytearray()
    with client.stream(method, path, timeout=seconds, **sent) as reply:
        for part in reply.iter_raw():
            content += part
            if len(content) > most:
                raise httpx.ReadError(f"a reply of more than {most:,} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"a reply that is not whole after {seconds:.0f} s")
    return reply.status_code, bytes(content)


def said_in(parts: Iterable[SaidReply]) -> tuple[Said, int]:
    """What the parts of an answer say together, and its tokens."""
    content = reason = ""
    calls = defaultdict[int, list[str]](lambda: ["", ""])
    num_tokens = 0
    for part in parts:
        if part.usage:
            num_tokens = part.usage.completion_tokens
        for choice in part.choices:
            reason = choice.finish_reason or reason
            content += choice.said.content or ""
            for place, call in enumerate(choice.said.tool_calls or ()):
                if call.index is not None:
                    place = call.index
                joined = calls[place]
                joined[0] += call.function.name or ""
                joined[1] += call.function.arguments or ""
    said = (content, [calls[index] for index in sorted(calls)])
    if not reason:
        return None, num_tokens
    return said, num_tokens


def said_in_stream(content: bytes) -> tuple[Said, int]:
    """The same of a stream, which ends with a mark of its own."""
    # Only a line feed ends a line here: a text may hold what others take for one (U+2028).
    lines = [line[6:].strip() for line in content.split(b"\n") if line.startswith(b"data: ")]
    try:
        if lines and lines.pop() == b"[DONE]":
            return said_in([SaidReply.model_validate_json(line) for line in lines])
    except ValidationError:  # vLLM says in a part that it failed
        pass
    return None, 0


def read_counters(content: bytes) -> Drafts:
    """vLLM's draft counters in Prometheus' text form, summed over engines.

    Raises:
        ValueError: no text, or a counter that nobody could have counted.
    """
    totals = Counter[str]()
    by_position = Counter[int]()
    for line in content.decode().split("\n"):
        series, _, number = line.rpartition(" ")
        metric, _, labels = series.partition("{")
        if not (metric.startswith(_COUNTER) and metric.endswith("_total")):
            continue
        name = metric.removeprefix(_COUNTER).removesuffix("_total")
        count = float(number)
        if not 0 <= count < 2**63:
            raise ValueError(f"{name}: {number}")
        if name == "accepted_tokens_per_pos":
            place = labels.partition('position="')[2].partition('"')[0]
            by_position[int(place)] += int(count)
        else:
            totals[name] += int(count)
    return Drafts(
        drafts=totals["drafts"],
        draft_tokens=totals["draft_tokens"],
        accepted_tokens=totals["accepted_tokens"],
        accepted_per_position=tuple([by_position[place] for place in sorted(by_position)]),
    )
