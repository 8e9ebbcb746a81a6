"""What `make dist` makes: an sdist with everything, the wheel built from it, and a page for the
package index.
"""

import importlib.util
import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from commands import captured
from data_files import cases
from keepmtp import __version__
from readme_renderer import markdown
from wheel import ROOT, tracked

GENERATED = {"PKG-INFO", "setup.cfg"}


@pytest.fixture
def sdist(built) -> Path:
    """That the wheel was made from."""
    (path,) = built.parent.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def description(built) -> str:
    """The long description, as HTML, as the package index renders it."""
    (name,) = [
        name for name in zipfile.ZipFile(built).namelist() if name.endswith(".dist-info/METADATA")
    ]
    metadata = message_from_bytes(zipfile.ZipFile(built).read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    html = markdown.render(str(metadata.get_payload(decode=True), "utf-8"))
    assert html
    return html


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


def test_the_page_of_the_index_has_no_link_to_a_file(description):
    """Nothing but the page is there: no picture, no docs/."""
    targets = re.findall(r'(?:href|src)="([^"]*)"', description)
    assert not [target for target in targets if not target.startswith(("https://", "#"))]
    assert "<table>" in description and "<code>docs/usage.md</code>" in description


@cases
def test_links_to_files_become_their_text(readme, shown):
    spec = importlib.util.spec_from_file_location("keepmtp_setup", ROOT / "setup.py")
    assert spec and spec.loader
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    assert setup.long_description(readme) == shown


def test_links_in_the_docs_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_changelog_knows_this_version():
    """The newest heading is this version's, and each can be read on one screen."""
    _, *releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert releases[0].startswith(f"[{__version__}]")
    assert all(len(release.splitlines()) <= 40 for release in releases)
