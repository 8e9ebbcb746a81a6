"""Which attention layers of a plan have scales of an FP8 KV cache, and under which names.

In: the recipe, the family, and the tensors that are planned already. Out: the scales to be
calibrated, two for each attention layer of vLLM's class `Attention`, those of the MTP block too; or
a refusal that says why there is no place for them.

Easy to get wrong: the config's entry holds for the draft as well, whether or not its loader takes
scales. Where it has no way in, the draft's cache is FP8 all the same, with scales of 1, and is
measured so. Latent attention caches one
vector for keys and values: compressed-tensors' entry never reaches its class.

Source: vLLM 0.32.0 layers/attention/{attention,mla_attention}.py, quantization/kv_cache.py, the
draft classes that the family files name; seen in dry loads of every family
(tests/vllm/test_kv_cache.py).
"""

from collections.abc import Iterable
from dataclasses import replace

from ...recipes.conventions import CACHE_LEAVES
from ...recipes.errors import RecipeError
from ...recipes.family import HFName, Part
from ...recipes.family_view import FamilyView
from ...recipes.schema import Recipe
from .tensor_plan import Output, TensorPlan


def with_cache_scales(
    recipe: Recipe, view: FamilyView, tensors: Iterable[TensorPlan]
) -> list[TensorPlan]:
    """The tensors, each projection of keys with its cache, and the scales that calibration will
    find.

    Raises:
        RecipeError: this family's attention has no place for them; it names the reason.
    """
    planned = list[TensorPlan]()
    scales = list[TensorPlan]()
    why = no_place(view)
    has_cache = False  # of the backbone
    for tensor in tensors:
        is_matrix = tensor.role == "attention" and len(tensor.shape) == 2 and tensor.fate != "drop"
        if is_matrix and any(".k_proj." in output.name for output in tensor.outputs):
            module = HFName(tensor.module.rpartition(".")[0])
            names = scale_names(view, tensor.part, module)
            tensor = tensor._replace(cache=names)
            has_cache = has_cache or tensor.part == "backbone"
            place = replace(tensor.place, module=module)
            for name in names:
                scales.append(
                    TensorPlan(
                        name=name,
                        inputs=(),
                        fate="add",
                        reason="recipe: kv_cache; scale of an FP8 cache from calibration data",
                        shape=(1,),
                        outputs=(Output(name, "BF16", (1,)),),
                        place=place,
                        shares=f"{module}.kv_cache",
                        calibrated="cache",
                    )
                )
        planned.append(tensor)
    if not why and not has_cache:
        why = "no attention layer with a projection of keys"
    if why:
        raise RecipeError(
            f"{recipe.name}: kv_cache",
            f"vLLM must have a place for scales of an FP8 cache in {view.family.model_type}",
            got=why,
            cure="Remove kv_cache from the recipe",
        )
    return planned + scales


def no_place(view: FamilyView) -> str:
    """Why no attention layer of the backbone takes scales; "" if they do."""
    if view.text_config.get("kv_lora_rank"):
        return (
            "latent attention, whose one cache for keys and values vLLM does not look up in "
            "compressed-tensors"
        )
    if view.family.loader.backbone_takes_kv_scales or view.family.no_fp8_cache:
        return view.family.no_fp8_cache
    return "a class of vLLM's without these parameters"


def scale_names(view: FamilyView, part: Part, module: HFName) -> tuple[HFName, ...]:
    """The names of an attention module's scales in compressed-tensors' convention; none where no
    loader takes them.
    """
    known = "usual"
    if part == "mtp":
        known = view.family.loader.draft_kv_names
    if not known:
        return ()
    holder = module
    if known == "own":
        holder = f"{module}.attn"
    return tuple(HFName(f"{holder}.{leaf}") for leaf in CACHE_LEAVES)
