"""The dry load under the whole CUDA wheel of vLLM, against the same under keepmtp's stubs.

In: an environment with the CUDA wheel (`make cuda-wheel` makes it), and the one that the dry load
always uses. Out: verdict and kernels of every family in every variant, and of every scheme, on each
pretended GPU, compared; `differences.md` and `kernels.md` beside the environment. Exit status 1
where anything differs.

Both sides run the same Python files of vLLM. With the stubs its compiled extensions, and the
packages that the CUDA wheel requires, are pretended; with the wheel they are the real ones, and
only the driver is pretended: a `libcuda.so.1` whose every function returns an error.

Easy to get wrong: an answer is kept, because a GPU takes minutes, until the checkpoints, the dry
load's own code or the vLLM that it ran under change.
"""

import argparse
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import releases
from checkpoint_files import Checkpoint, write
from good import ours
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import GPU, GPUS, ROLES, LoadAccount
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from matrix import VARIANTS, separate_target

FOLDER = Path(__file__).parent.parent / "build" / "cuda-wheel"
IN_VLLM = Path(inspect.getfile(DryLoader)).parent / "in_vllm"
# What the wheel's extensions and PyTorch's want of the driver. 100 is CUDA_ERROR_NO_DEVICE.
DRIVER = """
cuInit cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain
cuGetErrorString cuGetProcAddress cuGetProcAddress_v2 cuMemAddressFree cuMemAddressReserve
cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap
cuPointerGetAttribute cuTensorMapEncodeTiled cuDriverGetVersion cuDeviceGetCount
"""
SIDES = ("stubs", "wheel")
TABLED = "glm-4.7"  # the model of the kernel table: it has linears and routed experts
Name = tuple[str, str]
"""(model, variant)."""


@dataclass(frozen=True, order=True)
class Row:
    """Layers of one kind in one load: which kernel, or that the kernel refuses."""

    model: str
    variant: str
    gpu: str
    role: str
    where: str
    layer: str
    method: str


def driver(folder: Path) -> Path:
    """Compile the stand-in for the driver; a folder for LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    library, source = folder / "libcuda.so.1", folder / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER.split()))
    words = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(words, check=True)
    return folder


def made(scratch: Path) -> dict[Name, Job]:
    """Every family in every variant, and one model in every scheme, as headers over holes."""
    builders = {
        (model, variant): lambda model=model, build=build: build(model)
        for model in releases.MODELS
        for variant, build in VARIANTS.items()
    }
    builders |= {
        (TABLED, scheme): lambda scheme=scheme: ours(TABLED, scheme, scheme, "split")
        for scheme in SCHEMES
    }
    jobs = dict[Name, Job]()
    for number, ((model, variant), build) in enumerate(builders.items()):
        try:
            checkpoint: Checkpoint = build()
        except RecipeError:
            continue
        folder = write(scratch / str(number), checkpoint)
        target = separate_target(model, folder)
        jobs[model, variant] = Job(folder=target or folder, draft=folder if target else None)
    return jobs


def verdict(account: LoadAccount) -> str:
    """What vLLM raised and what its account found, in a form that two environments share."""
    failure = account.load.failure
    if failure is not None:
        return f"{failure.stage} {failure.role}: {failure.type}: {failure.words[:200]}"
    faults = [fault.param for role in ROLES for fault in account.of(role)[1].faults]
    misfits = [misfit.param for role in ROLES for misfit in account.of(role)[1].misfits]
    named = {"faults": faults, "misfits": misfits, "unconsumed": [*account.unconsumed]}
    found = [f"{len(names)} {kind}: {names[0]}" for kind, names in named.items() if names]
    return "; ".join(found) or "loads"


def told(account: LoadAccount) -> dict[str, Any]:
    """What is compared of a load."""
    rows = [
        [role, use.where, use.layer, use.method, use.kernel, use.outcome, use.count]
        for role in ROLES
        for use in account.of(role)[0].kernels
    ]
    return {"verdict": verdict(account), "rows": rows}


def load(vllm: VLLM, gpu: GPU, jobs: Mapping[Name, Job]) -> dict[str, Any]:
    """What every job told on one GPU, and the seconds of all."""
    start = time.perf_counter()
    with DryLoader(vllm, gpu=gpu) as loader:
        accounts = loader.load_all([*jobs.values()])
    answers = [[*name, told(each)] for name, each in zip(jobs, accounts, strict=True)]
    return {"answers": answers, "seconds": time.perf_counter() - start}


def python_files(vllm: VLLM, place: Path) -> Path:
    """The wheel without its compiled files, for the environment with the stubs."""
    (found,) = vllm.python.parent.parent.glob("lib/python*/site-packages/vllm")
    if not place.exists():
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(found, place / "vllm", ignore=ignored)
    return place


def flat(side: Mapping[str, Any]) -> tuple[dict[tuple[str, ...], str], dict[Row, str]]:
    """Verdicts by (model, variant, GPU), and kernels by row."""
    verdicts, kernels = dict[tuple[str, ...], str](), dict[Row, str]()
    for gpu, result in side.items():
        for model, variant, told in result["answers"]:
            verdicts[model, variant, gpu] = told["verdict"]
            for role, where, layer, method, kernel, outcome, _ in told["rows"]:
                refused = f" ({outcome})" if outcome.startswith("refused") else ""
                kernels[Row(model, variant, gpu, role, where, layer, method)] = kernel + refused
    return verdicts, kernels


def differences(sides: Mapping[str, Any]) -> tuple[str, int]:
    """A page of what differs, and how much."""
    (verdicts, kernels), (real_verdicts, real_kernels) = (flat(sides[side]) for side in SIDES)
    other = {
        cell: (text, real_verdicts[cell])
        for cell, text in verdicts.items()
        if text != real_verdicts[cell]
    }
    rows = sorted(kernels.keys() | real_kernels.keys())
    changed = {
        row: (kernels.get(row, ""), real_kernels.get(row, ""))
        for row in rows
        if kernels.get(row, "") != real_kernels.get(row, "")
    }
    kinds = Counter((row.gpu, row.layer, *pair) for row, pair in changed.items())
    seconds = {
        side: {gpu: round(result["seconds"]) for gpu, result in sides[side].items()}
        for side in SIDES
    }
    lines = [
        f"{len(verdicts)} cells, {len(other)} verdicts differ; "
        f"{len(rows)} kernel rows, {len(changed)} differ. Seconds: {seconds}\n",
        _table("GPU layer stubs wheel rows", [(*kind, count) for kind, count in kinds.items()]),
        _table("model variant GPU stubs wheel", [(*cell, *pair) for cell, pair in other.items()]),
        _table(
            "model variant GPU role where layer method stubs wheel",
            [(*vars(row).values(), *pair) for row, pair in changed.items()],
        ),
    ]
    return "\n".join(lines), len(other) + len(changed)


def kernel_table(real: Mapping[str, Any]) -> str:
    """Which kernel the wheel picks for each scheme, on each GPU."""
    _, kernels = flat(real)
    cells = dict[tuple[str, str], dict[str, dict[str, None]]]()
    for row, kernel in kernels.items():
        if row.variant in SCHEMES and kernel and "Attention" not in row.layer:
            kind = "routed experts" if "Experts" in row.layer or "MoE" in row.layer else "linear"
            cells.setdefault((row.variant, kind), {}).setdefault(row.gpu, {})[kernel] = None
    gpus = [*real]
    lines = [
        (scheme, kind, *(", ".join(by_gpu.get(gpu, ())) for gpu in gpus))
        for (scheme, kind), by_gpu in cells.items()
    ]
    return _table(f"scheme layers {' '.join(gpus)}", lines)


def _table(head: str, rows: list[tuple[Any, ...]]) -> str:
    columns = head.split()
    lines = [columns, ["---"] * len(columns), *rows]
    text = ""
    for line in lines:
        cells = [" ".join(str(cell).replace("|", "\\|").split()) for cell in line]
        text += f"| {' | '.join(cells)} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--gpu", action="append", choices=GPUS)
    options = parser.parse_args()
    folder, gpus = options.folder.resolve(), options.gpu or GPUS
    pretending = find_vllm()
    os.environ |= {
        "VLLM_PYTHON": str(folder / "venv" / "bin" / "python"),
        "LD_LIBRARY_PATH": str(driver(folder / "driver")),
    }
    real = find_vllm()
    site = python_files(real, folder / "site")
    vllms = {"stubs": replace(pretending, version=real.version, site=site), "wheel": real}
    sides = {side: dict[str, Any]() for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        jobs = made(Path(scratch))
        seen = hashlib.sha256(real.version.encode())
        for path in sorted([*IN_VLLM.glob("*.py"), *Path(scratch).rglob("*.json")]):
            seen.update(path.read_bytes())
        answers = folder / "answers" / seen.hexdigest()[:12]
        answers.mkdir(parents=True, exist_ok=True)
        for gpu in gpus:
            for side, vllm in vllms.items():
                kept = answers / f"{side}-{gpu}.json"
                if not kept.exists():
                    kept.write_text(json.dumps(load(vllm, gpu, jobs)))
                sides[side][gpu] = json.loads(kept.read_text())
                print(f"{gpu} {side}: {sides[side][gpu]['seconds']:.0f} s", file=sys.stderr)
    page, count = differences(sides)
    (folder / "differences.md").write_text(page)
    (folder / "kernels.md").write_text(kernel_table(sides["wheel"]))
    print(page.partition("\n")[0])
    print(folder / "differences.md")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
