"""Which recipes there are: the few keys of every shipped recipe that `keepmtp ls` shows.

In: recipes/models. Out: a `Listed` for each recipe. The values are not checked here: `find.read_file` and
`schema.validated` do that before a recipe is used.

Easy to get wrong: `keepmtp ls` must answer at once, so this module loads no pydantic. A recipe of a folder that is not
here, such as one of models/ in a package without it, is not listed: nobody could run it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_file import flat_recipes
from .shipped import find_path
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
    knobs: str = ""
    """How it searches scales, and what it says to its algorithm: `gptq: actorder null, block_size 64`."""

    @property
    def name(self) -> str:
        """`<model>.<variant>`, the recipe's full name."""
        return f"{self.model}.{self.variant}"


def model_files() -> list[Path]:
    """The model files that ship with keepmtp; the stem is the model's name."""
    return sorted(_MODELS.glob("*.yaml"))


def listed() -> list[Listed]:
    """Every shipped recipe that can be run, by model, the default variant first."""
    rows = [row for path in model_files() for row in _read(path)]
    return sorted(rows, key=lambda row: (row.model, not row.is_default, row.variant))


def _read(path: Path) -> Iterator[Listed]:
    for flat in flat_recipes(load_shipped(path), path).values():
        if not _is_here(flat):
            continue
        yield Listed(
            model=flat["model"],
            variant=flat["variant"],
            is_default=flat["default"],
            summary=flat["summary"],
            family=flat["family"],
            source=flat["source"],
            needs_batches=flat["calibration"] is not None,
            knobs="; ".join(filter(None, (_search(flat), _knobs(flat["calibration"])))),
        )


def _search(flat: Mapping[str, Any]) -> str:
    return f"search: {flat['search']}" if flat.get("search") else ""


def _knobs(calibration: Mapping[str, Any] | None) -> str:
    """The knobs in a calibration block, which has them under its algorithm's name."""
    algorithm = calibration["algorithm"] if calibration else ""
    written = calibration.get(algorithm) if calibration else None
    return f"{algorithm}: {in_words(written)}" if written else ""


def in_words(knobs: Mapping[str, Any]) -> str:
    """Knobs as they are in YAML: "actorder null, duo_scaling true"."""
    yaml = {None: "null", True: "true", False: "false"}
    said = {key: yaml[value] if value is None or isinstance(value, bool) else value for key, value in knobs.items()}
    return ", ".join(f"{key} {value}" for key, value in said.items())


def _is_here(flat: Mapping[str, Any]) -> bool:
    """Whether the files that a recipe names are on this machine; what is on the Hub is not asked for."""
    calibration = flat["calibration"]
    named = [flat["source"]] if flat["revision"] == "local" else []
    named += [calibration["dataset"]] if calibration and calibration["dataset_revision"] == "local" else []
    return all(find_path(name) is not None for name in named)
