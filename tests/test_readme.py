"""The README's picture is what `make docs` makes, and is not edited by hand. A figure has one page, and the README repeats it."""

import re
from typing import Any

import pytest
from dry_corpus import broken_cases, good_cases
from good import plan_of_recipe, released
from keepmtp.cli.ls import scheme_rows
from keepmtp.cli.main import app
from keepmtp.quantize.needs.needs import machine_of, needs_of
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.tensor_parallel import Split, why_not
from readme import COMMANDS, PICTURE, README, ROOT, picture
from typer.main import get_command


def test_the_picture_is_what_is_made_today():
    assert PICTURE.read_text() == picture(), "run `make docs`"


def test_the_picture_fetches_nothing():
    """It is shown on pages that load it from elsewhere: no font, no script, no address but that of
    SVG itself.
    """
    text = PICTURE.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not [
        word for word in ("http", "url(data", "@font-face", "@import", "<script") if word in text
    ]


def test_the_names_in_the_picture_of_target_and_draft_are_the_familys():
    """Each grey name, on disk, has the blue one behind it in vLLM."""
    view = find_view(released("qwen3.5-27b").config, "qwen3.5-27b")
    text = (ROOT / "docs" / "target_draft.svg").read_text()
    drawn = re.findall(r'class="(?:disk|vllm)"[^>]*>([\w.]+)</text>', text)
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    assert len(pairs) == 7
    for disk, runtime in pairs:
        place = view.place(HFName(f"{disk}.weight"))
        assert place is not None and place.runtime == runtime, disk


def test_the_figures_are_those_of_their_pages():
    text = README.read_text()
    page, quality, schemes = (
        (ROOT / "docs" / f"{name}.md").read_text()
        for name in ("benchmarks", "tables/quality", "schemes")
    )
    table = text.partition("## Figures")[2]
    measured = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", table, re.MULTILINE)
    figures = re.findall(r"\d+(?:\.\d+)?", " ".join(measured))
    assert len(figures) > 10
    assert [each for each in figures if not re.search(rf"(?<![\d.]){each}(?![\d])", page)] == []
    kept = re.findall(r"[\d.]+ ± [\d.]+", schemes)
    assert len(kept) > 15 and [each for each in kept if each not in quality] == []
    for row in scheme_rows():
        assert f"| {row['scheme']} | {row['bits']} |" in schemes


def test_the_page_counts_the_corpus():
    broken = [case.by for case in broken_cases()]
    static, dry = (sum(by in (one, "both") for by in broken) for one in ("static", "dry"))
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert (
        f"{len(broken)} broken checkpoints caught ({static} by the static check, {dry} by the dry "
        f"load); of {len([*good_cases()])} good ones"
    ) in page


def test_the_pages_can_be_finished():
    """Words of the README, and words of docs/ that a person wrote."""
    assert len(README.read_text().split()) <= 900
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "tables" / "failures.md"]
    words = {page.name: len(page.read_text().replace("|", "").split()) for page in pages}
    assert sum(words.values()) <= 16_000 and len(words) <= 13, words


def test_every_command_of_the_pages_has_a_verb_and_its_options():
    verbs: Any = get_command(app)
    lines = []
    for page in (README, *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        lines += re.findall(r"(?m)^keepmtp ([^#\n]+)", "".join(text.split("```")[1::2]))
        lines += re.findall(r"`keepmtp ([a-z][^`\n]+)`", text)
    assert len(lines) > 60
    for line in lines:
        words = line.partition(" -- ")[0].split()
        known = {"--help"}
        for option in verbs.get_command(None, words[0]).params:
            known |= {*option.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_what_is_quantized_loads_at_the_size_that_the_page_names():
    """By headers alone; tests/vllm/test_tensor_parallel.py lets vLLM load each."""
    assert COMMANDS
    for command in COMMANDS:
        plan = plan_of_recipe(command.recipe, "full")
        refused = why_not(plan.view.text_config, plan.cuts, Split(command.tp))
        assert refused is None, (str(command), refused)


@pytest.mark.full
def test_large_runs_need_what_plan_counts():
    page = (ROOT / "docs" / "large-runs.md").read_text()
    rows = re.findall(r"(?m)^\| (?:output|one GPU|main memory|disk for states).*", page)
    cells = [re.findall(r"\| ([\d,]+) GB", row) for row in rows]
    models = ("glm-4.5-air", "qwen3.5-397b", "deepseek-v3.1", "dsv4-pro")
    for model, written in zip(models, zip(*cells, strict=True), strict=True):
        plain, minmax, gptq = (
            needs_of(plan_of_recipe(f"{model}.{variant}", "full"), machine_of("H100"))
            for variant in ("nvfp4a16-fp8", "nvfp4-fp8", "w4a16-gptq")
        )
        counted = (
            plain.output,
            minmax.device,
            minmax.host,
            minmax.states,
            gptq.device,
            gptq.states,
        )
        assert written == tuple([f"{size / 1e9:,.0f}" for size in counted if size is not None])
