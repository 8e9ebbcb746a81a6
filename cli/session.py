"""What the verbs that measure with servers share: from two checkpoints to a folder of results.

In: the options that all of them have. Out: a `Session`, which knows what is measured and where
results go. It imports what help must not wait for, so verbs import it when they run. `keepmtp
check` writes its report with `recorder`.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from ..checkpoints.identity import Identity, identify
from ..checkpoints.mtp_source import has_mtp
from ..checkpoints.record import RECORD, is_draft_alone
from ..checkpoints.source import Source, open_source, small_file
from ..checkpoints.source_of import (
    original_of,
    recorded_mtp_source,
)
from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from ..recipes.find import find_recipe
from ..recipes.protocol import Evaluation, Gates
from ..validate.check.check import Checked
from ..validate.check.pair import as_of_draft
from ..validate.facts.results import now, report_folder, write_result
from ..validate.facts.rows import Arm
from ..validate.facts.schema import JudgementFact
from ..validate.facts.served import those
from ..validate.measure.cures import switched_on, told
from ..validate.measure.harness import Measuring, Model, Setup, Work, measured, planned
from ..validate.measure.room import refuse_no_room
from ..validate.measure.serve_line import refuse_settings
from ..validate.measure.server import refuse_words
from ..validate.report import report as reports
from ..validate.report.check_data import check_data, record_check, record_static, static
from ..validate.report.gates import decided_in, judge
from .options import ServeOptions, chosen_vllm, refuse_stray_words
from .progress import asking, bytes_bar, downloaded
from .tables import answer, tell

_CURE = "Name it with --source, or compare nothing with --source none"


@dataclass(frozen=True)
class Session:
    """One run of such a verb.

    Attributes:
        verb: for refusals.
        options: of the command line.
        source: what the checkpoint was made from; None takes its record's, `none` compares nothing.
        draft: a draft of its own; then it is what is judged, and the checkpoint is its target.
        is_dry: nothing is downloaded, and no source gets a block.
    """

    verb: str
    options: ServeOptions
    source: str | None
    draft: str = ""
    is_dry: bool = False

    @property
    def extra(self) -> tuple[str, ...]:
        """Words for `vllm serve`."""
        return tuple(self.options.vllm_words or ())

    @property
    def judged(self) -> str:
        """What is judged, as the user named it."""
        return self.draft or self.options.path

    @cached_property
    def opened(self) -> Source:
        """What is judged, not downloaded.

        Raises:
            RecipeError, CheckpointError: see `open_source`; or words that keepmtp must choose
                itself; or a draft alone, which is no model to serve.
        """
        refuse_stray_words(self.verb, self.extra)
        refuse_words(self.verb, self.extra)
        opened = open_source(self.judged)
        if not self.draft and is_draft_alone(small_file(opened, RECORD)):
            rule = "must be a model that can be served"
            cure = f"Use `keepmtp eval TARGET --draft {shlex.quote(self.judged)}`"
            raise RecipeError(opened.where, rule, got="a draft alone", cure=cure)
        return opened

    @cached_property
    def target(self) -> Source | None:
        """The target of a draft of its own, not downloaded."""
        if not self.draft:
            return None
        return open_source(self.options.path)

    @cached_property
    def original(self) -> Source | None:
        """What it was made from, not downloaded; None where nothing is compared.

        One without an MTP block is joined with the block that the checkpoint's record names, in a
        folder of hard links among the results: what cannot draft is nothing to compare with.
        """
        original = original_of(self.opened, self.source, cure=_CURE)
        if original is None or self.draft or self.is_dry or has_mtp(original):
            return original
        block = recorded_mtp_source(self.opened)
        if block is None:
            return original
        out = self.out / f"{Path(original.where).name}-with-mtp"
        tell(f"source: {original.where} has no MTP block; {out} gets that of {block.where}")
        require_extra("an MTP block for the source", "quantize")
        from ..cure.fix import proposed
        from ..cure.rewritten import rewrite

        outcome = proposed(downloaded(original), release=block)
        rewrite(outcome.proposal, out, block=outcome.block, bar=bytes_bar)
        return open_source(out)

    @property
    def is_recorded(self) -> bool:
        """Whether the result joins the others of the checkpoint."""
        return self.options.out is None and Path(self.judged).is_dir()

    @property
    def out(self) -> Path:
        """Where results go: those of a repository, which is no folder of anybody's, here."""
        if self.is_recorded:
            return report_folder(Path(self.judged))
        return self.options.out or Path(f"{Path(self.opened.where).name}.report")

    @cached_property
    def setup(self) -> Setup:
        """How to serve.

        Raises:
            VLLMError: no vLLM, or no room for what is written.
            RecipeError: something is not installed that the CPU build of vLLM may need; or words
                that this vLLM does not take.
        """
        # Whatever may be refused is refused before a server is started, which may take half an
        # hour.
        vllm = chosen_vllm()
        refuse_settings(self.extra, vllm.version)
        # The CPU build refuses some checkpoints only when it is asked to serve them. A copy of the
        # same weights is served then.
        if vllm.build == "cpu":
            require_extra("a BF16 copy, for what vLLM's CPU build has no kernel for,", "quantize")
        sources = (self.opened, self.target, self.original)
        refuse_no_room(sources, vllm, out=self.out, extra=self.extra)
        return Setup(vllm=vllm, out=self.out, timeout=self.options.timeout, extra=self.extra)

    @contextmanager
    def watched(self) -> Iterator[Setup]:
        """How to serve, with the progress shown."""
        with asking() as watch:
            yield replace(self.setup, watch=watch)

    def model(self, role: Arm, source: Source) -> Model:
        """One of the checkpoints, downloaded and hashed."""
        # `setup` refuses before anything is downloaded or kept.
        setup = self.setup
        if self.is_dry and source.folder is None:  # of what is not here nothing was asked
            return Model(role=role, source=source, identity=Identity(sha256=source.where, files={}))
        line = told(switched_on(source, setup.vllm.version), setup.vllm.version)
        if line:
            tell(f"{role}: {line}")
        return _hashed(role, source, setup.out)

    def models(self, *but: str) -> tuple[Model, Model | None]:
        """The checkpoint, and what it was made from, which is not the same bytes. Results of other
        bytes are refused, but for those of `but`.
        """
        checkpoint = self.model("checkpoint", self.opened)
        target = None
        if self.target is not None:
            served_with = self.model("checkpoint", self.target)
            checkpoint = replace(checkpoint, target=served_with)
            target = served_with.as_target
        if self.is_recorded:
            reports.refuse_stale(self.out, checkpoint.identity, but=but, target=target)
        if self.original is None:
            return checkpoint, None
        source = self.model("source", self.original)
        # Compared with itself, everything would pass.
        if source.identity.sha256 == checkpoint.identity.sha256:
            raise RecipeError(
                "--source",
                "must be what the checkpoint was made from, not the checkpoint itself",
                got=f"the same bytes in {source.source.where}",
                cure=_CURE,
            )
        return checkpoint, source

    @property
    def record(self) -> Path | None:
        """The checkpoint's keepmtp.json."""
        return small_file(self.opened, RECORD)

    def decided(self, recipe: str | None) -> tuple[Gates, tuple[Evaluation, ...]]:
        """The gates and the tasks of a recipe that is named, or of the one that the checkpoint was
        made by.
        """
        if recipe is not None:
            named, _ = find_recipe(recipe)
            return named.gates, named.evaluations
        where = f"{self.opened.where}: {RECORD}"
        return decided_in(self.record, cure="Name a recipe with --recipe", where=where)

    @property
    def places(self) -> str:
        """Where the results and the servers' logs are."""
        return f"Results: {self.out}; logs: {self.out / 'logs'}"

    def measure(
        self, makers: Mapping[str, Callable[..., Measuring]], *but: str, **how: Any
    ) -> tuple[dict[str, Any], JudgementFact]:
        """Ask what is missing, and keep what is found. A dry run ends here, with the servers that
        would be started.

        Args:
            makers: of a `Setup` and both models each makes a station, by the name of its part.
            but: see `models`.
            how: see `keep`.

        Raises:
            ServerFailed: a server failed, also where other stations have their answers.
        """
        checkpoint, source = self.models(*but, *makers)
        models = those(source, checkpoint)
        stations = {}
        with self.watched() as setup, setup.alone():
            for name, make in makers.items():
                stations[name] = make(setup=setup, source=source, checkpoint=checkpoint)
            lines = [*_in_words(planned(stations.values(), models))]
            if self.is_dry:
                answer({"servers": lines}, lines, as_json=self.options.as_json)
                raise typer.Exit
            for line in lines:
                tell(line)
            facts, failure = measured(stations, models, setup)
        judged = self._keep(facts, checkpoint, source, **how)
        if failure:
            raise failure
        return facts, judged

    def _keep(
        self, facts: Mapping[str, Any], checkpoint: Model, source: Model | None, **how: Any
    ) -> JudgementFact:
        """Write results, by the name of their part in report.json, and the report.

        Returns: the judgement of all results of the checkpoint; or of these alone, `how` as for
            `judge`, where they join none.
        """
        vllm = self.setup.vllm.version
        target = checkpoint.target and checkpoint.target.as_target
        of = checkpoint.identity
        for fact in facts.values():
            write_result(self.out, fact, checkpoint=of, vllm=vllm, target=target)
        compared = source and source.source
        # Next to the checkpoint's other results, or a folder of its own: then the report has a
        # check of these bytes made for it, and no other measurement.
        if self.is_recorded:
            opened = checkpoint.source
            record_static(self.out, opened, checkpoint.identity, source=compared, target=target)
            return reports.refresh(self.out).judgement
        checked = static(checkpoint.source, source=compared, target=target).data
        judgement = judge(check=checked, **facts, **how)
        made: Any = {"judgement": judgement, **facts}
        data = check_data(checked, checkpoint.source)
        report = reports.assemble(data, vllm=vllm, made_at=now(), **made)
        reports.write(self.out, report)
        return judgement


def _in_words(servers: Sequence[Sequence[Work]]) -> Iterator[str]:
    """What is started, and what for."""
    yield f"servers to start, one after the other: {len(servers)}"
    for works in servers:
        first = works[0]
        what = dict.fromkeys([f"{work.model.title}: {work.task}" for work in works])
        yield f"k={first.k} {' '.join(first.words)}".rstrip() + f", {', '.join(what)}"


def recorder(paths: list[str], draft: str = "") -> Callable[[Checked], Path]:
    """Hash the one checkpoint that is going to be checked, for `check --record`; with a draft of
    its own, which is then what is judged, that too.

    A file that changes during the check does not count as checked. Results of other bytes are
    refused before a dry load.

    Returns: called with what was found, it writes check.json and the report of all results, and
    returns its path.

    Raises:
        RecipeError: several checkpoints, or a Hub id.
        CheckpointError: the folder of results holds results of other bytes.
    """
    judged = draft or paths[0]
    if len(paths) != 1 or not Path(judged).is_dir():
        raise RecipeError(
            "--record",
            "keeps the check of one folder",
            got=" ".join([*paths, draft]).strip(),
            cure="Run it for each, on a checkpoint that lies here",
        )
    checkpoint = Path(judged)
    folder = report_folder(checkpoint)
    identity = identify(checkpoint, cache=folder, watch=bytes_bar("reading"))
    target = None
    if draft:
        target = _hashed("checkpoint", open_source(paths[0]), folder).as_target
    reports.refuse_stale(folder, identity, but=("check",), target=target)

    def keep(checked: Checked) -> Path:
        if draft:
            checked = as_of_draft(checked, target)
        record_check(folder, checked, identity)
        reports.refresh(folder)
        return folder / reports.JSON_FILE

    return keep


def _hashed(role: Arm, source: Source, cache: Path) -> Model:
    """A checkpoint, downloaded and hashed."""
    local = downloaded(source)
    assert local.folder is not None, "download() gives a folder"
    identity = identify(local.folder, cache=cache, watch=bytes_bar("reading"))
    return Model(role=role, source=local, identity=identity)
