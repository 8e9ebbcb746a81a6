"""Three builds of one model: dense parts of the first, experts of the second, MTP block of the
third.
"""

from pathlib import Path

from checkpoint_files import write
from good import ours
from keepmtp.recipes.conventions import FORMATS, Format

MODELS = {
    "deepseek-v3.1": "experts",
    "glm-4.7": "experts",
    "glm-5": "experts",
    "hy3": "experts",
    "longcat-flash-chat": "experts",
    "mimo-7b": "dense_mlp",
    "qwen3-next-80b": "experts",
    "qwen3.5-27b": "dense_mlp",
}
"""Model -> its heavy group: one of each of eight families."""


def builds(home: Path, model: str, format: Format) -> tuple[Path, Path, Path]:
    """Their headers; the first in this format, the others in the other one."""
    (other,) = {*FORMATS} - {format}
    first = write(home / "dense", ours(model, "FP8_BLOCK", format=format))
    heavy = write(home / "heavy", ours(model, "NVFP4A16", format=other))
    block = write(home / "block", ours(model, "NVFP4", "FP8_BLOCK", format=other))
    return first, heavy, block


def changes(model: str, heavy: Path, block: Path) -> list[str]:
    """The words of --set that put them together."""
    return [f"{MODELS[model]}=from:{heavy}", f"mtp=from:{block}"]
