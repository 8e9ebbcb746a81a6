"""A finished checkpoint with groups of others: the experts of one build, the dense parts and the
MTP block of another.

In: opened checkpoints of one model. Out: one `Source`, with the tensors of each group under the
names of their own files. Whoever plans, reads or writes sees one checkpoint.

Easy to get wrong: a group is its modules, and a build may store all experts of a layer in one
tensor. And a group fits no other norms than its own: AWQ and SmoothQuant move scale from a norm
into the weights after it, so `values.refuse_other_norms` compares them, before a byte is written.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

from ..recipes.errors import CheckpointError
from ..recipes.family import HFName
from ..recipes.family_view import Place
from .mtp_source import mtp_keys, with_tensors_of
from .safetensors_file import Entry
from .source import Source, view_of
from .source_of import refuse_another_model
from .stored import KV_SCALE_LEAVES

_BUILD = "must be a build of the same model as {}"
_CURE = "Name another build of the model"


def with_donors(source: Source, donors: Mapping[str, Source]) -> Source:
    """The checkpoint with groups of others.

    Args:
        source: has all other tensors.
        donors: a module group, `embedding`, `head` or `mtp` -> the checkpoint that it is from.

    Raises:
        RecipeError: another family, or another width or depth in config.json.
        CheckpointError: names a module that only one of them has.
    """
    different = {(donor.where, donor.revision): donor for donor in donors.values()}
    for donor in different.values():
        refuse_another_model(source, donor, rule=_BUILD, cure=_CURE)
    if "mtp" in donors:
        config = deepcopy({**source.config})
        family = view_of(source).family
        for (*outer, key), value, _ in mtp_keys(config, donors["mtp"].config, family):
            holder = config
            for name in outer:
                holder = holder[name]
            holder[key] = value
        source = replace(source, config=config)
    for group, donor in donors.items():
        source = _with_group(source, donor, group)
    return source


def _with_group(source: Source, donor: Source, group: str) -> Source:
    ours, modules = _group_of(source, group)
    theirs, given = _group_of(donor, group)
    odd = sorted(modules ^ given)
    if not theirs or (odd and group != "mtp"):  # whose layers the plan compares with config.json
        got = "one that only one of them has"
        if not odd:
            got = "none in either"
        raise CheckpointError(
            f"{donor.where}: {next(iter(odd), group)}",
            f"a donor must have the modules of {group} that {source.where} has, and no others",
            got=got,
            cure=_CURE,
        )
    left = {name: entry for name, entry in source.entries.items() if name not in ours}
    unindexed = {name: each for name, each in source.unindexed.items() if name not in ours}
    replaced = {**source.replaced, **ours}
    source = replace(source, entries=left, unindexed=unindexed, replaced=replaced)
    return with_tensors_of(source, donor, group, theirs)


def _group_of(opened: Source, group: str) -> tuple[dict[HFName, Entry], set[str]]:
    """The tensors of a group and its modules; of a stack of experts the single ones. Scales of the
    KV cache are of no group but the MTP block.
    """
    view = view_of(opened)
    stems = tuple(map(view.mtp_stem, range(view.num_mtp_layers)))
    tensors = dict[HFName, Entry]()
    modules = set[str]()
    for name, entry in {**opened.unindexed, **opened.entries}.items():
        place = view.place(name)
        own = ""
        if name.startswith(stems) or view.is_mtp(name):
            own = "mtp"
        elif place is not None and not name.endswith(KV_SCALE_LEAVES):
            own = place.role
        if own != group:
            continue
        tensors[name] = entry
        if place is not None:
            modules.update(_modules_at(place, entry))
    return tensors, modules


def _modules_at(place: Place, entry: Entry) -> Iterator[str]:
    if place.role == "table" and not place.row.table_scale:
        return  # the scale of all parts, which a plain table has not
    if not place.row.stacked or place.leaf:
        yield place.module
        return
    yield from place.unstacked(entry.shape[0])
