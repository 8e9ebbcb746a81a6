"""Which families can be calibrated, found by trying: the data of `keepmtp ls families`, and
docs/tables/families.md.

    make docs       writes recipes/calibrated_families.json and the table in docs/tables/families.md

In: the fixture of every release that has a recipe, tiny and without weights. Out: the same bytes on
every machine.
"""

import json
import tempfile
from pathlib import Path

from keepmtp.checkpoints.source import open_source
from keepmtp.cli.ls import family_rows
from keepmtp.quantize.calibrate.model.skeleton import backbone_refusal
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.families import SUPPORT_FILE
from pages import numbered, table, with_part
from releases import shipped_recipes, source_layout, write_checkpoint

PAGE = Path(__file__).parent.parent.parent / "docs" / "tables" / "families.md"


def tried(folder: Path) -> str:
    """recipes/calibrated_families.json as it would be written today."""
    found: dict[str, dict[str, str]] = {}
    recipes = {each.model: each for each in shipped_recipes() if each.calibration is None}
    for model, recipe in sorted(recipes.items()):
        if model.startswith("tiny-"):
            continue
        write_checkpoint(folder / model, *source_layout(model))
        plan = make_plan(recipe, open_source(folder / model))
        refusal = backbone_refusal(plan)
        found.setdefault(plan.view.family.model_type, {})[model] = (
            _in_words(refusal, plan) if refusal else ""
        )
    return json.dumps(dict(sorted(found.items())), indent=1) + "\n"


def _in_words(refusal: KeepMTPError, plan: Plan) -> str:
    if plan.view.family.no_backbone:
        return plan.view.family.no_backbone
    got = str(refusal.got)
    return got if got.startswith("no class") else f"{refusal.rule}; got {got}"


def page() -> str:
    """docs/tables/families.md, and below the table why not."""
    rows, reasons = [], []
    for row in family_rows():
        cells = [row[column] for column in ("family", "backbone", "mtp", "proof")]
        for place, why in ((1, row["why_not_backbone"]), (2, row["why_not_mtp"])):
            if why:
                if why not in reasons:
                    reasons.append(why)
                cells[place] += f" [{reasons.index(why) + 1}]"
        rows.append(cells)
    names = ("family", "calibrate backbone", "calibrate MTP", "proof")
    notes = numbered(f"{why}." for why in reasons)
    return with_part(PAGE, f"{table(names, rows)}\n\nWhy not:\n\n{notes}")


def main() -> None:
    """Write both files."""
    with tempfile.TemporaryDirectory() as scratch:
        SUPPORT_FILE.write_text(tried(Path(scratch)))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
