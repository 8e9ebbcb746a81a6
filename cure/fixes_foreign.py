"""Fixes of the lists of GPTQ, AWQ, Quark and AutoRound: a plain MTP block is on the list of what is left alone.

In: a `Checked`, and the proposal that its config is in. Out: a change of the list, in the words of its tool.

Easy to get wrong: with an empty `modules_to_not_convert`, vLLM finds the plain modules of an AWQ checkpoint in its
headers; with one entry it does not look. So the first entry comes with all others. And GPTQ's first expression that
matches decides, so an exception goes before what is there.

Source: vLLM 0.32.0 quantization/utils/gptq_utils.py (get_dynamic_override), auto_awq.py (maybe_update_config),
quark/utils.py (should_ignore_layer), inc/config_parser.py; the classes of validate/check/dialects read them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..validate.check.check import Checked
from ..validate.check.dialects.autoround import AutoRound
from ..validate.check.dialects.awq import Awq
from ..validate.check.dialects.gptq import Gptq
from ..validate.check.dialects.quark import Quark
from ..validate.check.runtime_view import Module, RuntimeView
from ..validate.check.vllm_module import ConfigEntry
from .fixes_lists import place_of_config
from .proposal import CONFIG, Edit, Proposal, SetValue


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a tool writes that a module is left alone.

    Attributes:
        key: of quantization_config.
        of_stem: the entry for all names that start so.
        of_name: the entry for one module.
        value: what an entry of an object has; None where `key` is a list.
    """

    key: str
    of_stem: Callable[[str], str]
    of_name: Callable[[str], str]
    value: Mapping[str, Any] | None = None


_SPELLINGS: Mapping[type, _Spelling] = {
    Gptq: _Spelling("dynamic", lambda s: f"-:^{re.escape(s)}", lambda n: f"-:^{re.escape(n)}$", {}),
    Awq: _Spelling("modules_to_not_convert", str, str),
    Quark: _Spelling("exclude", lambda s: f"re:^{re.escape(s)}.*", str),
    AutoRound: _Spelling(
        "extra_config",
        lambda s: f"^{re.escape(s)}.*",
        lambda n: f"^{re.escape(n)}$",
        {"bits": 16, "data_type": "float"},
    ),
}


def plain_modules_are_listed(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Plain modules, above all of the MTP block, that the tool's list does not reach: F15, F16, F20, F26, F38, F47."""
    runtime, place = checked.runtime, place_of_config(proposal)
    spelling = None if runtime is None else _SPELLINGS.get(type(runtime.dialect))
    if runtime is None or place is None or spelling is None:
        return
    now = proposal.value(CONFIG, (*place, spelling.key)) or ([] if spelling.value is None else {})
    missed = [module for module in runtime.modules if _is_plain(module) and module.resolution.built.form != "plain"]
    heads = [each.where for each in checked.data.findings if each.rule == "draft-head"]
    is_awq_without = isinstance(runtime.dialect, Awq) and not now
    if not missed and not heads and not is_awq_without:
        return
    if is_awq_without:
        missed = [module for module in runtime.modules if _is_plain(module)]
    entries = [*_entries(runtime, spelling, missed), *map(spelling.of_name, heads)]
    if is_awq_without:  # vLLM's own list has the modules of other parts, too
        entries += [prefix for _, prefix, _ in runtime.view.layout.opaque]
    lines = {entry: dict(spelling.value or {}) for entry in entries}
    why = "plain on disk; without an entry vLLM builds it quantized, and raises KeyError or on a shape"
    value: Any = [*now, *(entry for entry in entries if entry not in now)] if isinstance(now, list) else lines | now
    yield SetValue(file=CONFIG, place=(*place, spelling.key), value=value, why=why)


def _entries(runtime: RuntimeView, spelling: _Spelling, missed: Sequence[Module]) -> list[str]:
    """Entries for these modules, one for an MTP layer that is plain altogether; none that hits a quantized module."""
    packed = frozenset(name for module in runtime.modules if not _is_plain(module) for name in _names(module))
    found: dict[str, None] = {}
    for module in missed:
        stem = "" if module.layer is None else runtime.view.runtime_stem(module.part, module.layer)
        whole = [other for other in runtime.modules if (other.part, other.layer) == (module.part, module.layer)]
        is_layer = (
            module.part == "mtp" and stem and all(_is_plain(other) or not other.loads_quantized for other in whole)
        )
        entry = spelling.of_stem(stem) if is_layer else spelling.of_name(module.name)
        read = entry.removeprefix("-:") if isinstance(runtime.dialect, Gptq) else entry
        as_entry = ConfigEntry(where=spelling.key, written=entry, read=(read,))
        if is_layer or not runtime.dialect.covered(as_entry, packed):
            found[entry] = None
    return [*found]


def _names(module: Module) -> tuple[str, ...]:
    return (module.name, *module.shards) if module.loads_quantized else ()


def _is_plain(module: Module) -> bool:
    """Whether vLLM asks the quantization config about it, and it is plain on disk."""
    return module.loads_quantized and all(member.weight.form == "plain" for member in module.members)
