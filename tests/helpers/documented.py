"""The commands of README.md and docs/usage.md that quantize a large model.

In: the pages. Out: COMMANDS, each with the GPU and the tensor-parallel size that the lines after it
name.
"""

import re
from typing import NamedTuple

from commands import ROOT
from keepmtp.validate.facts.dry_load import GPU

PAGES = ("README.md", "docs/usage.md")


class Command(NamedTuple):
    """What `make quantize` makes, and where the page serves it."""

    page: str
    recipe: str
    gpu: GPU
    tp: int

    def __str__(self) -> str:
        return f"{self.page}: {self.recipe} at TP {self.tp}"


def _commands() -> list[Command]:
    found = []
    for page in PAGES:
        blocks = (ROOT / page).read_text().split("```")[1::2]
        for block in blocks:
            for made in re.finditer(r"make quantize +MODEL=(\S+) SCHEME=(\S+) .*OUT=(\S+)", block):
                model, scheme, out = made.groups()
                served = [line for line in block.splitlines() if f"OUT={out} " in line]
                words = "\n".join(served)
                sizes = re.findall(r"(?:\bTP=|--tensor-parallel-size )(\d+)", words) or ["1"]
                gpus = re.findall(r"\bGPU=(\w+)", words) or ["sm90"]
                found += [
                    Command(page, f"{model}.{scheme}", gpus[0], int(size)) for size in {*sizes}
                ]
    return found


COMMANDS = _commands()
