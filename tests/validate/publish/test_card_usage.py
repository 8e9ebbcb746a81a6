"""What a card says to the person who serves the checkpoint: context, sampling, parsers, GPUs, a
program that asks.
"""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import cards
import pytest
import reports
from answering import answering
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.families import families
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.report import card_page
from keepmtp.validate.report.card_page import page
from keepmtp.validate.report.usage import PARSERS, Usage, usage_of


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return cards.checkpoint(tmp_path_factory.mktemp("made") / "tiny")


def card_of(made: Path, **usage: object) -> str:
    told = cards.told(made, reports.bare())
    return page(replace(told, usage=replace(told.usage, **usage)))


def with_files(folder: Path, **files: object) -> Usage:
    """A chat model's small files beside the tiny model's weights."""
    copytree(reports.MODEL, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return usage_of(open_source(folder), "glm4_moe")


def test_what_its_own_files_say(tmp_path, made):
    config = json.loads((reports.MODEL / "config.json").read_text())
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": True, "min_p": "x`|", "do_sample": True}
    found = with_files(
        tmp_path / "a",
        config=config | {"max_position_embeddings": 131072},
        generation_config=values,
    )
    assert found == Usage(
        context=131072,
        sampling={"temperature": 0.6, "top_p": 0.95},
        is_chat=True,
        parsers=(
            "--reasoning-parser",
            "glm45",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "glm47",
        ),
        gpus=((1, "4090", 24),),
    )
    text = page(replace(cards.told(made, reports.bare()), usage=found))
    assert "| Context length | 131,072 tokens, by config.json |" in text
    assert (
        "| Sampling | `temperature` 0.6, `top_p` 0.95; vLLM takes these of generation_config.json"
        in text
    )
    assert "`--reasoning-parser glm45 --enable-auto-tool-choice --tool-call-parser glm47`" in text


def test_what_no_file_says_is_not_on_the_card(made):
    """The tiny model has no chat template and no sampling values, so it gets no parser either."""
    told = cards.told(made, reports.bare())
    assert not told.usage.is_chat and told.usage.parsers == () and not told.usage.sampling
    text = card_of(made, context=0)
    assert not re.search("Context length|Sampling|-parser", text)


@pytest.mark.parametrize(
    ("gib", "says"),
    [
        (15, "1 x 4090 (24 GB): the fewest"),
        (
            100,
            "8 x 4090 (24 GB), 4 x L40S (48 GB), 2 x H100 (80 GB), 1 x H200 (141 GB): the fewest",
        ),
        (400, "8 x H100 (80 GB), 4 x H200 (141 GB), 4 x B200 (180 GB): the fewest"),
        (2000, "more than 8 of any that keepmtp knows: the fewest"),
    ],
)
def test_gpus_are_counted_from_the_bytes(gib, says, made, tmp_path):
    """Of 100 GiB a half is on each of two H100, which have 61.7 GiB of 74.5 for weights: 0.92 of
    it, less a tenth.
    """
    opened = open_source(reports.MODEL)
    name, entry = next(iter(opened.entries.items()))
    opened = replace(
        opened,
        config={**opened.config, "num_attention_heads": 64},
        entries={name: replace(entry, num_bytes=gib << 30)},
    )
    assert f"| GPUs | {says}" in card_of(made, gpus=usage_of(opened, "").gpus)


def test_parsers_are_those_of_the_installed_vllm():
    site = next(Path(find_vllm().python).parent.parent.glob("lib/python3*/site-packages/vllm"))
    for number, folder in enumerate(("reasoning", "tool_parsers")):
        named = set(
            re.findall(
                r'^    "([\w-]+)": \(', (site / folder / "__init__.py").read_text(), re.MULTILINE
            )
        )
        wanted = {row[number] for row in PARSERS.values()} - {""}
        assert wanted <= named and "glm46" not in named, wanted - named
    assert set(PARSERS) <= set(families())


@pytest.mark.parametrize(
    ("is_chat", "question"), [(True, "What is 17 * 23?"), (False, "17 * 23 =")]
)
def test_the_client_of_the_card_runs(is_chat, question, made, tmp_path):
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", card_of(made, is_chat=is_chat), re.MULTILINE | re.DOTALL
    )
    assert max(map(len, program.splitlines())) <= card_page.MAX_COLUMNS
    with answering({question: "391"}, tmp_path / "log") as (server, asked):
        program = program.replace("http://localhost:8000", str(server.client.base_url).rstrip("/"))
        done = subprocess.run([find_vllm().python, "-c", program], capture_output=True, text=True)
    assert (done.stdout, asked[0]["model"]) == ("391\n", "ORG/tiny"), done.stderr
