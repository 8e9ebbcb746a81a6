"""Fixes of the lists of GPTQ, AWQ, Quark and AutoRound: a plain MTP block is on the list of what is left alone.

In: a `Checked`, and the proposal that its config is in. Out: a change of the list, in the words of its tool.

Easy to get wrong: with an empty `modules_to_not_convert`, vLLM finds the plain modules of an AWQ checkpoint in its
headers; with one entry it does not look. So the first entry comes with all others.

Source: vLLM 0.32.0 quantization/utils/gptq_utils.py (get_dynamic_override), auto_awq.py (maybe_update_config),
quark/utils.py (should_ignore_layer), inc/config_parser.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..validate.check.check import Checked
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.dialects.methods import method_of
from ..validate.check.runtime_view import Module, RuntimeView
from ..validate.check.vllm_module import UnknownDialect
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
        is_found: vLLM finds plain modules itself as long as the list is empty.
    """

    key: str
    of_stem: Callable[[str], str]
    of_name: Callable[[str], str]
    value: Mapping[str, Any] | None = None
    is_found: bool = False


_GPTQ = _Spelling("dynamic", lambda s: f"-:^{re.escape(s)}", lambda n: f"-:^{re.escape(n)}$", {})
_AWQ = _Spelling("modules_to_not_convert", str, str, is_found=True)
_QUARK = _Spelling("exclude", lambda s: f"re:^{re.escape(s)}.*", str)
_INC = _Spelling(
    "extra_config",
    lambda s: f"^{re.escape(s)}.*",
    lambda n: f"^{re.escape(n)}$",
    {"bits": 16, "data_type": "float"},
)
_SPELLINGS: Mapping[str, _Spelling] = {
    **dict.fromkeys(("gptq", "gptq_marlin", "auto_gptq"), _GPTQ),
    **dict.fromkeys(("awq", "awq_marlin", "auto_awq", "moe_wna16"), _AWQ),
    "quark": _QUARK,
    **dict.fromkeys(("inc", "auto-round", "auto_round"), _INC),
}


def plain_draft_is_listed(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """A plain MTP block that no list of the tool names: F15, F16, F20, F26, F47."""
    runtime, place = checked.runtime, place_of_config(proposal)
    if runtime is None or place is None or not isinstance(runtime.dialect, UnknownDialect):
        return
    spelling = _SPELLINGS.get(method_of(quantization_of(runtime.source.config) or {}))
    if spelling is None or not any(
        each.severity == "error" for each in checked.data.findings if each.rule == "dialect"
    ):
        return
    now = proposal.value(CONFIG, (*place, spelling.key)) or ([] if spelling.value is None else {})
    entries = _entries(runtime, spelling)
    if spelling.is_found and not now:
        entries = sorted({*entries, *(module.name for module in runtime.modules if _is_plain(module, "backbone"))})
    lines = {entry: dict(spelling.value or {}) for entry in entries}
    value: Any = [*now, *entries] if isinstance(now, list) else now | lines
    why = "plain on disk; without an entry vLLM builds the draft quantized, and raises KeyError or on a shape"
    yield SetValue(file=CONFIG, place=(*place, spelling.key), value=value, why=why)


def _entries(runtime: RuntimeView, spelling: _Spelling) -> list[str]:
    """Entries for the plain modules of the MTP block, one for a layer that is plain altogether."""
    found: dict[str, None] = {}
    for module in runtime.modules:
        if _is_plain(module, "mtp"):
            whole = [other for other in runtime.modules if (other.part, other.layer) == ("mtp", module.layer)]
            is_layer = module.layer is not None and all(_is_plain(other, "mtp") or not _asks(other) for other in whole)
            stem = runtime.view.runtime_stem("mtp", module.layer) if is_layer and module.layer is not None else ""
            found[spelling.of_stem(stem) if stem else spelling.of_name(module.name)] = None
    return [*found]


def _asks(module: Module) -> bool:
    """Whether vLLM asks the quantization config about it."""
    return module.role != "norm" and module.kind != "head" and module.loads_quantized


def _is_plain(module: Module, part: str) -> bool:
    members: Sequence = module.members
    return module.part == part and _asks(module) and all(member.weight.form == "plain" for member in members)
