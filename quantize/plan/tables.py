"""Embedding, head and n-gram table of the backbone: which forms vLLM's classes take, of the target
and of the draft, which gets the target's embedding and head.

In: a recipe that names one of them, and the family. Out: a refusal where the form does not load.

Easy to get wrong: the target may load a form that the draft does not, although the draft never
computes with its own: many fill a head of their own before they are given the target's.

Source: vLLM 0.32.0 and 0.33.0 layers/vocab_parallel_embedding.py, layers/quantization/
{modelopt,compressed_tensors/compressed_tensors}.py, compressed_tensors_embedding.py; the classes
that the family files name. Seen in dry loads of every family (docs/tables/heads.md).
"""

from collections.abc import Iterable, Iterator, Mapping

from ...recipes.errors import RecipeError
from ...recipes.family import TABLE_ROLES, HFName, Part, Role
from ...recipes.family_view import FamilyView, Place
from ...recipes.frozen import Shape
from ...recipes.runtimes.vllm import NEWEST
from ...recipes.schema import Recipe
from ...recipes.schemes import SCHEMES, Scheme
from .tensor_plan import Output, TensorPlan

TABLE_WORDS: Mapping[str, str] = {"F8_E4M3": "float8_e4m3fn", "U8": "nvfp4"}
"""Dtype of a packed n-gram table's rows -> the word of `Family.table_key`."""
_BLOCKS = "vocab_parallel_embedding.py takes no scales of blocks"


def is_table(place: Place) -> bool:
    """Whether this is the backbone's embedding, head or n-gram table, which a recipe may name."""
    return place.part == "backbone" and place.role in TABLE_ROLES


def table_scale(place: Place, dtype: str) -> HFName:
    """The scale that all parts of an n-gram table share, whose rows have this dtype."""
    scale = place.stem + place.row.table_scale
    if dtype == "U8":
        scale += "_2"
    return HFName(scale)


def table_outputs(place: Place, scheme: Scheme, shape: Shape) -> tuple[Output, ...]:
    """A part of an n-gram table as vLLM reads it under any dialect: modelopt's names, and the first
    part with the scale of all.

    Source: vLLM 0.33.0 models/qwen4_exp/nvidia/ngram_embedding.py (load_weights) and
    common/ngram_embedding.py (create_weights).
    """
    outputs = list[Output]()
    for spec in scheme.weight_tensors(*shape):
        name = HFName(f"{place.module}.{spec.suffix.removesuffix('_packed')}")
        if spec.shape == (1,):
            name = table_scale(place, outputs[0].dtype)
        if spec.shape != (1,) or place.module.endswith("_0"):
            outputs.append(Output(name, spec.dtype, spec.shape))
    return tuple(outputs)


def refuse_table(recipe: Recipe, view: FamilyView, place: Place, scheme: Scheme) -> None:
    """Refuse a form that vLLM does not load for an embedding or a head.

    Raises:
        RecipeError: names the module, vLLM's file and version.
    """
    misfits = _head_misfits
    if place.role != "head":
        misfits = _embedding_misfits
    for why, otherwise in misfits(recipe, view, place, scheme):
        raise RecipeError(
            f"{recipe.name}: backbone {place.role}",
            f"vLLM {NEWEST} must load {place.module} in {scheme.name}",
            got=why,
            cure=f"Set {place.role}: {otherwise}",
        )


def refuse_tables(recipe: Recipe, view: FamilyView, tensors: Iterable[TensorPlan]) -> None:
    """Refuse a packed embedding or head that another tensor stands against: one matrix for both, or
    a plain copy for a draft that is built packed.

    Raises:
        RecipeError: names what is there.
    """
    roles = set[tuple[Part, Role]]()
    packed = list[TensorPlan]()
    for tensor in tensors:
        roles.add((tensor.part, tensor.role))
        if tensor.scheme and is_table(tensor.place):
            packed.append(tensor)
    if view.is_tied or ("backbone", "head") not in roles:
        for group in ("embedding", "head"):
            if recipe.backbone.get(group) in SCHEMES and ("backbone", "embedding") in roles:
                raise RecipeError(
                    f"{recipe.name}: backbone {group}",
                    "embedding and head must be two matrices: one is looked up, the other "
                    "multiplied",
                    got="a head that is tied to the embedding",
                    cure=f"Remove {group} from the recipe",
                )
    for tensor in packed:
        is_drafts = "mtp" in view.family.embeddings and ("mtp", "embedding") in roles
        if tensor.role == "embedding" and is_drafts:
            raise RecipeError(
                f"{recipe.name}: backbone embedding",
                f"vLLM {NEWEST} builds the draft's embedding as the target's: both need one form",
                got=f"{tensor.scheme} for {tensor.module}, and a plain copy in the MTP block",
                cure="Set embedding: bf16",
            )


def _head_misfits(
    recipe: Recipe, view: FamilyView, place: Place, scheme: Scheme
) -> Iterator[tuple[str, str]]:
    """Why not, and what the head can have instead."""
    loader = view.family.loader
    plain = loader.plain_alone.get("head", "")
    if plain or not place.row.loads_quantized:
        yield (
            f"{plain or place.row.why_kept}, which builds it plain whatever the config says",
            "bf16",
        )
    if scheme.form == "fp8_block":
        yield _BLOCKS, "FP8_DYNAMIC"
    if recipe.format == "modelopt" and scheme.form == "nvfp4" and loader.fills_head:
        why = "a draft that fills a plain head of its own with codes of another width"
        yield why, "FP8_DYNAMIC, or use format: compressed-tensors"


def _embedding_misfits(
    recipe: Recipe, view: FamilyView, place: Place, scheme: Scheme
) -> Iterator[tuple[str, str]]:
    """Why not, and what an embedding or an n-gram table can have instead."""
    if place.role == "table":
        if scheme.name not in ("FP8", "NVFP4A16"):
            yield (
                "qwen4_exp/common/ngram_embedding.py, which looks up no other",
                "NVFP4A16, FP8 or bf16",
            )
        return
    family = view.family
    plain = family.loader.plain_alone.get("embedding", "")
    # Where the class asks without a name, no target reaches the embedding alone.
    if plain or not family.embeddings.get("backbone"):
        yield f"{plain or 'its class'}, which builds it plain whatever the config says", "bf16"
    if recipe.format == "modelopt":
        yield "modelopt's config, by which no row is looked up packed", "bf16"
    if scheme.form != "int_packed" or scheme.has_zero_point:
        yield (
            "compressed_tensors_embedding.py, which looks up integers without zero points",
            "W8A16",
        )
