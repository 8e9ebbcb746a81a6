"""`keepmtp bench` says what it would do, and prints a matrix as publishers do."""

import io
import shutil

import pytest
from commands import GLM, assert_shows, ran
from data_files import cases
from keepmtp.cli.bench import numbers
from keepmtp.cli.measured import benched as shown
from keepmtp.recipes.errors import RecipeError
from rich.console import Console
from stations import bench_fact
from stub_vllm import stub_vllm

NO_NUMBERS = " a 1.. 4..1 -1 1;2 0 1..1000000 99999999"


@cases
def test_numbers(words, found):
    assert numbers("--k", words, least=0) == tuple(found)


@pytest.mark.parametrize("words", NO_NUMBERS.split(" "))
def test_no_numbers(words):
    says = r"^--concurrency: must be .*; got .*\. Write --concurrency 1,8,32"
    with pytest.raises(RecipeError, match=says):
        numbers("--concurrency", words, least=1)


def test_a_dry_run_names_the_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    made = shutil.copytree(GLM, tmp_path / "made")
    (made / "number.txt").write_text("1")
    said = ran(f"bench {made} --source {GLM} --concurrency 1,8 --dry-run", cwd=tmp_path)
    first, *servers = said.splitlines()
    assert first == "servers to start, one after the other: 10"
    for whose, lines in (("source", servers[:5]), ("checkpoint", servers[5:])):
        assert lines == [f"k={k}, {whose}: speed" for k in range(5)]
    assert not (tmp_path / "made.report" / "bench.json").exists()


def test_source_and_checkpoint_stand_beside_each_other_and_a_sentence_says_which_k_to_serve():
    file = io.StringIO()
    Console(file=file, width=200).print(*shown(bench_fact()), highlight=False)
    assert_shows(
        file.getvalue(),
        "bench /data/checkpoint",
        "tokens a second, 1 at once, k=0 63.5 ± 1.3 105.9 ± 2.1 -",
        "tokens a second, 1 at once, k=3 115.8 ± 2.3 193.0 ± 3.9 -",
        "times as fast as k=0, 1 at once, k=3 1.82 1.82 -",
        "ms to the first token, 1 at once, k=3 20.0 20.0 -",
        "ms for each further token, 1 at once, k=3 8.6 5.2 -",
        "tokens a second, 8 at once, k=0 900.0 ± 18.0 900.0 ± 18.0 -",
        "Serve 1 at once with k=3, 1.82 times as fast as without MTP; 8 at once without MTP.",
        "Tokens a second: ± half the distance from slowest to fastest",
        "880 prompts of qualitative.jsonl, as messages through the chat template, greedily;",
        "vLLM 0.32.0 on NVIDIA H200 (140 GiB).",
    )
