"""What `keepmtp fix` and `convert` share: a new folder from a finished checkpoint, which
stays as it is, is judged and shown.

In: the new folder. Out: what the check and vLLM's own loaders find of it; exit status 1 if an error
is left.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from ..recipes.errors import printable
from ..recipes.frozen import Json, frozen
from . import exits
from .options import DryRunOption, GpusOption, JsonOption, StaticOption, chosen_gpus
from .progress import spinner
from .tables import answer

if TYPE_CHECKING:
    from ..cure.rewritten import Judged

# Of the lines of a diff, by how they begin.
_COLOURS = {"---": "bold", "+++": "bold", "+": "green", "-": "red", "#": "bold", "@": "cyan"}


@frozen
class NewFolder:
    """The new checkpoint, and who judges it."""

    out: Annotated[
        Path | None, typer.Option(help="The new folder; without it, nothing is written.")
    ] = None
    gpus: GpusOption = None
    static_only: StaticOption = False
    dry_run: DryRunOption = False
    as_json: JsonOption = False

    def folder(self) -> Path | None:
        """The folder, if it shall be written."""
        if self.dry_run:
            return None
        return self.out

    def judge(self, out: Path) -> "Judged":
        """Check and load the new folder."""
        from ..cure.rewritten import GPUS, judge

        gpus = GPUS
        if self.static_only:
            gpus = ()
        elif self.gpus:
            gpus = chosen_gpus(self.gpus)
        with exits.judging(out), spinner() as doing:
            return judge(out, gpus=gpus, progress=doing)

    def end(
        self, judged: "Judged", value: Json, diff: Iterable[str], notes: Iterable[str], path: str
    ) -> None:
        """Print what was changed and what was found of it, where commands call it `path`; end with
        the status that this comes to.
        """
        from . import findings

        parts: list[RenderableType] = []
        for line in diff:
            style = _COLOURS.get(line[:3]) or _COLOURS.get(line[:1], "")
            parts.append(Text(printable(line), style))
        parts += findings.parts(judged.checked.data, path=path)
        if judged.no_vllm is not None:
            parts.append(f"not loaded by vLLM: {judged.no_vllm}")
        status = 0
        if not judged.ok:
            status = exits.FINDINGS
        answer(value, [*parts, *notes], as_json=self.as_json, status=status)
