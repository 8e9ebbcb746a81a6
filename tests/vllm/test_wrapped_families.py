"""Types that share a family's table under other names, against vLLM's own classes: what is asked,
what is filled.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint
from good import outputs_of, plan_of, released
from keepmtp.quantize.config.written import modules_of
from keepmtp.validate.dryload.failures import known_defect
from keepmtp.validate.dryload.verdict_findings import objections
from keepmtp.validate.facts.dry_load import LoadAccount
from keepmtp.validate.facts.vllm_env import find_vllm
from wrapped import WRAPPED, nemotron_omni
from written_values import opened

pytestmark = pytest.mark.vllm

SCHEME = "FP8_DYNAMIC"
# Nemotron Omni as transformers' class reads it, and with a quantization config at the top level
# alone.
NATIVE, OUTSIDE = "nemotron_h_omni", "outside"
SOUNDS = "mimo-v2.5 with its audio_tokenizer"
# Parameters of towers that the fixtures leave out.
NO_TOWER = ("vision_model.", "mlp1.", "vision_final_layernorm.")
NOT_A_MATRIX = ("Attention", "VocabParallelEmbedding", "MambaMixer2", "ParallelLMHead")


def with_audio_tokenizer(folder: Path) -> None:
    (folder / "audio_tokenizer").mkdir()
    (folder / "audio_tokenizer" / "config.json").write_text("{}")


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> Mapping[str, LoadAccount]:
    """What vLLM did with what keepmtp writes, the MTP block quantized too."""
    plans = {name: plan_of(*make(), name, SCHEME, SCHEME) for name, make in WRAPPED.items()}
    made = {name: outputs_of(plan) for name, plan in plans.items()}
    config, tensors = nemotron_omni(NATIVE)
    outside = outputs_of(plans["NemotronH_Omni_Reasoning_V3"])
    del outside.config["llm_config"]["quantization_config"]
    sounds = released("mimo-v2.5")
    sounds.after = with_audio_tokenizer
    return dry_loaded(
        {
            **made,
            NATIVE: Checkpoint(config=config, tensors=tensors),
            OUTSIDE: outside,
            SOUNDS: sounds,
        }
    )


@pytest.mark.parametrize("name", WRAPPED)
def test_vllm_asks_for_the_tables_names_and_chooses_what_the_plan_chose(name, accounts):
    account = accounts[name]
    assert account.load.failure is None
    plan = plan_of(*WRAPPED[name](), name, SCHEME, SCHEME)
    chosen = {str(module.name): module.scheme for module in modules_of(plan)}
    towers = tuple(runtime for _, runtime, _ in plan.view.layout.opaque)
    wrong, unknown = {}, set()
    for role in ("target", "draft"):
        _, written = account.of(role)
        for asked in written.asked:
            if (
                not asked.path
                or asked.layer.endswith(NOT_A_MATRIX)
                or asked.prefix.startswith(towers)
            ):
                continue
            is_quantized = bool(asked.method) and not asked.method.startswith("Unquantized")
            if asked.prefix not in chosen:
                unknown.add(asked.prefix)
            elif is_quantized != bool(chosen[asked.prefix]):
                wrong[asked.prefix] = asked.method
    assert (wrong, unknown) == ({}, set())


@pytest.mark.parametrize("name", WRAPPED)
def test_every_tensor_is_read_and_every_parameter_is_filled(name, accounts):
    account = accounts[name]
    for role in ("target", "draft"):
        _, written = account.of(role)
        faults = [fault.param for fault in written.faults]
        assert [param for param in faults if not param.startswith(NO_TOWER)] == [], role
    assert [
        tensor for tensor in account.unconsumed if not tensor.startswith("model.time_series.")
    ] == []


@pytest.mark.parametrize(
    ("name", "words", "cure"),
    [
        (NATIVE, "vit_hidden_size", "--trust-remote-code"),
        (OUTSIDE, "CompressedTensorsConfig", "llm_config"),
    ],
)
def test_what_vllm_cannot_do_with_nemotron_omni_is_a_known_defect(name, words, cure, accounts):
    failure = accounts[name].load.failure
    assert failure and words in failure.words
    defect = known_defect(failure, family="nemotron_h", version=find_vllm().version)
    assert defect and cure in defect.cure


def test_what_vllm_drops_on_purpose_is_no_finding(accounts):
    """Intern-S2's encoder of time series; the same tensor under another name is a finding."""
    account = accounts["intern_s2_preview"]
    runtime = opened(Path(account.path))
    assert objections(account, runtime, version=find_vllm().version) == []
    other = account.model_copy(update={"unconsumed": ("model.time_serie.norm.weight",)})
    [found] = objections(other, runtime, version=find_vllm().version)
    assert found.finding.where == "model.time_serie.norm.weight"


def test_a_tokenizer_of_sounds_is_not_read(accounts):
    """Its weights are in a folder of their own, which no index names."""
    account = accounts[SOUNDS]
    assert account.load.ok and not account.of("target")[1].faults
