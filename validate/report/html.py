"""The Markdown of a document as one self-contained page.

In: Markdown, and the pictures in it. Out: HTML with its style and pictures in it, no script and no
request; light, dark, on paper and on a phone. Needs the `report` extra (markdown-it-py).

Easy to get wrong: names in a document come from strangers' checkpoints. The Markdown that is made
of them has no markup of theirs, and HTML in it is text.
"""

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from string import Template

from ...recipes.errors import printable

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
:root { color-scheme: light dark; --line: light-dark(#dde2e8, #2d3844); }
body { color: light-dark(#16202c, #e6ebf1); background: light-dark(#ffffff, #182029); }
body { font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 66rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
blockquote { margin: 0; padding: 0 1rem; border-left: .4rem solid var(--line); }
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


def page_of(text: str, *, heading: str, pictures: Mapping[str, bytes]) -> str:
    """Markdown of `markdown.py` as such a page. Equal texts give equal bytes.

    Args:
        text: the Markdown.
        heading: the browser's.
        pictures: file name -> PNG, of the images that the text shows.
    """
    from markdown_it import MarkdownIt

    browser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = browser.render(text)
    for name, content in pictures.items():
        address = f"data:image/png;base64,{b64encode(content).decode()}"
        # In words of the text, a quotation mark is an entity.
        body = body.replace(f'src="{name}"', f'src="{address}"')
    return _PAGE.substitute(policy=_POLICY, title=escape(printable(heading)), body=body)
