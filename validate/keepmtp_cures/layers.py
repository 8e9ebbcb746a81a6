"""Single layers and classes of vLLM's models that lack a case."""

from typing import Any

from . import mends


@mends(
    "vllm.model_executor.models.openpangu",
    "OpenPanguDecoderLayer",
    hashes="fecbdbc505dc",
)
def openpangu_layer(module: Any) -> None:
    """DeepSeek's draft, which openPangu's is built on, asks each layer whether it scatters its
    experts over ranks; openPangu's layer never does.
    """
    module.OpenPanguDecoderLayer.use_sequence_parallel_moe = False


@mends(
    "vllm.v1.spec_decode.llm_base_proposer",
    "SpecDecodeBaseProposer.model_returns_tuple",
    hashes="28dd9a9eea57",
)
def openpangu_pair(module: Any) -> None:
    """openPangu's draft returns a pair, as DeepSeek's does: for the logits, and for the next step.
    The V1 runner does not know it; V2 looks.
    """
    own = module.SpecDecodeBaseProposer.model_returns_tuple

    def model_returns_tuple(self: Any) -> bool:
        architectures = self.draft_model_config.hf_config.architectures
        if architectures and "OpenPanguMTPModel" in architectures:
            return True
        return own(self)

    module.SpecDecodeBaseProposer.model_returns_tuple = model_returns_tuple


@mends("vllm.models.qwen4_exp.nvidia.model", "without_modelopt_fp4", hashes="c80656ccc7a0")
def qwen_indexer(module: Any) -> None:
    """Under modelopt's NVFP4 attention with an indexer is built plain, whatever the checkpoint
    holds; the checkpoint's exclude_modules say it, as for every other module.
    """
    module.without_modelopt_fp4 = lambda quant_config: quant_config


@mends("vllm.model_executor.parameter", "BasevLLMParameter._shard_id_as_int", hashes="573088f2a91e")
def minimax_indexer(module: Any) -> None:
    """MiniMax-M3's fused projection has two parts after q, k and v, which scales of one value a
    part do not know.
    """
    own = module.BasevLLMParameter._shard_id_as_int
    indexer = {"index_q": 3, "index_k": 4}

    def _shard_id_as_int(self: Any, shard_id: str | int) -> int:
        if shard_id in indexer:
            return indexer[shard_id]
        return own(self, shard_id)

    module.BasevLLMParameter._shard_id_as_int = _shard_id_as_int
