"""Rules on a quantization config that keepmtp does not judge, or not in full.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in docs/failures.md.

Easy to get wrong: a dialect with a file of its own may still hold a scheme whose tensors the check does not know. Then
it must say so, or silence would read as good.
"""

from collections.abc import Iterator

from ..facts.findings import Objection, objection
from .dialects.autoround import AutoRound
from .dialects.quark import Quark
from .runtime_view import Module, RuntimeView
from .vllm_module import UnknownDialect


def other_dialects_exclude_mtp(runtime: RuntimeView) -> Iterator[Objection]:
    """Dialects without a file of their own: a plain MTP block must be on the list of what is left alone: R8."""
    dialect = runtime.dialect
    is_unknown = isinstance(dialect, UnknownDialect) and not dialect.name.startswith("modelopt")
    if not is_unknown and not (isinstance(dialect, AutoRound | Quark) and _is_not_judged(runtime)):
        return
    yield objection(
        rule="dialect",
        severity="warning",
        where="config.json: quantization_config",
        says=f"is {dialect.name}, whose matching keepmtp does not reproduce: stored forms are not judged against it",
        cure="Add --gpu sm90 (or sm100, sm120): the dry load asks vLLM itself",
    )
    plain = [module for module in runtime.modules if is_unknown and _is_plain_mtp_matrix(module)]
    names = frozenset(module.name for module in plain)
    if plain and not any(dialect.covered(entry, names) for entry in dialect.entries):
        yield objection(
            rule="dialect",
            severity="error",
            where=plain[0].members[0].weight.weight.name,
            says=f"is plain, and no list of {dialect.name} (modules_to_not_convert, exclude, ignore) names "
            f"{plain[0].name}: vLLM builds the draft quantized, and raises KeyError or a shape mismatch",
            cure=f"Add {plain[0].name} and its like to that list",
        )


def _is_not_judged(runtime: RuntimeView) -> bool:
    """Whether vLLM builds a module in a form that the check does not know."""
    answers = (module.resolution for module in runtime.modules)
    return any(answer.built.form == "unknown" and not answer.error for answer in answers)


def _is_plain_mtp_matrix(module: Module) -> bool:
    """Whether a module of the MTP block is plain on disk, and would be built quantized."""
    is_matrix = module.role != "norm" and module.kind != "head"
    is_plain = module.members[0].weight.form == "plain"
    return module.part == "mtp" and is_matrix and is_plain and module.loads_quantized


RULES = (other_dialects_exclude_mtp,)
