"""The steps of `make gpu-serve`: what keepmtp makes, served by a real vLLM with method=mtp, against
what keepmtp and the CPU server said of it.

In: `Options`. Out: for each step a function that gives its rows one by one, the most telling first,
since a step may be cut.

Easy to get wrong: vLLM names a kernel once in its log, for all modules that it was picked for, and
one that nothing was left to choose for it does not name. So a row says which of the kernels that
`check --gpu` names stand in the log, and which others do. And PyTorch is imported only by the steps
that compute: a process takes seconds for that, of two minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from figures import Figure
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.run.child import Child, environment
from keepmtp.recipes.runtimes.vllm import asked as taken_by
from keepmtp.validate.facts.served import Run, Served
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.serve_check import Check, serve
from keepmtp.validate.measure.texts import PROMPTS

ROOT = Path(__file__).parent.parent
GIB = 2**30
GLM, QWEN = "tiny-glm4-moe", "tiny-qwen3_5"
TUNED = "tuned.yaml"
# A variant with a tuned block, which needs a recipe of its own.
SETTINGS = {
    "rest": "NVFP4",
    "mtp": "tuned",
    "calibration": "problems-32x128",
    "summary": "NVFP4, MTP block NVFP4 and tuned",
    "mtp_tuned": {
        **{"mtp": "NVFP4", "steps": 40, "batch_size": 4, "relative_rate": 0.014, "seed": 0},
        **{"loss": "lk_hybrid", "draft_steps": 3, "decay": 0.6},
    },
}
# Name -> the words of `keepmtp quantize`. The first decides what the rest of the time is for.
MADE: dict[str, str] = {
    f"{GLM} W4A16 + FP8": f"{GLM} --scheme w4a16-fp8",
    f"{QWEN} FP8_DYNAMIC": f"{QWEN} --scheme fp8-dynamic",
    f"{GLM} NVFP4A16 + FP8": f"{GLM} --scheme nvfp4a16-fp8",
    f"{GLM} NVFP4, MTP block NVFP4": f"{GLM} --scheme nvfp4-mtp-nvfp4",
    f"{GLM} FP8, FP8 KV cache": f"{GLM} --scheme fp8-kv",
    f"{GLM} FP8_BLOCK": f"{GLM} --scheme FP8_BLOCK",
    f"{GLM} W4A16 + FP8, MTP block FP8_DYNAMIC": f"{GLM} --scheme w4a16-fp8 --mtp FP8_DYNAMIC",
    f"{GLM} NVFP4, MTP block tuned": f"{TUNED} --scheme tuned",
    f"{QWEN} W4A16 + FP8": f"{QWEN} --scheme w4a16-fp8",
    f"{QWEN} NVFP4": f"{QWEN} --scheme nvfp4",
    f"{QWEN} FP8": f"{QWEN} --scheme fp8",
    f"{QWEN} NVFP4, MTP block NVFP4": f"{QWEN} --scheme nvfp4 --mtp NVFP4",
}
# Name -> the one that `keepmtp convert` makes it of.
CONVERTED = {f"{GLM} NVFP4, modelopt's dialect": f"{GLM} NVFP4, MTP block NVFP4"}
FIRST = next(iter(MADE))
# What the CPU has kernels of some speed for, and one server of it draws all steps.
SMALL = {f"{QWEN} W8A8": f"{QWEN} --scheme W8A8"}
TWIN = f"{QWEN} FP8_DYNAMIC"
RANDOM = "mimo-7b"
_FEWER = "the first, k=1 and 2"
# Further servers of the same kind, which --small leaves out.
NOT_SMALL = (_FEWER, f"{RANDOM} NVFP4, served")
# Of a model that transformers does not have; vLLM asks the checkpoint's own Python for it.
_CONFIG_CLASS = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
DEPTH = 3
KS = {False: (0, 1, 2, 3), True: (1,)}
# How far a server may be below another that adds up in another order, in acceptance.
APART = 0.03
# All positions together, of a server on a CPU (docs/benchmarks.md).
ON_CPU = {f"{GLM} W4A16 + FP8": 0.985, f"{QWEN} FP8_DYNAMIC": 1.0}
_DRAFT_HEAD = "draft_lm_head_quantization"
# Where vLLM says what it picked: the name, without what it was picked from.
_PICKED = re.compile(r"\b(?:Using|Selected) '?(\w+)'?(?= for |[\w -]*\bbackend|\.?$)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run serves.

    Attributes:
        device: cuda or cpu.
        small: few tokens and servers.
        folder: for checkpoints.
        served: of this step alone, for answers and logs.
        sm: the GPU that `check` pretends, "sm90".
        words: for every server.
        start_seconds: a server may take to be healthy.
    """

    device: str
    small: bool
    folder: Path
    served: Path
    sm: str
    words: tuple[str, ...]
    start_seconds: float

    @property
    def shared(self) -> tuple[str, ...]:
        """Words for a server of a tiny model, which leaves room for others beside it. A size for
        the cache spares a profile, which fails where another server frees memory.
        """
        if self.device == "cpu":
            return self.words
        memory = ("--gpu-memory-utilization", "0.15", "--kv-cache-memory-bytes", str(4 * GIB))
        return (*memory, *self.words)


Step = Callable[[Options], Iterator[Figure]]


def steps(options: Options) -> Mapping[str, Step]:
    """Name -> a step, in order of worth."""
    found: dict[str, Step] = {}
    names = [*SMALL] if options.small else [*MADE, *CONVERTED]
    found |= {name: partial(served_well, name) for name in names}
    found |= {_FEWER: partial(fewer_drafts, names[0])}
    found |= {"wrong ignore list": wrong_ignore_list}
    found |= {f"bench k={k}": partial(benched, k) for k in KS[options.small]}
    found |= {
        _DRAFT_HEAD: quantized_draft_head,
        f"{RANDOM}, random weights": random_source,
        f"{RANDOM} FP8_DYNAMIC": partial(random_quantized, "FP8_DYNAMIC", {}),
        f"{RANDOM} NVFP4, MTP block NVFP4": partial(
            random_quantized, "NVFP4", {"mtp": "NVFP4", "calibration": "problems-32x128"}
        ),
        f"{RANDOM} FP8_DYNAMIC, served": partial(random_served, "FP8_DYNAMIC"),
        f"{RANDOM} NVFP4, served": partial(random_served, "NVFP4"),
    }
    if options.small:
        for name in NOT_SMALL:
            del found[name]
    return found


# --- tiny models ----------------------------------------------------------------------------------


def made(name: str, options: Options) -> Path:
    """The checkpoint of that name, made if it is not there."""
    folder = options.folder / slug(name)
    if (folder / "keepmtp.json").exists():
        return folder
    if name in CONVERTED:
        source = made(CONVERTED[name], options)
        keepmtp("convert", source, "--to", "modelopt", "--static-only", "--out", folder)
    else:
        first, *words = (SMALL | MADE)[name].split()
        recipe: object = first
        if first == TUNED:
            recipe = tuned_recipe(options.folder)
        keepmtp("quantize", recipe, *words, "--out", folder)
    return folder


def tuned_recipe(folder: Path) -> Path:
    """The tiny model's recipe with one variant more."""
    document = yaml.safe_load((ROOT / "recipes" / "models" / f"{GLM}.yaml").read_text())
    document["source"] = str(ROOT / "models" / GLM)
    document["variants"]["tuned"] = SETTINGS
    path = folder / TUNED
    path.write_text(yaml.safe_dump(document))
    return path


def slug(name: str) -> str:
    """A name as a folder's."""
    return re.sub(r"[^\w.]+", "-", name)


def keepmtp(*words: object, status: tuple[int, ...] = (0,)) -> str:
    """What the command prints. It ends with this process, and takes its servers with it.

    Raises:
        RuntimeError: another exit status; with the last line that it said.
    """
    command = [sys.executable, "-P", "-m", "keepmtp", *map(str, words)]
    ours = environment(is_ours=True)
    with (
        tempfile.TemporaryFile("w+") as errors,
        Child(
            command, environment=ours, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as child,
    ):
        told, _ = child.process.communicate()
        errors.seek(0)
        said = errors.read()
    sys.stderr.write(said[-3000:])
    if child.process.returncode not in status:
        last = (said or told).strip().splitlines()[-1:]
        raise RuntimeError(f"keepmtp {words[0]}: exit status {child.process.returncode}: {last}")
    return told


def asked(folder: Path, ks: tuple[int, ...], options: Options, extra: tuple[str, ...]) -> Served:
    """Serve a folder at each k and ask the prompts; answers that are there are not asked again.

    Raises:
        RuntimeError: no server came up; in vLLM's words.
    """
    setup = Setup(vllm=find_vllm(), out=options.served, timeout=options.start_seconds, extra=extra)
    model = Model(role="checkpoint", source=open_source(folder), identity=identify(folder))
    prompts, most = (PROMPTS[:1], 16) if options.small else (PROMPTS, 128)
    served = serve(model, setup=setup, check=Check(ks=ks, prompts=prompts, max_tokens=most))
    for run in served.runs:
        if not run.loaded:
            raise RuntimeError(f"k={run.k}: {run.error}")
    return served


def served_well(name: str, options: Options) -> Iterator[Figure]:
    """One variant: it starts with method=mtp, with the kernels that were said, and accepts and
    answers as was said.
    """
    started = time.monotonic()
    folder = made(name, options)
    yield Figure(what="quantized", measured=f"{time.monotonic() - started:.1f} s")
    told = keepmtp("check", folder, "--gpu", options.sm, "-k", DEPTH, "--json", status=(0, 1))
    checked = json.loads(told)
    found = ", ".join(each["says"][:80] for each in checked["findings"])
    yield Figure(
        what=f"check --gpu {options.sm}",
        measured=found or "no findings",
        expected="no error",
        met=checked["ok"],
    )
    served = asked(folder, (DEPTH,), options, options.shared)
    (run,) = served.runs
    yield Figure(
        what="starts with method=mtp",
        measured=f"after {run.seconds_to_health:.0f} s, served {served.as_served}",
        expected="the files themselves",
        met=served.as_served == "native" or options.device == "cpu",
    )
    yield accepted_like(run, options, name, folder)
    yield kernels_in_log(checked["dry"][0], Path(run.log), options)
    *_, run = asked(folder, (0, DEPTH), options, options.shared).runs
    parted = run.partings or ()
    gaps = [f"{each.gap:.3f}" if each.gap is not None else "unknown" for each in parted]
    yield Figure(
        what=f"answers, MTP on and off, {len(run.outputs)} prompts",
        measured=f"{len(parted)} differ, log-probabilities apart by {', '.join(gaps)}"
        if parted
        else "the same",
        expected="the same, or a tie",
        met=all(each.gap is not None and each.gap < 0.1 for each in parted),
    )


def without_server(folder: Path, k: int) -> tuple[float, ...]:
    """Acceptance by position that keepmtp's own run found; empty where it calibrated nothing."""
    calibrated = json.loads((folder / "keepmtp.json").read_text()).get("calibration") or {}
    own = ()
    for row in calibrated.get("rows", ()):
        if row["acceptance"]:
            own = tuple(row["acceptance"]["by_position"].get(str(k), ()))
    return own


def accepted_like(run: Run, options: Options, name: str, folder: Path) -> Figure:
    """Acceptance by position, the one of k=1 first, against the CPU server's and the run's own."""
    said = f"{percent(run.acceptance_per_position)} of {run.drafts:,} drafts"
    own = without_server(folder, run.k)
    if own:
        said += f"; without a server {percent(own)}"
    least = ON_CPU.get(name, sum(own) / max(1, len(own)))
    is_judged = bool(least) and options.device != "cpu"
    return Figure(
        what=f"accepted by position, k={run.k}",
        measured=said,
        expected=f"{least:.1%} in all, less {APART:.0%}" if is_judged else "",
        met=not is_judged or (run.acceptance or 0.0) >= least - APART,
    )


def percent(shares: tuple[float, ...]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def kernels_in_log(dry: Mapping[str, Any], log: Path, options: Options) -> Figure:
    """Which kernels of each kind of module the log names, of those that `check` said.

    On a CPU the server picks others, and nothing is judged.
    """
    picked = {*_PICKED.findall(log.read_text(errors="replace"))}
    said, missing, left_out = set[str](), list[str](), set[str]()
    for role in ("target", "draft"):
        for use in dry[role]["kernels"]:
            if not use["kernel"]:
                continue
            words = {*use["kernel"].split()}
            said |= words
            if words & picked:
                continue
            # Set where vLLM was installed without FlashInfer.
            if "GPU_KIT" in os.environ and use["kernel"].startswith("FlashInfer"):
                left_out |= words
            else:
                missing.append(f"{use['where']} {use['kernel']}")
    others = sorted(picked - said)
    measured = f"{', '.join(sorted(said & picked)) or 'none'}"
    if missing:
        measured += f"; not in the log: {', '.join(missing)}"
    if left_out:
        measured += f"; not in the kit: {', '.join(sorted(left_out))}"
    return Figure(
        what="kernels that the log names",
        measured=f"{measured}; others in the log: {', '.join(others) or 'none'}",
        expected=f"those that check --gpu {options.sm} says" if options.device != "cpu" else "",
        met=not missing or options.device == "cpu",
    )


def fewer_drafts(name: str, options: Options) -> Iterator[Figure]:
    """Acceptance at k = 1 and 2, one server each."""
    folder = made(name, options)
    for k in (1, 2):
        (run,) = asked(folder, (k,), options, options.shared).runs
        yield accepted_like(run, options, name, folder)


def wrong_ignore_list(options: Options) -> Iterator[Figure]:
    """A checkpoint whose ignore list has wrong names: vLLM loads it, and nothing is accepted."""
    from keepmtp.validate.check.check import examine
    from twins import broken

    good = made(TWIN, options)
    folder = options.folder / "twin"
    if not folder.exists():
        broken(good, folder)
    says = [each.says[:80] for each in examine(folder).data.findings if each.severity == "error"]
    yield Figure(
        what="check", measured=says[0] if says else "nothing", expected="an error", met=bool(says)
    )
    (run,) = asked(folder, (1,), options, options.shared).runs
    yield Figure(
        what="loads, accepted at k=1",
        measured=f"{run.accepted_tokens} of {run.draft_tokens} tokens",
        expected="loads without a word, 0 accepted",
        met=run.draft_tokens > 0 and not run.accepted_tokens,
    )


def benched(k: int, options: Options) -> Iterator[Figure]:
    """`keepmtp bench` of the first checkpoint with one k."""
    folder = made(FIRST if not options.small else next(iter(SMALL)), options)
    asked = ["--concurrency", "1,8,32", "--repeat", 1, "--output-tokens", 128]
    if options.small:
        asked = ["--concurrency", "1", "--repeat", 1, "--output-tokens", 4, "--requests", 1]
    limits = ("--timeout", options.start_seconds, "--out", options.served)
    told = keepmtp("bench", folder, "-k", k, *asked, *limits, "--json", "--", *options.words)
    for cell in json.loads(told)["bench"]["checkpoint"]["cells"]:
        yield Figure(
            what=f"{cell['concurrency']} in flight",
            measured=f"{cell['tokens_per_second']:.0f} tokens/s"
            if not cell["error"]
            else cell["error"],
            expected="answers",
            met=not cell["error"],
        )


def quantized_draft_head(options: Options) -> Iterator[Figure]:
    """Drafting with a quantized copy of the head, where this vLLM can."""
    name = FIRST if not options.small else next(iter(SMALL))
    version = find_vllm().version
    if "fp8" not in taken_by(version).options.get(_DRAFT_HEAD, ()):
        yield Figure(what="not run", measured=f"vLLM {version} does not take it")
        return
    folder = made(name, options)
    words = (*options.shared, f"--speculative-config.{_DRAFT_HEAD}", "fp8")
    (run,) = asked(folder, (1,), options, words).runs
    yield accepted_like(run, options, name, folder)


# --- a model of true size -------------------------------------------------------------------------


def random_source(options: Options) -> Iterator[Figure]:
    """MiMo-7B's layout with random weights, MTP block too, and a tiny model's tokenizer."""
    from gpu_models import fill_with_noise
    from keepmtp.pipeline import plan_before_measuring
    from keepmtp.recipes.find import find_recipe
    from releases import source_layout, write_checkpoint

    folder = options.folder / RANDOM
    started = time.monotonic()
    size = "tiny" if options.small else "full"
    config, tensors = source_layout(RANDOM, size=size)
    write_checkpoint(folder, config, tensors, num_shards=None if size == "full" else 1)
    for path in (ROOT / "models" / GLM).glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    recipe, _ = find_recipe(RANDOM)
    fill_with_noise(plan_before_measuring(recipe, open_source(folder)), folder, "backbone", "mtp")
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    measured = f"{written / GIB:.2f} GiB in {time.monotonic() - started:.1f} s"
    yield Figure(what="written", measured=measured)


def random_quantized(scheme: str, choices: Mapping[str, str], options: Options) -> Iterator[Figure]:
    """Quantize it; time, and peak memory of the GPU against the plan."""
    import torch
    from gpu_row import forget_peak, peak_bytes
    from keepmtp import api
    from keepmtp.quantize.needs.memory import stations

    source = options.folder / RANDOM
    device = torch.device(options.device)
    forget_peak(device)
    started = time.monotonic()
    plan = api.plan(RANDOM, source=source, scheme=scheme, **choices)
    result = api.quantize(plan, options.folder / f"{RANDOM}-{scheme}")
    minutes = (time.monotonic() - started) / 60
    yield Figure(what="quantized and checked", measured=f"{minutes:.2f} min")
    peak = peak_bytes(device)[1] / GIB
    if choices:
        counted = max(station.device_bytes for station in stations(plan)) / GIB
        yield Figure(
            what="peak memory of the GPU",
            measured=f"{peak:.2f} GiB, planned {counted:.2f} GiB" if peak else "not counted",
            expected="at most what is planned" if peak else "",
            met=peak <= counted,
        )
    size = sum(path.stat().st_size for path in result.out.glob("*.safetensors"))
    yield Figure(what="written", measured=f"{size / GIB:.2f} GiB")


def random_served(scheme: str, options: Options) -> Iterator[Figure]:
    """Serve what that has written. Random weights accept by chance."""
    folder = options.folder / f"{RANDOM}-{scheme}"
    (folder / "configuration_mimo.py").write_text(_CONFIG_CLASS)
    (run,) = asked(folder, (1,), options, ("--trust-remote-code", *options.words)).runs
    yield Figure(
        what="starts with method=mtp",
        measured=f"after {run.seconds_to_health:.0f} s; {run.tokens_per_second:.0f} tokens/s, "
        f"accepted {run.accepted_tokens} of {run.draft_tokens}",
        expected="it does",
        met=run.draft_tokens > 0,
    )
