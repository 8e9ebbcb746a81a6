"""Which schemes a module can take: rules of vLLM's loaders, asked before a byte is written."""

import pytest
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import RecipeError
from releases import source_layout, write_checkpoint
from writing import recipe_with

BF16 = dict.fromkeys(("attention", "dense_mlp", "shared_experts", "experts"), "bf16")


@pytest.mark.parametrize(
    ("role", "is_refused"), [("dense_mlp", False), ("shared_experts", False), ("experts", True)]
)
def test_only_the_last_shard_of_a_linear_module_may_end_in_a_part_block(role, is_refused, tmp_path):
    """192 rows are one block and a half. down_proj is a shard alone; experts are fused by vLLM."""
    config, tensors = source_layout("glm-4.7")
    for name, (dtype, shape) in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = (dtype, (192, shape[1]))
    folder = write_checkpoint(tmp_path, config, tensors)
    recipe = recipe_with("glm-4.7", backbone=BF16 | {role: "FP8_BLOCK"}, mtp="source")
    if not is_refused:
        plan = make_plan(recipe, open_source(folder))
        assert "FP8_BLOCK" in {tensor.scheme for tensor in plan.tensors}
        return
    with pytest.raises(RecipeError, match=r"N divisible by 128 .*got N=192 in .*experts\.0\.down"):
        make_plan(recipe, open_source(folder))
