"""Which recipes there are: the few keys of every shipped file that `keepmtp ls` shows.

In: recipes/models. Out: a `Listed` for each file. Nothing is validated here; `schema.read_recipe` does that before a
recipe is used.

Easy to get wrong: a listing must be there at once, so this module loads no pydantic, and YAML's parser in C where there
is one.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

MODELS = Path(__file__).parent / "models"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What a listing says of one recipe. The keys are those of `schema.Recipe`."""

    model: str
    variant: str
    is_default: bool
    summary: str
    family: str
    source: str
    needs_batches: bool

    @property
    def name(self) -> str:
        """`<model>.<variant>`, the recipe file's stem."""
        return f"{self.model}.{self.variant}"


def recipe_files() -> list[Path]:
    """The recipes that ship with keepmtp."""
    return sorted(MODELS.glob("*.yaml"))


def listed() -> list[Listed]:
    """Every shipped recipe, by model, the default variant first."""
    rows = [_read(path) for path in recipe_files()]
    return sorted(rows, key=lambda row: (row.model, not row.is_default, row.variant))


def _read(path: Path) -> Listed:
    raw = yaml.load(path.read_text(), Loader=_LOADER)  # noqa: S506 - a safe loader, in C or in Python
    return Listed(
        model=raw["model"],
        variant=raw["variant"],
        is_default=raw["default"],
        summary=raw["summary"],
        family=raw["family"],
        source=raw["source"],
        needs_batches=raw["calibration"] is not None,
    )
