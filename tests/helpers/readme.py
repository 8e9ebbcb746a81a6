"""The README's picture, made from what it shows; and COMMANDS, those of README.md that quantize a large model, each
with the GPU and the tensor-parallel size that the lines after it name.

    make docs       writes docs/check.svg

In: the shipped Qwen3.5 model. Out: the same bytes on every machine: a fixed width, a fixed id, and no font that
a browser would have to fetch.
"""

import io
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from commands import ROOT, captured, environment_without
from data_files import table
from keepmtp.pipeline import plan_for, quantize
from keepmtp.validate.facts.dry_load import GPU
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from written_values import broken

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "check.svg"
COLUMNS = 118
# (accepted, drafted) in vLLM 0.32.0 on a CPU: tests/vllm/test_tiny_models.py compares.
ACCEPTED = {"right": (57, 57), "wrong": (0, 114)}
THEME = TerminalTheme(*table("helpers/theme"))
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="keepmtp check finds the \
checkpoint whose draft vLLM accepts in 0 % of all cases">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture() -> str:
    """The right and the wrong checkpoint, what `keepmtp check` prints of them, and what vLLM
    accepts.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plan, text = plan_for("tiny-qwen3_5", source=str(ROOT / "models" / "tiny-qwen3_5"))
        right = quantize(plan, text, out=Path(scratch) / "right").out
        broken(right, Path(scratch) / "wrong")
        printed = _printed("check", "right", "wrong", folder=Path(scratch))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(
        _comment(
            "# Same weights. Only config.json differs: the MTP block of `wrong` is not under "
            "ignore."
        )
    )
    console.print(Text("$ keepmtp check right wrong", style="bold"))
    console.print(Text.from_ansi(printed))
    console.print(
        _comment(
            "\n# Here it is silence: vLLM 0.32 loads both, and answers right. Drafts that it accepts:"
        )
    )
    for name, (accepted, drafted) in ACCEPTED.items():
        colour, filled = "green" if accepted else "red", round(40 * accepted / drafted)
        bar = Text(" " * filled, f"on {colour}") + Text(" " * (40 - filled), "on bright_black")
        console.print(
            Text(f"{name}  ") + bar + Text(f"  {accepted} of {drafted}", f"bold {colour}")
        )
    svg = console.export_svg(
        title="keepmtp check", theme=THEME, code_format=SVG, unique_id="keepmtp"
    )
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _comment(words: str) -> Text:
    return Text(words, style=Style(color="cyan"))


def _printed(*words: str, folder: Path) -> str:
    """What the command prints on a terminal of that width, colours included."""
    terminal = {
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
        "LINES": "50",
    }
    kept = environment_without("NO_COLOR", "COLORTERM", "PYTHONPATH")
    done = captured(
        [sys.executable, "-m", "keepmtp", *words],
        cwd=folder,
        env=kept | terminal,
    )
    assert not done.stderr, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")


def main() -> None:
    PICTURE.write_text(picture())
    print(f"{PICTURE.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()


class Command(NamedTuple):
    """What `make quantize` makes, and where the README serves it."""

    recipe: str
    gpu: GPU
    tp: int

    def __str__(self) -> str:
        return f"{self.recipe} at TP {self.tp}"


def _commands() -> list[Command]:
    found = []
    for block in README.read_text().split("```")[1::2]:
        for made in re.finditer(r"make quantize +MODEL=(\S+) SCHEME=(\S+) .*OUT=(\S+)", block):
            model, scheme, out = made.groups()
            words = "\n".join(line for line in block.splitlines() if f"OUT={out} " in line)
            sizes = re.findall(r"(?:\bTP=|--tensor-parallel-size )(\d+)", words) or ["1"]
            gpus = re.findall(r"\bGPU=(\w+)", words) or ["sm90"]
            found += [Command(f"{model}.{scheme}", gpus[0], int(size)) for size in {*sizes}]
    return found


COMMANDS = _commands()
