"""What the package index shows: the README without what works only in a checkout, relative links
and the picture.

Everything else is in pyproject.toml. A link whose target is a file becomes its text, which is the
file's path.
"""

import re
from pathlib import Path


def long_description(readme: str) -> str:
    """The README for a page that has no files next to it."""
    without_pictures = re.sub(r"!\[[^]]*\]\((?!https:)[^)]*\)\n\n", "", readme)
    return re.sub(r"\[([^]]+)\]\((?!https:|#)[^)]*\)", r"`\1`", without_pictures)


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=long_description(readme), long_description_content_type="text/markdown")
