"""A model's tokenizer and chat template, in a process of their own (tokenize_child.py): they are a
stranger's, and may compute for ever, take all memory or raise anything.

In: the source checkpoint, and a dataset's rows. Out: an `Encoders`: a row's token ids, and which of
them a model writes. Whatever ends that process becomes one sentence.

Easy to get wrong: rows go there as Python's values, which may be dates. Only plain numbers come
back.
"""

import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from ....checkpoints.fact import Count
from ....checkpoints.source import Source
from ....recipes.errors import CheckpointError, RecipeError
from ....recipes.frozen import Raw
from ...run.child import Child, environment

# To build a tokenizer, and to encode a row.
SECONDS = 60
MOST_BYTES = 4 << 30
_LONGEST = 1 << 27  # bytes of an answer
_CHILD = f"{__package__}.tokenize_child"
_Ids = TypeAdapter(list[Count])
_Written = TypeAdapter(list[bool] | None)

Conversation = Sequence[Raw]


class Answered(NamedTuple):
    """A text whose beginning a user wrote."""

    prompt: str
    text: str


DataRow = str | Answered | Conversation


class Encoders:
    """One model's ways to encode a row; a context manager.

    Raises:
        CheckpointError: there is no tokenizer next to the weights, or none that transformers can
            build.
    """

    def __init__(self, source: Source, *, may_run_code: bool):
        """Start the process and wait until it has built the tokenizer.

        Args:
            source: its files must be on this machine.
            may_run_code: whether Python that the checkpoint ships may be run.
        """
        assert source.folder is not None, "download() first"
        self.source = source
        self._may_run_code = may_run_code
        self._log = TemporaryFile()  # noqa: SIM115 - closed on exit
        limits = (str(SECONDS), str(MOST_BYTES))
        self._child = Child(
            [sys.executable, "-m", _CHILD, source.folder, str(int(may_run_code)), *limits],
            environment=environment(is_ours=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        built = CheckpointError(
            source.where,
            "a calibrated run needs the model's tokenizer beside the weights",
            got="none",
            cure="Copy the release's tokenizer files there, or set calibration.model_code: "
            "checkpoint if it is code of the checkpoint",
        )
        try:
            self._has_template = self._answer(TypeAdapter(bool), built)
        except CheckpointError:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()
        self._log.close()

    def encode(self, row: DataRow, where: str) -> list[int]:
        """A row's token ids.

        Args:
            row: not a blank one.
            where: its place in messages.

        Raises:
            CheckpointError: it is a conversation and there is no way to encode one.
            RecipeError: this row is not allowed by the way that there is, or takes too much.
        """
        if not (isinstance(row, str | Answered) or self._has_template):
            self._refuse_conversations()
        return self._asked(("encode", row), _Ids, where)

    def written(self, row: DataRow, ids: Sequence[int], where: str) -> list[bool] | None:
        """Which tokens of a row a model writes; None where nothing marks them.

        Args:
            row: one that can be encoded.
            ids: what it is encoded to.
            where: its place in messages.

        Raises: RecipeError: as `encode`.
        """
        return self._asked(("written", row, ids), _Written, where)

    def _asked(self, question: tuple[Any, ...], form: TypeAdapter[Any], where: str) -> Any:
        given = self._child.process.stdin
        assert given
        with suppress(BrokenPipeError):  # then nothing can be read either
            pickle.dump(question, given)
            given.flush()
        cure = "Mend the row, or name a column"
        rule = "must suit the model's chat format"
        return self._answer(form, RecipeError(where, rule, got="", cure=cure))

    def _answer(self, form: TypeAdapter[Any], refusal: CheckpointError | RecipeError) -> Any:
        """The next line of the process; the refusal with its last words, if it has ended."""
        said = self._child.process.stdout
        assert said
        with suppress(ValidationError):
            return form.validate_json(said.readline(_LONGEST), strict=True)
        self._child.end()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        words = [line for line in lines if line.strip()]
        status = self._child.process.returncode
        got = f"exit status {status}"
        if words:
            got = one_line(words[-1])
        if status == -signal.SIGALRM:
            got = f"no end after {SECONDS} s"
        elif status < 0 and not words:
            got = f"a process that was ended by {signal.Signals(-status).name}"
        raise type(refusal)(refusal.where, refusal.rule, got=got, cure=refusal.cure)

    def _refuse_conversations(self) -> None:
        """Where neither a template nor code that may be run encodes them."""
        assert self.source.folder is not None
        files = sorted(self.source.folder.glob("encoding/encoding*.py"))
        if files and self._may_run_code:
            return
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


def one_line(said: object, longest: int = 300) -> str:
    """What a library or a person says, short enough for a sentence."""
    text = " ".join(str(said).split()).rstrip(".")
    if len(text) <= longest:
        return text
    return f"{text[: longest - 3]}..."
