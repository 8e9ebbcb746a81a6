"""Which cures a server gets, what is said of them before, and what of those that it has applied.

tests/vllm/test_cures.py has real servers. The stub applies what it is told.
"""

import json
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
from commands import keepmtp
from keepmtp.checkpoints.source import open_source
from keepmtp.validate import keepmtp_cures
from keepmtp.validate.dryload.failures import known
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.keepmtp_cures import step
from keepmtp.validate.measure.cures import by_version, needed, switched_on
from keepmtp.validate.measure.server import server_environment
from stub_vllm import stub_vllm
from writing import tiny

STEP = "step.layer_types,step.draft_scales,step.config_keys"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("cured") / "step", "step-3.5-flash", "sparse")


@pytest.mark.parametrize(
    "model, quant_method, version, cures",
    [
        ("step-3.5-flash", "", "0.32.0", "step.layer_types step.draft_scales step.config_keys"),
        ("step-3.5-flash", "", "0.33.0", "step.draft_scales step.config_keys"),
        ("hy3", "", "0.33.0", ""),
        ("hy3", "modelopt", "0.33.0", "heads.hy3_draft"),
        ("openpangu-ultra", "", "0.31.0", "layers.openpangu_layer layers.openpangu_pair"),
        ("glm-4.7", "modelopt", "0.32.0", ""),
    ],
)
def test_a_checkpoint_needs_what_its_family_and_dialect_meet(
    model, quant_method, version, cures, tmp_path
):
    path = tiny(tmp_path / "made", model, "sparse")
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    if quant_method:
        config["quantization_config"] = {"quant_method": quant_method, "quant_algo": "FP8"}
    (path / "config.json").write_text(json.dumps(config))
    assert needed(open_source(path), version) == tuple(cures.split())


def test_every_cure_has_families():
    rows = [defect for defect in known().defects if defect.cure_in_vllm]
    assert rows and all(defect.families for defect in rows)


def test_the_user_may_name_them(folder, monkeypatch):
    source = open_source(folder)
    assert ",".join(switched_on(source, "0.32.0")) == STEP
    for named, found in {"0": (), "1": ("1",), "a,b": ("a", "b")}.items():
        monkeypatch.setenv("KEEPMTP_CURES", named)
        assert switched_on(source, "0.32.0") == found
    assert by_version(source)[0] == (
        "`step.layer_types` in vLLM 0.31.0 to 0.32.0, no more from 0.33.0 on"
    )


@pytest.mark.parametrize("named", ["1 ", " 1", "1,", "1,step.draft_scales"])
def test_one_means_every_cure_however_it_is_written(named, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = len(sys.meta_path)
    monkeypatch.setenv("KEEPMTP_CURES", named)
    keepmtp_cures.register()
    waiting = [name for cures in sys.meta_path[0]._waiting.values() for name in cures]
    assert len(waiting) > 5 and sorted(waiting) == sorted(keepmtp_cures.cures())
    for nothing in ("", " ", "0 "):
        monkeypatch.setenv("KEEPMTP_CURES", nothing)
        keepmtp_cures.register()
    assert len(sys.meta_path) == before + 1


def test_a_class_of_vllms_own_for_a_config_stays(capfd, monkeypatch):
    """No hash is over the table that a cure adds it to; here of a fork that has it."""
    monkeypatch.setattr(keepmtp_cures, "OUTCOMES", {})
    module = SimpleNamespace(__name__="config", __file__="config.py")
    module._CONFIG_REGISTRY = {"step3p5": dict, "step3p7": dict}
    cure = step.config_keys
    monkeypatch.setattr(type(cure), "refused", lambda *_: "")
    keepmtp_cures._apply(module, {"step.config_keys": cure})
    assert module._CONFIG_REGISTRY["step3p7"] is dict
    assert "did nothing: config is not the source" in capfd.readouterr().err
    assert keepmtp_cures.OUTCOMES["step.config_keys"].endswith("it has a class for step3p7")


def test_vllm_finds_them_once(folder, tmp_path, monkeypatch):
    """On its path, instead of those of a keepmtp that is installed beside it."""
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    places = server_environment(replace(find_vllm(), cures=("a", "b")), tmp_path)
    assert places["KEEPMTP_CURES"] == "a,b" and str(tmp_path) in places["PYTHONPATH"].split(":")
    found = metadata.distributions(path=[str(tmp_path)])
    points = {point.name: point.value for each in found for point in each.entry_points}
    assert points["keepmtp_cures"] == "keepmtp_cures:register"
    assert {each.name for each in metadata.distributions(path=[str(tmp_path)])} >= {"keepmtp"}
    assert (tmp_path / "keepmtp_cures" / "__init__.py").is_file()
    (tmp_path / "off").mkdir()
    off = server_environment(find_vllm(), tmp_path / "off")
    assert off["KEEPMTP_CURES"] == "0" and not (tmp_path / "off/keepmtp_cures").exists()


@pytest.mark.full
def test_a_result_says_what_was_applied(folder, tmp_path):
    """In the terminal and the result; and before the start."""
    words = f"eval {folder} --only acceptance,lossless --source none -k 1 --out {tmp_path / 'out'}"
    python = str(stub_vllm(tmp_path))
    done = keepmtp(words, VLLM_PYTHON=python, status=0)
    applied = ", ".join(sorted(STEP.split(",")))
    assert f"checkpoint: vLLM 0.32.0 is mended by keepmtp's cures {STEP.replace(',', ', ')}; " in (
        " ".join(done.stderr.split())
    )
    says = f"vLLM was mended by keepmtp's cures {applied}"
    assert f"Figures of the checkpoint are of a mended vLLM: {says}." in " ".join(
        done.stdout.split()
    )
    assert says in (tmp_path / "out" / "serve.json").read_text()
    plain = keepmtp(words, VLLM_PYTHON=python, KEEPMTP_CURES="0", status=0)
    assert "mended" not in plain.stdout + plain.stderr, "other answers, with a file of their own"
