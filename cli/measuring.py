"""What the verbs that measure with servers share: from two checkpoints to a folder of results.

In: the options that all of them have. Out: a `Session`, which knows what is measured and where
results go.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from ..recipes.frozen import frozen
from ..validate.facts.vllm_env import TIMEOUT_SECONDS
from .options import JsonOption, chosen_vllm, refuse_stray_words
from .progress import bytes_bar, downloaded
from .tables import tell

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..recipes.protocol import Gates
    from ..validate.facts.results import Station
    from ..validate.facts.schema import JudgementFact
    from ..validate.facts.served import Role
    from ..validate.measure.harness import Model, Setup

_CURE = "Name it with --source, or compare nothing with --source none"
OriginalOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="What it was made from, folder or Hub id; default: what its keepmtp.json names, if "
        "that is a folder here. `none`: nothing is compared.",
    ),
]


@frozen
class ServeOptions:
    """A checkpoint that is measured with servers, and where the results go.

    Attributes:
        path: Checkpoint to measure: a folder or a Hub id.
        timeout: Seconds a server may take to be healthy.
        out: Folder for these results alone; default: NAME.report next to the checkpoint, with all
            its results.
    """

    path: str
    timeout: Annotated[float, typer.Option(min=1)] = TIMEOUT_SECONDS
    out: Path | None = None
    as_json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of such a verb.

    Attributes:
        station: whose result file is written.
        options: of the command line.
        extra: words for `vllm serve`.
        opened, original: the checkpoint and what it was made from, None where nothing is compared;
            not downloaded.
    """

    station: "Station"
    options: ServeOptions
    extra: tuple[str, ...]
    opened: "Source"
    original: "Source | None"

    @property
    def is_recorded(self) -> bool:
        """Whether the result joins the others of the checkpoint."""
        return self.options.out is None and Path(self.options.path).is_dir()

    @property
    def out(self) -> Path:
        """Where results go: those of a repository, which is no folder of anybody's, here."""
        from ..validate.facts.results import report_folder

        if self.is_recorded:
            return report_folder(Path(self.options.path))
        return self.options.out or Path(f"{Path(self.opened.where).name}.report")

    @cached_property
    def setup(self) -> "Setup":
        """How to serve.

        Raises:
            VLLMError: no vLLM, or no room for what is written.
            RecipeError: something is not installed that the CPU build of vLLM may need; or words
                that this vLLM does not take.
        """
        from ..validate.measure.harness import Setup
        from ..validate.measure.room import refuse_no_room
        from ..validate.measure.serve_line import refuse_settings

        # Whatever may be refused is refused before a server is started, which may take half an
        # hour.
        vllm = chosen_vllm()
        refuse_settings(self.extra, vllm.version)
        # The CPU build refuses some checkpoints only when it is asked to serve them. A copy of the
        # same weights is served then.
        if vllm.build == "cpu":
            require_extra("a BF16 copy, for what vLLM's CPU build has no kernel for,", "quantize")
        refuse_no_room((self.opened, self.original), vllm, out=self.out, extra=self.extra)
        return Setup(vllm=vllm, out=self.out, timeout=self.options.timeout, extra=self.extra)

    def model(self, role: "Role", source: "Source") -> "Model":
        """One of the checkpoints, downloaded and hashed."""
        from ..checkpoints.identity import identify
        from ..validate.measure.cures import switched_on, told
        from ..validate.measure.harness import Model

        # `setup` refuses before anything is downloaded or kept.
        setup = self.setup
        if line := told(switched_on(source, setup.vllm.version), setup.vllm.version):
            tell(f"{role}: {line}")
        is_shown = not self.options.as_json
        local = downloaded(source, is_shown=is_shown)
        assert local.folder is not None, "download() gives a folder"
        reading = bytes_bar("reading") if is_shown else None
        identity = identify(local.folder, cache=setup.out, watch=reading)
        return Model(role=role, source=local, identity=identity)

    def checkpoint(self, *but: "Station") -> "Model":
        """The checkpoint. Results of other bytes are refused, but for those of this station and
        `but`.
        """
        from ..validate.report import report as reports

        model = self.model("checkpoint", self.opened)
        if self.is_recorded:
            reports.refuse_stale(self.out, model.identity, but=(self.station, *but))
        return model

    def source_of(self, checkpoint: "Model") -> "Model | None":
        """What it was made from, which is not the same bytes."""
        if self.original is None:
            return None
        source = self.model("source", self.original)
        # Compared with itself, everything would pass.
        if source.identity.sha256 == checkpoint.identity.sha256:
            raise RecipeError(
                "--source",
                "must be what the checkpoint was made from, not the checkpoint itself",
                got=f"the same bytes in {source.source.where}",
                cure=_CURE,
            )
        return source

    @property
    def record(self) -> Path | None:
        """The checkpoint's keepmtp.json."""
        from ..checkpoints.record import RECORD
        from ..checkpoints.source import small_file

        return small_file(self.opened, RECORD)

    @property
    def gates(self) -> "Gates":
        """The gates of the recipe that the checkpoint was made by."""
        from ..validate.report.gates import decided_in

        return decided_in(self.record, cure="Restore the keepmtp.json that keepmtp wrote")[0]

    @property
    def places(self) -> str:
        """Where the result and the servers' logs are."""
        from ..validate.facts.results import file_of

        return f"Result: {file_of(self.out, self.station)}; logs: {self.out / 'logs'}"

    def keep(self, fact: Any, checkpoint: "Model", **alone: Any) -> "JudgementFact":
        """Write the result.

        Returns: the judgement of all results of the checkpoint, or of `alone` where it joins none.
        """
        from ..validate.facts.results import write_result
        from ..validate.report import report as reports
        from ..validate.report.gates import judge

        vllm = self.setup.vllm.version
        write_result(self.out, self.station, fact, checkpoint=checkpoint.identity, vllm=vllm)
        if self.is_recorded:
            # The new result joins the others, and all gates are judged anew.
            judgement = reports.refresh(self.out).judgement
            if judgement is not None:
                return judgement
        return judge(**alone)


def begin(
    verb: str, station: "Station", options: ServeOptions, words: list[str], source: str | None
) -> Session:
    """Open both checkpoints.

    Args:
        verb: for refusals.
        station: whose result file will be written.
        options: of the command line.
        words: for `vllm serve`.
        source: what the checkpoint was made from; None takes its record's, `none` compares nothing.

    Raises:
        RecipeError, CheckpointError: see `open_source` and `original_of`; or words that keepmtp
            must choose itself.
    """
    from ..checkpoints.source import open_source
    from ..checkpoints.source_of import original_of
    from ..validate.measure.server import refuse_words

    refuse_stray_words(verb, words)
    refuse_words(verb, words)
    opened = open_source(options.path)
    return Session(
        station=station,
        options=options,
        extra=tuple(words),
        opened=opened,
        original=original_of(opened, source, cure=_CURE),
    )
