"""A serve log or a traceback: its words, without what the server writes before each line.

In: bytes from a file or a pipe, of which the last ones count. Out: a `Log`: lines that may tell a
failure, and the exceptions with the place in vLLM that raised them.

Easy to get wrong: every worker writes the same traceback, each line after its own name and time,
and an exception comes again as the cause of others. A line is kept once. Logs are a stranger's
bytes: nothing is printed as it came.
"""

import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase

from ...recipes.errors import printable

MOST_BYTES = 8 << 20
_CHUNK = 1 << 20
_LONGEST_LINE = 4000
_MOST_LINES = 20_000
_MOST_RAISED = 1_000
_ESCAPES = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]|�\[[0-9;]{1,20}m")
# What stands before the words: vllm-1 | of containers, (Worker_TP0 pid=7), [rank0]:, a level with
# date, time and place, a date alone.
_BEFORE = re.compile(
    r"(?:\s{0,4}(?:[\w.-]{1,60} {1,20}\||\(\w{1,60}(?: \w{1,20}=\d{1,9}){0,3}(?:, "
    r"ip=[\d.]{1,40})?\)"
    r"|\[rank\d{1,5}\]:|\[VLLM LOG\]"
    r"|(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"(?:\[[^\]]{1,80}\]|\S{1,60}\])"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\dZ+:]{0,20})){1,6} ?"
)
_FRAME = re.compile(r'^\s{0,20}File "([^"]{1,400})", line (\d{1,7})')
_EXCEPTION = re.compile(
    r"^\s{0,4}([A-Za-z_][\w.]{0,120}(?:Error|Exception))(?::(?: (.{0,3900}))?)?$"
)
_TELLS = (
    "Error",
    "Exception",
    "error",
    "WARNING",
    "assert",
    "cceptance",
    "not found",
    "failed",
    "different",
    "scal",
)
_READ = (*_TELLS, 'File "')


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The last part of a log.

    Attributes:
        lines: each line that may tell a failure, once, in order of its first appearance.
        raised: each exception as the log has it, once and in order, with file:line of its last
            frame in vLLM ("" where the log has none).
    """

    lines: tuple[str, ...]
    raised: Mapping[str, str]


def read_log(stream: BufferedIOBase) -> Log:
    """The last `MOST_BYTES` of a file or a pipe; Ctrl-C is the end of a pipe that stays open."""
    kept: deque[bytes] = deque()
    size = 0
    with suppress(KeyboardInterrupt):
        while chunk := stream.read1(_CHUNK):
            kept.append(chunk)
            size += len(chunk)
            while size - len(kept[0]) >= MOST_BYTES:
                size -= len(kept.popleft())
    return parse_log(b"".join(kept)[-MOST_BYTES:])


def parse_log(raw: bytes) -> Log:
    """Lines and exceptions of a log."""
    lines: dict[str, None] = {}
    raised: dict[str, str] = {}
    at = ""
    for written in raw.decode(errors="replace").splitlines():
        if not any(word in written[:_LONGEST_LINE] for word in _READ):
            continue
        line = words_of(written)
        if frame := _FRAME.match(line):
            at = _place(frame[1], frame[2]) or at
            continue
        if found := _EXCEPTION.match(line):
            kind = found[1].rpartition(".")[2]
            raised.setdefault(f"{kind}: {found[2] or ''}".removesuffix(": "), at)
            if len(raised) > _MOST_RAISED:  # what ended the server is at the end
                del raised[next(iter(raised))]
            at = ""
        if len(lines) < _MOST_LINES and any(word in line for word in _TELLS):
            lines.setdefault(line)
    return Log(lines=tuple(lines), raised=raised)


def words_of(line: str) -> str:
    """A line without the server's own words before it, short enough and fit to be shown."""
    bare = _ESCAPES.sub("", line[:_LONGEST_LINE])
    if before := _BEFORE.match(bare):
        bare = bare[before.end() :]
    return printable(bare).rstrip()


def _place(file: str, line: str) -> str:
    """file:line below vLLM's package, or below vLLM Ascend's or SGLang's; "" for other files."""
    for other in ("vllm_ascend/", "sglang/srt/"):
        _, found, rest = file.rpartition(f"/{other}")
        if found:
            return f"{other}{rest}:{line}"
    package, _, rest = file.replace("\\", "/").rpartition("vllm/")
    is_vllm = package.endswith(("packages/", "vllm/", "workspace/")) or not package
    if rest and is_vllm:
        return f"vllm/{rest}:{line}"
    return ""
