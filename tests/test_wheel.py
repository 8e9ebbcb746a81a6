"""The wheel as strangers have it: each extra alone in an environment of its own, run from another
folder.

What `keepmtp eval` does with real servers is run from such an environment in
tests/vllm.
"""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import IN_F32, captured
from data_files import table
from keepmtp import __version__
from wheel import stranger

EXTRAS = ("", "quantize", "report", "calibrate", "evaluate")
PACKING = ("quantize", "calibrate", "evaluate")
PAGES = ("report", "evaluate")
MODEL = "models/tiny-glm4-moe"  # ships in the wheel
MADE = "out/tiny-glm4-moe.w4a16-fp8"
PYRIGHT = Path(sys.executable).with_name("pyright")
NO_VLLM = "neither VLLM_PYTHON"

Keepmtp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(
    scope="module",
    params=["", *(pytest.param(extra, marks=pytest.mark.full) for extra in EXTRAS[1:])],
    ids=lambda extra: extra or "no-extra",
)
def extra(request) -> str:
    return request.param


def command(bin: Path, folder: Path) -> Keepmtp:
    """The command of an environment, in a folder."""

    def run(words: str, *, calibrates: bool = False) -> subprocess.CompletedProcess[str]:
        start = [bin / "keepmtp"]
        if calibrates:
            start = [bin / "python", *IN_F32]
        done = captured(
            [*start, *words.split()],
            cwd=folder,
            env=stranger(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def keepmtp(extra, installed, tmp_path_factory) -> Keepmtp:
    """What a test writes, later ones find."""
    return command(installed(extra), tmp_path_factory.mktemp("elsewhere"))


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(done: subprocess.CompletedProcess[str], *, install: str) -> None:
    """One sentence that names the extra and what to install."""
    assert done.returncode == 2 and not done.stdout, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert f"`{install}` extra; got no " in done.stderr
    assert f"Run uv pip install 'keepmtp[{install}]' --python " in done.stderr, done.stderr


def test_the_wheel_holds_one_package(built):
    """With its recipes, its tiny models and its types, and nothing beside keepmtp."""
    names = set(zipfile.ZipFile(built).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"keepmtp", f"{built.name.split('-py3')[0]}.dist-info"}
    expected = """
        api.py py.typed cli/main.py quantize/plan/plan.py recipes/families/glm4_moe.yaml
        recipes/calibrations.yaml recipes/models/dsv4-flash.yaml models/problems.jsonl
        models/docs.jsonl models/docs_license.txt models/tiny-docs/model-00002-of-00002.safetensors
        validate/keepmtp_cures/step.py validate/measure/lossless.yaml validate/dryload/failures.toml recipes/runtimes/vllm.json
    """
    assert {f"keepmtp/{name}" for name in expected.split()} <= names
    assert not [name for name in names if "/train/" in name or "/tests/" in name]


@pytest.mark.full
def test_what_needs_no_extra_needs_none(installed, tmp_path):
    keepmtp = command(installed(""), tmp_path)
    assert good(keepmtp("--version")) == f"keepmtp {__version__}\n"
    assert "quantize" in good(keepmtp("--help"))
    assert "tiny-glm4-moe" in good(keepmtp("ls"))
    assert json.loads(good(keepmtp("doctor --json")))["ok"]
    assert "no findings" in good(keepmtp(f"check {MODEL}"))
    assert good(keepmtp("init tiny-glm4-moe --out mine.yaml")) == "mine.yaml\n"
    planned = json.loads(good(keepmtp("plan mine.yaml --json")))
    assert planned["recipe"]["model"] == "tiny-glm4-moe" and planned["mtp_layers"] == 1
    assert "vllm serve" in good(keepmtp(f"serve {MODEL} --dry-run"))
    assert "draft" in good(keepmtp(f"check {MODEL} --modules"))
    assert "nothing to change" in good(keepmtp(f"fix {MODEL}"))


STARTED = table("test_wheel")


def test_each_row_of_the_page_installs_what_its_verbs_need(keepmtp, extra):
    page = (Path(__file__).parent.parent / "docs" / "usage.md").read_text()
    rows = re.findall(
        r'^\| (`.*`.*) \| `pip install "?\.(?:\[(\w+)\])?"?`.*\|$', page, re.MULTILINE
    )
    assert {extra for _, extra in rows} == set(EXTRAS)
    assert {verb for verbs, _ in rows for verb in re.findall("`([^`]+)`", verbs)} == STARTED.keys()
    for verb in re.findall("`([^`]+)`", next(verbs for verbs, named in rows if named == extra)):
        done = keepmtp(STARTED[verb].replace("MODEL", MODEL))
        assert done.returncode in (0, 1, 2) and "extra; got no" not in done.stderr, verb
        assert extra or not done.returncode, done.stderr


def test_the_python_api_needs_no_extra_to_plan_and_check(installed, tmp_path):
    code = (
        "from keepmtp import api; print(api.plan('tiny-glm4-moe').view.num_mtp_layers, "
        f"api.check({MODEL!r}).ok)"
    )
    words = [str(installed("") / "python"), "-c", code]
    done = captured(words, cwd=tmp_path, env=stranger(HF_HUB_OFFLINE="1"))
    assert done.stdout == "1 True\n", done.stderr


def test_making_a_shipped_model(keepmtp, extra):
    """With `quantize` alone, data-free recipes of models that the wheel has; with more, the default
    one; with `calibrate`, those with batches.
    """
    good(keepmtp("quantize tiny-glm4-moe --dry-run"))
    if extra in PACKING:
        more = {
            "quantize": ["tiny-glm4-moe.nvfp4a16-fp8", "tiny-qwen3_5.fp8-dynamic"],
            "calibrate": ["tiny-glm4-moe.nvfp4", "tiny-qwen3_5.w4a16-gptq"],
        }
        for recipe in ("tiny-glm4-moe", *more.get(extra, ())):
            done = keepmtp(f"quantize {recipe}", calibrates=recipe in more["calibrate"])
            assert "check passed" in good(done)
        assert "no findings" in good(keepmtp(f"check {MADE}"))
    else:
        refused(keepmtp("quantize tiny-glm4-moe"), install="quantize")
    if extra != "calibrate":
        refused(keepmtp("quantize tiny-glm4-moe.nvfp4"), install="calibrate")


def test_serving_and_scoring(keepmtp, extra):
    """Only what stops before a server: nobody has a vLLM here."""
    if extra != "evaluate":
        refused(keepmtp(f"eval {MODEL}"), install="evaluate")
        return
    done = keepmtp(f"eval {MADE}")
    assert done.returncode == 2 and NO_VLLM in done.stderr, done.stderr


def test_what_is_judged_and_published_is_what_was_measured(keepmtp, extra):
    """The stations behind the measurements, on a checkpoint that was only checked."""
    if extra not in PACKING:
        return
    good(keepmtp(f"check {MADE} --record"))
    assert keepmtp(f"eval {MADE} --only gates").returncode == 3, "too little was measured"
    if extra not in PAGES:
        refused(keepmtp(f"card {MADE}"), install="report")
        return
    said = keepmtp(f"card {MADE}").stderr
    said += keepmtp(f"publish {MADE} --repo a/b --dry-run").stderr
    assert re.search(r"; got [^.]+\. ", said)


def test_the_types_are_part_of_the_promise(installed, tmp_path):
    """A caller's type checker sees keepmtp's annotations."""
    python = installed("") / "python"
    (tmp_path / "caller.py").write_text(
        "from keepmtp.recipes.find import find_recipe\nrecipe, text = "
        "find_recipe('tiny-glm4-moe')\n"
        "reveal_type(recipe)\nreveal_type(text)\n"
    )
    words = [str(PYRIGHT), "--pythonpath", str(python), str(tmp_path / "caller.py")]
    done = captured(words, cwd=tmp_path, status=0)
    assert '"Recipe"' in done.stdout and '"str"' in done.stdout, done.stdout
