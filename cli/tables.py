"""What people see: plans and reports as rich tables, and the same values as JSON.

In: values of the other stations. Out: renderables, plain dictionaries, and JSON on standard output. Nothing is decided
here, and no station is loaded: a listing has the same look and needs none.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..quantize.plan import Plan, TensorPlan
    from ..validate.check.findings import Report
    from ..validate.dryload.loader import Side, Verdict
    from ..validate.report.schema import JudgementWord

GIB = 2**30
VERDICT_COLOURS: "Mapping[JudgementWord, str]" = {"pass": "green", "regression": "red", "infeasible": "yellow"}


def plan_summary(plan: "Plan") -> RenderableType:
    """Fate by module group with sizes before and after, the reasons, and the totals."""
    table = plain_table(f"{plan.recipe.name}: {plan.recipe.summary}")
    for column in ("part", "modules", "fate"):
        table.add_column(column)
    for column in ("tensors", "before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    reasons: dict[str, list[str]] = {}
    for row in plan_rows(plan):
        totals = groups[row["part"], row["modules"], _fate(row)]
        for place, key in enumerate(("tensors", "bytes_before", "bytes_after")):
            totals[place] += row[key]
        if not row["reason"].startswith("recipe:"):
            modules = reasons.setdefault(row["reason"], [])
            if row["modules"] not in modules:
                modules.append(row["modules"])
    previous = ""
    for (part, modules, fate), (count, before, after) in groups.items():
        if previous not in ("", part):
            table.add_section()
        sizes = size_in_words(before), size_in_words(after)
        table.add_row(part if part != previous else "", modules, fate, f"{count:,}", *sizes)
        previous = part
    why = plain_table("why, where it is not the recipe's choice", show_header=False)
    for reason, modules in reasons.items():
        why.add_row(", ".join(modules), escape(reason))
    total = (
        f"{plan.source.where} ({plan.source.revision}): {len(plan.entries):,} tensors in, "
        f"{sum(len(tensor.outputs) for tensor in plan.tensors):,} out; {size_in_words(plan.num_bytes_before)} -> "
        f"{size_in_words(plan.num_bytes_after)} in {len(plan.shards)} shard{'s' * (len(plan.shards) != 1)}; "
        f"{plan.view.num_mtp_layers} MTP layer{'s' * (plan.view.num_mtp_layers != 1)}\n"
    )
    return Group(table, why, Text(total))


def plain_table(title: str, *, show_header: bool = True) -> Table:
    """The one look of keepmtp's tables, without columns yet."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_header=show_header,
    )


def _fate(row: Mapping[str, Any]) -> str:
    stored, forms = row["stored_as"], row["stored_before"]
    match row["fate"]:
        case "quantize":
            return f"quantize to {stored}"
        case "dequantize":
            return f"{stored} from {forms}"
        case "add":
            return "add a copy"
        case "drop":
            return "drop"
        case _:
            return f"keep {stored}"


def config_listing(config: Mapping[str, Any]) -> RenderableType:
    """Targets and ignore list, as they will stand in config.json."""
    table = plain_table("quantization_config, in vLLM's runtime names")
    table.add_column("entry", no_wrap=True)
    table.add_column("pattern", overflow="fold")
    for group in config["config_groups"].values():
        for target in group["targets"]:
            table.add_row(group["format"], escape(target))
    table.add_section()
    for entry in config["ignore"]:
        table.add_row("ignore", escape(entry))
    return table


def report(found: "Report") -> RenderableType:
    """A check's findings, or that there are none, and what vLLM did with it on every pretended GPU."""
    parts: list[RenderableType] = [_findings(found)]
    if found.dry:
        parts.append(_dry_loads(found.dry))
    return Group(*parts)


def _findings(found: "Report") -> RenderableType:
    if not found.findings:
        return Text.from_markup(f"[green]check passed[/] {escape(str(found.path))}: no findings")
    table = plain_table(f"check {found.path}")
    for column in ("severity", "where", "what will happen", "cure"):
        table.add_column(column, overflow="fold")
    for finding in found.findings:
        colour = "red" if finding.severity == "error" else "yellow"
        table.add_row(
            f"[{colour}]{finding.severity}[/]",
            escape(finding.where) + _more(finding.count),
            escape(finding.says),
            escape(finding.cure),
        )
    return table


def _dry_loads(verdicts: "Sequence[Verdict]") -> RenderableType:
    table = plain_table("dry load: vLLM's own classes and loaders on meta tensors")
    for column in ("GPU", "TP", "", "class", "filled", "shared with the target", "kernels"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        failure = verdict.failure
        for role, side in (("target", verdict.target), ("draft", verdict.draft)):
            is_stopped = failure is not None and (not side.cls or failure.role == role)
            filled = f"{side.num_written:,} of {side.num_params:,}"
            table.add_row(
                verdict.gpu if role == "target" else "",
                str(verdict.tp) if role == "target" else "",
                role,
                side.cls or "-",
                "[red]stopped[/]" if is_stopped else filled,
                escape(", ".join(side.shared)),
                escape(_kernels(side)),
            )
        table.add_section()
    return table


def _kernels(side: "Side") -> str:
    """Kernels by name with their number of layers; one whose preparation needs values is marked."""
    counts: dict[str, int] = defaultdict(int)
    for kernel in side.kernels:
        if kernel.kernel:
            mark = {"ok": "", "not": "?", "refused": " refused"}[kernel.outcome.partition(" ")[0].rstrip(":")]
            counts[kernel.kernel.partition(" ")[0] + mark] += kernel.count
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _more(count: int) -> str:
    return f" and {count - 1:,} more" if count > 1 else ""


def next_steps(plan: "Plan", folder: Path) -> Text:
    """Where the result is, and how it is served."""
    speculative = f'{{"method":"mtp","num_speculative_tokens":{max(1, plan.view.num_mtp_layers)}}}'
    return Text(
        f"{folder}: {size_in_words(plan.num_bytes_after)}, MTP block {_mtp_word(plan)}.\n"
        f"Serve it:  vllm serve {folder} --speculative-config '{speculative}'"
    )


def _mtp_word(plan: "Plan") -> str:
    schemes = sorted({t.scheme or "plain" for t in plan.tensors if t.part == "mtp" and len(t.shape) >= 2})
    return "kept in BF16" if schemes == ["plain"] else f"stored as {', '.join(schemes)}"


def plan_rows(plan: "Plan") -> list[dict[str, Any]]:
    """The plan by part, module group, fate and reason, with counts and bytes."""
    groups: dict[tuple[str, ...], list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        stored = tensor.scheme or "/".join(sorted({output.dtype for output in tensor.outputs})) or "-"
        groups[tensor.part, tensor.role, tensor.fate, stored, tensor.form, tensor.reason].append(tensor)
    entries = plan.entries
    return [
        {
            "part": part,
            "modules": role,
            "fate": fate,
            "stored_before": form,
            "stored_as": stored,
            "reason": reason,
            "tensors": len(tensors),
            "bytes_before": sum(entries[name].num_bytes for t in tensors for name in t.inputs if fate != "add"),
            "bytes_after": sum(output.num_bytes for t in tensors for output in t.outputs),
        }
        for (part, role, fate, stored, form, reason), tensors in sorted(groups.items())
    ]


def size_in_words(size: int) -> str:
    """Bytes for people: GiB, or MiB and KiB for small ones."""
    unit, divisor = next(((u, d) for u, d in (("GiB", GIB), ("MiB", 2**20)) if size >= d // 10), ("KiB", 1024))
    return f"{size / divisor:,.1f} {unit}" if size else "-"


def print_json(value: object, indent: int | None = 2) -> None:
    """One JSON value on standard output, nothing else."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")
