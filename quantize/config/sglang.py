"""What SGLang 0.5.23 makes of a checkpoint's modules, in either dialect: what it cannot build, whatever a config says.

In: a family's view and the named modules. Out: obstacles, half a sentence each, with SGLang's file: why SGLang cannot
serve the checkpoint with its MTP block. Then nothing is added to a config for SGLang.

Source: SGLang 0.5.23 and the files in recipes/runtimes/sglang.py.
"""

from collections.abc import Iterable, Iterator

from ...recipes.family_view import FamilyView
from ...recipes.runtimes.sglang import sglang_model, sglang_spelling, sglang_stem
from .modules import NamedModule


def no_draft(view: FamilyView) -> str:
    """Why SGLang has no draft for the model under any config of ours; "" where it has one."""
    model = sglang_model(view.config)
    if model.own_config:
        return f"its classes read a quantization config of their own form alone ({model.file})"
    return "" if model.draft is not None else f"{model.no_draft} ({model.file})"


def clash(view: FamilyView, name: str, module: NamedModule, other: NamedModule) -> str:
    """That SGLang has one name for two modules of different schemes."""
    described = [f"{found.place.module} ({found.scheme or 'plain'})" for found in (module, other)]
    return f"it asks for {name} for both {' and '.join(described)} ({sglang_model(view.config).file})"


def unnamed(view: FamilyView, modules: Iterable[NamedModule]) -> Iterator[str]:
    """Quantized modules that SGLang builds without a quantization config."""
    model = sglang_model(view.config)
    for module in modules:
        place = module.place
        if not module.scheme or place.role == "head":
            continue
        is_built = place.layer is None or sglang_stem(view, place.part, place.layer) is not None
        if place.part == "mtp" and model.plain_draft:
            yield f"it builds the MTP layer plain, and {place.module} is in {module.scheme} ({model.file})"
        elif is_built and not sglang_spelling(view, place)[1]:
            yield f"it builds {place.module} plain, and it is in {module.scheme} ({model.file})"
