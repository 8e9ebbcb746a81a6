"""How fix, graft and convert end: the check, vLLM's own loaders, and the exit status.

In: a new folder. Out: what was found of it, on standard output.

Easy to get wrong: the folder is there before it is judged, so a stop from outside must say how it
is judged again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import exits, findings
from .check import check_json
from .options import AnyVLLMOption, chosen_gpus
from .tables import print_json, say

if TYPE_CHECKING:
    from ..cure.judged import Judged
    from ..validate.facts.dry_load import GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Who judges the new folder."""

    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            help="GPU that vLLM pretends for the dry load at the end; may be repeated. Default "
            "sm100.",
        ),
    ] = None
    static_only: Annotated[
        bool,
        typer.Option(
            "--static-only", help="End with the check alone: vLLM does not load the result."
        ),
    ] = False
    any_vllm: AnyVLLMOption = False

    @property
    def pretended(self) -> "tuple[GPU, ...]":
        """The GPUs of the dry load; none with --static-only."""
        from ..cure.judged import GPUS

        return () if self.static_only else tuple(chosen_gpus(self.gpus or [])) or GPUS

    def judge(
        self,
        out: Path,
        doing: Callable[[str], None],
        *,
        headers: Path | None = None,
        name: str | None = None,
    ) -> "Judged":
        """Check and load a new folder; where it lacks files, by `headers`, those of the whole
        called `name`.
        """
        from ..cure.judged import judge

        with exits.judging(out, is_whole=headers is None):
            return judge(
                headers or out,
                gpus=self.pretended,
                any_vllm=self.any_vllm,
                name=name,
                progress=doing,
            )


def checked_json(judged: "Judged") -> dict[str, Any]:
    """What was found, for machines."""
    return check_json(judged.checked.data, judged.checked.accounts)


def end(judged: "Judged", value: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print what was made, in lines for people, and what was found of it; end with the status that
    this comes to.
    """
    if as_json:
        print_json(value)
    else:
        console = Console()
        for line in lines:
            say(console, line)
        if judged.no_vllm is not None:
            say(console, f"vLLM was not asked: {judged.no_vllm}")
        findings.show(console, judged.checked.data)
    if not judged.ok:
        raise typer.Exit(exits.FINDINGS)
