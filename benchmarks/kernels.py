"""Which kernel vLLM picks for each scheme on each GPU, by the dry load.

    make docs PAGE=kernels

In: the newest vLLM that keepmtp knows, fetched once. Out: docs/tables/kernels.json, and
the table of docs/tables/kernels.md.

Easy to get wrong: the GPUs are pretended. The log of a real server names its kernels, which `make
gpu` compares with these.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from _helpers import ROOT
from checkpoint_files import write
from good import ours
from keepmtp.recipes.conventions import ALGORITHMS, NOT_FOR_EXPERTS
from keepmtp.recipes.runtimes.vllm import NEWEST
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.dry_load import GPUS, ROLES
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from pages import table, with_part

PAGE = ROOT / "docs" / "tables" / "kernels.md"
DATA = PAGE.with_suffix(".json")
MODEL = "glm-4.7"  # it has linears and routed experts
DENSE = "mimo-7b"  # for what modelopt has for linears alone
Kernels = dict[str, dict[str, dict[str, list[str]]]]
"""scheme -> layers -> kernel -> GPUs."""


def jobs(scratch: Path) -> dict[str, Job]:
    """A checkpoint of each scheme as headers over holes."""
    found = {}
    for scheme in SCHEMES:
        checkpoint = ours(MODEL, scheme, scheme, "split")
        found[scheme] = Job(folder=write(scratch / scheme, checkpoint))
    for scheme in ALGORITHMS:
        model = MODEL
        if scheme in NOT_FOR_EXPERTS:
            model = DENSE
        checkpoint = ours(model, scheme, scheme, "split", "modelopt")
        name = f"modelopt {scheme}"
        found[name] = Job(folder=write(scratch / name, checkpoint))
    return found


def kernels_of(vllm: VLLM, scratch: Path) -> Kernels:
    """What a version picks on every GPU."""
    checkpoints = jobs(scratch)
    found: Kernels = {name: {} for name in checkpoints}
    for gpu in GPUS:
        with DryLoader(vllm, gpu=gpu) as loader:
            accounts = loader.load_all([*checkpoints.values()])
        for by_layers, account in zip(found.values(), accounts, strict=True):
            for role in ROLES:
                for use in account.of(role)[0].kernels:
                    if not use.kernel or "Attention" in use.layer:
                        continue
                    layers = "linear modules"
                    if use.layer == "RoutedExperts":
                        layers = "routed experts"
                    kernel = use.kernel
                    if use.outcome.startswith("refused"):
                        kernel += f" ({use.outcome})"
                    gpus = by_layers.setdefault(layers, {}).setdefault(kernel, [])
                    if gpu not in gpus:
                        gpus.append(gpu)
    return found


def written(kernels: Mapping[str, Mapping[str, Mapping[str, list[str]]]]) -> str:
    """The table of the kernels."""
    rows = []
    for scheme, by_layers in kernels.items():
        for layers, chosen in by_layers.items():
            cells = [f"{', '.join(gpus)}: {name}" for name, gpus in chosen.items()]
            rows.append([scheme, layers, "; ".join(cells)])
    return table(("scheme", "layers", "kernels"), rows)


def main() -> None:
    """Write both."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    (vllm,) = had_vllms([NEWEST], find_vllm())[0]
    with tempfile.TemporaryDirectory() as scratch:
        kernels = kernels_of(vllm, Path(scratch))
    data = {"vllm": vllm.version, "gpus": GPUS, "kernels": kernels}
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(with_part(PAGE, written(kernels)))


if __name__ == "__main__":
    main()
