"""`keepmtp explain` reads what vLLM itself raised: its words and its place, from checkpoints broken
in known ways.
"""

import pytest
from dry_corpus import broken_cases
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.explain import Explanation, explain
from keepmtp.validate.dryload.log import parse_log
from keepmtp.validate.facts.dry_load import LoadAccount

pytestmark = pytest.mark.vllm

# A broken checkpoint -> the failure, and words of the tensor or entry that the answer must name.
NAMED = {
    "F1 dropped, count kept": ("MTP weights dropped", "model.layers.3."),
    "F14 experts of the draft not ignored": (
        "experts built in another form",
        "mtp.layers.0.mlp.experts",
    ),
    "F32 KV scales in the draft": (
        "scales of the KV cache in the MTP layer",
        "layers.3.self_attn.k_proj.k_scale",
    ),
    "F38 placeholder head quantized": (
        "weight of another width",
        "model.layers.3.shared_head.head",
    ),
    "H7 eh_proj packed": ("scale without a parameter in the draft", "model.layers.3.eh_proj"),
    "INT4 cache": ("number format of the KV cache", "kv_cache_scheme"),
}


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> dict[str, LoadAccount]:
    made = {case.name: case.build() for case in broken_cases() if case.name in NAMED}
    return dry_loaded(made)


def serve_log(account: LoadAccount) -> bytes:
    """vLLM's own words, as a worker writes them to the log of a server."""
    failure = account.load.failure
    assert failure is not None
    file, _, line = failure.at.rpartition(":")
    said = [f'  File "/opt/venv/lib/python3.12/site-packages/{file}", line {line}, in load_weights']
    said += f"{failure.type}: {failure.words}".splitlines()
    before = "(Worker_TP0 pid=4242) ERROR 02-27 16:21:24 [multiproc_executor.py:796] "
    return "".join(f"{before}{words}\n" for words in said).encode()


def explained(account: LoadAccount) -> Explanation:
    return explain(examine(account.path), parse_log(serve_log(account)))


@pytest.mark.parametrize("case", NAMED)
def test_a_real_exception_is_recognized_and_its_culprit_named(case, accounts):
    name, words = NAMED[case]
    (answer,) = explained(accounts[case]).answers
    assert answer.failure.name == name
    assert words in " ".join((answer.names, answer.on_disk, *answer.confirmed))
