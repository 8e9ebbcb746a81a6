"""`make gpu`: what keepmtp computes on this machine's GPU, how fast, and how vLLM serves it there.

In: a GPU, and with it the environments of this checkout. Out: rows, printed and put into the table
of docs/tables/gpu.md as they come, so that a run that is cut loses one part. Exit status 1 if a row is not
as expected, 2 if there is no GPU. With --small a CPU runs the same program in minutes, and writes
nothing.

Easy to get wrong: vLLM names a kernel once in its log, for all modules that it was picked for, and
one that nothing was left to choose for it does not name. So a row says which of the kernels that
`check --gpu` names are in the log, and which others are.
"""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from figures import QUIET, Figure, Part, run
from gpu_computes import DEPTH, ROOT, casts, finite, packed, rates, tiny_line, wide_layer
from keepmtp import api
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.run import CalibrationRun
from keepmtp.quantize.run.ranks import joined
from keepmtp.validate.facts.dry_load import DryLoad
from keepmtp.validate.facts.served import Run
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.harness import Model, Setup, measured
from keepmtp.validate.measure.serve_check import AcceptanceStation
from keepmtp.validate.measure.texts import PROMPTS

PAGE = ROOT / "docs" / "tables" / "gpu.md"
BEGIN, END = "<!-- begin: written by make gpu -->\n", "<!-- end -->\n"
_KEY = 2  # columns that name a row, with the last one
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Schemes of the tiny model: scales from data in backbone and block; rewritten weights.
LINES = ("nvfp4-mtp-nvfp4", "fp8", "w4a16-gptq")
# Part -> model, scheme and the MTP block's; the first decides what the rest of the time is for.
SERVED = {
    "glm.w4a16-fp8": ("tiny-glm4-moe", "w4a16-fp8", None),
    "qwen.fp8-dynamic": ("tiny-qwen3_5", "fp8-dynamic", None),
    "glm.nvfp4a16-fp8": ("tiny-glm4-moe", "nvfp4a16-fp8", None),
    "glm.nvfp4-mtp-nvfp4": ("tiny-glm4-moe", "nvfp4-mtp-nvfp4", None),
    "glm.fp8-kv": ("tiny-glm4-moe", "fp8-kv", None),
    "glm.fp8-block": ("tiny-glm4-moe", "FP8_BLOCK", None),
    "glm.w4a16-fp8-mtp-fp8-dynamic": ("tiny-glm4-moe", "w4a16-fp8", "FP8_DYNAMIC"),
    "qwen.w4a16-fp8": ("tiny-qwen3_5", "w4a16-fp8", None),
    "qwen.nvfp4": ("tiny-qwen3_5", "nvfp4", None),
    # What a CPU has kernels of some speed for.
    "qwen.w8a8": ("tiny-qwen3_5", "W8A8", None),
}
K = 3
# How far a server may be below keepmtp's own acceptance, since both add up in another order.
APART = 0.03
# Where vLLM says what it picked: the name, without what it was picked from.
_PICKED = re.compile(r"\b(?:Using|Selected) '?(\w+)'?(?= for |[\w -]*\bbackend|\.?$)", re.MULTILINE)
# DeepGEMM's warm-up and FlashInfer's sampler, which not every machine can compile, take minutes.
STARTS_SOON = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def served(
    model: str, scheme: str, mtp: str | None, folder: Path, *, small: bool
) -> Iterator[Figure]:
    """One variant: it starts with method=mtp, with the kernels that were said, accepts as many
    drafts as keepmtp found itself, and answers as without drafts.
    """
    out = folder / "checkpoint"
    started = time.monotonic()
    run = api.quantize(api.plan(model, scheme=scheme, mtp=mtp), out)
    yield Figure(what="quantized", measured=f"{time.monotonic() - started:.1f} s")
    gpu = architecture()
    checked = api.check(out, gpus=[gpu], num_drafts=K)
    yield Figure(
        what=f"check --gpu {gpu}",
        measured=f"{len(checked.findings)} findings",
        expected="no error",
        met=checked.ok,
        at_any_size=True,
    )
    words = os.environ.get("VLLM_ARGS", "").split()
    prompts, most = PROMPTS, 128
    if small:
        prompts, most = PROMPTS[:1], 16
    model = Model(role="checkpoint", source=open_source(out), identity=identify(out))
    setup = Setup(vllm=find_vllm(), out=folder / "served", extra=tuple(words))
    asked = {"ks": (0, K), "prompts": prompts, "max_tokens": most}
    station = AcceptanceStation(setup=setup, source=None, checkpoint=model, **asked)
    found = measured({"serve": station}, [model], setup)[0]["serve"].checkpoint
    drafting = found.runs[-1]
    if not drafting.loaded:
        raise RuntimeError(drafting.error)
    yield Figure(
        what="starts with method=mtp",
        measured=f"served {found.as_served}",
        expected="the files themselves",
        met=found.as_served == "native",
    )
    yield accepted(drafting, run.calibration)
    yield kernels_in_log(checked.dry[0], Path(drafting.log).read_text(errors="replace"))
    parted = drafting.partings or ()
    yield Figure(
        what=f"answers, MTP on and off, {len(prompts)} prompts",
        measured=f"{len(parted)} differ",
        expected="the same, or a tie",
        met=all(parting.is_near_tie for parting in parted),
    )


def accepted(drafting: Run, calibration: CalibrationRun | None) -> Figure:
    """Acceptance by position, against keepmtp's own where a run with text has measured it."""
    measured = f"{percent(drafting.acceptance_per_position)} of {drafting.drafts:,} drafts"
    if calibration is None:
        return Figure(what=f"accepted by position, k={K}", measured=measured)
    own = calibration.summary["rows"][-1]["acceptance"]["by_position"][str(K)]
    least = sum(own) / K - APART
    return Figure(
        what=f"accepted by position, k={K}",
        measured=f"{measured}; without a server {percent(own)}",
        expected=f"at least {least:.1%} in all",
        met=(drafting.acceptance or 0.0) >= least,
    )


def percent(shares: Iterable[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def kernels_in_log(dry: DryLoad, log: str) -> Figure:
    """Which kernels of each kind of module the log names, of those that the dry load did."""
    picked = {*_PICKED.findall(log)}
    named, missing = set[str](), list[str]()
    for loaded in (dry.target, dry.draft):
        for use in loaded.kernels:
            words = {*use.kernel.split()}
            named |= words
            if words and not words & picked:
                missing.append(f"{use.where} {use.kernel}")
    measured = f"{', '.join(sorted(named & picked)) or 'none'}"
    if missing:
        measured += f"; not in the log: {', '.join(missing)}"
    others = ", ".join(sorted(picked - named))
    return Figure(
        what="kernels that the log names",
        measured=f"{measured}; others in the log: {others or 'none'}",
        expected=f"those that check --gpu {dry.gpu} says",
        met=not missing,
    )


def architecture() -> str:
    """What `keepmtp check --gpu` pretends: this GPU; for a CPU, an H100."""
    if DEVICE.type == "cpu":
        return "sm90"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


# --- the page -------------------------------------------------------------------------------------


def keep(figure: Figure) -> None:
    """Put a row into the page."""
    partial_page = PAGE.with_suffix(".partial")
    partial_page.write_text(with_row(PAGE.read_text(), row(figure, machine())))
    partial_page.rename(PAGE)


def machine() -> str:
    """What a row was measured on."""
    versions = f"vLLM {find_vllm().version}, PyTorch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, {versions}"


def row(figure: Figure, on: str) -> list[str]:
    """The cells of a figure."""
    met = ""
    if figure.expected:
        met = "**no**"
        if figure.met:
            met = "yes"
    cells = (figure.part, figure.what, figure.measured, figure.expected, met, on)
    return [" ".join(cell.replace("|", "\\|").split()) for cell in cells]


def with_row(page: str, cells: list[str]) -> str:
    """The page with a row more, or with it in place of the same row on the same machine."""
    before, table, after = re.split(
        f"({re.escape(BEGIN)}.*)(?={re.escape(END)})", page, flags=re.DOTALL
    )
    lines = table.rstrip().splitlines()
    for number, line in enumerate(lines):
        old = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if old[:_KEY] == cells[:_KEY] and old[-1] == cells[-1]:
            lines[number] = f"| {' | '.join(cells)} |"
            break
    else:
        lines.append(f"| {' | '.join(cells)} |")
    return before + "\n".join(lines) + "\n\n" + after


PARTS: dict[str, Part] = {
    "casts": partial(casts, DEVICE),
    "packed": partial(packed, DEVICE),
    "finite": partial(finite, DEVICE),
    "rates": partial(rates, DEVICE),
    **{f"line.{scheme}": partial(tiny_line, scheme, DEVICE) for scheme in LINES},
    **{model: partial(wide_layer, model, DEVICE) for model in DEPTH},
    **{name: partial(served, *choices) for name, choices in SERVED.items()},
}


def main() -> None:
    """Refuse a machine without a GPU; else run the parts."""
    if DEVICE.type == "cpu" and not {"--small", "--help"} & {*sys.argv}:
        print(
            f"error: gpu: PyTorch must see a GPU; got PyTorch {torch.__version__} without one. Run it "
            "on a machine with a GPU, or try the program itself with make gpu SMALL=1.",
            file=sys.stderr,
        )
        sys.exit(2)
    os.environ.update({**QUIET, **STARTS_SOON, **os.environ})
    # As a run of keepmtp does, with its choice of allocator.
    with joined():
        run(__doc__, PARTS, kept=keep)


if __name__ == "__main__":
    main()
