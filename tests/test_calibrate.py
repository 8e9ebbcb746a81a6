import pytest
from passes import error, events, finished, small_recipe, start, statistics

CALIBRATED = ["nvfp4", "w4a16-gptq", "w4a16-awq"]
# Each rerun is killed at another place, later than the last.
PLACES = [("before statistics", 0), ("after statistics", 1), ("amid states", 1), ("amid removal", 1)]


@pytest.mark.parametrize("variant", CALIBRATED)
@pytest.mark.parametrize("model", ["tiny-glm4-moe", "tiny-qwen3_5"])
def test_a_killed_pass_goes_on_and_leaves_the_same_bytes(model, variant, tmp_path):
    recipe = small_recipe(tmp_path, f"{model}.{variant}")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    straight = start(recipe, unbroken)
    for place in PLACES:
        assert finished(start(recipe, broken, kill=place)) == [-9], place
    assert finished(start(recipe, broken)) == [0]
    assert finished(straight) == [0]
    assert len(statistics(unbroken)) == 3
    assert statistics(broken) == statistics(unbroken)
    assert events(unbroken) == events(broken) == [1, 2, 3], "no layer twice"
    assert [path.name for path in (broken / "states").iterdir()] == ["00003"]
