"""What people see of a plan, as rich tables, and the same values as JSON.

In: values of the other floors. Out: tables, plain dictionaries, and JSON on standard output. Nothing is decided here.

Easy to get wrong: `keepmtp ls` uses this look too and must start at once, so the other floors are imported for types
only.
"""

import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape as escaped_markup
from rich.table import Table
from rich.text import Text

from ..recipes.errors import printable, size_in_words
from ..validate.measure.serve_line import serve_words

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan, TensorPlan
    from ..validate.facts.schema import JudgementWord

MIB = 2**20
GIB = 2**30
VERDICT_COLOURS: "Mapping[JudgementWord, str]" = {"pass": "green", "regression": "red", "infeasible": "yellow"}


def show_plan(console: Console, plan: "Plan") -> None:
    """Print what happens to each module group, with sizes before and after; the reasons; and the totals."""
    rows = plan_rows(plan)
    console.print(_fates(plan, rows))
    console.print(_reasons(rows))
    console.print(Text(f"{totals(plan)}\n"), highlight=False, soft_wrap=True)


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


def totals(plan: "Plan") -> str:
    """A plan in one line: its source, tensors, bytes, shards and MTP layers."""
    num_out = sum(len(tensor.outputs) for tensor in plan.tensors)
    num_shards, num_mtp_layers = len(plan.shards), plan.view.num_mtp_layers
    return (
        f"{printable(plan.source.where)} ({plan.source.revision}): {len(plan.entries):,} tensors in, {num_out:,} out; "
        f"{size_in_words(plan.num_bytes_before)} -> {size_in_words(plan.num_bytes_after)} in "
        f"{num_shards} shard{_s(num_shards)}; {num_mtp_layers} MTP layer{_s(num_mtp_layers)}"
        f"{_from_elsewhere(plan)}"
    )


def _from_elsewhere(plan: "Plan") -> str:
    other = plan.source.mtp_source
    return "" if other is None else f" of {printable(other.where)} ({other.revision})"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def escape(text: str) -> str:
    """A text inside rich's markup: its brackets are no markup, and it moves no cursor. It may be a stranger's name."""
    return escaped_markup(printable(text))


def plain_table(title: str, *, show_header: bool = True) -> Table:
    """The one look of keepmtp's tables, without columns yet."""
    return Table(
        title=escape(title),
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
            return "add a scale" if row["modules"] == "attention" else "add a copy"
        case "drop":
            return "drop"
        case _:
            return f"keep {stored}"


def config_listing(config: Mapping[str, Any]) -> Text:
    """Targets and ignore list, as the checkpoint's config.json will have them; a pattern is never broken."""
    lines = ["quantization_config, in vLLM's runtime names"]
    for group in config.get("config_groups", {}).values():
        lines += [f"  {group['format']}  {target}" for target in group["targets"]]
    if "quant_algo" in config:
        lines += [f"  modelopt  {config['quant_algo']}"]
        lines += [f"  {row['quant_algo']}  {name}" for name, row in config.get("quantized_layers", {}).items()]
    lines += [f"  ignore  {entry}" for entry in config["ignore"]]
    return Text("\n".join(map(printable, lines)) + "\n")


def next_steps(plan: "Plan", folder: Path) -> Text:
    """Where the result is, and the command that serves it, alone on its line."""
    command = shlex.join(serve_words(str(folder), max(1, plan.view.num_mtp_layers)))
    size = size_in_words(plan.num_bytes_after)
    cache = ", FP8 KV cache" if plan.recipe.kv_cache else ""
    return Text(f"{printable(str(folder))}: {size}{cache}, MTP block {_mtp_word(plan)}. Serve it:\n  {command}")


def _mtp_word(plan: "Plan") -> str:
    schemes = sorted({t.scheme or "plain" for t in plan.tensors if t.part == "mtp" and len(t.shape) >= 2})
    tuned = "tuned, " if any(tensor.tuned for tensor in plan.tensors) else ""
    return f"{tuned}kept in BF16" if schemes == ["plain"] else f"{tuned}stored as {', '.join(schemes)}"


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


def say(console: Console, line: str) -> None:
    """One line as it is, fit for a terminal, which may wrap it."""
    console.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(value: object, indent: int | None = 2) -> None:
    """One JSON value on standard output, nothing else."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")
