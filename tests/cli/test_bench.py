"""`keepmtp bench` refuses before a server is started, says what it would do, and prints a matrix as
publishers do.
"""

import io
import json
import shutil

import pytest
from benches import bench_fact
from commands import ROOT, keepmtp, refused
from keepmtp.cli.bench import numbers, shown
from keepmtp.recipes.errors import RecipeError
from rich.console import Console

GLM = str(ROOT / "models" / "tiny-glm4-moe")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("0..4", (0, 1, 2, 3, 4)),
        ("0,1,3", (0, 1, 3)),
        ("8, 1,8,32", (1, 8, 32)),
        ("2", (2,)),
        ("0..1,4", (0, 1, 4)),
    ],
)
def test_numbers(words, found):
    assert numbers("--k", words, least=0) == found


@pytest.mark.parametrize(
    "words", ["", "a", "1..", "4..1", "-1", "1;2", "0", "1..1000000", "99999999"]
)
def test_no_numbers(words):
    with pytest.raises(
        RecipeError, match=r"^--concurrency: must be .*; got .*\. Write --concurrency 1,8,32"
    ):
        numbers("--concurrency", words, least=1)


def test_a_line_of_another_form_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n{"text": "other"}\n')
    refused(
        f"bench {GLM} --prompts {path}",
        says="prompts.jsonl:2: must begin with a text of the user",
    )


def test_a_k_that_the_block_cannot_draft_is_named(tmp_path):
    """With two MTP layers vLLM drafts one, or an even number."""
    twin = shutil.copytree(GLM, tmp_path / "twin")
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    refused(
        f"bench {twin} --k 0..4",
        says="--k: with 2 MTP layers vLLM drafts a multiple of them; got 3",
    )


def test_a_dry_run_counts_cells_and_servers(tmp_path):
    done = keepmtp(
        f"bench {GLM} --source {GLM} --concurrency 1,8 --dry-run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert {
        "checkpoints: 2",
        "servers: 10",
        "k: [0, 1, 2, 3, 4]",
        "repetitions: 3",
        "requests: 1440",
    } <= {*said}
    assert "prompts: 400 of held_out.jsonl" in said
    assert not list(tmp_path.iterdir())


def printed(width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in shown(bench_fact()):
        console.print(part, highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_is_the_publishers_with_the_spread_and_the_recommended_k():
    said = printed()
    rows = [" ".join(line.split()) for line in said[said.index("(checkpoint)") :].splitlines()]
    assert rows[4:9] == [
        "1 at once 0 105.9 ± 2.1 - 20.0 9.4 - -",
        "1 at once 1 152.7 ± 3.1 1.44 20.0 6.5 90.0 1.90",
        "1 at once 2 179.9 ± 3.6 1.70 20.0 5.6 90.0 81.0 2.71",
        "1 at once best 3 193.0 ± 3.9 1.82 20.0 5.2 90.0 81.0 72.9 3.44",
        "1 at once 4 162.1 ± 3.2 1.53 20.0 6.2 90.0 81.0 72.9 65.6 4.10",
    ]
    words = " ".join(said.split())
    assert (
        "1 at once: k=3, 1.82 times as fast as k=0: its slowest repetition, 189.1 tokens a second"
        in words
    )
    assert "8 at once: k=0: no larger k is faster than k=0 beyond the spread" in words
    assert (
        "k=4, 8 at once: 77.4 % of the drafts are accepted, and it is slower than k=0 (0.53x)"
        in words
    )
    assert all(len(line) <= 80 for line in printed(80).splitlines())
