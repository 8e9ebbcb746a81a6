"""The facts of a dry load, from vLLM's process to report.json.

In: the JSON that validate/dryload/in_vllm prints for one checkpoint. Out: a `LoadAccount`. Its
`load` is what report.json, the page and the card hold; the rest is what the findings are made from.

Easy to get wrong: vLLM may raise nothing and still hold something else than the files. So `ok` is
False where the account has an error, also without a failure (check_on.py counts the errors).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, get_args

from packaging.version import Version
from pydantic import AfterValidator, Field

from ...checkpoints.fact import Count, Fact, Figure, NumDrafts
from ...recipes.runtimes.vllm import parsed

GPU = Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]
GPUS: tuple[GPU, ...] = get_args(GPU)
GPU_NAMES: Mapping[str, str] = {
    "sm80": "A100",
    "sm86": "RTX 3090, A10",
    "sm89": "L40S, RTX 4090",
    "sm90": "H100, H200",
    "sm100": "B200",
    "sm120": "RTX PRO 6000, RTX 5090",
}
"""What people call the GPUs of a compute capability."""
Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = get_args(Role)
_YES = {True: "yes", False: "no"}
_LONGEST = 80  # characters of an error in a row; the findings have it whole


def gpu_title(gpu: str) -> str:
    """A GPU as both the dry load and people call it: `sm100 (B200)`."""
    if gpu in GPU_NAMES:
        return f"{gpu} ({GPU_NAMES[gpu]})"
    return gpu


class KernelUse(Fact):
    """Layers of one kind, and the kernel that vLLM would run them with.

    Attributes:
        layer, method, kernel: classes, or names of back-ends.
        count: layers.
        where: prefix of the first.
        outcome: "ok", "refused: ...", or "not judged: ..." where values or compiled operators
            decide.
        refused: why vLLM raises, the same words; "" where it does not. Not in report.json.
        lacks_gpu: it is the GPU that has no kernels for it, whatever the scheme. Not in
            report.json.
    """

    layer: str
    method: str
    kernel: str
    count: Count
    where: str
    outcome: str
    refused: str = Field(default="", exclude=True)
    lacks_gpu: bool = Field(default=False, exclude=True)


class LoadedModel(Fact):
    """A target or a draft after loading.

    Attributes:
        cls: vLLM's class; "" where vLLM stopped before it.
        num_params: parameters that a checkpoint must fill.
        num_written: parameters that this one filled.
        shared: parameters that vLLM replaces by the target's after loading.
    """

    cls: str = ""
    num_params: Count = 0
    num_written: Count = 0
    shared: tuple[str, ...] = ()
    kernels: tuple[KernelUse, ...] = ()


class LoadFailure(Fact):
    """vLLM's exception.

    Attributes:
        stage: config, world, construct, load, share or process; "crash" if the process died.
        role: target, draft or "".
        type, words, at: the exception's class, message, and file:line in vLLM.
        tensor: the tensor on disk that the loader was reading; "" outside loading.
    """

    stage: str
    role: str
    type: str
    words: str
    at: str = ""
    tensor: str = ""


def _version(word: str) -> str:
    """A version that can be compared; a report may be a stranger's."""
    Version(word)
    return word


class DryLoad(Fact):
    """One checkpoint on one pretended GPU.

    Attributes:
        vllm: the version that loaded it.
        error: the first error, where and what; "" for none.
        defect: what the failure is called where it is vLLM's own fault; else "".
        cures: of validate/keepmtp_cures, those with which this vLLM loads it without an error; ()
            where it does as it is, or where none helps.
        k: draft tokens a step; 0 where the target was loaded alone.
        ok: no error, neither vLLM's nor one in the account.
        attention: the value of --attention-backend that it takes; "" for vLLM's own choice.
        seconds: of all stages together.
        peak_mib: of the process that loaded.
    """

    dropped = frozenset({"num_errors", "runner"})

    vllm: Annotated[str, AfterValidator(_version)]
    gpu: str
    tp: Count
    k: NumDrafts
    ok: bool
    error: str = ""
    defect: str = ""
    cures: tuple[str, ...] = ()
    failure: LoadFailure | None = None
    target: LoadedModel
    draft: LoadedModel
    attention: str = ""
    seconds: Figure = 0.0
    peak_mib: Count = 0


class Fault(Fact):
    """A runtime parameter that was not written over all its elements.

    Attributes:
        param: its name in vLLM.
        num_written, num_expected: elements.
        sources: the tensors on disk that it was written from, each with the elements written.
    """

    param: str
    num_written: int
    num_expected: int
    sources: dict[str, int]


class Misfit(Fact):
    """A write that changed what it wrote: numbers cast between packed and wide formats, or one
    value spread over many.

    Attributes:
        param: the parameter's name in vLLM.
        tensor: the tensors on disk, comma-separated.
        given, wanted: dtype or shape on disk, and that of the parameter.
    """

    param: str
    tensor: str
    given: str
    wanted: str


class Question(Fact):
    """What vLLM asked a quantization config while it built a layer, and the answer ("" for none).

    Attributes:
        prefix: the name that it asked about.
        layer: class of the layer.
        path: the layer's place in the model, which its parameters are named after.
    """

    prefix: str
    layer: str
    method: str
    path: str


class ModelAccount(Fact):
    """How the parameters of a target or a draft were written.

    Attributes:
        faults: parameters that are uninitialised memory, keep the value of their construction, or
            were filled in part.
        misfits: writes that changed what they wrote.
        asked: what the quantization config was asked, in the order of construction.
    """

    faults: tuple[Fault, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    asked: tuple[Question, ...] = ()


class LoadAccount(Fact):
    """A dry load, and everything that was seen of it.

    Attributes:
        path: the checkpoint.
        unconsumed: tensors on disk that neither target nor draft used.
        truncated: (tensor, elements used, elements) of those used in part; known at TP 1 only.
    """

    path: str
    load: DryLoad
    target: ModelAccount = ModelAccount()
    draft: ModelAccount = ModelAccount()
    unconsumed: tuple[str, ...] = ()
    truncated: tuple[tuple[str, int, int], ...] = ()

    def of(self, role: Role) -> tuple[LoadedModel, ModelAccount]:
        """What was loaded as target or draft, and how its parameters were written."""
        if role == "target":
            return self.load.target, self.target
        return self.load.draft, self.draft

    def with_cures(self, cures: tuple[str, ...]) -> "LoadAccount":
        """The same, of a checkpoint that loads with these."""
        return self.model_copy(update={"load": self.load.model_copy(update={"cures": cures})})

    def judged(self, errors: Sequence[str], defect: str) -> "LoadAccount":
        """The same with its errors, each where and what, and vLLM's defect that caused them."""
        update = {"ok": not errors, "error": "".join(errors[:1]), "defect": defect}
        load = self.load.model_copy(update=update)
        return self.model_copy(update={"load": load})


def by_version(loads: Iterable[DryLoad]) -> dict[str, list[DryLoad]]:
    """The loads of each vLLM, the oldest first."""
    of_version: dict[str, list[DryLoad]] = defaultdict(list)
    for load in loads:
        of_version[load.vllm].append(load)
    return {version: of_version[version] for version in sorted(of_version, key=parsed)}


def serving(loads: Sequence[DryLoad]) -> list[str]:
    """The versions without an error on any GPU, the oldest first."""
    bad = {load.vllm for load in loads if not load.ok}
    return [version for version in by_version(loads) if version not in bad]


def newest(loads: Sequence[DryLoad]) -> list[DryLoad]:
    """Those of the newest version, which a verdict is about."""
    if not loads:
        return []
    return [*by_version(loads).values()][-1]


def cured_in(load: DryLoad, loads: Iterable[DryLoad]) -> str:
    """The first later version of those that were tried which loads it at the same place; "" for
    none, or where nothing is wrong.
    """
    for version, own in by_version(loads).items():
        for other in own:
            is_same = (other.gpu, other.tp, other.k) == (load.gpu, load.tp, load.k)
            if is_same and other.ok and not load.ok and parsed(version) > parsed(load.vllm):
                return version
    return ""


VERSION_COLUMNS = ("vLLM", "GPU", ">TP", "loads", "drafts", "what is wrong")


def version_rows(loads: Sequence[DryLoad]) -> Iterator[tuple[str, ...]]:
    """A row for each version, GPU and TP size, in VERSION_COLUMNS: what stops it, and the version
    that cures it.
    """
    for vllm, own in by_version(loads).items():
        for load in own:
            is_loaded = load.target.num_written == load.target.num_params
            # A target that was loaded whole still counts as loaded if its draft was refused.
            if load.failure is not None and load.failure.role != "draft":
                is_loaded = False
            drafts = "-"
            if load.k:
                drafts = _YES[load.ok]
            wrong = load.error
            if len(wrong) > _LONGEST:
                wrong = f"{wrong[:_LONGEST]}..."
            if load.defect:
                wrong = load.defect
            later = cured_in(load, loads)
            if later:
                wrong += f" Cured in {later}"
            if load.cures:
                wrong += f" Loads with cures ({', '.join(load.cures)})"
            yield vllm, load.gpu, f"{load.tp}", _YES[is_loaded], drafts, wrong


def versions_in_short(loads: Sequence[DryLoad]) -> str:
    """`0.30.0 is the oldest that loads and drafts it, of 0.29.0, 0.30.0 and 0.31.0`; "" where one
    alone was tried.
    """
    tried = list(by_version(loads))
    good = serving(loads)
    if len(tried) < 2:
        return ""
    if not good:
        return f"none of {listed(tried)} loads and drafts it as it is"
    says = f"{good[0]} is the oldest that loads and drafts it, of {listed(tried)}"
    # Older versions that do not load it are what a newer one cured; newer ones are a surprise.
    newer = tried[tried.index(good[0]) :]
    bad = [version for version in newer if version not in good]
    if bad:
        says += f"; {listed(bad)} does not"
    return says


def with_cures(loads: Iterable[DryLoad]) -> str:
    """`, with keepmtp's cure step.layer_types`, where vLLM needs one; else ""."""
    cures = dict[str, None]()
    for load in loads:
        cures |= dict.fromkeys(load.cures)
    if not cures:
        return ""
    plural = ""
    if len(cures) > 1:
        plural = "s"
    return f", with keepmtp's cure{plural} {listed(cures)}"


def places(loads: Iterable[DryLoad], *, is_named: bool = False) -> str:
    """`sm90 and sm100 at TP 1 and 4`, or `sm90 at TP 1 and sm120 at TP 4` where the TP sizes
    differ.

    `is_named`: with the names that people know, `sm100 (B200)`.
    """
    # GPUs with the same TP sizes are named together.
    by_gpu: dict[str, dict[int, None]] = defaultdict(dict)
    for load in loads:
        gpu = load.gpu
        if is_named:
            gpu = gpu_title(gpu)
        by_gpu[gpu][load.tp] = None
    together: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for gpu, sizes in by_gpu.items():
        together[tuple(sizes)].append(gpu)
    return listed([f"{listed(gpus)} at TP {listed(of)}" for of, gpus in together.items()])


def listed(words: Iterable[object]) -> str:
    """`a, b and c`."""
    *most, last = [str(word) for word in words]
    if not most:
        return last
    return f"{', '.join(most)} and {last}"
