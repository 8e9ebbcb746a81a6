"""What `keepmtp check` prints for people: a block for each finding, in a compiler's manner, and the
dry loads.

    error: mtp.layers.0.mlp.down_proj.weight and 6 more
      stored as plain BF16, but vLLM builds mtp.layers.0.mlp.down_proj as fp8_channel: ...
      cure: Add 're:^mtp[.]layers[.]0[.]' to ignore: vLLM's name, not the one on disk
            "re:^mtp[.]layers[.]0[.]"

In: a `CheckData`. Out: lines on a console. Nothing is decided here.

Easy to get wrong: people copy the cure. It is on a line of its own that is never wrapped, and so is
what it quotes: commands in backticks, patterns of vLLM and JSON, which are printed again as
config.json has them. A command names this checkpoint, where the rule could only say PATH. Only what
will happen is wrapped, between words, and in a pipe not even that.
"""

import io
import json
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..recipes.errors import printable, shortened
from .tables import counted, say, table

if TYPE_CHECKING:
    from ..recipes.runtimes import Runtime
    from ..validate.facts.dry_load import DryLoad
    from ..validate.facts.findings import CheckpointFacts
    from ..validate.facts.results import CheckData

_WIDEST = 120
_LONGEST = 4000
_COLOURS = {"error": "bold red", "warning": "bold yellow"}
# What a cure quotes: `a command`, 're:a pattern', or {"a": "JSON object"}.
_QUOTED = re.compile(r"`(?P<command>[^`]+ [^`]+)`|'(?P<pattern>re:[^']+)'|(?P<json>\{\".*\})")

_PLACE = re.compile(r"(`(?:keepmtp|KEEPMTP_CURES=\S+ vllm) [^`]*)\bPATH\b")


def show(
    console: Console,
    found: "CheckData",
    *,
    path: str | None = None,
    servers: "Sequence[Runtime]" = ("vllm",),
) -> None:
    """Print the findings of one checkpoint, what vLLM did with it on every pretended GPU, and the
    verdict.

    Args:
        console: to print on.
        found: what is shown.
        path: what commands call the checkpoint; default the name in `found`.
        servers: by whose rules it was judged; the verdict names them where they are not vLLM alone.
    """
    path = path or found.path
    lines: list[str | Text] = []
    for finding in found.findings:
        more = f" and {finding.count - 1:,} more" * (finding.count > 1)
        severity = (f"{finding.severity}: ", _COLOURS[finding.severity])
        cure = with_path(finding.cure, path)
        lines += [
            Text.assemble(severity, (shortened(finding.where, _LONGEST), "bold"), more),
            *wrapped(console, shortened(finding.says, _LONGEST), "  "),
            Text.assemble(("  cure: ", "green"), printable(cure)),
            *map("        {}".format, pasted(cure)),
            "",
        ]
    if found.dry:
        lines += _dry_loads(console, found)
    elif found.facts.mtp_layers_follow_k:
        lines.append(
            "vLLM builds an MTP layer for each drafted token: -k up to "
            f"{found.facts.num_mtp_layers}"
        )
    for line in (*lines, _verdict(found, servers)):
        say(console, line)


def with_path(words: str, path: str) -> str:
    """Words whose commands name a checkpoint in the place of PATH."""
    return _PLACE.sub(lambda found: found[1] + shlex.quote(path), words)


def pasted(cure: str) -> list[str]:
    """What a cure quotes, each as it is pasted: a command as it is, a pattern as a JSON string."""
    quoted = _QUOTED.finditer(cure)
    return [
        json.dumps(found["pattern"]) if found["pattern"] else found["command"] or found["json"]
        for found in quoted
    ]


def wrapped(console: Console, words: str, indent: str = "") -> list[str]:
    """Lines for this terminal, broken between words; one line in a pipe, whose reader has no
    width.
    """
    if not console.is_terminal:
        return [f"{indent}{words}"]
    return textwrap.wrap(
        words,
        min(console.width, _WIDEST),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _verdict(found: "CheckData", servers: "Sequence[Runtime]") -> Text:
    from ..recipes.runtimes.sglang import VERSION

    counts = Counter(finding.severity for finding in found.findings)
    words = (
        ", ".join(counted(count, severity) for severity, count in sorted(counts.items()))
        or "no findings"
    )
    verdict = ("check failed", "red")
    if found.ok:
        verdict = ("check passed", "green")
        if any(finding.rule == "family" for finding in found.findings):
            verdict = ("check passed in part", "green")
    if tuple(servers) != ("vllm",):
        names = {"vllm": f"vLLM {found.judged_by}", "sglang": f"SGLang {VERSION} (not run)"}
        words += f"; judged for {', '.join(names[each] for each in servers)}"
    if unjudged := found.facts.num_unjudged:
        words += f"; {counted(unjudged, 'module')} of the vision tower: not judged without --gpu"
    return Text.assemble(verdict, f" {printable(found.path)}: {words}")


def _dry_loads(console: Console, found: "CheckData") -> Iterator[str | Text]:
    """What one vLLM did on each GPU; of several a row each."""
    from ..validate.facts import dry_load

    by_version = dry_load.by_version(found.dry)
    whose = f"{dry_load.listed(by_version)}'s own classes and loaders on meta tensors"
    yield Text(f"dry load: vLLM {whose}", style="italic")
    if len(by_version) == 1:
        for load in found.dry:
            yield from _dry_load(load, found.facts)
    else:
        drawn = io.StringIO()
        rows = table("", dry_load.VERSION_COLUMNS, dry_load.version_rows(found.dry))
        Console(file=drawn, width=min(console.width, _WIDEST)).print(rows)
        yield from map(str.rstrip, filter(str.strip, drawn.getvalue().splitlines()))
        yield f"vLLM {dry_load.versions_in_short(found.dry)}"
    yield ""


def _dry_load(load: "DryLoad", facts: "CheckpointFacts") -> Iterator[str | Text]:
    yield f"  {load.gpu} at TP {load.tp}"
    if idle := facts.idle_mtp_layers(load.k):
        layers = f"{idle} MTP layers are"
        if idle == 1:
            layers = "1 MTP layer is"
        yield f"    {layers} not built at k={load.k}: vLLM leaves their tensors alone"
    models = {"target": load.target}
    if load.k:
        models["draft"] = load.draft
    for role, model in models.items():
        line = Text(f"    {role:<6}  {printable(model.cls or '-')}: ")
        if load.failure is not None and (not model.cls or load.failure.role == role):
            line.append("stopped", "red")
        else:
            line.append(f"{model.num_written:,} of {model.num_params:,} filled")
        if model.shared:
            line.append(f"; shared with the target: {printable(', '.join(model.shared))}")
        counts = Counter[str]()
        for kernel in model.kernels:
            if kernel.kernel:
                outcome = kernel.outcome.partition(" ")[0].rstrip(":")
                mark = {"ok": "", "not": "?", "refused": " refused"}[outcome]
                counts[kernel.kernel.partition(" ")[0] + mark] += kernel.count
        if counts:
            kernels = ", ".join(f"{count} {name}" for name, count in counts.items())
            line.append(f"; kernels: {printable(kernels)}")
        yield line
