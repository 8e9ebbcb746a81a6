"""`keepmtp bench` says what it would do, and prints a matrix as publishers do."""

import io

import pytest
from benches import bench_fact
from commands import ROOT, ran
from keepmtp.cli.bench import numbers
from keepmtp.cli.measured import benched as shown
from keepmtp.recipes.errors import RecipeError
from printed import printed
from rich.console import Console
from tables import cases

NO_NUMBERS = " a 1.. 4..1 -1 1;2 0 1..1000000 99999999"


@cases
def test_numbers(words, found):
    assert numbers("--k", words, least=0) == tuple(found)


@pytest.mark.parametrize("words", NO_NUMBERS.split(" "))
def test_no_numbers(words):
    says = r"^--concurrency: must be .*; got .*\. Write --concurrency 1,8,32"
    with pytest.raises(RecipeError, match=says):
        numbers("--concurrency", words, least=1)


def test_a_dry_run_counts_cells_and_servers(tmp_path):
    model = "models/tiny-glm4-moe"
    line = f"bench {ROOT}/{model} --source {ROOT}/{model} --concurrency 1,8 --dry-run"
    printed("bench_dry_run.txt", ran(line, cwd=tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_table_is_the_publishers_with_the_spread_and_the_recommended_k():
    console = Console(file=io.StringIO(), width=80)
    for part in shown(bench_fact()):
        console.print(part, highlight=False)
    printed("bench.txt", console.file.getvalue())  # type: ignore[attr-defined]
