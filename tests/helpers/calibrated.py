"""Calibrated plans over tiny models, and statistics for them that no calibration made."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.plan.plan import Plan, TensorPlan, make_plan
from keepmtp.quantize.run.statistics import Statistics, write_statistics
from keepmtp.recipes.conventions import FORMATS
from keepmtp.recipes.family import HFName
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from writing import recipe_with, tiny, written


def planned(
    folder: Path,
    *,
    model: str = "glm-4.7",
    algorithm: str = "minmax",
    data: Literal["sparse", "random"] = "sparse",
    **words: str,
) -> Plan:
    """A calibrated plan over a model, tiny unless it is there; `words` are schemes by group, NVFP4
    where not said.
    """
    calibration = find_recipe("glm-4.7.nvfp4-fp8")[0].calibration
    assert calibration is not None
    mtp, rest = words.pop("mtp", "bf16"), words.get("rest", "NVFP4")
    backbone = {group: words.get(group, rest) for group in find_recipe(model)[0].backbone}
    data_block = calibration.model_dump() | {"algorithm": algorithm}
    recipe = recipe_with(model, backbone=backbone, mtp=mtp, calibration=data_block)
    made = make_plan(recipe, open_source(tiny(folder, model, data)))
    return replace(made, shard_bytes=2_000_000)


def in_both_formats(folder: Path, **words: str) -> dict[str, tuple[Plan, Path]]:
    """One model with made-up statistics, written once in each format."""
    plan = planned(folder / "source", data="random", **words)
    statistics = saved(folder / "statistics", made_up(plan))
    found = {}
    for name in FORMATS:
        recipe = Recipe.model_validate(plan.recipe.model_dump() | {"format": name})
        made = plan.again(recipe)
        written(made, folder / name, statistics=statistics)
        found[name] = (made, folder / name)
    return found


def made_up(plan: Plan) -> dict[HFName, torch.Tensor]:
    """Statistics for a plan: input scales, and modules packed from weights that are not the
    source's.
    """
    made: dict[HFName, torch.Tensor] = {}
    for number, unit in enumerate(plan.units):
        if unit[0].calibrated == "weights":
            rng = torch.Generator().manual_seed(number)
            matrices = [matrix for tensor in unit for matrix in _matrices(tensor, rng)]
            packed = pack(SCHEMES[unit[0].scheme], matrices)
            outputs = [output for tensor in unit for output in tensor.outputs]
            size = len(outputs) // len(packed)
            for index, parts in enumerate(packed):
                for output in outputs[index * size : (index + 1) * size]:
                    leaf = output.name.rpartition(".")[2]
                    made[output.name] = (
                        parts[leaf] if leaf in parts else torch.tensor([900.0 + number])
                    )
        else:
            for output in (output for tensor in unit for output in tensor.calibrated_outputs):
                dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[output.dtype]
                made[output.name] = torch.tensor([900.0 + number], dtype=dtype)
    return made


def _matrices(tensor: TensorPlan, rng: torch.Generator) -> list[torch.Tensor]:
    n, k = tensor.shape[-2] // max(1, len(tensor.stacked)), tensor.shape[-1]
    count = tensor.shape[0] * len(tensor.stacked) if tensor.stacked else 1
    return [torch.randn(n, k, generator=rng).bfloat16() for _ in range(count)]


def saved(folder: Path, tensors: dict[HFName, torch.Tensor]) -> Statistics:
    """Written as calibration does, one file a layer."""
    layers: dict[str, dict[HFName, torch.Tensor]] = {}
    for name, value in tensors.items():
        layers.setdefault(".".join(name.split(".")[:3]), {})[name] = value
    for layer, values in layers.items():
        write_statistics(folder / f"{layer}.safetensors", values, {"fingerprint": "f"})
    return Statistics.open(folder)
