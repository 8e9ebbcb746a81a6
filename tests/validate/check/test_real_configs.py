"""Public quantized releases: the verdict on each, by reason."""

import json

import pytest
from checked import check
from checkpoint_files import write
from real_releases import FOLDER, NAMES, published, real_release


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_on_a_public_release(name, tmp_path):
    """And of SGLang, which serves them; GPTQ's names are not judged for it, MiniMax has no draft."""
    folder = write(tmp_path / "checkpoint", real_release(name))
    data = check(folder)
    assert [[f.severity, f.rule, f.where] for f in data.findings] == published(name)["findings"], (
        data.findings
    )
    assert data.ok == all(severity != "error" for severity, *_ in published(name)["findings"])
    assert data.facts.num_mtp_tensors
    found = check(folder, runtimes=("sglang",)).findings
    wanted = [("warning", "sglang-config")] if "gptq" in name else []
    assert "minimax" in name or [(each.severity, each.rule) for each in found] == wanted, found


def test_each_file_says_where_it_is_from():
    assert len(NAMES) >= 12
    for name in NAMES:
        given = published(name)
        assert given["origin"].keys() == {"repository", "files", "read_in"} and all(
            given["origin"].values()
        )
        assert given["taken"] and given["trimmed"] and given["derived"]
        assert (FOLDER / f"{name}.json").stat().st_size < 16_000


@pytest.mark.parametrize(
    "name, entries",
    [
        ("deepseek-v3.1-nvfp4", ["model.layers.3*"]),
        ("glm-5.2-nvfp4", ["model.layers.3*"]),
        ("qwen3.5-122b-a10b-nvfp4", ["mtp.layers.0*", "mtp*"]),
    ],
)
def test_without_its_entry_for_the_draft_it_is_an_error(name, entries, tmp_path):
    """The twin: the release as it would be if its maker had forgotten the MTP block."""
    folder = write(tmp_path / "checkpoint", real_release(name))
    for file in ("config.json", "hf_quant_config.json"):
        text = (folder / file).read_text()
        for entry in entries:
            text = text.replace(json.dumps(entry), '"nothing"')
        (folder / file).write_text(text)
    found = [f.where for f in check(folder).findings if f.severity == "error"]
    assert found and all(where.startswith(("mtp.", "model.layers.3.")) for where in found)
