"""`keepmtp doctor`: what is installed here, what can be checked with it, and what would enable the rest.

In: this Python's package metadata, vLLM's environment, the machine. Out: tables, or JSON. Nothing heavy is imported.

Easy to get wrong: what is not installed is not broken, since planning and checking need no torch and no vLLM. Broken is
what somebody chose and cannot work: a VLLM_PYTHON without vLLM, a vLLM outside the supported range. A token is found,
never shown.
"""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..recipes.errors import VLLMError
from ..recipes.extras import missing, requirements
from ..validate.serving import vllm_env

# Extra -> what keepmtp cannot do without it. A package that several need is listed with the first.
EXTRAS = {
    "quantize": "packing weights",
    "report": "the HTML report",
    "calibrate": "calibrated recipes",
    "evaluate": "GSM8K",
}
_TOKEN_NAMES = ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_GET_VLLM = "make vllm"
_GET_QUANTIZE = "pip install 'keepmtp[quantize]'"
_GET_EVALUATE = "pip install 'keepmtp[evaluate]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One thing that keepmtp can do somewhere: whether it can here, why, and the command that does or enables it."""

    what: str
    can: bool
    why: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        packages: versions in keepmtp's environment; "" where not installed.
        vllm: the environment that was found, of any version; None if there is none.
        no_vllm: the refusal, if vLLM cannot be used.
        gpus, cpu, cpu_features: of this machine.
        token: where a token of the Hub was found; "" if nowhere. Not the token.
        broken: what was chosen and cannot work, a sentence each.
    """

    keepmtp: str
    python: str
    packages: dict[str, str]
    vllm: vllm_env.VLLM | None
    no_vllm: str
    gpus: tuple[vllm_env.GPU, ...]
    cpu: str
    cpu_features: tuple[str, ...]
    token: str
    abilities: tuple[Ability, ...]
    broken: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The form of `keepmtp doctor --json`."""
        return asdict(self) | {
            "vllm": self.vllm.as_dict() if self.vllm else None,
            "supported_vllm": {"range": f"{vllm_env.SUPPORTED}.*", "tested": list(vllm_env.TESTED)},
            "ok": not self.broken,
        }


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")] = False,
) -> None:
    """Say what was found on this machine, what can be checked here, and what would enable the rest.

    Looks at keepmtp's own environment, at vLLM's (VLLM_PYTHON, else .venv-vllm), at the processor, at NVIDIA GPUs, and
    whether there is a token for the Hub, which is neither shown nor tried.
    Exit status 2 if something that was chosen cannot work; what is merely not installed is none of it.

    Example: `VLLM_PYTHON=/opt/vllm/bin/python keepmtp doctor`
    """
    found = diagnose()
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2) + "\n")
    else:
        _show(found, Console())
    if found.broken:
        raise typer.Exit(2)


def diagnose() -> Diagnosis:
    """Look at this machine; asks vLLM's Python for versions, a second at most."""
    packages = {needed.name: _version(needed.name) for extra in EXTRAS for needed in requirements(extra)}
    vllm, no_vllm, is_broken = None, "", False
    try:
        vllm = vllm_env.find_vllm(any_version=True)
        vllm_env.find_vllm()
    except VLLMError as error:
        # Its first word is "vllm" where none was named and none is in its usual place: not installed, not broken.
        no_vllm, is_broken = str(error), not str(error).startswith("vllm: ")
    gpus, (cpu, flags) = vllm_env.gpus_here(), vllm_env.cpu_here()
    features = tuple(flag for flag in vllm_env.CPU_FLAGS if flag in flags)
    usable, token = vllm if not no_vllm else None, _where_token()
    return Diagnosis(
        keepmtp=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        packages=packages,
        vllm=vllm,
        no_vllm=no_vllm,
        gpus=gpus,
        cpu=cpu,
        cpu_features=features,
        token=token,
        broken=(no_vllm,) if is_broken else (),
        abilities=_abilities({extra: missing(extra) for extra in EXTRAS}, packages, usable, gpus, token),
    )


def _abilities(
    lacking: dict[str, list[str]],
    packages: dict[str, str],
    vllm: vllm_env.VLLM | None,
    gpus: tuple[vllm_env.GPU, ...],
    token: str,
) -> tuple[Ability, ...]:
    from ..validate.dryload.loader import GPUS

    can_pack = not lacking["quantize"]
    no_packing = f"needs {' and '.join(lacking['quantize'])}"
    on_gpu = can_pack and bool(gpus) and not packages["torch"].endswith("+cpu")
    can_serve = vllm is not None and (vllm.build == "cpu" or bool(gpus))
    no_vllm = "needs vLLM's own classes, in an environment of their own"
    get_server = _GET_VLLM if vllm is None else "a GPU, or VLLM_PYTHON=... of a vLLM built for CPUs"
    natively, copied = _serving(vllm, gpus)
    can_copy = can_serve and can_pack
    page, absent, scoring = lacking["report"], lacking["calibrate"], lacking["evaluate"]
    can_score = can_serve and not scoring
    dry = f"vLLM {vllm.version} on meta tensors, no GPU needed" if vllm else no_vllm
    return (
        Ability(
            what="plan, static check",
            can=True,
            why="headers and config.json are enough",
            command="keepmtp check CHECKPOINT",
        ),
        *(
            Ability(
                what=f"dry load on a pretended {gpu}",
                can=vllm is not None,
                why=dry,
                command=f"keepmtp check CHECKPOINT --gpu {gpu}" if vllm else _GET_VLLM,
            )
            for gpu in GPUS
        ),
        Ability(
            what="real server, natively",
            can=can_serve,
            why=natively,
            command="keepmtp serve-check CHECKPOINT" if can_serve else get_server,
        ),
        Ability(
            what="real server, on a BF16 copy",
            can=can_copy,
            why=copied if can_pack else no_packing,
            command="keepmtp serve-check CHECKPOINT" if can_copy else _GET_QUANTIZE if can_serve else get_server,
        ),
        Ability(
            what="HTML report",
            can=not page,
            why="jinja2 and matplotlib are here" if not page else f"needs {' and '.join(page)}",
            command="keepmtp check CHECKPOINT --html FOLDER" if not page else "pip install 'keepmtp[report]'",
        ),
        Ability(
            what="packing weights, without data",
            can=can_pack,
            why=f"torch {packages['torch']}, on the CPU" if can_pack else no_packing,
            command="keepmtp quantize MODEL" if can_pack else _GET_QUANTIZE,
        ),
        Ability(
            what="packing weights on a GPU",
            can=on_gpu,
            command="keepmtp quantize MODEL" if on_gpu else "",
            why="one shard a GPU at a time" if on_gpu else "needs a GPU and torch built for CUDA",
        ),
        Ability(
            what="calibrated recipes, mtp: auto",
            can=not absent,
            why="llm-compressor, transformers and datasets are here" if not absent else f"needs {' and '.join(absent)}",
            command="keepmtp quantize MODEL" if not absent else "pip install 'keepmtp[calibrate]'",
        ),
        Ability(
            what="GSM8K, with method=mtp",
            can=can_score,
            why=f"needs {' and '.join(scoring)}"
            if scoring
            else f"lm-eval {packages['lm-eval']} asks vLLM's server"
            if can_serve
            else "needs a real server",
            command=_GET_EVALUATE if scoring else "keepmtp eval CHECKPOINT" if can_serve else get_server,
        ),
        Ability(
            what="model card",
            can=not page,
            why="jinja2 and matplotlib are here" if not page else f"needs {' and '.join(page)}",
            command="keepmtp card CHECKPOINT" if not page else _GET_EVALUATE,
        ),
        Ability(
            what="publishing to the Hub",
            can=bool(token) and not page,
            why=f"needs {' and '.join(page)}"
            if page
            else f"a token from {token}, not tried"
            if token
            else "needs a token with write access",
            command=_GET_EVALUATE
            if page
            else "keepmtp publish CHECKPOINT --repo ORG/NAME"
            if token
            else "hf auth login",
        ),
    )


def _serving(vllm: vllm_env.VLLM | None, gpus: tuple[vllm_env.GPU, ...]) -> tuple[str, str]:
    """Why a checkpoint can be served with its own bytes, and why on a BF16 copy."""
    if vllm is None:
        return "needs vLLM", "needs vLLM"
    if vllm.build == "cpu":
        return (
            "vLLM's CPU kernels: BF16, W4A16, FP8_DYNAMIC and INT8 linears, NVFP4 linears by emulation",
            "for what has no CPU kernel: quantized routed experts, FP8 in blocks, MXFP4",
        )
    if not gpus:
        why = "this vLLM is built for CUDA, and no GPU is here"
        return why, why
    return f"on {', '.join(gpu.name for gpu in gpus)}", "where the GPU has no kernel for a scheme"


def _where_token() -> str:
    """Where huggingface_hub 1.33 finds one; the Hub is not asked what it is good for."""
    from huggingface_hub import get_token

    named = next((name for name in _TOKEN_NAMES if os.environ.get(name, "").strip()), "")
    return named or ("`hf auth login`" if get_token() else "")


def _use(package: str) -> str:
    return next(what for extra, what in EXTRAS.items() if package in {needed.name for needed in requirements(extra)})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _show(found: Diagnosis, out: Console) -> None:
    """Two tables: what was found, and what can be done with it."""
    table = Table(title="found", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("version")
    table.add_row("keepmtp", found.keepmtp)
    table.add_row("Python", escape(found.python))
    for name, number in found.packages.items():
        table.add_row(name, number or f"[yellow]not installed:[/] no {_use(name)}")
    table.add_section()
    supported = f"supported: {vllm_env.SUPPORTED}.*, tested: {', '.join(vllm_env.TESTED)}"
    if found.vllm:
        colour = "red" if found.no_vllm else "green"
        table.add_row("vLLM", f"[{colour}]{found.vllm.version}[/], {found.vllm.build.upper()} build ({supported})")
        table.add_row("  Python", escape(str(found.vllm.python)))
        for name in ("torch", "transformers", "compressed_tensors"):
            table.add_row(f"  {name.replace('_', '-')}", getattr(found.vllm, name) or "not installed")
    else:
        table.add_row("vLLM", f"[yellow]none[/] ({supported})")
    table.add_section()
    table.add_row("Hub token", f"from {found.token}" if found.token else "none")
    table.add_row(
        "GPU",
        ", ".join(f"{gpu.name}, sm{gpu.capability.replace('.', '')}, {gpu.memory_gib:.0f} GiB" for gpu in found.gpus)
        or "none",
    )
    table.add_row("CPU", escape(found.cpu or "unknown"))
    table.add_row("  features", ", ".join(found.cpu_features) or "none that vLLM's CPU kernels ask for")
    out.print(table)
    table = Table(title="what can be done here", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "why", "command"):
        table.add_column(column, overflow="fold", no_wrap=column == "")
    for ability in found.abilities:
        sign = "[green]yes[/]" if ability.can else "[yellow]no[/]"
        table.add_row(sign, ability.what, escape(ability.why), escape(ability.command) or "-")
    out.print(table)
    for sentence in found.broken:
        out.print(f"[red]broken:[/] {sentence}", highlight=False, soft_wrap=True)
    if found.no_vllm and not found.broken:
        out.print(escape(found.no_vllm), highlight=False, soft_wrap=True)
