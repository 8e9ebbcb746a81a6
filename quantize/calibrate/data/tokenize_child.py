"""The process in which a model's tokenizer and chat template run; tokenize.py starts it.

In: the checkpoint's folder, whether its Python may be run, and limits of time and memory; then
questions on standard input, pickled. Out: a line of JSON for each: token ids, or which of them a
model writes when it is asked what the row's user asked. What is raised ends the process, whose last
words it is.

Easy to get wrong: a chat template writes its own special tokens, so its text must not get the
tokenizer's on top; and a model without a template may have its encoding as Python next to the
weights. Templates may show a turn differently once others follow it; a token that is not surely a
model's counts as its user's.
"""

import json
import os
import pickle
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from ....recipes.frozen import without_none
from .tokenize import Answered, Conversation, DataRow, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What chat templates and encodings raise on a part of a conversation that they do not allow.
UNENCODABLE = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
_EncodeTurns = Callable[[Conversation, bool], list[int]]


@dataclass(frozen=True)
class _Ways:
    """To encode a row; the encoding of conversations is looked up at the first one."""

    tokenizer: "PreTrainedTokenizerBase"
    folder: Path

    def encode(self, row: DataRow) -> list[int]:
        """A row's token ids."""
        if not isinstance(row, str | Answered):
            return self._conversation(row, False)
        ids = self.tokenizer.encode("".join(row), add_special_tokens=True, verbose=False)
        ends = self.tokenizer.eos_token_id
        if isinstance(ends, int) and ids[-1:] != [ends]:
            return [*ids, ends]
        return ids

    def written(self, row: DataRow, ids: Sequence[int]) -> list[bool] | None:
        """Which tokens of a row a model writes; None where nothing marks them.

        Args:
            row: one that can be encoded.
            ids: what it is encoded to.
        """
        if isinstance(row, Answered) and self.tokenizer.is_fast:
            spans = self.tokenizer("".join(row), return_offsets_mapping=True, verbose=False)
            # Special tokens are at (0, 0), and a tokenizer that trims spaces leaves one of spaces
            # alone without length.
            first = len(row.prompt)
            written = [start >= first and end > first for start, end in spans["offset_mapping"]]
            # The end belongs to the answer, whether the tokenizer or `encode` has added it.
            if ids[-1] == self.tokenizer.eos_token_id:
                written[len(ids) - 1 :] = [True]
            return written
        if isinstance(row, str | Answered):
            return None
        written = [False] * len(ids)
        for index, turn in enumerate(row):
            if turn["role"] != "assistant":
                continue
            try:
                # An answer begins after the tokens that a server gets: the turns before it, and the
                # beginning of an answer.
                asked = self._conversation(row[:index], True)
                answered = self._conversation(row[: index + 1], False)
            except UNENCODABLE:  # templates need not take a part of a conversation
                continue
            # After the answer there may be an end that only a whole conversation has.
            end = 0
            for token, of_whole in zip(answered, ids, strict=False):
                if token != of_whole:
                    break
                end += 1
            if asked == answered[: len(asked)]:
                written[len(asked) : end] = [True] * (end - len(asked))
        return written

    @cached_property
    def _conversation(self) -> _EncodeTurns:
        """How to encode turns; its second argument adds the beginning of an answer.

        Without a chat template it is DeepSeek-V3.2's and V4's way: `encode_messages` in
        `encoding/encoding_*.py`. Source: vllm 0.32.0 tokenizers/deepseek_v4.py, which adds no
        special tokens to the encoded text either. A user's turn that comes last is followed by the
        beginning of an answer without being asked for it.
        """
        if self.tokenizer.chat_template:

            def by_template(row: Conversation, is_asked: bool) -> list[int]:
                # Columns of files spell a missing key as None, which templates would print.
                turns = [without_none(turn) for turn in row]
                ids = self.tokenizer.apply_chat_template(
                    turns, tokenize=True, return_dict=False, add_generation_prompt=is_asked
                )
                return cast("list[int]", ids)

            return by_template
        file = min(self.folder.glob("encoding/encoding*.py"))
        encode_messages = runpy.run_path(str(file))["encode_messages"]

        def by_own_code(row: Conversation, _: bool) -> list[int]:
            turns = [without_none(turn) for turn in row]
            written = encode_messages(turns, thinking_mode="chat")
            return self.tokenizer.encode(written, add_special_tokens=False, verbose=False)

        return by_own_code


def main(folder: str, may_run_code: str, seconds: str, most_bytes: str) -> None:
    """Limits first; then a line that says whether conversations have a template, and the answers.

    Raises:
        ValueError: what transformers 5.17 makes of no files for some classes is no tokenizer.
    """
    sys.excepthook = _last_words
    if may_run_code == "0":
        # transformers imports PyTorch where it finds it, which takes four of five seconds.
        sys.modules["torch"] = cast(ModuleType, None)
    from transformers import AutoTokenizer

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a stranger's code prints is no answer
    resource.setrlimit(resource.RLIMIT_DATA, (int(most_bytes), int(most_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(int(seconds))
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=may_run_code == "1"
    )
    if len(tokenizer) < 2:
        raise ValueError("no tokenizer.json")
    ways = _Ways(tokenizer=tokenizer, folder=Path(folder))
    found = bool(tokenizer.chat_template)
    while True:
        signal.alarm(0)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        name, *given = pickle.load(sys.stdin.buffer)  # noqa: S301 - keepmtp's own
        signal.alarm(int(seconds))
        found = getattr(ways, name)(*given)


def _last_words(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    sys.stderr.write(f"\n{one_line(error) or kind.__name__}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
