"""inference_mode.py against the crash it is there for: llm-compressor #2745, reproduced on a
foreign model.

The crash needs all of: a decorated forward on a sequential target, weights that are loaded while it
runs (here from disk; on a GPU, any CPU weight), and an algorithm that writes weights back (GPTQ).
With weights that stay where they are, or round-to-nearest, a decorated model calibrates as if
nothing were wrong, and a test of it would show nothing.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decorated_model import write_foreign
from keepmtp.quantize.calibrate.model.inference_mode import guard
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from torch import nn

ROOT = Path(__file__).parents[3]

# llm-compressor changes transformers' classes and keeps a session for the whole process, so it gets
# one of its own. One import for all questions: it takes most of the time.
CALIBRATIONS = r"""
import contextlib, json, sys, tempfile, traceback
from pathlib import Path
import torch
import yaml
from compressed_tensors.offload import offload_module
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.model.inference_mode import guard
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schema import Recipe
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.utils.transformers import warn_inference_mode_forwards
from loguru import logger
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
warnings = []
logger.remove()
logger.enable("llmcompressor")  # keepmtp's own use of it is silent
logger.add(lambda message: warnings.append(str(message)), level="WARNING")
rng = torch.Generator().manual_seed(0)
samples = [{"input_ids": torch.randint(0, 512, (32,), generator=rng)} for _ in range(4)]

class Processor:
    def save_pretrained(self, *_, **__):
        pass

def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

def gptq(folder, context=contextlib.nullcontext):
    model = load(folder)
    for module in list(model.modules()):
        if module._parameters:
            offload_module(module, "cpu", "disk", offload_dir=tempfile.mkdtemp(dir=offloaded))
    with context():
        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128)
        recipe = GPTQModifier(config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)},
                              ignore=["lm_head", "re:.*mtp_layers.*"])
        oneshot(model=model, recipe=recipe, dataset=DataLoader(samples, batch_size=2), pipeline="sequential",
                processor=Processor(), trust_remote_code_model=True)
    return {name: value.clone() for name, value in model.state_dict().items() if ".layers." in name}

def refusal(folder, batch, policy):
    try:
        model = load(folder)
        with guard(model, policy=policy), torch.no_grad():
            model(**batch)
    except CheckpointError as error:
        return str(error)

def backbone_pass(folder, policy):
    # keepmtp's own path: statistics by name, or the refusal and how many files there were by then.
    document = yaml.safe_load(Path(mimo).read_text()) | {"source": folder, "revision": "local", "calibration": {
        "algorithm": "gptq", "dataset": "none", "dataset_revision": "local", "split": "train", "column": "text",
        "samples": 4, "held_out": 2, "sequence_length": 32, "batch_size": 2, "seed": 0,
        "model_code": "checkpoint", "decorated_forward": policy}}
    data = CalibrationData(ids=torch.stack(samples_ids), held_out_ids=torch.stack(samples_ids[:2]), provenance={})
    cpu, out = torch.device("cpu"), Path(tempfile.mkdtemp(dir=offloaded))
    try:
        calibrate_backbone(make_plan(Recipe(**document), open_source(folder)), data, out, device=cpu,
                           ranks=Ranks(rank=0, size=1, device=cpu))
    except CheckpointError as error:
        return [str(error), len(list(out.glob("statistics/*")))]
    return {name: value for file in sorted(out.glob("statistics/*")) for name, value in load_file(file).items()}

decorated, within, plain, offloaded, mimo = sys.argv[1:]
samples_ids = [sample["input_ids"] for sample in samples]
answers = {}
for form, folder in {"decorated": decorated, "with": within}.items():
    try:
        gptq(folder)
        answers[f"crash, {form}"] = None
    except RuntimeError as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        answers[f"crash, {form}"] = [str(error), last.filename, last.line]
answers["warned in the pipeline"] = [line for line in warnings if "inference_mode" in line]
model = load(decorated)
warn_inference_mode_forwards(model)
answers["warned when asked"] = [line for line in warnings if "inference_mode" in line]

wanted = gptq(plain)
for form, folder in {"decorated": decorated, "with": within}.items():
    found = gptq(folder, lambda: guard(torch.nn.Module(), policy="unwrap"))
    same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    answers[f"{form}, without"] = same and any(name.endswith("weight_scale") for name in wanted)

batch = {"input_ids": samples[0]["input_ids"][None]}
answers["plain, refuse"] = refusal(plain, batch, "refuse")
wanted = backbone_pass(plain, "refuse")
for form, folder in {"decorated": decorated, "with": within}.items():
    answers[f"{form}, refuse"] = refusal(folder, batch, "refuse")
    answers[f"{form}, unwrap"] = refusal(folder, batch, "unwrap")
    answers[f"keepmtp, {form}, refuse"] = backbone_pass(folder, "refuse")
found = backbone_pass(decorated, "unwrap")
answers["keepmtp, unwrap"] = [len(wanted), [
    name for name in wanted.keys() | found.keys() if name not in found or not torch.equal(wanted[name], found[name])
]]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("foreign")
    # Not "with" alone: the folder's name becomes that of a Python package.
    forms = [
        str(write_foreign(folder / f"mimo_{form}", form)) for form in ("decorated", "with", "plain")
    ]
    (folder / "offloaded").mkdir()
    recipe = folder / "mimo-7b.w4a16.yaml"
    recipe.write_text(find_recipe("mimo-7b.w4a16")[1])
    words = [sys.executable, "-c", CALIBRATIONS, *forms, str(folder / "offloaded"), str(recipe)]
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("form", ["decorated", "with"])
def test_llmcompressor_dies(answers, form):
    """The crash as reported, at the line that the guard's docstring blames, for either way to write
    it.
    """
    message, file, line = answers[f"crash, {form}"]
    assert "Inplace update to inference tensor outside InferenceMode" in message
    assert file.endswith("compressed_tensors/offload/cache/base.py")
    assert line == "onloaded.copy_(value)"


@pytest.mark.full
def test_llmcompressor_does_not_warn_in_the_pipeline_that_dies(answers):
    """Why keepmtp looks for itself: the same function, asked before the forwards are replaced, does
    see it.
    """
    assert answers["warned in the pipeline"] == []
    assert len(answers["warned when asked"]) == 1


@pytest.mark.parametrize("form", ["decorated", "with"])
def test_llmcompressor_lives_without_inference_mode(answers, form):
    """Same pipeline, offloading and algorithm; every tensor as from the model that never was
    decorated.
    """
    assert answers[f"{form}, without"] is True


def test_keepmtp_lives_on_the_same_model(answers):
    """Layer by layer with GPTQ, the checkpoint's own code: every statistic as from the plain
    model.
    """
    num_statistics, different = answers["keepmtp, unwrap"]
    assert num_statistics == 42
    assert different == []


@pytest.mark.parametrize("form", ["decorated", "with"])
def test_keepmtp_refuses_before_the_first_layer_is_calibrated(answers, form):
    sentence, num_files = answers[f"keepmtp, {form}, refuse"]
    assert sentence.startswith(
        "modeling_mimo.MiMoDecoderLayer.forward: must not compute under torch.inference_mode"
    )
    assert num_files == 0


@pytest.mark.parametrize("form", ["decorated", "with"])
def test_guard_on_the_foreign_model(answers, form):
    refused = answers[f"{form}, refuse"]
    assert refused.startswith(
        "modeling_mimo.MiMoDecoderLayer.forward: must not compute under torch.inference_mode"
    )
    assert (
        "got inference mode at model.layers.0. Set calibration.decorated_forward: unwrap" in refused
    )
    assert refused.endswith("in modeling_mimo.py.")
    assert answers[f"{form}, unwrap"] is None and answers["plain, refuse"] is None


# --- Ways to write it -----------------------------------------------------------------------------


def note(function):
    """A wrapper that does no harm."""

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


def entering(function):
    """Inference mode by hand, from a context that is kept."""
    context = torch.inference_mode()

    @functools.wraps(function)
    def wrapper(*args):
        with context:
            return function(*args)

    return wrapper


def plain_forward(self, x):
    return self.linear(x)


def block(forward, *bases: type) -> type:
    def init(self):
        nn.Module.__init__(self)
        self.linear = nn.Linear(4, 4)

    return type("Block", bases or (nn.Module,), {"__init__": init, "forward": forward})


class Model(nn.Module):
    def __init__(self, cls: type):
        super().__init__()
        self.layers = nn.ModuleList([block(plain_forward)(), cls()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def by_super(self, x):
    return super(type(self), self).forward(x)


def replaced(self, x):
    return self.linear(x) + 1


BATCH = {"x": torch.ones(1, 4)}
DECORATED = {
    "called": block(torch.inference_mode()(plain_forward)),
    "named": block(torch.inference_mode(plain_forward)),
    "twice": block(torch.inference_mode()(note(torch.inference_mode()(plain_forward)))),
    "inherited": type("Block", (block(torch.inference_mode()(plain_forward)),), {}),
    "called by super": type(
        "Block", (block(torch.inference_mode()(plain_forward)),), {"forward": by_super}
    ),
    "a context that is kept": block(entering(plain_forward)),
    "in a helper": block(lambda self, x: torch.inference_mode()(self.linear)(x)),
}
HARMLESS = {
    "plain": block(plain_forward),
    "no_grad": block(torch.no_grad()(plain_forward)),
    "inference_mode(False)": block(torch.inference_mode(False)(plain_forward)),
    "another wrapper": block(note(plain_forward)),
    "replaced by a subclass": type(
        "Block", (block(torch.inference_mode()(plain_forward)),), {"forward": replaced}
    ),
}


def returns_a_clone(self, x):
    """Nothing of it is seen in what the forward returns."""
    with torch.inference_mode():
        y = x @ self.linear.weight
    return y.clone()


DECORATED["in a block whose result is cloned"] = block(returns_a_clone)


@pytest.mark.parametrize("cls", DECORATED.values(), ids=DECORATED)
def test_each_way_to_begin_it(cls):
    """Refused by name, or disarmed for as long as the context lasts."""
    model = Model(cls)
    wanted = model(**BATCH)
    where = r"got inference mode at layers\.1\. Set calibration.decorated_forward: unwrap"
    with pytest.raises(CheckpointError, match=where), guard(model, policy="refuse"):
        model(**BATCH)
    with guard(model, policy="unwrap"), torch.no_grad():
        result = model(**BATCH)
        assert not result.is_inference() and not result.requires_grad
        assert torch.equal(result, wanted)
    assert torch.inference_mode()(model.layers[0])(**BATCH).is_inference(), "restored"


@pytest.mark.parametrize("cls", HARMLESS.values(), ids=HARMLESS)
def test_harmless_wrappers_pass(cls):
    model = Model(cls)
    with guard(model, policy="refuse"), torch.inference_mode():  # begun outside of any forward
        model(**BATCH)


def test_the_outermost_module_is_named():
    """The layers inside run under inference mode too, and are not to blame."""
    outer = block(lambda self, x: torch.inference_mode()(self.inner.__call__)(x))()
    outer.inner = Model(block(plain_forward))
    model = nn.Sequential(outer)
    with pytest.raises(CheckpointError, match=r"mode at 0\. "), guard(model, policy="refuse"):
        model(BATCH["x"])


@pytest.mark.parametrize("name", ["tiny-glm4-moe", "tiny-qwen3_5"])
def test_transformers_own_decorators_are_no_danger(name):
    """The shipped models, whose forwards carry several: none is refused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(ROOT / "models" / name).get_text_config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert any(hasattr(type(module).forward, "__wrapped__") for module in model.modules())
    with guard(model, policy="refuse"), torch.no_grad():
        model(input_ids=torch.ones(1, 8, dtype=torch.int64))
