"""A plan for people and machines: fates, calibration, the entries of config.json, and what would stop the run.

In: a plan. Out: tables on standard output, or one JSON value. Nothing is decided here.

Easy to get wrong: the JSON has no refusals. Only people see what would stop the run.
"""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from ..checkpoints.identity import listed
from ..quantize.config.written import config_of
from ..quantize.needs.needs import Needs, lines
from ..quantize.plan.choices import choices_of
from ..quantize.plan.own_code import code_left_out
from ..quantize.plan.plan import Plan
from ..quantize.write.refusals import refusals
from ..recipes.errors import printable
from ..recipes.runtimes.sglang import VERSION
from . import calibration_tables, tables
from .tables import escape


def show(made: Plan, needs: Needs, *, as_json: bool) -> None:
    """Print a plan and what it needs, and for people also what would stop the run."""
    if as_json:
        tables.print_json(plan_json(made) | {"needs": asdict(needs)})
        return
    out = Console()
    tables.show_plan(out, made)
    out.print(companions(made), highlight=False, soft_wrap=True)
    if made.recipe.is_searched:
        out.print(Text("\n".join([*budget_lines(made), ""])), soft_wrap=True)
    if made.needs_batches:
        out.print(calibration_tables.will_do(made))
    config = config_of(made)
    out.print(tables.config_listing(config.value), highlight=False, soft_wrap=True)
    out.print(Text(f"served by: vLLM 0.32, {printable(config.line)}\n"), soft_wrap=True)
    out.print(Text("\n".join([*lines(needs), ""])), soft_wrap=True)
    for refusal in refusals(made):
        out.print(f"[yellow]Would be refused:[/] {escape(refusal)}", highlight=False, soft_wrap=True)


def _separate_mtp(plan: Plan) -> dict[str, Any]:
    other = plan.source.mtp_source
    return {} if other is None else {"mtp_source": {"name": other.where, "revision": other.revision}}


def companions(plan: Plan) -> Text:
    """Which files the output gets besides weights, and which it does not."""
    left = plan.source.left
    lines = [f"carried: {', '.join(plan.companions) or 'no other file'}", code_left_out(plan)]
    lines.append(f"left: {listed(left)}" if left else "")
    return Text("\n".join([*map(printable, filter(None, lines)), ""]))


def budget_json(plan: Plan) -> dict[str, Any]:
    """What is known of a search before it: the budget, the units, and the sizes that are possible."""
    choices = choices_of(plan.recipe, plan.source)
    assert plan.recipe.backbone_auto is not None
    words = {word: choices.uniform(word) for word in plan.recipe.backbone_auto.candidates}
    words = {"smallest": choices.smallest, **words, "largest": choices.largest}
    sizes = {
        name: {"bytes": choices.num_bytes(each), "bits": round(choices.bits(each), 4), "fits": choices.fits(each)}
        for name, each in words.items()
    }
    return {"budget": plan.recipe.budget, "units": len(choices.units), "plans": sizes}


def budget_lines(plan: Plan) -> list[str]:
    """The same for people; one word for all units is that for those that it suits."""
    found = budget_json(plan)
    said = [f"Budget {found['budget']}: a search chooses the words of {found['units']} units. All files would have"]
    for name, size in found["plans"].items():
        verdict = "fits" if size["fits"] else "does not fit"
        said.append(f"  {name:<12} {size['bytes']:>19,} bytes  {size['bits']:>6.2f} bits a weight  {verdict}")
    return said


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan for machines: totals, rows by module group, the quantization_config, and the calibration."""
    config = config_of(plan)
    return {
        "recipe": plan.recipe.model_dump(mode="json"),
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        **_separate_mtp(plan),
        "tensors": {"before": len(plan.entries), "after": sum(len(tensor.outputs) for tensor in plan.tensors)},
        "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
        "shards": len(plan.shards),
        "carried": list(plan.companions),
        "left": [*(() if plan.trust_remote_code else plan.source.code), *plan.source.left],
        "mtp_layers": plan.view.num_mtp_layers,
        "needs_calibration": plan.needs_calibration,
        "groups": tables.plan_rows(plan),
        "quantization_config": config.value,
        "sglang": {"version": VERSION, "obstacles": list(config.obstacles)},
        "calibration": calibration_tables.will_do_json(plan),
        **({"search": budget_json(plan)} if plan.recipe.is_searched else {}),
    }
