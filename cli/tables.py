"""What people see: plans and reports as rich tables, and the same values as JSON.

In: values of the other floors. Out: tables, plain dictionaries, and JSON on standard output. Nothing is decided here.

Easy to get wrong: `keepmtp ls` uses this look too and must start at once, so the other floors are imported for types
only.
"""

import json
import sys
from collections import Counter, defaultdict
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
    from ..validate.dryload.facts import DryLoad, LoadedModel
    from ..validate.report.results import CheckData
    from ..validate.report.schema import JudgementWord

MIB = 2**20
GIB = 2**30
VERDICT_COLOURS: "Mapping[JudgementWord, str]" = {"pass": "green", "regression": "red", "infeasible": "yellow"}


def plan_summary(plan: "Plan") -> RenderableType:
    """What happens to each module group, with sizes before and after; the reasons; and the totals."""
    rows = plan_rows(plan)
    return Group(_fates(plan, rows), _reasons(rows), Text(_totals(plan)))


def _fates(plan: "Plan", rows: list[dict[str, Any]]) -> Table:
    table = plain_table(f"{plan.recipe.name}: {plan.recipe.summary}")
    for column in ("part", "modules", "fate"):
        table.add_column(column)
    for column in ("tensors", "before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    sums: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts = {key: row[key] for key in ("tensors", "bytes_before", "bytes_after")}
        sums[row["part"], row["modules"], _fate(row)].update(counts)
    previous = ""
    for (part, modules, fate), total in sums.items():
        if previous not in ("", part):
            table.add_section()
        sizes = size_in_words(total["bytes_before"]), size_in_words(total["bytes_after"])
        table.add_row(part if part != previous else "", modules, fate, f"{total['tensors']:,}", *sizes)
        previous = part
    return table


def _reasons(rows: list[dict[str, Any]]) -> Table:
    """Each reason that is not the recipe's, with the module groups that have it."""
    modules_of: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        is_choice = row["reason"].startswith("recipe:")
        if not is_choice and row["modules"] not in modules_of[row["reason"]]:
            modules_of[row["reason"]].append(row["modules"])
    table = plain_table("why, where it is not the recipe's choice", show_header=False)
    for reason, modules in modules_of.items():
        table.add_row(", ".join(modules), escape(reason))
    return table


def _totals(plan: "Plan") -> str:
    num_out = sum(len(tensor.outputs) for tensor in plan.tensors)
    num_shards, num_mtp_layers = len(plan.shards), plan.view.num_mtp_layers
    return (
        f"{plan.source.where} ({plan.source.revision}): {len(plan.entries):,} tensors in, {num_out:,} out; "
        f"{size_in_words(plan.num_bytes_before)} -> {size_in_words(plan.num_bytes_after)} in "
        f"{num_shards} shard{_s(num_shards)}; {num_mtp_layers} MTP layer{_s(num_mtp_layers)}\n"
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


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
    """Targets and ignore list, as the checkpoint's config.json will have them."""
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


def report(found: "CheckData") -> RenderableType:
    """A check's findings, or that there are none, and what vLLM did with it on every pretended GPU."""
    parts: list[RenderableType] = [_findings(found)]
    if found.dry:
        parts.append(_dry_loads(found.dry))
    return Group(*parts)


def _findings(found: "CheckData") -> RenderableType:
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


def _dry_loads(loads: "Sequence[DryLoad]") -> RenderableType:
    table = plain_table("dry load: vLLM's own classes and loaders on meta tensors")
    for column in ("GPU", "TP", "", "class", "filled", "shared with the target", "kernels"):
        table.add_column(column, overflow="fold")
    for load in loads:
        failure = load.failure
        for role, model in (("target", load.target), ("draft", load.draft)):
            is_stopped = failure is not None and (not model.cls or failure.role == role)
            filled = f"{model.num_written:,} of {model.num_params:,}"
            table.add_row(
                load.gpu if role == "target" else "",
                str(load.tp) if role == "target" else "",
                role,
                model.cls or "-",
                "[red]stopped[/]" if is_stopped else filled,
                escape(", ".join(model.shared)),
                escape(_kernels(model)),
            )
        table.add_section()
    return table


def _kernels(model: "LoadedModel") -> str:
    """Kernels by name with their number of layers; one whose preparation needs values is marked."""
    counts: dict[str, int] = defaultdict(int)
    for kernel in model.kernels:
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
        dtypes = "/".join(sorted({output.dtype for output in tensor.outputs}))
        stored = tensor.scheme or dtypes or "-"
        groups[tensor.part, tensor.role, tensor.fate, stored, tensor.form, tensor.reason].append(tensor)
    rows = []
    for (part, role, fate, stored, form, reason), tensors in sorted(groups.items()):
        # A copy that is added has the bytes of its original, which are counted there.
        inputs = [] if fate == "add" else [name for tensor in tensors for name in tensor.inputs]
        rows.append(
            {
                "part": part,
                "modules": role,
                "fate": fate,
                "stored_before": form,
                "stored_as": stored,
                "reason": reason,
                "tensors": len(tensors),
                "bytes_before": sum(plan.entries[name].num_bytes for name in inputs),
                "bytes_after": sum(output.num_bytes for tensor in tensors for output in tensor.outputs),
            }
        )
    return rows


def size_in_words(size: int) -> str:
    """Bytes for people: GiB, or MiB and KiB for small ones."""
    if not size:
        return "-"
    if size >= GIB // 10:
        return f"{size / GIB:,.1f} GiB"
    if size >= MIB // 10:
        return f"{size / MIB:,.1f} MiB"
    return f"{size / 1024:,.1f} KiB"


def print_json(value: object, indent: int | None = 2) -> None:
    """One JSON value on standard output, nothing else."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")
