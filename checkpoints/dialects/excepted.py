"""The entries that leave modules plain, in the words of the tool that wrote the list.

In: a dialect, modules that are plain on disk, and the names of those that are quantized. Out:
entries that reach the former and none of the latter, as vLLM's class reads and compares them.

Easy to get wrong: an entry may hit more than it means. `model.layers.3*` excludes layers 30 to 39
too, so each entry is compared with every name that must stay quantized.
"""

from collections.abc import Iterable, Sequence

from .dialect import Dialect, Exceptions, entry_for
from .runtime_view import Module


def entries_for(
    dialect: Dialect, modules: Iterable[Module], quantized: Sequence[str], *, stem: str
) -> list[str]:
    """Entries that reach these modules.

    Args:
        dialect: as the class that has the modules reads it.
        modules: plain on disk.
        quantized: names that no entry may reach.
        stem: what the names of the modules begin with, if everything below it is plain.
    """
    exceptions = dialect.exceptions
    if exceptions is None:
        return []
    entries = dict[str, None]()
    if exceptions.of_stem and stem:
        entry = entry_for(exceptions.of_stem, stem)
        if not reach(dialect, [entry], quantized):
            if not exceptions.parts_come_first:
                return [entry]
            entries[entry] = None
            # What vLLM refuses needs its own name, which it looks for first.
            modules = [module for module in modules if module.resolution.error]
    for module in modules:
        for entry in _entries_of(dialect, exceptions, module, quantized):
            entries[entry] = None
    return [*entries]


def _entries_of(
    dialect: Dialect, exceptions: Exceptions, module: Module, quantized: Sequence[str]
) -> Sequence[str]:
    """The entries for one module: vLLM's name, or, where a mapper spoils that, the names on
    disk.
    """
    if exceptions.of_experts and module.kind == "experts":
        return [entry_for(exceptions.of_experts, module.name)]
    ways: list[Sequence[str]] = [[entry_for(exceptions.of_name, module.name)]]
    if exceptions.may_be_on_disk:
        ways.append(names_on_disk(module))
    safe = [entries for entries in ways if not reach(dialect, entries, quantized)]
    for entries in safe:
        if reach(dialect, entries, [module.name]):
            return entries
    # An entry that vLLM does not take for this module may be right for another reader.
    if safe:
        return safe[0]
    return []


def names_on_disk(module: Module) -> list[str]:
    """The names of a module's weights on disk; of routed experts, the one of all."""
    names = set[str]()
    for member in module.members:
        name = member.weight.module
        if module.kind == "experts" and ".experts." in name:
            name = name.partition(".experts.")[0] + ".experts"
        names.add(name)
    return sorted(names)


def reach(dialect: Dialect, entries: Iterable[str], names: Iterable[str]) -> bool:
    """Whether one of these entries hits one of `names`."""
    for entry in entries:
        read = dialect.reads(entry)
        for name in names:
            if dialect.hits(read, name):
                return True
    return False
