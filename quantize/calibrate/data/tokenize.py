"""From a dataset's row to token ids, with the tokens that begin and end a text or a conversation
for this model.

In: the source checkpoint's tokenizer files. Out: an `Encoders`: a row's token ids, and which of
them a model writes when it is asked what the row's user asked.

Easy to get wrong: a chat template writes its own special tokens, so its text must not get the
tokenizer's on top; and a model without a template may have its encoding as Python next to the
weights, which runs only if the recipe allows it. Templates may show a turn differently once others
follow it; a token that is not surely a model's counts as its user's.
"""

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import eq
from typing import NamedTuple, cast

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ....checkpoints.source import Source
from ....recipes.errors import CheckpointError
from ....recipes.frozen import Raw, without_none

Conversation = Sequence[Raw]
UNENCODABLE = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
"""What chat templates and encodings raise on a conversation that they do not allow."""


class Answered(NamedTuple):
    """A text whose beginning a user wrote."""

    prompt: str
    text: str


DataRow = str | Answered | Conversation
_EncodeTurns = Callable[[Conversation, bool], list[int]]


@dataclass(frozen=True)
class Encoders:
    """One model's ways to encode a row; the encoding of conversations is looked up at the first
    one.
    """

    tokenizer: PreTrainedTokenizerBase
    source: Source
    may_run_code: bool

    def encode(self, row: DataRow) -> list[int]:
        """A row's token ids.

        Raises: CheckpointError if it is a conversation and there is no way to encode
            one; one of `UNENCODABLE` if this row is not allowed by the way that there is.
        """
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
            written = [s >= first and e > first for s, e in spans["offset_mapping"]]
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
            end = [*map(eq, answered, ids), False].index(False)
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
                turns = list(map(without_none, row))
                ids = self.tokenizer.apply_chat_template(
                    turns, tokenize=True, return_dict=False, add_generation_prompt=is_asked
                )
                return cast("list[int]", ids)

            return by_template
        assert self.source.folder is not None
        files = sorted(self.source.folder.glob("encoding/encoding*.py"))
        if not (files and self.may_run_code):
            got = "none"
            if files:
                got = f"encoding/{files[0].name}, which is the checkpoint's code"
            raise CheckpointError(
                self.source.where,
                "the tokenizer must have a chat template to calibrate on conversations",
                got=got,
                cure="Put the release's chat_template.jinja beside it, name a column of texts, or "
                "read the code, set calibration.model_code: checkpoint and add --trust-remote-code",
            )
        encode_messages = runpy.run_path(str(files[0]))["encode_messages"]

        def by_own_code(row: Conversation, _: bool) -> list[int]:
            written = encode_messages(list(map(without_none, row)), thinking_mode="chat")
            return self.tokenizer.encode(written, add_special_tokens=False, verbose=False)

        return by_own_code


def encoders(source: Source, *, may_run_code: bool) -> Encoders:
    """The source's own tokenizer.

    Args:
        source: its files must be on this machine.
        may_run_code: whether Python that the checkpoint ships may be run.

    Raises:
        CheckpointError: there is no tokenizer next to the weights, or none that transformers can
            build.
    """
    assert source.folder is not None, "download() first"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=may_run_code
        )
        if len(tokenizer) < 2:  # what transformers 5.17 makes of no files for some classes
            raise ValueError("no tokenizer.json")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            source.where,
            "a calibrated run needs the model's tokenizer beside the weights",
            got=one_line(error),
            cure="Copy the release's tokenizer files there, or set calibration.model_code: "
            "checkpoint if it is code of the checkpoint",
        ) from error
    return Encoders(tokenizer=tokenizer, source=source, may_run_code=may_run_code)


def one_line(said: object, longest: int = 300) -> str:
    """What a library or a person says, short enough for a sentence."""
    text = " ".join(str(said).split()).rstrip(".")
    if len(text) <= longest:
        return text
    return f"{text[: longest - 3]}..."
