"""docs/upstream has a patch for vLLM for each cure that the newest vLLM needs, and its table names
every cure.
"""

import os
import re
import subprocess
import tomllib

import pytest
from commands import ROOT
from keepmtp.validate.dryload.versions import cache_folder

FOLDER = ROOT / "docs" / "upstream"
PAGE = (FOLDER / "README.md").read_text()
PATCHES = sorted(FOLDER.glob("*.patch"))
VERSION = re.findall(r"against vLLM ([\d.]+\d)", PAGE)[0]
ROW = re.compile(r"^\| (.+?) \| (\[?)([\w.]+)(?:\]\(([\w.]+)\))? \| `(.+?)` \|", re.MULTILINE)


def test_the_table_names_every_cure_and_its_versions():
    defects = tomllib.loads((ROOT / "validate/dryload/failures.toml").read_text())["defects"]
    wanted = [
        (name, each["cure_in_vllm"], each.get("versions", "all"))
        for name, each in defects.items()
        if "cure_in_vllm" in each
    ]
    rows = ROW.findall(PAGE)
    assert [(name, cure, versions) for name, _, cure, _, versions in rows] == wanted
    with_patch = {cure: patch for _, _, cure, patch, versions in rows if "<" not in versions}
    assert with_patch == {cure: f"{cure}.patch" for cure in with_patch}
    assert sorted(with_patch.values()) == [patch.name for patch in PATCHES]
    assert len(PAGE.replace("|", "").split()) <= 200


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_says_why_and_brings_its_test(patch):
    text = patch.read_text()
    head, _, diff = text.partition("\n---\n")
    assert re.search(
        r"^Subject: \[PATCH\] \[Bugfix\]\[(Model|Quantization)\] \w", head, re.MULTILINE
    )
    assert "Signed-off-by" not in text, "who proposes it signs it"
    changed = re.findall(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)
    (test,) = [path for path in changed if path.startswith("tests/")]
    assert f"Test: pytest {test}" in head
    assert all(path.startswith("vllm/") for path in changed if path != test)


@pytest.mark.full
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies(patch):
    site = cache_folder() / VERSION
    if not (site / "vllm").is_dir():
        pytest.skip(f"no {site}: keepmtp check FOLDER --gpu sm90 --vllm {VERSION} fetches it")
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(site.parent)}
    command = ["git", "apply", "--check", "--verbose", str(patch)]
    done = subprocess.run(command, cwd=site, env=outside, capture_output=True, text=True)
    assert done.returncode == 0 and "Checking patch" in done.stderr, done.stderr
