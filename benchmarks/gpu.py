"""`make gpu-test`: keepmtp on a GPU against keepmtp on a CPU, and how fast and how large it is
there.

In: a device (and --small for sizes that a CPU computes in seconds). Out: a row when it is measured,
its JSON with --json, and on a GPU the table of docs/gpu.md. Exit status 1 if anything differs, 2 if the device is
not there.

Easy to get wrong: what is started here has no network and no installed keepmtp. The make target
sets PYTHONPATH to a folder that holds the checkout under its name, and the wheels that were carried
along.
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

try:
    import torch
    from figures import Figure, measured, printed
except ModuleNotFoundError as error:
    print(
        "error: GPU_PYTHON: must have PyTorch for its GPU and what docs/gpu.md names; got "
        f"{sys.executable} without "
        f"{error.name}. Name a Python that has it, or carry it there.",
        file=sys.stderr,
    )
    sys.exit(2)

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
PARTS = (
    "casts",
    "finite",
    "rates",
    "packing",
    "collectives",
    "line",
    "glm-4.5-air",
    "deepseek-v3.1",
)
BEGIN, END = "<!-- begin: written by make gpu-test -->\n", "<!-- end -->\n"


def main() -> None:
    """Run every part, print its rows, write the page; the exit status says whether all is as
    expected.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, or cpu to try the program itself."
    )
    parser.add_argument(
        "--small", action="store_true", help="Sizes that a CPU computes in seconds."
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="A part; may be given more than once.",
        choices=PARTS,
    )
    parser.add_argument(
        "--page",
        type=Path,
        help="Write the table here, too; docs/gpu.md after a whole run on a GPU.",
    )
    parser.add_argument("--json", action="store_true", help="Print each row as JSON.")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if refusal := missing(device):
        print(refusal, file=sys.stderr)
        sys.exit(2)
    from keepmtp.quantize.run.ranks import joined

    # As a run of keepmtp does, with its choice of allocator.
    with tempfile.TemporaryDirectory(prefix="keepmtp-gpu-") as folder, joined():
        calls = parts(device, Path(folder), small=chosen.small)
        rows = printed(measured(calls, chosen.only), as_json=chosen.json)
    is_whole = device.type == "cuda" and not chosen.small and not chosen.only
    if page := chosen.page or (PAGE if is_whole else None):
        write_page(page, rows, device)
    sys.exit(not all(row.met for row in rows))


def missing(device: torch.device) -> str:
    """The sentence for a device that is not there; "" if it is."""
    if device.type == "cpu" or (torch.accelerator.is_available() and _is_there(device)):
        return ""
    return (
        f"error: gpu-test: PyTorch must see the device {device}; got PyTorch {torch.__version__} "
        "without it. "
        "Run it on a machine with a GPU, or try the program itself with make gpu-test DEVICE=cpu "
        "SMALL=1."
    )


def _is_there(device: torch.device) -> bool:
    own = torch.accelerator.current_accelerator()
    return (
        own is not None
        and own.type == device.type
        and (device.index or 0) < torch.accelerator.device_count()
    )


def parts(
    device: torch.device, folder: Path, *, small: bool
) -> Mapping[str, Callable[[], list[Figure]]]:
    """Name -> a function of no arguments that gives the rows of the part."""
    # llm-compressor logs to standard output, also while it is imported.
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")
    from gpu_kernels import casts, collectives, finite, packing, rates
    from gpu_models import WIDE, tiny_line, wide_layer

    calls = (
        partial(casts, device),
        partial(finite, device),
        partial(rates, device),
        partial(packing, device),
        partial(collectives, device),
        partial(tiny_line, device, folder),
        *(partial(wide_layer, model, device, folder) for model in WIDE),
    )
    return {name: partial(call, small=small) for name, call in zip(PARTS, calls, strict=True)}


def write_page(page: Path, rows: list[Figure], device: torch.device) -> None:
    """Put the table between the markers of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [
        f"{machine(device)}\n",
        "| part | what | measured | expected | met |",
        "|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {row.part} | {row.what} | {row.measured} | {row.expected} | "
            f"{_met(row, 'yes', '**no**')} |"
        )
        for row in rows
    ]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}")


def _met(row: Figure, yes: str, no: str) -> str:
    return "" if not row.expected else yes if row.met else no


def machine(device: torch.device) -> str:
    """What the figures were taken on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    packages = ", ".join(
        f"{each} {version(each)}" for each in ("torch", "transformers", "llmcompressor")
    )
    return f"Taken on {name}; Python {platform.python_version()}, {packages}."


if __name__ == "__main__":
    main()
