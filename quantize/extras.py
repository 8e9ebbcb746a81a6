"""What pip must have installed for a job, asked before the job begins.

In: the name of one of pyproject's extras. Out: nothing, or a refusal that says what to install. Nothing is imported, so
that asking costs nothing.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from ..recipes.errors import RecipeError, refuse

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "quantize": ("numpy", "torch"),
    "report": ("jinja2", "matplotlib"),
    "calibrate": (
        "accelerate", "compressed_tensors", "datasets", "jinja2", "llmcompressor", "numpy", "safetensors", "torch",
        "transformers",
    ),
    "evaluate": ("jinja2", "lm_eval", "matplotlib"),
})  # fmt: skip
"""Extra -> the packages it brings, by the names that Python imports."""


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def require_extra(where: object, extra: str, *, otherwise: str = "") -> None:
    """Refuse where a package is missing.

    Args:
        where: what needs it.
        extra: of keepmtp.
        otherwise: what can be done without it, as words behind "or".

    Raises:
        RecipeError: names the packages, and what to install.
    """
    if absent := missing(extra):
        cure = f"Run pip install 'keepmtp[{extra}]'" + (f", or {otherwise}" if otherwise else "")
        raise RecipeError(refuse(where, f"needs keepmtp's `{extra}` extra", f"no {' and no '.join(absent)}", cure))
