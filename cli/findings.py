"""What `keepmtp check` prints for people: a block for each finding, in a compiler's manner, and the
dry loads.

    error: mtp.layers.0.mlp.down_proj.weight and 6 more
      stored as plain BF16, but vLLM builds mtp.layers.0.mlp.down_proj as fp8_channel: ...
      cure: Add 're:^mtp[.]layers[.]0[.]' to ignore: vLLM's name, not the one on disk

In: a `CheckData`. Out: lines on a console. Nothing is decided here.

Easy to get wrong: people copy the cure, so only what will happen is wrapped.
"""

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from ..recipes.errors import counted, printable, shortened
from ..recipes.extras import missing
from ..recipes.frozen import Json
from ..recipes.runtimes import Runtime
from ..validate.check.built import BuiltGroup, groups_of
from ..validate.check.check import SERVERS, Checked
from ..validate.facts import dry_load
from ..validate.facts.dry_load import LoadAccount, cured_in, serving
from ..validate.facts.findings import Finding, commands
from ..validate.facts.results import CheckData
from . import exits
from .tables import answer, by_reason, table

if TYPE_CHECKING:
    from ..validate.check.reading import Level

_WIDEST = 120
# Characters: a hostile name may have a million.
_LONGEST = 4000
_MODELS = {"backbone": "target", "mtp": "draft"}  # of vLLM
_COLOURS = {"error": "bold red", "warning": "bold yellow"}
# A rule knows no path: its commands say PATH where this checkpoint is meant.
_PLACE = re.compile(r"(`(?:keepmtp|KEEPMTP_CURES=\S+ vllm) [^`]*)\bPATH\b")


def parts(
    data: CheckData,
    *,
    path: str = "",
    servers: Sequence[Runtime] = ("vllm",),
    console: Console | None = None,
) -> Iterator[RenderableType]:
    """The findings of one checkpoint, what vLLM did with it on every pretended GPU, and the
    verdict.

    Args:
        data: what is shown.
        path: what commands call the checkpoint; default the name in `data`.
        servers: by whose rules it was judged; the verdict names them where they are not vLLM alone.
        console: to be printed on; default standard output.
    """
    console = console or Console()
    for finding in data.findings:
        yield from _block(console, finding, path or data.path)
    if data.dry:
        yield from _dry_loads(data)
    elif data.facts.mtp_layers_follow_k:
        most = data.facts.num_mtp_layers
        yield f"vLLM builds an MTP layer for each drafted token: -k up to {most}"
    yield _verdict(data, servers)


def _block(console: Console, finding: Finding, path: str) -> Iterator[str | Text]:
    """One finding: where, what will happen, and the cure."""
    severity = (f"{finding.severity}: ", _COLOURS[finding.severity])
    more = ""
    if finding.count > 1:
        more = f" and {finding.count - 1:,} more"
    yield Text.assemble(severity, (shortened(finding.where, _LONGEST), "bold"), more)
    yield from wrapped(console, shortened(finding.says, _LONGEST), "  ")
    yield Text.assemble(("  cure: ", "green"), printable(with_path(finding.cure, path)))
    yield ""


def with_path(words: str, path: str) -> str:
    """Words whose commands name a checkpoint in the place of PATH."""
    # A function, since a path may hold a backslash, which means something else in a template.
    return _PLACE.sub(lambda command: command[1] + shlex.quote(path), words)


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


def _modules(groups: Sequence[BuiltGroup]) -> Iterator[RenderableType]:
    """What vLLM builds of each group of modules, and why."""
    rows = []
    named = []
    for group in groups:
        modules = f"{_MODELS[group.part]} {group.modules}"
        filled = f"{counted(group.tensors, 'tensor')}, {group.stored}"
        rows.append([f"{modules} ({group.count:,})", group.built, filled])
        named.append((group.why, modules))
    if rows:
        yield table("", ("modules", "built as", "filled from"), rows)
    for reason, modules in by_reason(named).items():
        yield f"Why {modules}: {reason}."


def _way_out(cure: str) -> Text:
    """A command that cures all that can be cured."""
    return Text.assemble(("cure: ", "green"), printable(cure))


def _verdict(data: CheckData, servers: Sequence[Runtime]) -> Text:
    counts = Counter(finding.severity for finding in data.findings)
    words = ", ".join(counted(counts[severity], severity) for severity in sorted(counts))
    if not words:
        words = "no findings"
    verdict = ("check failed", "red")
    if data.ok:
        verdict = ("check passed", "green")
        # The rule of a model that has no MTP block: the rest of it was judged.
        if any(finding.rule == "family" for finding in data.findings):
            verdict = ("check passed in part", "green")
    cures = dry_load.with_cures(data.dry).removeprefix(",")
    if cures and data.ok:
        words += f"; a plain vLLM fails: it loads{cures}, which serve and eval switch on"
    if tuple(servers) != ("vllm",):
        names = [SERVERS[server].format(data.judged_by) for server in servers]
        words += f"; judged for {', '.join(names)}"
    unjudged = data.facts.num_unjudged
    if unjudged:
        words += f"; {counted(unjudged, 'module')} of the vision tower: not judged without --gpu"
    if data.ok and not data.values_read:
        words += "; values: not read (--values reads them)"
    elif data.values_read == "norms":
        words += "; values: read of the MTP block's norms alone (--values reads more)"
    return Text.assemble(verdict, f" {printable(data.path)}: {words}")


def _dry_loads(data: CheckData) -> Iterator[RenderableType]:
    """What each vLLM did on each GPU."""
    yield Text("dry load: vLLM's own classes and loaders on meta tensors", style="italic")
    yield table("", dry_load.VERSION_COLUMNS, dry_load.version_rows(data.dry))
    short = dry_load.versions_in_short(data.dry)
    if short:
        yield f"vLLM {short}"
    yield ""


def check_json(data: CheckData, accounts: Sequence[LoadAccount] = ()) -> Json:
    """What `keepmtp check --json` prints of one checkpoint."""
    # Other programs read these names: they stay when a field of check.json gets another one.
    found = []
    for finding in data.findings:
        cure = with_path(finding.cure, data.path)
        found.append(finding.model_dump(exclude={"origin"}) | {"cure": cure})
    printed: Json = {
        "path": data.path,
        "ok": data.ok,
        "findings": found,
        "facts": data.facts.model_dump(),
    }
    for account in accounts:
        load = account.load
        models = {}
        for role in ("target", "draft"):
            model, _ = account.of(role)
            models[role] = {
                "class": model.cls,
                "parameters": model.num_params,
                "written": model.num_written,
                "shared": model.shared,
                "kernels": [kernel.model_dump() for kernel in model.kernels],
            }
        shown = load.model_dump(exclude={"k"}) | models
        shown |= {"num_drafts": load.k, "loads": load.failure is None}
        shown["cured_in"] = cured_in(load, data.dry)
        printed.setdefault("dry", []).append(shown)
    if accounts:
        # From the oldest on; none may serve it.
        printed["oldest_vllm"] = next(iter(serving(data.dry)), "")
    return printed


def with_values_read(checked: Checked, level: "Level") -> Checked:
    """What the values say too, where the packages are there that read them, and an MTP block: one
    with norms of zero loads without a word.
    """
    has_none = level == "norms" and not checked.data.facts.num_mtp_tensors
    if has_none or missing("quantize"):
        return checked
    from ..validate.check.values import with_values  # imports torch

    return with_values(checked, level)


def show(
    checked: Checked, servers: Sequence[Runtime], *, has_modules: bool = False, as_json: bool
) -> int:
    """Print what was found of one checkpoint, with what vLLM builds of its modules or without;
    returns its exit status.
    """
    groups = ()
    if has_modules and checked.runtime is not None:
        groups = groups_of(checked.runtime)
    cures = commands(checked.data.findings, checked.data.path)
    if as_json or checked.refusal is None:
        # In JSON, a refusal is a finding.
        value = check_json(checked.data, checked.accounts) | {"runtimes": servers, "cures": cures}
        if has_modules:
            value["modules"] = groups
        found = parts(checked.data, servers=servers)
        answer(value, chain(_modules(groups), found, map(_way_out, cures)), as_json=as_json)
    else:
        exits.say_refusal(checked.refusal)
    # One version of vLLM that does not start says nothing of the checkpoint.
    for error in checked.unjudged:
        exits.say_refusal(error)
    if checked.refusal is not None or checked.unjudged:
        return exits.REFUSAL
    if not checked.data.ok:
        return exits.FINDINGS
    return 0
