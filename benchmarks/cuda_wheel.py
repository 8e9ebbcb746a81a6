"""The dry load under the whole CUDA wheel of vLLM, against the same under keepmtp's stubs.

In: an environment with the CUDA wheel (`make cuda-wheel` makes it), and the one that the dry load
always uses. Out: verdict and kernels of every scheme on each pretended GPU, and of every family in
every variant on those of `--gpu`, compared: `differences.md` beside the environment. And the
wheel's kernel of every scheme on each GPU: recipes/runtimes/kernels.json, which plan and card read,
and the table of docs/dryload.md. Exit status 1 where anything differs.

Both sides run the same Python files of vLLM. With the stubs its compiled extensions, and the
packages that the CUDA wheel requires, are pretended; with the wheel they are the real ones, and
only the driver is pretended: a `libcuda.so.1` whose every function returns an error.

Easy to get wrong: an answer is kept, because a GPU takes minutes, until its checkpoint, the dry
load's own code or the vLLM that it ran under change. And the two environments need not have the
same packages: a verdict that differs may be that of another transformers.
"""

import argparse
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import releases
from checkpoint_files import Checkpoint, write
from good import ours
from keepmtp.recipes.conventions import ALGORITHMS, NOT_FOR_EXPERTS
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.runtimes.vllm import FILE
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import GPU, GPUS, ROLES, LoadAccount
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from matrix import VARIANTS, separate_target

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "cuda-wheel"
DATA = FILE.with_name("kernels.json")
PAGE = ROOT / "docs" / "dryload.md"
BEGIN, END = "<!-- table of make cuda-wheel -->\n", "<!-- end of table -->\n"
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
DENSE = "mimo-7b"  # for what modelopt has for linears alone
AT_ONCE = 32  # loads between two writings of the answers
# vLLM picks one of a set's names.
ONE_OF = re.compile(r"(?<=Some parameters like )\S+")
Name = tuple[str, str]
"""(model, variant)."""
Kernels = dict[str, dict[str, dict[str, list[str]]]]
"""scheme -> layers -> kernel -> GPUs."""


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


FAMILIES: dict[Name, Callable[[], Checkpoint]] = {
    (model, variant): partial(build, model)
    for model in releases.MODELS
    for variant, build in VARIANTS.items()
}
OF_SCHEMES: dict[Name, Callable[[], Checkpoint]] = {
    (TABLED, scheme): partial(ours, TABLED, scheme, scheme, "split") for scheme in SCHEMES
}
for _scheme in ALGORITHMS:
    _model = TABLED if _scheme not in NOT_FOR_EXPERTS else DENSE
    OF_SCHEMES[_model, f"modelopt {_scheme}"] = partial(
        ours, _model, _scheme, _scheme, "split", "modelopt"
    )


def made(scratch: Path, builders: Mapping[Name, Callable[[], Checkpoint]]) -> dict[Name, Job]:
    """Checkpoints as headers over holes, without those that keepmtp refuses to make."""
    jobs = dict[Name, Job]()
    for number, ((model, variant), build) in enumerate(builders.items()):
        try:
            checkpoint = build()
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
        words = ONE_OF.sub("...", failure.words)
        return f"{failure.stage} {failure.role}: {failure.type}: {words[:200]}"
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


def load(vllm: VLLM, gpu: GPU, jobs: Mapping[Name, Job], kept: Path) -> list[Any]:
    """What every job told on one GPU, with its model and variant; from `kept` where it is there."""
    found = json.loads(kept.read_text()) if kept.exists() else {}
    keys = dict[Name, str]()
    for name, job in jobs.items():
        own = hashlib.sha256()
        for folder in filter(None, (job.folder, job.draft)):
            for path in sorted(folder.glob("*.json")):
                own.update(path.read_bytes())
        keys[name] = ", ".join((*name, own.hexdigest()[:12]))
    missing = [name for name, key in keys.items() if key not in found]
    if missing:
        with DryLoader(vllm, gpu=gpu) as loader:
            for start in range(0, len(missing), AT_ONCE):
                names = missing[start : start + AT_ONCE]
                accounts = loader.load_all([jobs[name] for name in names])
                for name, account in zip(names, accounts, strict=True):
                    found[keys[name]] = told(account)
                kept.write_text(json.dumps(found))
    return [[*name, found[key]] for name, key in keys.items()]


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
    for gpu, answers in side.items():
        for model, variant, told in answers:
            verdicts[model, variant, gpu] = told["verdict"]
            for role, where, layer, method, kernel, outcome, _ in told["rows"]:
                refused = f" ({outcome})" if outcome.startswith("refused") else ""
                kernels[Row(model, variant, gpu, role, where, layer, method)] = kernel + refused
    return verdicts, kernels


def differences(sides: Mapping[str, Any]) -> tuple[str, int]:
    """A page of what differs, and how much; a load that ends otherwise has no kernels to compare."""
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
        and (row.model, row.variant, row.gpu) not in other
    }
    kinds = Counter((row.gpu, row.layer, *pair) for row, pair in changed.items())
    lines = [
        f"{len(verdicts)} cells, {len(other)} verdicts differ; "
        f"{len(rows)} kernel rows, {len(changed)} differ\n",
        _table("GPU layer stubs wheel rows", [(*kind, count) for kind, count in kinds.items()]),
        _table("model variant GPU stubs wheel", [(*cell, *pair) for cell, pair in other.items()]),
        _table(
            "model variant GPU role where layer method stubs wheel",
            [(*vars(row).values(), *pair) for row, pair in changed.items()],
        ),
    ]
    return "\n".join(lines), len(other) + len(changed)


def kernels_of(side: Mapping[str, Any]) -> Kernels:
    """Which kernel is picked for each scheme, on which GPUs."""
    found: Kernels = {}
    for row, kernel in flat(side)[1].items():
        of_schemes = (row.model, row.variant) in OF_SCHEMES
        if of_schemes and kernel and "Attention" not in row.layer:
            layers = "routed experts" if row.layer == "RoutedExperts" else "linear modules"
            gpus = found.setdefault(row.variant, {}).setdefault(layers, {}).setdefault(kernel, [])
            if row.gpu not in gpus:
                gpus.append(row.gpu)
    return found


def with_table(page: str, kernels: Kernels) -> str:
    """A page with the table of the kernels between its markers."""
    lines = [
        (scheme, layers, "; ".join(f"{', '.join(gpus)}: {name}" for name, gpus in chosen.items()))
        for scheme, by_layers in kernels.items()
        for layers, chosen in by_layers.items()
    ]
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}{_table('scheme layers kernels', lines)}{END}{rest.partition(END)[2]}"


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
    parser.add_argument("--gpu", action="append", choices=GPUS, help="with every family on it")
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
    own = hashlib.sha256(real.version.encode())
    for path in sorted(IN_VLLM.glob("*.py")):
        own.update(path.read_bytes())
    answers = folder / "answers" / own.hexdigest()[:12]
    answers.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        jobs = made(Path(scratch), FAMILIES | OF_SCHEMES)
        few = {name: job for name, job in jobs.items() if name in OF_SCHEMES}
        for side, vllm in vllms.items():
            for gpu in GPUS:
                asked = jobs if gpu in gpus else few
                start, kept = time.perf_counter(), answers / f"{side}-{gpu}.json"
                sides[side][gpu] = load(vllm, gpu, asked, kept)
                seconds = time.perf_counter() - start
                print(f"{gpu} {side}: {seconds:.0f} s", file=sys.stderr, flush=True)
    page, count = differences(sides)
    (folder / "differences.md").write_text(page)
    kernels = kernels_of(sides["wheel"])
    data = {"vllm": real.version, "gpus": GPUS, "kernels": kernels}
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), kernels))
    print(page.partition("\n")[0])
    print(folder / "differences.md")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
