"""The kinds of fuzz cases whose input is no checkpoint: prompts, texts, rows, names, and what
lies beside one.

In: a random generator. Out: a `Case`, as in kinds.py, which lists these too.

Easy to get wrong: no case starts a real server. VLLM_PYTHON names `no_server`, which knows its
versions and fails to serve, so that a verb reads all that it reads before one, and then says that
none came up. A checkpoint with answers.json is served by a stub that gives these answers.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import corpus
import edits
import stub_vllm
from case import Case, some
from data_files import json_of, put_json, put_lines, spelled
from edits import ODD, Edit
from task_rows import TASK_ROWS

HELD_OUT = str(corpus.ROOT / "models" / "held_out.jsonl")
Rows = list[dict[str, Any]]
_case = partial(Case, reads_weights=False)
RAW_LINES = tuple(map(spelled, ODD["raw_lines"]))
FOLDERS = (
    *(
        name
        for name in edits.NAMES
        if name not in ("", ".", "..") and not {"/", "\x00", "\ud800"} & set(name)
    ),
    *ODD["folders"],
)


def no_server(path: Path) -> Path:
    """A Python for VLLM_PYTHON that tells versions, serves nothing, and loads with vllm/__init__.py
    alone.
    """
    told = json.dumps(stub_vllm.VERSIONS)
    stub = path.with_name("stub")
    stub.mkdir()
    serves = f'[ -f "$4/answers.json" ] && exec {stub_vllm.stub_vllm(stub, start=0)} "$@"'
    loads = f'*/in_vllm*) exec {sys.executable} -I "$PYTHONPATH/vllm/__init__.py"'
    path.write_text(
        f"#!/bin/sh\ncase \" $* \" in *' serve '*) {serves}; exit 3;; {loads};; esac\necho '{told}'\n"
    )
    path.chmod(0o755)
    return path


# --- files that a user names ----------------------------------------------------------------------


def _written(
    file: str, says: str, content: bytes, more: Callable[[Path], object] = lambda folder: None
) -> Edit:
    def do(folder: Path) -> None:
        edits.replace(folder / file, content)
        more(folder)

    return Edit(f"{file}: {says}", do)


def _lines(rng: Random, file: str, rows: Rows) -> Edit:
    """A file of JSON lines with one thing wrong."""
    good = [json.dumps(row) for row in rows]
    whole = "\n".join(good).encode()
    at = rng.randrange(len(rows))
    way = rng.random()
    if way < 0.15:
        return edits.no_file(rng, file)
    if way < 0.3:
        inner = edits.mangled(rng, file, len(whole))
        return _written(file, inner.says, whole, inner.do)
    if way < 0.6:
        line = rng.choice(RAW_LINES)
        good.insert(at, line)
        content = "\n".join(good).encode("utf-8", "surrogatepass")
        return _written(file, f"line {at + 1} is {edits.shown(line)}", content)
    return edits.grafted_line(rng, file, rows)


def _ending(rng: Random, *usual: str) -> str:
    return rng.choice((*usual * 4, "", ".csv", ".parquet", ".json", ".txt", ".jsonl"))


def prompt_files(rng: Random) -> Case:
    """Prompts of bench and of serve-check."""
    file = f"asked{_ending(rng, '.jsonl', '.txt')}"
    words = rng.choice(
        ("bench {} --dry-run", "bench {} --dry-run --json", "serve-check {} --out {}.out")
    )
    words = _near(f"{words} --prompts {{}}/{file}")
    edit = _lines(rng, file, ODD["prompts"])
    return _case(base=rng.choice(corpus.REAL), edits=(edit,), words=words)


def texts(rng: Random) -> Case:
    """Held-out texts of closeness."""
    file = f"held{_ending(rng, '.jsonl', '.txt')}"
    words = _near(f"closeness {{}} --source OTHER --text {{}}/{file} --out {{}}.out")
    return _case(base=corpus.REAL[0], edits=(_lines(rng, file, ODD["texts"]),), words=words)


def rows(rng: Random) -> Case:
    """Rows of every task of eval."""
    task, sample = rng.choice(sorted(TASK_ROWS.items()))
    file = f"rows{_ending(rng, '.jsonl', '.json')}"
    words = f"eval {{}} --source none --task {task} --dataset {{}}/{file} --out {{}}.out"
    if rng.random() < 0.7:
        words += " --shots 0"
    made = [dict(row) for row in sample["rows"]]
    return _case(base=corpus.REAL[0], edits=(_lines(rng, file, made),), words=_near(words))


# --- names ----------------------------------------------------------------------------------------


def _strange_file(rng: Random) -> Edit:
    """One more file with an odd name: Python, weights, a tokenizer's, a folder."""
    name = rng.choice(FOLDERS)[:90] + rng.choice(
        ("", ".py", ".json", ".txt", ".safetensors", ".md")
    )

    def do(folder: Path) -> None:
        where = folder
        if (folder / "NAME").is_dir():
            where = folder / "NAME"
        (where / name).write_bytes(b"{}")

    return Edit(f"a file called {edits.shown(name)}", do)


def names(rng: Random) -> Case:
    """A checkpoint's folder, or a file in it, has an odd name; every verb that takes one."""
    base = rng.choice((*corpus.REAL, corpus.MEASURED))
    path = "{}"
    if base == corpus.MEASURED:
        path = "{}/NAME"
    made = tuple(_strange_file(rng) for _ in range(rng.choice((0, 0, 1, 2))))
    words = _near(rng.choice((*ODD["reads"], *ODD["of_a_folder"])))
    words = tuple(re.sub(r"^\{\}", path, word) for word in words)
    return _case(base=base, edits=made, words=words, name=rng.choice(FOLDERS)[:90])


# --- what lies in a checkpoint, and beside it -----------------------------------------------------


def companions(rng: Random) -> Case:
    """The small files of a checkpoint that only serving, asking or a card reads; and its config for
    these verbs.
    """
    base = rng.choice(corpus.REAL)

    def edit() -> Edit:
        if rng.random() < 0.8:
            return edits.spoilt(rng, corpus.folder(base), rng.choice(ODD["companions"]))
        file = rng.choice(ODD["more_companions"])
        content = b'{"chat_template": "x"}'
        inner = edits.mangled(rng, file, len(content))
        return _written(file, inner.says, content, inner.do)

    return _case(base=base, edits=some(rng, edit), words=_near(rng.choice(ODD["reads"])))


def _near(line: str) -> tuple[str, ...]:
    """The words of a line, with the folder of another checkpoint and a file of texts."""
    near = {"OTHER": str(corpus.folder(corpus.OTHER)), "HELD": HELD_OUT}
    return tuple(near.get(word, word) for word in line.split())


def results(rng: Random) -> Case:
    """Records, results and reports of every station, for the verbs that go on with them."""
    folder = corpus.folder(corpus.MEASURED)
    name = corpus.checkpoint_in(corpus.MEASURED)
    by_folder = []
    for part in ("", ".report"):
        found = (folder / f"{name}{part}").rglob("*")
        by_folder.append(sorted(str(path.relative_to(folder)) for path in found if path.is_file()))

    def edit() -> Edit:
        if rng.random() < 0.1:
            return _strange_file(rng)
        if rng.random() < 0.1:
            return _front_matter(rng, f"{name}/README.md")
        return edits.spoilt(rng, folder, rng.choice(rng.choice(by_folder)))

    words = _near(rng.choice((*ODD["reads"], *ODD["of_results"])))
    words = tuple(word.replace("{}", f"{{}}/{name}", 1) for word in words)
    return _case(base=corpus.MEASURED, edits=some(rng, edit), words=words)


def _front_matter(rng: Random, file: str) -> Edit:
    """The source's own card, which a checkpoint's card takes license and language from."""
    key = rng.choice(("license", "language", "tags", "pipeline_tag", "base_model", "license_name"))
    line = f"{key}: {edits.text_of(edits.value(rng))}"
    return _written(
        file,
        f"front matter {edits.shown(line)}",
        f"---\n{line}\n---\n".encode("utf-8", "surrogatepass"),
    )


# --- a stranger's servers -------------------------------------------------------------------------


def answers(rng: Random) -> Case:
    """What a server answers to each request."""
    path = rng.choice(sorted(ODD["answers"]))
    good = ODD["answers"][path]
    edit = _written("answer", "is good", json.dumps(good).encode())
    says = edits.mangled(rng, "answer", len(json.dumps(good)))
    if rng.random() < 0.7:
        says = edits.grafted(rng, "answer", good)

    def do(folder: Path) -> None:
        edit.do(folder)
        says.do(folder)
        said = dict.fromkeys(ODD["answers"])
        for each in said:
            said[each] = json.dumps(ODD["answers"][each])
        said[path] = (folder / "answer").read_bytes().decode("latin1")
        (folder / "answer").unlink()
        corpus.copied(corpus.folder(corpus.OTHER), folder / "source")
        for each in (folder, folder / "source"):
            put_json(each / "answers.json", said)
        put_lines(folder / "rows.jsonl", TASK_ROWS["gsm8k"]["rows"])

    words = _near(rng.choice(ODD["of_servers"]))
    return _case(base=corpus.REAL[0], edits=(Edit(f"{path}: {says.says}", do),), words=words)


def init(rng: Random) -> Case:
    """init of odd checkpoints, and of odd recipes."""
    if rng.random() < 0.5:
        base = corpus.pick(rng)
        tree = json_of(corpus.folder(base) / "config.json")
        made = some(rng, lambda: edits.grafted(rng, "config.json", tree))
        return _case(base=base, edits=made, words=_near("init {} --out {}.out"))
    base = rng.choice(corpus.RECIPES)
    path = corpus.folder(base) / "recipe.yaml"
    inner = None
    if rng.random() < 0.6:
        inner = edits.mangled(rng, "recipe.yaml", path.stat().st_size)
    edit = inner or edits.no_file(rng, "recipe.yaml")
    words = _near("init {}/recipe.yaml --out {}.out")
    return _case(base=base, edits=(edit,), words=words, writes=("recipe.yaml",))
