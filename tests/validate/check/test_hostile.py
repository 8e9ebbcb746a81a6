"""Checkpoints of a stranger: the check ends in a finding, never in a traceback, a hang or a raw
escape.

tests/fuzz/ tries the same by chance; here is each thing once, with what must be said.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checked import check
from checkpoint_files import Change, changed, config, hf_quant_config, quantization, tensor, write
from commands import keepmtp
from good_checkpoints import GOOD
from keepmtp.checkpoints.dialects import patterns
from keepmtp.recipes import match_clock
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.check import check as checks
from keepmtp.validate.facts.results import CheckData

EVIL = "re:([a-z0-9._]+)*!"
DEEP = {"a": [{"b": {}}]}


@pytest.fixture(autouse=True)
def briefly(monkeypatch) -> None:
    """A pattern gets a part of its seconds; in a command, below, it gets all of them."""
    monkeypatch.setattr(match_clock, "MATCHING_SECONDS", 0.3)


def hostile(folder: Path, base: str, *changes: Change) -> Path:
    """A folder with a good checkpoint that was changed."""
    return write(folder / "checkpoint", changed(GOOD[base], *changes))


def checked(folder: Path, base: str, *changes: Change) -> CheckData:
    return check(hostile(folder, base, *changes))


PLACES = {
    "glm nvfp4": "config_groups config_groups/group_0 config_groups/group_0/targets config_groups/group_0/weights config_groups/group_0/weights/num_bits config_groups/group_0/weights/group_size format ignore",
    "v3 block": "config_groups/group_0/weights/block_structure",
    "glm modelopt": "quant_algo ignore group_size quantization",
    "glm mixed": "quantized_layers",
    "glm modelopt file": "quantization/exclude_modules",
    "released deepseek-r1": "weight_block_size ignored_layers",
}


@pytest.mark.parametrize("value", [1.5, "text", [DEEP], True], ids=repr)
@pytest.mark.parametrize(
    "base, place", [(base, place) for base in PLACES for place in PLACES[base].split()]
)
def test_another_type_in_a_quantization_config_is_one_finding(tmp_path, base, place, value):
    """Whatever the value: a text where a text belongs, and numbers that are texts, are taken."""
    change = quantization
    file = "config.json: quantization_config"
    if "file" in base:
        change = hf_quant_config
        file = "hf_quant_config.json"
    report = checked(tmp_path, base, change(place, value))
    finding = next(iter(report.findings), None)
    if finding and finding.rule == "config" and "types that vLLM" in finding.says:
        assert not report.ok and len(report.findings) == 1
        assert file in finding.where and place.rpartition("/")[2] in finding.says
    else:
        assert isinstance(value, str | bool), "a number or a list is the wrong type everywhere"


@pytest.mark.parametrize(
    "base, place, values",
    [
        (
            "released deepseek-r1",
            "weight_block_size",
            [0, -1, [0, 128], [128], [1099511627776, 1099511627776], [-128, 128]],
        ),
        (
            "glm w4a16",
            "config_groups/group_0/weights/num_bits",
            [0, 1000000000000000000000000000000],
        ),
        ("glm w4a16", "config_groups/group_0/weights/group_size", [-7]),
        ("glm gptq", "bits", ["4"]),
        ("released deepseek-r1", "activation_scheme", ["dinamic", None]),
    ],
)
def test_a_value_that_vllm_does_not_take(tmp_path, base, place, values):
    for number, value in enumerate(values):
        report = checked(tmp_path / str(number), base, quantization(place, value))
        assert [finding.rule for finding in report.findings] == ["config"], value


@pytest.mark.few(2)
@pytest.mark.parametrize("place", ["ignore", "config_groups/group_0/targets"])
@pytest.mark.parametrize(
    "entry", [EVIL, "re:(a*)*$|(([a-z0-9._]+)+)+!", "re:(.*.*.*.*.*.*.*.*.*.*)*_"]
)
def test_a_regex_without_end_is_an_error_that_names_it(tmp_path, place, entry):
    start = time.process_time()
    report = checked(tmp_path, "mimo fp8", quantization(place, [entry]))
    assert time.process_time() - start < 10 * match_clock.MATCHING_SECONDS
    assert [finding.severity for finding in report.findings] == ["error"]
    assert entry in report.findings[0].where and "would hang" in report.findings[0].says
    assert "repeats inside of repeats" in report.findings[0].cure


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ["fix", "checkpoint", "--from", "checkpoint", "--dry-run"],
        ["fix", "checkpoint", "--dry-run"],
        ["check", "checkpoint", "--modules"],
    ],
)
def test_a_regex_without_end_ends_every_verb(tmp_path, words):
    hostile(tmp_path, "next fp8", quantization("ignore", [EVIL]))
    done = keepmtp(*words, cwd=tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert "would hang" in " ".join((done.stdout + done.stderr).split()), done.stdout + done.stderr


def test_a_regex_outside_of_any_limit_ends_too():
    with pytest.raises(CheckpointError, match="would hang"):
        patterns.equal_or_regex("model.layers.0.mlp.experts.0.down_proj", EVIL)
    with (
        patterns.time_limit(),
        pytest.raises(CheckpointError, match="would hang"),
        patterns.time_limit(),
    ):
        patterns.equal_or_regex("model.layers.0.mlp.experts.0.down_proj", EVIL)


@pytest.mark.parametrize(
    "entry", ["re:(", "re:*", "re:[", "re:" + "(" * 200, "re:(?P<a>x)(?P<a>y)"]
)
def test_a_regex_that_is_none_is_an_error_that_names_it(tmp_path, entry):
    report = checked(tmp_path, "mimo fp8", quantization("ignore", [entry]))
    assert [finding.severity for finding in report.findings] == ["error"]
    assert (
        entry in report.findings[0].where
        and "must be a regular expression" in report.findings[0].says
    )


def test_what_vllm_would_hang_on_is_not_loaded(tmp_path):
    """The dry load leaves out a checkpoint without a source (validate/dryload/check_on.py)."""
    folder = hostile(tmp_path, "mimo fp8", quantization("ignore", [EVIL]))
    assert checks.examine(folder).source is None


def test_usual_patterns_do_not_come_near_the_limit(tmp_path):
    assert checked(tmp_path, "dsv4 published").ok


def test_a_check_in_a_thread_has_no_timer(tmp_path):
    """Signals belong to the main thread; the check works in another one, without the limit."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(checked, tmp_path, "mimo fp8").result().ok


def test_the_timer_is_gone_after_the_check(tmp_path):
    import signal

    checked(tmp_path, "mimo fp8")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


def test_experts_beyond_those_counted_are_not_listed(tmp_path):
    """A stacked tensor without elements may say that it has a milliard experts."""
    base = "released qwen3.5-397b"
    name = next(name for name in GOOD[base]().tensors if name.endswith("experts.down_proj"))
    start = time.monotonic()
    report = checked(tmp_path, base, tensor(name, "BF16", 10**9, 0, 4))
    assert time.monotonic() - start < 10
    says = {finding.rule: finding.says for finding in report.findings}
    assert says["experts"].startswith("exists, but config.json counts"), says


def test_lost_experts_are_one_finding_with_their_number(tmp_path):
    report = checked(tmp_path, "glm fp8", config("n_routed_experts", 1000))
    found = [finding for finding in report.findings if finding.rule == "experts"]
    # Experts 4 to 999 of the layers of backbone and MTP block, each with three projections.
    assert {finding.count % 996 for finding in found} == {0}
    assert ".experts.4." in found[0].where


@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "a\nb", "\u202egnp", "\ud800", "[/red]", "x" * 5000], ids=ascii
)
def test_names_of_a_file_are_printed_without_what_a_terminal_obeys(tmp_path, name):
    entries = [f"mtp.{name}", *GOOD["glm fp8"]().quantization["ignore"]]
    changes = quantization("ignore", entries), tensor(f"model.{name}", "F32", 1)
    for number, change in enumerate(changes):
        report = checked(tmp_path / str(number), "glm fp8", change)
        text = json.dumps(report.model_dump(mode="json"), ensure_ascii=False)
        assert all(char.isprintable() for char in text) and len(text) < 20_000
