"""vLLM's own defects, mended in a server: which cures a checkpoint needs, how vLLM gets them, and
which of them it has applied.

In: a checkpoint and a version of vLLM. Out: names of validate/keepmtp_cures, for KEEPMTP_CURES.

Easy to get wrong: a result names those that the server says it has applied.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.source import Source
from ...recipes.runtimes.vllm import KNOWN
from ..dryload.failures import cures_in_vllm
from ..facts.served import MENDED
from .serve_line import CURES

_PACKAGE = Path(__file__).parent.parent / "keepmtp_cures"
_APPLIED = re.compile(r"keepmtp's cure ([\w.]+) was applied")


def needed(source: Source, version: str) -> tuple[str, ...]:
    """The cures of what this vLLM gets wrong about checkpoints of this family and dialect."""
    return cures_in_vllm(RuntimeView.of(source, version), version)


def switched_on(source: Source, version: str) -> tuple[str, ...]:
    """Those that the user names in KEEPMTP_CURES ("0" for none, "1" for all), else those that are
    needed.
    """
    named = os.environ.get(CURES)
    if not named:
        return needed(source, version)
    return tuple([name for name in named.split(",") if name != "0"])


def told(cures: Sequence[str], version: str) -> str:
    """The line before a start; "" where nothing is switched on."""
    if not cures:
        return ""
    return (
        f"vLLM {version} is mended by keepmtp's cures {', '.join(cures)}; {CURES}=0 serves with "
        "it as it is"
    )


def by_version(source: Source) -> list[str]:
    """`step.layer_types in vLLM 0.29.0 to 0.32.0, no more from 0.33.0 on`, for each cure."""
    versions = dict[str, list[str]]()
    for version in KNOWN:
        for cure in needed(source, version):
            versions.setdefault(cure, []).append(version)
    found = []
    for cure, those in versions.items():
        span = " to ".join(dict.fromkeys((those[0], those[-1])))
        later = KNOWN[KNOWN.index(those[-1]) + 1 :]
        end = f"no more from {later[0]} on" if later else "the newest known"
        found.append(f"`{cure}` in vLLM {span}, {end}")
    return found


def install(folder: Path) -> None:
    """Let a vLLM that has `folder` on its path find the cures: a distribution that shadows a
    keepmtp that is installed next to it, so that nothing is mended twice.
    """
    (folder / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    distribution(folder, "keepmtp", __version__, plugin=_PACKAGE.name)


def distribution(folder: Path, name: str, version: str, *, plugin: str) -> None:
    """Metadata of a distribution whose module `plugin` is one of vLLM's general plugins."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = f"[vllm.general_plugins]\n{plugin} = {plugin}:register\n"
    (info / "entry_points.txt").write_text(points)


def in_words(log: Path) -> str:
    """The cures that a server says it has applied, as a clause; "" for none."""
    # One that is switched on may do nothing, since vLLM's source is another or its module is never
    # imported.
    found = sorted(set(_APPLIED.findall(log.read_text(encoding="utf-8", errors="replace"))))
    if not found:
        return ""
    return f"{MENDED} {', '.join(found)}"
