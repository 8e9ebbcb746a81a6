"""README.md below its front matter: what a model card says, from report.json, keepmtp.json and
recipe.yaml alone.

In: a `CardFacts`. Out: Markdown. The card is read in a minute: report.json has the rest.

Easy to get wrong: a card may only have numbers of the report, and numbers computed from them.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import PurePath
from typing import TYPE_CHECKING

from ...checkpoints.record import Record
from ...recipes.errors import counted, size_in_words
from ...recipes.frozen import Json, frozen
from ...recipes.schemes import SCHEMES
from ..facts.benched import NO_SPEED, BenchFact
from ..facts.dry_load import versions_in_short
from ..facts.evaluated import EvaluationFact
from ..facts.numbers import percent
from ..facts.schema import FullReport
from ..measure.serve_line import separate_draft, serve_words
from . import tables
from .base_model import BaseModel
from .best_k import best_k_of_report
from .markdown import Block, Code, Md, Table, code, codes, inline, markdown, picture, title
from .provenance import ModuleGroup

if TYPE_CHECKING:
    from .charts import Chart  # it imports matplotlib

PICTURE = "acceptance.png"
MAX_COLUMNS = 76
"""The Hub's page cuts longer lines of code, or hides their ends."""


@frozen
class CardFacts:
    """Everything a card is made from.

    Attributes:
        name: of the checkpoint's folder.
        report: with paths of the machine already shortened.
        record, recipe: keepmtp.json and recipe.yaml.
        groups: what is in the checkpoint.
        base_model: its Hub id, and how that is known.
        repository: where it is published; "" where that is not known yet.
        metadata: what the front matter says and nobody measured.
        chart: the card's drawing.
        drafting: what vLLM needs besides k to draft.
        attention: a GPU -> the value of --attention-backend that it needs there.
        cures: that the report's vLLM needs.
        cured: each cure, with the versions that need it.
        parsers: words for the server that read tool calls and thoughts.
    """

    name: str
    report: FullReport
    record: Record
    recipe: str
    groups: tuple[ModuleGroup, ...]
    base_model: BaseModel
    repository: str
    metadata: Json
    chart: "Chart | None" = None
    drafting: tuple[str, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    cures: tuple[str, ...] = ()
    cured: tuple[str, ...] = ()
    parsers: str = ""

    @property
    def model(self) -> str:
        """What a reader names to serve it."""
        return self.repository or f"ORG/{self.name}"

    @property
    def compared(self) -> str:
        """What was evaluated as the source: it may have another name, such as a copy with an MTP
        block.
        """
        name = self.record.source.name
        evaluation = self.report.of(EvaluationFact)
        if evaluation and evaluation.source:
            path = evaluation.source.path
            if PurePath(path).name != PurePath(name).name:
                return path
        return name

    def schemes(self, *parts: str) -> tuple[str, ...]:
        """Of the tensors on disk in these parts, all by default; in the order of the table of
        schemes.
        """
        used = set[str]()
        for group in self.groups:
            if not parts or group.part in parts:
                used.update(group.schemes)
        known = [name for name in SCHEMES if name in used]
        return (*known, *sorted(used - SCHEMES.keys()))


def page(facts: CardFacts) -> str:
    """The card's text. Equal values give equal bytes."""
    return markdown(_blocks(facts))


def _blocks(facts: CardFacts) -> Iterator[Block]:
    report = facts.report
    yield title(facts.name, 1)
    yield _verdict(report)
    yield from _summary(facts)
    yield from _results(facts)
    yield from _gates(report)
    yield from _serve(facts)
    yield title("What is in it")
    yield _about(facts)
    yield title("Limitations")
    yield [*_limitations(facts)]
    yield from _made_with(facts)


def _verdict(report: FullReport) -> Md:
    """The sentence that a reader came for."""
    judged = report.judgement
    start = "**This checkpoint passes its gates.**"
    if judged.verdict == "regression":
        start = "> [!CAUTION]\n> **Regression: this checkpoint failed its gates.**"
    elif judged.verdict == "infeasible":
        says = "Not measured: too little is known of this checkpoint to pass or fail it."
        start = f"> [!WARNING]\n> **{says}**"
    return Md(f"{start} {inline(judged.says)}")


def _summary(facts: CardFacts) -> Iterator[Block]:
    """What it is, in a sentence and in a table."""
    report = facts.report
    record = facts.record
    source = record.source.name
    block = "its multi-token-prediction (MTP) block"
    origin = code(source)
    donor = (record.donors or {}).get("mtp")
    if donor:
        origin = code(donor.name)
        block = f"the multi-token-prediction (MTP) block of {origin}"
    schemes = codes(facts.schemes())
    kept = "kept unquantized"
    if facts.schemes("mtp"):
        kept = f"quantized to {codes(facts.schemes('mtp'))}"
    for reason in report.judgement.reasons:
        if (reason.gate, reason.verdict) == ("acceptance", "pass"):
            kept += ", which still drafts for speculative decoding"
    says = f"{code(source)} quantized to {schemes or 'no scheme'} for vLLM, with {block} {kept}."
    if report.target:
        says = (
            f"The multi-token-prediction (MTP) block of {origin}, {kept}: a checkpoint "
            f"of its own, which vLLM serves as the draft of {code(report.target.path)}."
        )
    yield says
    yield f"Recipe {code(record.recipe.name)}: {record.recipe.summary}"


def _results(facts: CardFacts) -> Iterator[Block]:
    """Source, checkpoint, and checkpoint with MTP off, a row for each figure."""
    report = facts.report
    yield title("Results")
    rows = [row for row in tables.rows_of(report) if not row.is_detail]
    found = tables.results(rows)
    if rows:
        yield found
        yield f"{tables.LEGEND} Acceptance depends on what is asked: compare within a row."
    if facts.chart:
        yield picture(facts.chart.alt, PICTURE)
    notes = [note for part in report.parts for note in part.notes()]
    if notes:
        yield list(dict.fromkeys(notes))


def _gates(report: FullReport) -> Iterator[Block]:
    """The verdict of each gate, and why."""
    judged = report.judgement
    yield title(f"Gates: {judged.title}")
    rows = [(reason.gate, reason.title, reason.says) for reason in judged.reasons]
    yield Table(columns=("gate", "verdict", "reason"), rows=rows)


def _about(facts: CardFacts) -> Table:
    """What it was made from, and what it needs."""
    report = facts.report
    record = facts.record
    base = facts.base_model
    based_on = inline(base.says)
    if base.name:
        name = inline(base.name)
        based_on = f"[{name}](https://huggingface.co/{base.name}). {based_on}"
    layers = counted(report.facts.num_mtp_layers, "layer")
    tensors = counted(report.facts.num_mtp_tensors, "tensor")
    rows = [
        ("Base model", Md(based_on)),
        ("Source", f"{code(record.source.name)}, revision {code(record.source.revision)}"),
    ]
    target = report.target
    if target:
        says = f"{code(target.path)}, revision {code(target.revision)}"
        rows.append(("Target", f"{says}; SHA-256 over its files {code(target.sha256)}"))
    runs_on = []
    for name in facts.schemes():
        if name in SCHEMES:
            runs_on.append(f"{code(name)} on {SCHEMES[name].hardware}")
    rows += [
        ("Format", f"{code(report.facts.dialect)}: {_stored(facts, 'backbone')}"),
        ("Runs on", "; ".join(runs_on) or "wherever vLLM serves BF16"),
        ("MTP block", f"{layers}, {tensors}: {_stored(facts, 'mtp')}"),
    ]
    cache = record.recipe.whole.get("kv_cache")
    if cache:
        how = "with calibrated scales, which vLLM takes by itself; `--kv-cache-dtype bfloat16` "
        rows.append(("KV cache", f"{code(cache)} {how}overrules it"))
    after = size_in_words(record.bytes.after)
    devices = codes(dict.fromkeys(_devices(report)))
    where = ""
    if devices:
        where = f", on {devices}"
    rows += [
        ("Size", f"{size_in_words(record.bytes.before)} before, {after} now"),
        ("Calibration", _calibrated(report)),
        ("Measured by", f"the publisher{where}; nobody else has verified it"),
    ]
    if facts.parsers:
        rows.append(("Parsers", facts.parsers))
    versions = versions_in_short(report.dry) or "no other version was tried"
    rows.append(("vLLM", f"{report.vllm}; {versions}"))
    license_id = "not stated here; that of the base model applies"
    for key in ("license", "license_name"):
        license_id = str(facts.metadata.get(key, license_id))
    rows.append(("License", license_id))
    return Table(columns=("", ""), rows=rows)


def _stored(facts: CardFacts, part: str) -> str:
    """Each scheme with the groups that it is of."""
    said = []
    for scheme in facts.schemes(part):
        groups = []
        for group in facts.groups:
            if group.part == part and scheme in group.schemes:
                groups.append(group.modules)
        said.append(f"{code(scheme)}: {', '.join(groups)}")
    return "; ".join(said) or "unquantized"


def _calibrated(report: FullReport) -> str:
    """By what, and on which texts."""
    fact = report.calibration
    if fact is None:
        return report.absent.get("calibration", "Not known.")
    texts = []
    for one in (fact.data, *fact.data.also):
        words = f"{code(one.dataset)}, {one.dataset_revision}"
        if one.subset:
            words = f"{code(one.dataset)}, {one.subset}, {one.dataset_revision}"
        if one in fact.data.also:
            words = f"{percent(one.share)} of {words}"
        texts.append(words)
    return (
        f"{fact.algorithm} on {fact.data.tokens:,} tokens in sequences of "
        f"{fact.sequence_length:,}: {'; '.join(texts)}"
    )


def _devices(report: FullReport) -> list[str]:
    devices = []
    for part in report.parts:
        if part.environment.get("device"):
            devices.append(part.environment["device"])
    return devices


def _serve(facts: CardFacts) -> Iterator[Block]:
    """How to serve it."""
    best = best_k_of_report(facts.report)
    model = facts.model
    words = (best.k, *facts.drafting)
    target = facts.report.target
    if target:
        model = target.path
        words = (*words, *separate_draft(facts.model))
    command = serve_words(model, *words, cures=facts.cures)
    drafts = "This serves without drafting"
    if best.k:
        drafts = f"This drafts {counted(best.k, 'token')} a step"
    yield title("Serve")
    yield Code(text=shell(command))
    yield f"{drafts}, {best.why}."
    for gpu, backend in facts.attention.items():
        yield f"On {gpu} add {code(f'--attention-backend {backend}')}."
    if facts.cured:
        where = ""
        if facts.cures:
            where = "The command wants keepmtp's wheel beside vLLM (`pip install --no-deps`). "
        yield (
            "vLLM itself has defects with this model, which keepmtp's cures mend where it runs: "
            f"{'; '.join(facts.cured)}. {where}Without the cures vLLM raises, or its drafts are "
            "wrong."
        )
    folder = "A folder works as well"
    if not facts.repository:
        folder = "`ORG` is the owner of this repository; a folder works as well"
    yield f"{folder}. `--tensor-parallel-size N` splits the weights over N GPUs."


def _limitations(facts: CardFacts) -> Iterator[str]:
    """What a reader must not take for granted, a sentence or two each."""
    report = facts.report
    record = facts.record
    what = "quantization"
    if report.target:
        what = "draft"
    yield (
        f"This {what} was judged on the questions and texts named above, and on nothing else. What "
        "the base model is made for, its limits, risks and license hold here too."
    )
    served = [says for part in report.parts for says in tables.how_served(part)]
    yield from dict.fromkeys(served)
    for device in _devices(report):
        if device.startswith("CPU"):
            yield f"No GPU was used ({device}), so nothing here says how fast it is."
            break
    if report.calibration and report.calibration.unmeasured:
        yield f"No acceptance by calibration: {report.calibration.unmeasured}"
    if report.dry:
        yield "A dry load tells that every tensor finds its place, not that a kernel is right."
    for finding in report.findings:
        if finding.severity == "warning":
            yield f"The check warns of {finding.where}: {finding.says}"
    if record.source.revision == "local":
        yield (
            "The source was a local folder, identified by no more than its files' names and sizes "
            "in `keepmtp.json`."
        )
    if report.target and report.target.revision == "local":
        yield "The target was a local folder, identified by the SHA-256 over its files alone."
    if record.recipe.whole.get("requantize"):
        yield "Weights were rounded twice: the source was quantized already."
    source = code(record.source.name)
    if facts.compared != record.source.name:
        yield f"Figures are compared with those of {code(facts.compared)}, not of {source}."
    for group, donor in (record.donors or {}).items():
        name = f"{code(donor.name)}, revision {code(donor.revision)}"
        yield f"{code(group)} is not of {source}, but of {name}, with a license of its own."
    if not (report.target or report.of(BenchFact)):
        yield NO_SPEED


def _made_with(facts: CardFacts) -> Iterator[Block]:
    """What repeats it."""
    report = facts.report
    record = facts.record
    yield title("Made with")
    versions = [f"{package} {version}" for package, version in sorted(record.versions.items())]
    made = ", ".join([f"keepmtp {record.keepmtp}", *versions])
    yield f"{made}; report by keepmtp {report.keepmtp}, {report.made_at}."
    yield Code(text=facts.recipe, language="yaml")
    yield (
        "`keepmtp.json` holds the recipe as it was run: `--scheme`, `--mtp` and `mtp: auto` may "
        f"have decided otherwise than this file. Again, with keepmtp {record.keepmtp}:"
    )
    yield Code(text=_command(facts))
    of_bytes = ""
    if report.identity:
        sha256 = code(report.identity.sha256)
        of_bytes = f", measured on the bytes whose list of files has the SHA-256 {sha256}"
    yield (
        f"Every number above is from `report.json` in this repository{of_bytes}; `report.html` is "
        "this page for a browser."
    )


def shell(words: Iterable[str]) -> str:
    """A command that a narrow column does not cut: on one line, or an option with its value on
    each.

    A word that would make its line too long begins another one.
    """
    quoted = [shlex.quote(word) for word in words]
    if len(" ".join(quoted)) <= MAX_COLUMNS:
        return " ".join(quoted)
    lines = [""]
    for word in quoted:
        if word.startswith("-") or len(f"{lines[-1]} {word}") > MAX_COLUMNS:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return " \\\n  ".join(lines)


def _command(facts: CardFacts) -> str:
    """The command that repeats the run.

    It does not install keepmtp: the package index does not have it, so anybody could take its name
    there.
    """
    words = ["keepmtp", "quantize", "recipe.yaml", "--source", facts.record.source.name]
    donor = (facts.record.donors or {}).get("mtp")
    if donor and facts.record.recipe.whole.get("mtp_source"):
        words += ["--mtp-source", donor.name]
    if facts.report.target:
        words += ["--draft-for", facts.report.target.path]
    return shell([*words, "--out", facts.name])
