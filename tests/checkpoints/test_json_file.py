"""config.json and other small files of strangers: the right types, or one sentence with file and
key.
"""

import json
import math
from pathlib import Path

import pytest
from data_files import cases, put_json, spelled, table
from keepmtp.checkpoints.json_file import read_config, read_object
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.families import families
from keepmtp.recipes.find import find_recipe
from releases import source_layout, write_checkpoint

TABLE = table("checkpoints/test_json_file")
FILES = TABLE["FILES"]


def test_a_surrogate_pair_is_one_character(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\\ud83d\\ude00 \\\\ud800"}')
    assert read_object(tmp_path / "a.json", "here") == {"a": "\U0001f600 \\ud800"}


def test_a_file_of_holes_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(CheckpointError, match="must be at most 167772160 bytes long"):
        read_config(tmp_path / "config.json", "here")


@pytest.mark.parametrize("raw, said", FILES.values(), ids=FILES)
def test_a_file_that_holds_no_object(raw, said, tmp_path):
    (tmp_path / "a.json").write_bytes(spelled(raw).encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        read_object(tmp_path / "a.json", "here", cure="Mend it")
    assert str(caught.value).startswith(f"here: {said}") and str(caught.value).endswith(
        ". Mend it."
    )


def test_what_configs_of_released_models_have(tmp_path):
    """State-space models have Infinity."""
    (tmp_path / "config.json").write_text(
        '{"time_step_limit": [0.0, Infinity], "deep": [[[[[[[]]]]]]]}'
    )
    assert read_config(tmp_path / "config.json", "here")["time_step_limit"] == [0.0, math.inf]


VALUES = [*TABLE["VALUES"], 10**400, "x" * 10**5]
TAKEN = TABLE["TAKEN"]


@pytest.mark.parametrize("inner", [False, True], ids=["top", "text_config"])
@pytest.mark.parametrize("key", TAKEN)
def test_a_key_of_another_type(key, inner, tmp_path):
    """Each value is taken or refused with the key's name; null is as if it were not there."""
    path = tmp_path / "config.json"
    taken = [json.dumps(value) for value in (*TAKEN[key], None)]
    for value in map(json.dumps, [*VALUES, None]):
        path.write_text(
            f'{{"text_config": {{"{key}": {value}}}}}' if inner else f'{{"{key}": {value}}}'
        )
        if value in taken:
            read_config(path, "here")
        else:
            with pytest.raises(CheckpointError) as caught:
                read_config(path, "here")
            message = str(caught.value)
            assert message.startswith(f"here: {'text_config.' * inner}{key}"), value
            assert ": must " in message and len(message) < 500, value


def test_every_key_of_every_family_has_a_type(tmp_path):
    path = tmp_path / "config.json"
    for family in families().values():
        for key in (family.num_layers_key, *family.mtp_count_keys, *family.mtp_parts_keys):
            outer, _, last = key.partition(".")
            for value in [{}, -1, 10**9] if key else []:
                put_json(path, {outer: {last: value}} if last else {outer: value})
                with pytest.raises(CheckpointError, match=rf"^here: {key}: must "):
                    read_config(path, "here")


def plan(folder: Path, **changes) -> int:
    config, tensors = source_layout("glm-4.7")
    config = {key: value for key, value in (config | changes).items() if value != "gone"}
    write_checkpoint(folder, config, tensors)
    return len(make_plan(find_recipe("glm-4.7.nvfp4a16-fp8")[0], open_source(folder)).tensors)


@cases
def test_the_plan_of_a_config_with_a_wrong_key(says, changes, tmp_path):
    assert plan(tmp_path / "right")
    with pytest.raises(
        CheckpointError,
        match=rf"config\.json: {says} Take (config\.json|the key) from the original release",
    ):
        plan(tmp_path / "wrong", **changes)
