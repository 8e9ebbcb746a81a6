"""report.html: one self-contained page from the content of report.json, and from nothing else.

In: a `FullReport`. Out: HTML with its style and pictures in it, no script and no request; light,
dark, on paper and on a phone. Needs the `report` extra (markdown-it-py, matplotlib).

Easy to get wrong: names in a report come from strangers' checkpoints. The Markdown that is made of
them has no markup of theirs, and HTML in it is text.
"""

from base64 import b64encode
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from ...checkpoints.files import write_whole
from ...recipes.errors import printable
from ...recipes.extras import require_extra
from ..facts.schema import FullReport
from .markdown import Block, markdown, picture

HTML_FILE = "report.html"
# The policy makes a browser enforce it: no script, no request.
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: light-dark(#dde2e8, #2d3844); --verdict: $colour; }
body { color: light-dark(#16202c, #e6ebf1); background: light-dark(#ffffff, #182029); }
body { font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 66rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
blockquote { margin: 0; padding: 0 1rem; border-left: .4rem solid var(--verdict); }
table { display: block; overflow-x: auto; border-collapse: collapse; overflow-wrap: normal; }
th, td { padding: .4rem .8rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { text-align: left; }
img { max-width: 32rem; width: 100%; }
@media print { :root { color-scheme: light; } tr, img { break-inside: avoid; } }
</style>
</head>
<body>
<main>
$body</main>
</body>
</html>
""")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_html(folder: Path, report: FullReport) -> Path:
    """Write report.html into `folder`, replacing an older one at once; returns its path.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    return write_whole(folder / HTML_FILE, render(report))


def render(report: FullReport) -> str:
    """The page. Equal reports give equal bytes.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    require_extra("report.html", "report")
    from .charts import charts  # what needs the extra is imported once it is known to be there
    from .sections import page

    drawn = {}
    for name, chart in charts(report).items():
        content = b64encode(chart.png).decode()
        drawn[name] = picture(chart.alt, f"data:image/png;base64,{content}")
    name = Path(report.path).name or report.path
    colour = "#17693a" if report.verdict.ok else "#b3261e"
    heading = f"{name}: {report.verdict.label} (keepmtp)"
    return page_of(page(report, drawn), heading=heading, colour=colour)


def page_of(blocks: Iterable[Block], *, heading: str, colour: str = "inherit") -> str:
    """Blocks as such a page; `heading` is the browser's, `colour` the verdict's."""
    from markdown_it import MarkdownIt

    browser = MarkdownIt("commonmark", {"html": False}).enable("table")
    return _PAGE.substitute(
        policy=_POLICY,
        title=escape(printable(heading)),
        colour=colour,
        body=browser.render(markdown(blocks)),
    )
