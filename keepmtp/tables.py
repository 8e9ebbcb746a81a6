"""What people see: plans, listings and reports as rich tables, and the same values as JSON.

In: values of the other stations. Out: renderables and plain dictionaries. Nothing is decided here.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .quantize.plan import Plan, TensorPlan
from .quantize.quant_config import quantization_config
from .recipes.families import families
from .recipes.schema import read_recipe, recipe_files
from .recipes.schemes import SCHEMES, num_bytes
from .validate.static import Report

GIB = 2**30


def listings() -> dict[str, list[dict[str, str]]]:
    """What `keepmtp ls` shows: rows of plain strings by listing."""
    recipes = [read_recipe(path) for path in recipe_files()]
    unique = {family.model_type: family for family in families().values()}
    return {
        "models": [
            {
                "model": recipe.model, "variant": recipe.variant + (" *" if recipe.default else ""),
                "calibration": "needed" if recipe.calibrated_schemes() else "-", "summary": recipe.summary,
            }
            for recipe in recipes
        ],
        "schemes": [
            {
                "scheme": scheme.name, "bits": f"{bits_per_weight(scheme.name):.2f}", "format": scheme.format,
                "calibration": "needed" if scheme.needs_calibration else "-", "hardware": scheme.hardware,
                "summary": scheme.summary,
            }
            for scheme in SCHEMES.values()
        ],
        "families": [
            {"family": family.model_type, "also": ", ".join(family.also), "notes": family.notes}
            for _, family in sorted(unique.items())
        ],
    }  # fmt: skip


def bits_per_weight(scheme: str) -> float:
    """Bits on disk per weight, scales included, for a 4096 x 4096 matrix."""
    specs = SCHEMES[scheme].tensors(4096, 4096)
    return 8 * sum(num_bytes(spec.dtype, spec.shape) for spec in specs) / 4096**2


def listing(name: str, rows: list[dict[str, str]]) -> Table:
    """One of `listings` as a table."""
    table = Table(title=f"{name}{' (* default variant)' if name == 'models' else ''}", title_justify="left")
    for number, column in enumerate(rows[0]):
        table.add_column(column, no_wrap=number < 2, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table


def plan_summary(plan: Plan) -> RenderableType:
    """Fate by module group, and sizes before and after."""
    table = Table(title=f"{plan.recipe.name}: {plan.recipe.summary}", title_justify="left")
    for column, justify in (
        ("part", "left"), ("modules", "left"), ("fate", "left"), ("stored as", "left"), ("tensors", "right"),
        ("GiB before", "right"), ("GiB after", "right"), ("why", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    last_part = ""
    for row in _rows(plan):
        if row["part"] != last_part:
            table.add_section()
            last_part = row["part"]
        table.add_row(
            row["part"], row["role"], row["fate"], row["stored as"], f"{row['tensors']:,}", _gib(row["bytes_before"]),
            _gib(row["bytes_after"]), escape(row["reason"]),
        )  # fmt: skip
    before, after = plan.num_bytes_before, plan.num_bytes_after
    source = f"{plan.source.where} ({plan.source.revision})"
    total = (
        f"{source}: {len(plan.entries):,} tensors in, {sum(len(t.outputs) for t in plan.tensors):,} out, "
        f"{_gib(before)} -> {_gib(after)} GiB, {len(plan.shards)} shard{'s' * (len(plan.shards) != 1)}; "
        f"MTP layers: {plan.view.num_mtp_layers}"
    )
    return Group(table, Text(total))


def config_listing(config: Mapping[str, Any]) -> RenderableType:
    """Targets and ignore list, as they will stand in config.json."""
    table = Table(title="quantization_config (vLLM's runtime names)", title_justify="left")
    table.add_column("entry", no_wrap=True)
    table.add_column("pattern", overflow="fold")
    for group in config["config_groups"].values():
        for target in group["targets"]:
            table.add_row(group["format"], escape(target))
    table.add_section()
    for entry in config["ignore"]:
        table.add_row("ignore", escape(entry))
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan for machines: totals, rows by module group, and the quantization_config."""
    return {
        "recipe": plan.recipe.model_dump(mode="json"),
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        "tensors": {"before": len(plan.entries), "after": sum(len(tensor.outputs) for tensor in plan.tensors)},
        "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
        "shards": len(plan.shards),
        "mtp_layers": plan.view.num_mtp_layers,
        "needs_calibration": plan.needs_calibration,
        "groups": _rows(plan),
        "quantization_config": quantization_config(plan),
    }


def report(found: Report) -> RenderableType:
    """A check's findings, or that there are none."""
    if not found.findings:
        return Text.from_markup(f"[green]check passed[/] {escape(str(found.path))}: no findings")
    table = Table(title=f"check {found.path}", title_justify="left")
    for column in ("severity", "where", "what will happen", "cure"):
        table.add_column(column, overflow="fold")
    for finding in found.findings:
        colour = "red" if finding.severity == "error" else "yellow"
        table.add_row(
            f"[{colour}]{finding.severity}[/]", escape(finding.where), escape(finding.says), escape(finding.cure)
        )
    return table


def next_steps(plan: Plan, folder: Path) -> Text:
    """Where the result is, and how it is served."""
    speculative = f'{{"method":"mtp","num_speculative_tokens":{max(1, plan.view.num_mtp_layers)}}}'
    return Text(
        f"{folder}: {plan.num_bytes_after / GIB:.3f} GiB, MTP block {_mtp_word(plan)}.\n"
        f"Serve it:  vllm serve {folder} --speculative-config '{speculative}'"
    )


def _mtp_word(plan: Plan) -> str:
    schemes = sorted({t.scheme or "plain" for t in plan.tensors if t.part == "mtp" and len(t.shape) >= 2})
    return "kept in BF16" if schemes == ["plain"] else f"stored as {', '.join(schemes)}"


def _rows(plan: Plan) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        stored = tensor.scheme or "/".join(sorted({output.dtype for output in tensor.outputs})) or "-"
        groups[tensor.part, tensor.role, tensor.fate, stored, tensor.reason].append(tensor)
    entries = plan.entries
    return [
        {
            "part": part, "role": role, "fate": fate, "stored as": stored, "tensors": len(tensors),
            "bytes_before": sum(entries[name].num_bytes for t in tensors for name in t.inputs if fate != "add"),
            "bytes_after": sum(output.num_bytes for t in tensors for output in t.outputs), "reason": reason,
        }
        for (part, role, fate, stored, reason), tensors in sorted(groups.items())
    ]  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / GIB:,.3f}" if size < 10 * GIB else f"{size / GIB:,.1f}"
