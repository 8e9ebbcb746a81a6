"""One checkpoint on one pretended GPU: construct, load, share, process, and say what happened.

In: a `Job`, in a process that `gpu.install` has prepared. Out: a JSON-able dictionary
(`StagedLoad.account`), with the fields of `LoadAccount` in validate/facts/dry_load.py, which reads
it.

Easy to get wrong: vLLM's exception is its verdict. Everything that vLLM may raise is caught here,
in one place, and nowhere else. Only vLLM's own code runs inside it.
"""

import json
import resource
import time
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import safetensors
import torch

from . import gpu, kernels, world
from .account import Account, Construction
from .demands import demands_of


@dataclass(slots=True)
class Part:
    """What became of the target or the draft."""

    model: Any = None
    account: Account | None = None
    paths: dict[int, str] = field(default_factory=dict)
    asked: list[tuple[Any, str, str]] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def loaded_and_written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `LoadedModel` and as `ModelAccount`."""
        loaded: dict[str, Any] = {"shared": self.shared, "kernels": self.kernels}
        written: dict[str, Any] = {"asked": []}
        if self.model is not None:
            loaded["cls"] = type(self.model).__name__
            loaded["num_params"] = len(list(self.model.parameters()))
        for layer, prefix, method in self.asked:
            question = {"prefix": prefix, "method": method}
            place = {"layer": type(layer).__name__, "path": self.paths.get(id(layer), "")}
            written["asked"].append(question | place)
        if self.account is None:  # vLLM stopped before it loaded
            return loaded, written
        # A checkpoint need not fill what is shared, and what is optional.
        params = [param for param in self.account.params.values() if param.name not in self.shared]
        own = {param.name: param.status for param in params if param.status != "optional"}
        faults = [param.as_fault() for param in params if param.status in ("empty", "partial")]
        keys = ("param", "tensor", "given", "wanted")
        misfits = [misfit for misfit in self.account.misfits if misfit[0] in own]
        written["faults"] = faults
        written["misfits"] = [dict(zip(keys, misfit, strict=True)) for misfit in misfits]
        loaded["num_params"] = len(own)
        loaded["num_written"] = len(own) - len(faults)
        return loaded, written


class StagedLoad:
    """The dry load of one job, stage by stage. A job has the fields of `Job` in loader.py, the
    version of vLLM, and the `attention` that it is served with, "" for vLLM's choice.
    """

    def __init__(self, job: Any, *, gpu: str):
        self._job = job
        self._gpu = gpu
        self._parts = {"target": Part(), "draft": Part()}
        self._now = self._parts["target"]
        self._at = ("config", "")

    def account(self) -> dict[str, Any]:
        """Run all stages; the first that vLLM refuses ends them."""
        start = time.perf_counter()
        failure = None
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  vLLM may raise anything, and that is its verdict
            failure = self._failure(error)
        load: dict[str, Any] = {
            "vllm": self._job.vllm,
            "gpu": self._gpu,
            "tp": self._job.tp,
            "k": self._job.num_drafts,
            "ok": failure is None,
            "failure": failure,
            "attention": self._job.attention,
            "seconds": round(time.perf_counter() - start, 2),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        account = {"path": self._job.folder, "load": load, **self._tensors()}
        for role, part in self._parts.items():
            load[role], account[role] = part.loaded_and_written()
        return account

    def _run(self) -> None:
        self._config = config = _engine_config(self._job)
        record_questions(lambda *question: self._now.asked.append(question))
        if self._job.whole_experts:
            _know_experts()
        self._at = ("world", "")
        world.init(config, tp=self._job.tp, rank=self._job.rank)
        model_configs = {"target": config.model_config}
        if config.speculative_config is not None:
            model_configs["draft"] = config.speculative_config.draft_model_config
        for role, model_config in model_configs.items():
            self._now = self._parts[role]
            self._at = ("construct", role)
            construction = self._construct(model_config)
            self._at = ("load", role)
            self._load(model_config, construction)
        if "draft" in model_configs:
            self._at = ("share", "draft")
            self._share()
        done: dict[Any, dict[str, Any]] = {}
        for role in model_configs:
            self._at = ("process", role)
            part = self._parts[role]
            part.kernels = kernels.process(part.model, self._config, done)

    def _failure(self, error: Exception) -> dict[str, Any]:
        """As `LoadFailure`."""
        stage, role = self._at
        at, _ = kernels.last_frame(error)
        tensor = ""
        if stage == "load":
            tensor = getattr(self._now.account, "current", "")
        failure = {"type": type(error).__name__, "words": str(error)[:2000], "at": at}
        return failure | {"stage": stage, "role": role, "tensor": tensor}

    def _construct(self, model_config: Any) -> Construction:
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        construction = Construction()
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"), construction:
            self._now.model = initialize_model(self._config, model_config=model_config)
        # A question to the quantization config has the layer; its place is known only now.
        for path, module in self._now.model.named_modules():
            self._now.paths[id(module)] = path
        return construction

    def _load(self, model_config: Any, construction: Construction) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import default_loader, weight_utils

        model = self._now.model
        account = self._now.account = Account(model, construction, demands_of(model))

        def weights(files: Iterable[str], *args: Any, **kwargs: Any) -> Iterator[Any]:
            return account.hand_over(world.meta_tensors(files))

        # vLLM's own reader chooses the files; only the tensors are replaced.
        default_loader.safetensors_weights_iterator = weights
        # For "pt" it maps the whole file as memory that could be written: that counts like an
        # allocation (server.py: limit_memory), and a shard may be larger than the limit.
        weight_utils.safe_open = lambda path, framework: safetensors.safe_open(path, "np")
        loader = default_loader.DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        loader.counter_before_loading_weights = time.perf_counter()
        try:
            with set_current_vllm_config(self._config), gpu.weights_only(), account:
                loader.load_weights(model, model_config)
        finally:
            account.settle(model)

    def _share(self) -> None:
        """vLLM's own code replaces the draft's embedding and head, as it does after loading."""
        from vllm.config import set_current_vllm_config

        target = self._parts["target"].model
        draft = self._parts["draft"].model
        before = dict(draft.named_parameters(remove_duplicate=False))
        with (
            mock.patch.object(torch.Tensor, "cpu", lambda tensor, *args, **kwargs: tensor),
            # Values are unknown here, so a copy counts as different.
            mock.patch.object(torch, "equal", gpu.returns(False)),
            set_current_vllm_config(self._config),
        ):
            if self._job.method == "dspark":
                from vllm.model_executor import model_loader
                from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

                model_loader.get_model = gpu.returns(draft)
                load_dspark_model(target, self._config)
            elif self._config.use_v2_model_runner:
                from vllm.v1.worker.gpu.spec_decode.eagle import utils

                utils.get_model = gpu.returns(draft)
                utils.load_eagle_model(target, self._config)
            else:
                _share_v1(target, draft, self._config)
        after = dict(draft.named_parameters(remove_duplicate=False))
        shared = [name for name in sorted(before) if after.get(name) is not before[name]]
        self._parts["draft"].shared = shared

    def _tensors(self) -> dict[str, Any]:
        """Of the tensors that were loaded, those that nobody used, and those that were used in
        part.
        """
        used: dict[str, int] = {}
        sizes: dict[str, int] = {}
        # Target and draft each read all files: what one of them used is used.
        for part in self._parts.values():
            for name, tensor in getattr(part.account, "tensors", {}).items():
                sizes[name] = tensor.num_elements
                used[name] = max(used.get(name, 0), tensor.num_read)
        cut = [(name, used[name], sizes[name]) for name in sorted(used) if used[name] < sizes[name]]
        unconsumed = [name for name, count, _ in cut if not count]
        truncated = [row for row in cut if row[1] and self._job.tp == 1]  # a rank reads its part
        return {"unconsumed": unconsumed, "truncated": truncated}


def _engine_config(job: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = None
    if job.num_drafts:
        speculative = {"method": job.method, "num_speculative_tokens": job.num_drafts}
        if job.draft:
            speculative["model"] = job.draft
    with open(f"{job.folder}/config.json") as file:
        declared = json.load(file)
    _know_config(declared)
    _leave_out_tokenizers(declared)
    text_config = declared.get("text_config") or declared.get("llm_config") or declared
    longest = text_config.get("max_position_embeddings", 256)
    backend = None
    if job.tp > 1:
        backend = "mp"
    attention: dict[str, Any] = {}
    if job.attention:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        attention["attention_backend"] = AttentionBackendEnum[job.attention]
    return EngineArgs(
        model=job.folder,
        speculative_config=speculative,
        enforce_eager=True,
        max_model_len=min(256, longest),
        skip_tokenizer_init=True,
        tensor_parallel_size=job.tp,
        enable_expert_parallel=job.whole_experts,
        distributed_executor_backend=backend,
        **attention,
    ).create_engine_config()


def _know_experts() -> None:
    """Which experts a rank has is read while the model is built and loaded, so it has values."""
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    determine = expert_map_manager.determine_expert_map

    def determined(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return determine(*args, **kwargs)

    expert_map_manager.determine_expert_map = determined


def _know_config(declared: dict[str, Any]) -> None:
    """Config classes that come with a checkpoint (auto_map) become config.json's keys: its code
    never runs.

    A key that holds the config of a known model, such as text_config, becomes that model's config.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    model_type = declared.get("model_type", "")
    if "auto_map" not in declared or model_type in CONFIG_MAPPING or model_type in _CONFIG_REGISTRY:
        return

    class ConfigKeys(PretrainedConfig):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            inner = {}
            for key, value in config_dict.items():
                if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
                    inner[key] = CONFIG_MAPPING[value["model_type"]](**value)
            if "llm_config" in inner:  # Nemotron Omni's class has it under both names
                inner.setdefault("text_config", inner["llm_config"])
            return super().from_dict({**config_dict, **inner}, **kwargs)

    ConfigKeys.model_type = model_type
    AutoConfig.register(model_type, ConfigKeys)


def _leave_out_tokenizers(declared: dict[str, Any]) -> None:
    """Tokenizers that a model's class wants, of words or of sounds: no dry load has them, no weight
    depends on them.

    Nemotron Omni's class asks for the numbers of three words; MiMo-V2.5's audio encoder loads a
    folder of its own; DeepSeek-V4.1 finds the rows of its n-gram tables by the tokens' texts.
    """
    architectures = " ".join(declared.get("architectures") or ())
    if "NemotronH_" in architectures:
        from vllm.model_executor.models import nano_nemotron_vl

        tokenizer = types.SimpleNamespace(encode=gpu.returns([0]))
        nano_nemotron_vl.cached_tokenizer_from_config = gpu.returns(tokenizer)
    if "MiMoV2" in architectures:
        from vllm.model_executor.models.mimo_audio import MimoAudioEncoder

        MimoAudioEncoder._load_audio_tokenizer = staticmethod(gpu.returns(None))
    if "DeepseekV41" in architectures:
        from vllm.models.deepseek_v41.nvidia import model

        model.NgramHashState = gpu.returns(torch.nn.Module())


def _share_v1(target: Any, draft: Any, config: Any) -> None:
    from vllm.model_executor.models import supports_multimodal
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    if supports_multimodal(target):
        target = target.get_language_model()
    proposer: Any = types.SimpleNamespace(
        model=draft,
        vllm_config=config,
        use_local_argmax_reduction=False,
        speculative_config=config.speculative_config,
    )
    Proposer._maybe_share_embeddings(proposer, target)
    Proposer._maybe_share_lm_head(proposer, target)


def record_questions(note: Any) -> None:
    """Call `note` with every question to a quantization config of this process: layer, prefix,
    method.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    depth = [0]

    def recorded(method: Any) -> Any:
        def get_quant_method(
            config: Any, layer: Any, prefix: str, *args: Any, **kwargs: Any
        ) -> Any:
            depth[0] += 1
            try:
                answer = method(config, layer, prefix, *args, **kwargs)
            finally:
                depth[0] -= 1
            # A config may ask another one; only the outer question counts.
            if depth[0] == 0:
                note(layer, prefix, kernels.class_of(answer))
            return answer

        return get_quant_method

    pending = list(QuantizationConfig.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "get_quant_method" in cls.__dict__:
            cls.get_quant_method = recorded(cls.__dict__["get_quant_method"])
