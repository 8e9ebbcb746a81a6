"""docs/publishing.md, run as it stands: line by line, on a tiny fine-tune that lost its MTP block and
on one that has it.
"""

import json
import re
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
from commands import GLM, ROOT, ran
from keepmtp.checkpoints.mtp_source import has_mtp
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.options import ServeOptions
from keepmtp.cli.session import Session
from keepmtp.pipeline import plan_for, quantize
from keepmtp.recipes.errors import RecipeError
from real_vllm import NEEDS_VLLM, UNIPROC, VLLM_PYTHON
from written_values import fine_tune

# What is added to a line so that it ends in minutes: 400 short questions are enough for the gates.
# No repository is there; `bench`, and servers with MTP off, are in tests/vllm.
ADDED = {
    "bench": "--dry-run",
    "eval": f"--only tasks --recipe tiny-glm4-moe -- {' '.join(UNIPROC)}",
    "publish": "--dry-run",
}
ALONE = ("plan", "quantize")


def lines_for(*, has_block: bool) -> list[str]:
    """The commands of the page, as it says that they are to be changed."""
    block = (ROOT / "docs" / "publishing.md").read_text().split("```")[1]
    found = re.findall(r"^keepmtp (.*?)(?: +#.*)?$", block, re.MULTILINE)
    assert len(found) == 9
    if has_block:
        found = [line.replace(" --mtp-source RELEASE", "") for line in found]
    # Four attention heads are not for eight GPUs.
    return [line.replace("RELEASE", str(GLM)).replace("--tp 8", "--tp 1") for line in found]


@pytest.fixture(scope="module", params=[False, True], ids=["lost", "kept"])
def place(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder, in which the lines before a server have been run, and all lines."""
    folder, said = tmp_path_factory.mktemp("place"), ""
    fine_tune(folder, has_block=request.param)
    lines = lines_for(has_block=request.param)
    for line in lines:
        if line.split()[0] in ALONE:
            said = ran(line, cwd=folder)
    assert "check passed out/mine" in said
    return folder, lines


def test_the_checkpoint_can_be_made_again(place, monkeypatch):
    """By its recipe.yaml, with the block of the release; and is not rounded a second time unasked."""
    folder, _ = place
    monkeypatch.chdir(folder)
    again = quantize(*plan_for("out/mine/recipe.yaml"), out=folder / "again").out
    for path in (folder / "out" / "mine").iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(RecipeError, match="Quantize my-fine-tune, or add --requantize"):
        plan_for("out/mine", scheme="nvfp4a16-fp8")


def test_a_source_without_a_block_gets_the_one_that_its_checkpoint_has(place, monkeypatch):
    """Else it drafts nothing, and acceptance is never compared."""
    folder, _ = place
    monkeypatch.chdir(folder)
    session = Session("eval", ServeOptions(path="out/mine"), None)
    source = session.original
    assert source is not None and has_mtp(source)
    if source.where == "my-fine-tune":  # it has its own
        return
    shared = open_source("my-fine-tune").entries
    assert shared.keys() < source.entries.keys() == open_source(GLM).entries.keys()
    shard = "model-00001-of-00002.safetensors"
    assert (folder / source.where / shard).stat().st_nlink == 2, "no copy"
    again = Session("eval", ServeOptions(path="out/mine"), None)
    assert again.original.where == source.where


class TestServed:
    pytestmark: ClassVar = [*NEEDS_VLLM, pytest.mark.full]

    @pytest.mark.parametrize("place", [False], ids=["lost"], indirect=True)
    def test_every_line(self, place):
        """Of the fine-tune that has its block, the lines before a server make the same checkpoint."""
        folder, lines = place
        said = ""
        real = {"OMP_NUM_THREADS": "1", "VLLM_PYTHON": str(VLLM_PYTHON), "HF_HUB_OFFLINE": "1"}
        for line in lines:
            more = "" if "--only" in line else ADDED.get(line.split()[0], "")
            said = ran(f"{line} {more}", cwd=folder, **real)
        assert "model-00002-of-00002.safetensors" in said, "what publish would send"
        card = (folder / "out" / "mine.card" / "README.md").read_text()
        assert "## Gates: pass\n" in card and "unknown" not in card

    def test_a_source_without_a_block_is_served_with_mtp_off(self, tmp_path):
        """Where its block is gone: its score is compared, and the gate on acceptance stays open."""
        fine_tune(tmp_path, has_block=False)
        real = {"OMP_NUM_THREADS": "1", "VLLM_PYTHON": str(VLLM_PYTHON)}
        shutil.copytree(GLM, tmp_path / "release")
        words = "my-fine-tune --mtp-source release --scheme w4a16-fp8 --out mine"
        ran(f"quantize {words}", cwd=tmp_path)
        shutil.rmtree(tmp_path / "release")
        words = f"mine --source my-fine-tune --json {ADDED['eval']}"
        told = json.loads(ran(f"eval {words}", cwd=tmp_path, **real))
        source = told["evaluation"]["source"]
        assert source["drafts"] == 0 and source["num_questions"] == 400
        gates = {each["gate"]: each for each in told["judgement"]["reasons"]}
        assert gates["gsm8k"]["verdict"] == "pass"
        assert gates["acceptance"]["verdict"] == "infeasible"
        assert "has no MTP block and was served with MTP off" in gates["acceptance"]["says"]
