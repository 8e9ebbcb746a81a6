"""Which recipes there are: the few keys of every shipped recipe that `keepmtp ls` shows.

In: recipes/models. Out: a `Listed` for each recipe. The values are not checked here: `find.read_file` and
`schema.validated` do that before a recipe is used.

Easy to get wrong: `keepmtp ls` must answer at once, so this module loads no pydantic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .model_file import flat_recipes
from .yaml_file import load_shipped

_MODELS = Path(__file__).parent / "models"


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
        """`<model>.<variant>`, the recipe's full name."""
        return f"{self.model}.{self.variant}"


def model_files() -> list[Path]:
    """The model files that ship with keepmtp; the stem is the model's name."""
    return sorted(_MODELS.glob("*.yaml"))


def listed() -> list[Listed]:
    """Every shipped recipe, by model, the default variant first."""
    rows = [row for path in model_files() for row in _read(path)]
    return sorted(rows, key=lambda row: (row.model, not row.is_default, row.variant))


def _read(path: Path) -> Iterator[Listed]:
    for flat in flat_recipes(load_shipped(path), path).values():
        yield Listed(
            model=flat["model"],
            variant=flat["variant"],
            is_default=flat["default"],
            summary=flat["summary"],
            family=flat["family"],
            source=flat["source"],
            needs_batches=flat["calibration"] is not None,
        )
