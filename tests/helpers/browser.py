"""A real browser for the tests of report.html: headless Chromium, and a look at what it made of a
page.
"""

import json
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from commands import captured

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "no Chromium on PATH: `make test` installs it on Debian as root, elsewhere install chromium "
    "or google-chrome"
)
# Run in the page: what was fetched, what sticks out, and the colours that text really has.
PROBE = """
<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *:not(table *)")].filter(e => e.getBoundingClientRect().right > innerWidth + 1);
  const ink = (one, property) => one ? getComputedStyle(one)[property] : "";
  parent.postMessage({
    html: document.documentElement.outerHTML,
    inner: innerWidth, scroll: document.documentElement.scrollWidth,
    wide: wide.map(e => e.tagName + ": " + e.textContent.trim().slice(0, 60)),
    fetched: performance.getEntriesByType("resource").map(e => e.name),
    title: document.title, scripts: document.scripts.length,
    sheet: ink(document.body, "backgroundColor"),
    inks: [...document.querySelectorAll("h2, td, p, li, th")].map(e => ink(e, "color")),
    empty: [...document.querySelectorAll("img")].filter(e => e.naturalWidth < 50).length,
  }, "*");
});
</script>
"""
# A browser's window is never narrower than 500 pixels; a frame is as narrow as a phone.
_FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">
<script>addEventListener("message", told => { document.body.dataset.probe = JSON.stringify(told.data); });</script>
<iframe src="PAGE" style="border: 0; width: WIDTHpx; height: 900px"></iframe>"""


@dataclass
class Seen(HTMLParser):
    """A rendered page: elements by tag, their text, what the probe told, and lines on the
    console.
    """

    html: str
    console: list[str]
    probe: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._silent, self.frame = False, "{}"
        self.feed(self.html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self._silent = tag in ("style", "script", "title")
        self.frame = dict(attrs).get("data-probe") or self.frame

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        self.text += " " * (tag in ("p", "td", "th", "dd", "dt", "h1", "h2", "h3", "strong"))

    def handle_data(self, data: str) -> None:
        self.text += "" if self._silent else data


def look(page: Path, *, width: int, is_dark: bool = False, scratch: Path) -> Seen:
    """A page that holds `PROBE`, in a frame `width` pixels wide; skips where there is no
    Chromium.
    """
    frame = scratch / "frame.html"
    frame.write_text(_FRAME.replace("PAGE", page.as_uri()).replace("WIDTH", str(width)))
    outer = opened(frame, is_dark=is_dark, scratch=scratch)
    probe = json.loads(outer.frame)
    assert probe, "the page's probe must have run"
    return Seen(html=probe.pop("html"), console=outer.console, probe=probe)


def opened(page: Path, *, is_dark: bool = False, scratch: Path) -> Seen:
    """A page as Chromium leaves it in a window of 1280 pixels; skips where there is no Chromium."""
    name = next((path for name in NAMES if (path := shutil.which(name))), None)
    if name is None:
        pytest.skip(MISSING)
    words = [
        name,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--hide-scrollbars",
        f"--user-data-dir={scratch / 'profile'}",
        "--window-size=1280,900",
        "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = captured(words, timeout=120)
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]
    return Seen(
        html=done.stdout, console=[line for line in done.stderr.splitlines() if "CONSOLE" in line]
    )


def contrast(one: str, other: str) -> float:
    """WCAG 2.1 contrast ratio of two `rgb(r, g, b)` colours: 1 to 21."""

    def luminance(colour: str) -> float:
        channels = [int(word) / 255 for word in colour.partition("(")[2].rstrip(")").split(",")[:3]]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
