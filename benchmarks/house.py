"""How readable the tree is, in numbers: sizes, density, and what is said twice.

In: the Python files and the data of keepmtp in this checkout. Out: a list;
`benchmarks/house.py --places`.

Easy to get wrong: these numbers find a place to look at, and prove nothing. A function of 90 lines
in a row of plain steps reads better than nine of ten lines. tests/test_house.py holds only those
that must not grow.
"""

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = ("recipes", "checkpoints", "quantize", "validate", "cure", "cli")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
# Files of data and of golden text count like code, so that no figure is met by moving text to
# another file type. JSON is left out: targets write it.
DATA = {".yaml", ".yml", ".toml", ".j2", ".txt", ".md"}
DATA_WORD = re.compile(r"[\w.\-/*]+|[\[\]{}:,|>=<%]")
DATA_COMMENT = re.compile(r"(?m)^\s*#.*")
# A longer string counts its words: a program or a page in a string is no single token.
LONG_STRING = 8
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Words of docstrings and comments that have a plainer one, which comes after the colon.
VAGUE = {
    r"\btold\b": "called with, reported, told apart: by what",
    r"\bbeside\b": "next to, in the same folder as, and",
    r"\bbehind\b": "after",
    r"\blies?\b": "is, is stored in",
    r"\bstands? (in|for|beside|where)\b": "is in, means",
    r"\bbears? .{0,20}out\b": "agrees with",
    r"\bside by side\b": "at the same time, next to each other",
}


def sources() -> list[Path]:
    """The files of the package: what the wheel holds, without tests and scripts."""
    inside = (path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py")))
    return [
        *(
            ROOT / name
            for name in ("__init__.py", "__main__.py", "api.py", "pipeline.py")
            if (ROOT / name).exists()
        ),
        *inside,
    ]


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    """`recipes.schema` for recipes/schema.py; "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def prose(path: Path) -> Iterator[str]:
    """The docstrings and comments of a file, each on one line. Messages are not among them."""
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield " ".join(node.value.value.split())
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def vague_words() -> dict[str, int]:
    """How often each pattern of `VAGUE` occurs in prose."""
    texts = [text for path in sources() for text in prose(path)]
    return {pattern: sum(len(re.findall(pattern, text)) for text in texts) for pattern in VAGUE}


def top_level(tree: ast.Module) -> dict[str, ast.stmt]:
    """The names that a module defines or imports, those inside `if` and `try` included."""
    found: dict[str, ast.stmt] = {}
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = node
            case ast.Import() | ast.ImportFrom():
                found |= {
                    alias.asname or alias.name.partition(".")[0]: node for alias in node.names
                }
            case ast.If() | ast.Try() | ast.With():
                waiting += [
                    child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
                ]
            case _:
                targets = [leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name)]
                found |= {leaf.id: node for leaf in targets if isinstance(leaf.ctx, ast.Store)}
    return found


def types() -> dict[str, frozenset[str]]:
    """`file:Class` and the fields it declares, for classes with four fields or more."""
    found = {}
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                declared = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                fields = frozenset(target.id for target in declared if isinstance(target, ast.Name))
                if len(fields) >= 4:
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = fields
    return found


def twins() -> list[tuple[str, str]]:
    """Pairs of types that share four fields or more, and three quarters of the smaller one's."""
    found = []
    for (first, ours), (second, theirs) in combinations(types().items(), 2):
        if len(ours & theirs) >= max(4, 0.75 * min(len(ours), len(theirs))):
            found.append((first, second))
    return found


def homonyms() -> dict[str, list[str]]:
    """Public classes and type aliases whose name has a definition in more than one file."""
    where: dict[str, list[str]] = {}
    for path in sources():
        for name, node in top_level(parsed(path)).items():
            is_type = isinstance(node, ast.ClassDef) or (
                isinstance(node, ast.Assign) and name[1:] != name[1:].upper()
            )
            if is_type and name[:1].isupper():
                where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: files for name, files in sorted(where.items()) if len(files) > 1}


def _docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where the docstrings of a file begin: line and column."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found


def code_tokens(path: Path) -> int:
    """Tokens that are code: no comment, docstring, line end or indentation, so that no formatter
    moves the number. A string of more than `LONG_STRING` words counts its words.
    """
    text = path.read_text()
    docs = _docstrings(parsed(path))
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in NO_CODE or token.start in docs:
            continue
        words = len(token.string.split()) if token.type == tokenize.STRING else 1
        count += words if words > LONG_STRING else 1
    return count


def data_tokens(path: Path) -> int:
    """Words and brackets of a file of data or golden text, without comment lines."""
    return len(DATA_WORD.findall(DATA_COMMENT.sub("", path.read_text(errors="replace"))))


def tokens_of(folder: Path) -> int:
    """Code and data of all files below a folder, links and hidden files left out."""
    count = 0
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.is_symlink() or not path.is_file():
            continue
        if path.suffix == ".py":
            count += code_tokens(path)
        elif path.suffix in DATA:
            count += data_tokens(path)
    return count


def tokens_by_room() -> dict[str, int]:
    """Code and data of the package by folder, the largest first."""
    found: dict[str, int] = {}
    for path in [*sources(), *data_files()]:
        folder = path.relative_to(ROOT).parent.as_posix()
        tokens = code_tokens(path) if path.suffix == ".py" else data_tokens(path)
        found[folder] = found.get(folder, 0) + tokens
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def data_files() -> list[Path]:
    """Data and templates of the package."""
    inside = (path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*")))
    return [path for path in inside if path.suffix in DATA]


def is_truth(node: ast.AST) -> bool:
    """Whether an expression is a comparison or says by its name that it is true or false."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()) | ast.Call(func=ast.Name(id="bool")):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith(("is_", "has_"))
    return False


def is_dense(node: ast.AST) -> bool:
    """Whether a node does several steps in one expression, or takes one of several values by `and`
    or `or`.
    """
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            return True
        case ast.Call(func=ast.Name(id="map" | "filter")):
            return True
        case ast.Assign() | ast.Return() | ast.keyword() | ast.AnnAssign():
            chosen = getattr(node.value, "values", [])
            if not isinstance(node.value, ast.BoolOp):
                return False
            return any(not is_truth(each) and not isinstance(each, ast.BoolOp) for each in chosen)
    return isinstance(node, (ast.IfExp, ast.NamedExpr, ast.Lambda, *COMPREHENSIONS))


def dense_forms(tree: ast.Module) -> int:
    """How many dense forms a file has."""
    return sum(is_dense(node) for node in ast.walk(tree))


def measures() -> dict[str, float]:
    """Every figure by name."""
    trees = [parsed(path) for path in sources()]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    code = sum(map(code_tokens, sources()))
    return {
        "tokens of the package": sum(tokens_by_room().values()),
        "tokens of the tests": tokens_of(ROOT / "tests"),
        "dense forms in 1,000 tokens": round(1000 * sum(map(dense_forms, trees)) / code, 2),
        "function length, median": round(statistics.median(lengths)),
        "functions over 100 lines": sum(length > 100 for length in lengths),
    }


def main() -> None:
    """Print the figures, and on request the places that they count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", action="store_true", help="also rooms, twins, names and words")
    places = {"": measures}
    if parser.parse_args().places:
        places |= {
            "tokens by folder": tokens_by_room,
            "types with the same fields": lambda: dict(enumerate(twins())),
            "names with several definitions": homonyms,
            "vague words": vague_words,
        }
    for title, measure in places.items():
        print(title)
        for name, value in measure().items():
            print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
