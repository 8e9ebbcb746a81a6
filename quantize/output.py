"""The output folder without its shards: refusals, config.json, index, record, and the final name.

In: a plan. Out: small files, written whole or not at all. No weight is read and torch is not needed, so a refusal
costs nothing.

Easy to get wrong: only the same plan may continue from a killed run's shards. The file OUT.partial.sha256 has the
fingerprint of that plan; it is removed last.
"""

import hashlib
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoints.companions import inside
from ..checkpoints.files import complete, held, partial_path, write_whole
from ..checkpoints.record import RECIPE, RECORD, Record
from ..checkpoints.source import INDEX, file_sizes
from ..recipes.errors import RecipeError
from .plan import Plan
from .quant_config import quantization_config

# Calibrated values depend on their versions.
_CALIBRATING = ("llmcompressor", "compressed-tensors", "transformers")


def _stamp(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial.sha256")


def refuse_output(plan: Plan, out: Path, *, calibration: str | None = "") -> None:
    """Refuse an output folder in which the run could not end, before a byte is written.

    Args:
        plan: what will be written.
        out: where.
        calibration: what `fingerprint` takes by that name; None while it is not known yet, so that an unfinished
            output is not compared.

    Raises:
        RecipeError: it exists, is inside the source, its disk is too small, or its unfinished part is another run's.
    """
    if out.exists():
        raise RecipeError(
            out,
            "an existing output is never overwritten",
            got="a finished folder",
            cure="Choose another OUT, or remove it",
        )
    folder = plan.source.folder
    if folder is not None and out.resolve().is_relative_to(folder.resolve()):
        raise RecipeError(
            out, "the output must lie outside the source", got=f"a folder in {folder}", cure="Choose another OUT"
        )
    partial = partial_path(out)
    done = sum((partial / s.file).stat().st_size for s in plan.shards if (partial / s.file).is_file())
    missing = plan.num_bytes_after - done
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if missing > free:
        raise RecipeError(
            out,
            f"{missing / 2**30:.1f} GiB must be free on its disk",
            got=f"{free / 2**30:.1f} GiB",
            cure="Choose another OUT, or make room",
        )
    if folder is None or calibration is None or not partial.is_dir():
        return
    stamp = _stamp(out)
    if not stamp.is_file() or stamp.read_text() != fingerprint(plan, calibration):
        raise RecipeError(
            partial,
            "an unfinished output can only be resumed with the same recipe, source, "
            "calibration data and keepmtp version",
            got="another plan",
            cure="Remove it, or choose another OUT",
        )


@contextmanager
def claim(plan: Plan, out: Path, *, calibration: str = "") -> Iterator[Path]:
    """The partial folder, marked as this plan's and held against other runs for as long as the context lasts.

    `calibration` is what `fingerprint` takes.

    Raises:
        RecipeError: another run holds it.
    """
    partial = partial_path(out)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_whole(_stamp(out), fingerprint(plan, calibration))
    partial.mkdir(exist_ok=True)
    with held(partial, "only one run may write an output"):
        yield partial


def finish(plan: Plan, partial: Path, *, recipe_text: str, calibration: Mapping[str, Any] | None = None) -> None:
    """Write all files but the shards: config.json, index, tokenizer and other files, recipe, record."""
    write_whole(partial / "config.json", json.dumps(output_config(plan), indent=2, ensure_ascii=False) + "\n")
    weight_map = {output.name: shard.file for shard in plan.shards for output in shard.outputs}
    index = {"metadata": {"total_size": plan.num_bytes_after}, "weight_map": dict(sorted(weight_map.items()))}
    write_whole(partial / INDEX, json.dumps(index, indent=2) + "\n")
    assert plan.source.folder is not None
    for name in plan.companions:
        (partial / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(inside(plan.source.folder, name), partial / name)
    write_whole(partial / RECIPE, recipe_text)
    write_whole(partial / RECORD, record_of(plan, calibration).text())


def publish(partial: Path, out: Path) -> None:
    """Give a whole checkpoint its final name."""
    assert partial == partial_path(out)
    complete(out)
    _stamp(out).unlink()


def output_config(plan: Plan) -> dict[str, Any]:
    """The source's config.json with the new quantization_config in place of whatever it had."""
    config = {key: value for key, value in plan.source.config.items() if key != "compression_config"}
    if "quantization_config" in (config.get("text_config") or {}):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    return {**config, "quantization_config": quantization_config(plan)}


def fingerprint(plan: Plan, calibration: str = "") -> str:
    """SHA-256 over everything the output's bytes depend on: recipe, decisions, source files, versions.

    Args:
        plan: over a local source.
        calibration: identifies the batches, such as the hash of their ids; counts only where the plan needs batches.
    """
    assert plan.source.folder is not None
    folder = plan.source.folder
    files = {name: [size, (folder / name).stat().st_mtime_ns] for name, size in file_sizes(plan.source).items()}
    digest = hashlib.sha256()
    recipe = plan.recipe.model_dump(mode="json", exclude={"evaluation", "gates"})  # they change no byte of a shard
    for part in (recipe, output_config(plan), files, [__version__, _versions("torch")]):
        digest.update(json.dumps(part).encode() + b"\0")
    for tensor in plan.tensors:
        digest.update(f"{tensor.name} {tensor.fate} {tensor.scheme} {tensor.outputs}\n".encode())
    if plan.needs_calibration:
        digest.update(json.dumps([calibration, _versions(*_CALIBRATING)]).encode())
    return digest.hexdigest()


def record_of(plan: Plan, calibration: Mapping[str, Any] | None = None) -> Record:
    """What makes this checkpoint, without dates: the same input gives the same record."""
    packages = ("torch", "numpy", *(_CALIBRATING if calibration else ()))
    source = plan.source
    return Record.model_validate(
        {
            "keepmtp": __version__,
            "recipe": plan.recipe.model_dump(mode="json"),
            "source": {
                "name": source.where if source.revision != "local" else Path(source.where).name,
                "revision": source.revision,
                "files": file_sizes(source),
            },
            "calibration": dict(calibration) if calibration else None,
            "tensors": dict(Counter(tensor.fate for tensor in plan.tensors)),
            "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
            "versions": {"python": platform.python_version(), **_versions(*packages)},
        }
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
