"""What `make dist` makes: an sdist with everything, and the wheel built from it."""

import re
import sys
import tarfile
from pathlib import Path

import pytest
from commands import captured
from keepmtp import __version__
from wheel import ROOT, tracked

GENERATED = {"PKG-INFO", "setup.cfg"}


@pytest.fixture
def sdist(built) -> Path:
    """That the wheel was made from."""
    (path,) = built.parent.glob("*.tar.gz")
    return path


@pytest.mark.full
def test_the_sdist_holds_what_git_tracks(sdist):
    """Tests, models, docs and the Makefile too: who unpacks it can run `make test`."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names if not name.startswith("keepmtp.egg-info/")} == set(
        tracked()
    ) | GENERATED


@pytest.mark.full
def test_the_index_would_take_both(built, sdist):
    words = [sys.executable, "-m", "twine", "check", "--strict", str(built), str(sdist)]
    captured(words, status=0)


def test_links_in_the_docs_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_changelog_knows_this_version():
    """The newest heading is this version's, and each can be read on one screen."""
    _, *releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert releases[0].startswith(f"[{__version__}]")
    assert all(len(release.splitlines()) <= 40 for release in releases)
