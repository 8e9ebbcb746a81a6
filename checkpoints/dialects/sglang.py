"""What SGLang 0.5.23 makes of a checkpoint's modules, in either dialect: what it cannot build,
whatever a config says.

In: a family's view and the named modules. Out: obstacles, half a sentence each, with SGLang's file:
why SGLang cannot serve the checkpoint with its MTP block. Then nothing is added to a config for
SGLang.

Source: SGLang 0.5.23 and the files in recipes/runtimes/sglang.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from ...recipes.family_view import FamilyView
from ...recipes.runtimes.sglang import sglang_model, sglang_spelling, sglang_stem
from .modules import NamedModule, Spellings, concrete, path_regex, without_number


def no_draft(view: FamilyView) -> str:
    """Why SGLang has no draft for the model under any config of ours; "" where it has one."""
    model = sglang_model(view.config)
    if model.own_config:
        return f"its classes read a quantization config of their own form alone ({model.file})"
    if model.draft is None:
        return f"{model.no_draft} ({model.file})"
    return ""


def sglang_asks(
    view: FamilyView, modules: Iterable[NamedModule], rename: Callable[[str], str] = str
) -> tuple[list[tuple[str, NamedModule, Spellings]], list[str]]:
    """The names that SGLang asks for, each with its module and as regexes; and names of modules of
    two schemes.

    Args:
        view: the family's names.
        modules: those that SGLang knows.
        rename: turns a name into that of the module that holds it, where the dialect asks so.
    """
    modules = list(modules)
    file = sglang_model(view.config).file
    owner = dict[str, NamedModule]()
    for module in modules:
        owner |= dict.fromkeys(concrete(module.spelled), module)
    asked = list[tuple[str, NamedModule, Spellings]]()
    clashes = list[str]()
    for module in modules:
        place = module.place
        stem, paths = sglang_spelling(view, place)
        layer = None
        cut = re.escape(stem)
        if place.layer is not None and str(place.layer) in stem:
            layer = place.layer
            cut = without_number(stem, place.layer)
        for path in paths:
            spelled = Spellings((cut,), layer, (path_regex(path),))
            name = rename(next(concrete(spelled)))
            other = owner.setdefault(name, module)
            if other.scheme == module.scheme:
                asked.append((name, module, spelled))
                continue
            first = f"{place.module} ({module.scheme or 'plain'})"
            second = f"{other.place.module} ({other.scheme or 'plain'})"
            clashes.append(f"it asks for {name} for both {first} and {second} ({file})")
    return asked, clashes


def unnamed(view: FamilyView, modules: Iterable[NamedModule]) -> Iterator[str]:
    """Quantized modules that SGLang builds without a quantization config."""
    model = sglang_model(view.config)
    for module in modules:
        place = module.place
        if not module.scheme or place.role == "head":
            continue
        is_built = place.layer is None or sglang_stem(view, place.part, place.layer) is not None
        if place.part == "mtp" and model.plain_draft:
            yield (
                f"it builds the MTP layer plain, and {place.module} is in {module.scheme} "
                f"({model.file})"
            )
        elif is_built and not sglang_spelling(view, place)[1]:
            yield f"it builds {place.module} plain, and it is in {module.scheme} ({model.file})"
