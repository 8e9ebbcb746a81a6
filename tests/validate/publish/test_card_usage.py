"""What a card says to the person who serves the checkpoint: context, sampling, parsers, GPUs, a
program that asks.
"""

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
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.report import card_page
from keepmtp.validate.report.card_page import page
from keepmtp.validate.report.provenance import gpus_of, is_chat


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return cards.checkpoint(tmp_path_factory.mktemp("made") / "tiny")


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
    assert f"| GPUs | {says}" in page(cards.told(made, reports.bare(), gpus=gpus_of(opened)))


def test_a_chat_template_makes_a_chat_model(tmp_path):
    assert not is_chat(open_source(reports.MODEL))
    copytree(reports.MODEL, tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert is_chat(open_source(tmp_path / "a"))


@pytest.mark.parametrize(("chats", "question"), [(True, "What is 17 * 23?"), (False, "17 * 23 =")])
def test_the_client_of_the_card_runs(chats, question, made, tmp_path):
    (program,) = re.findall(
        r"^```python\n(.*?)^```$",
        page(cards.told(made, reports.bare(), is_chat=chats)),
        re.MULTILINE | re.DOTALL,
    )
    assert max(map(len, program.splitlines())) <= card_page.MAX_COLUMNS
    with answering({question: "391"}, tmp_path / "log") as (server, asked):
        program = program.replace("http://localhost:8000", str(server.client.base_url).rstrip("/"))
        done = subprocess.run([find_vllm().python, "-c", program], capture_output=True, text=True)
    assert (done.stdout, asked[0]["model"]) == ("391\n", "ORG/tiny"), done.stderr
