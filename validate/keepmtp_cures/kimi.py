"""Kimi-K3: its delta net's fused projection."""

from typing import Any

from . import mends

_PARTS = 6  # q, k, v, gate, f_a and beta; a seventh is padding


@mends(
    "vllm.models.kimi_k3.nvidia.kda",
    "_KimiGDNMergedColumnParallelLinear",
    "KimiK3DeltaAttention.__init__",
    hashes="65051d959db6 c1accc10f4f3 719e7d2d4a1a",
)
def padded_projection(module: Any) -> None:
    """The rows that pad the projection are made zero through `weight`, which a packed module does
    not have, and no scale is given to them.

    Packed rows are made zero like plain ones. Their scales become zero, and where each part has
    one scale, padding gets that of the first: the largest of a module's scales stays what it is.
    """
    fused = module._KimiGDNMergedColumnParallelLinear

    class Padded(fused):
        def __getattr__(self, name: str) -> Any:
            packed = self.__dict__.get("_parameters", {}).get("weight_packed")
            if name == "weight" and packed is not None:
                return packed
            return super().__getattr__(name)

        def weight_loader_v2(self, param: Any, loaded_weight: Any, shard: Any = None) -> None:
            super().weight_loader_v2(param, loaded_weight, shard)
            if shard != 0 or len(self.output_sizes) <= _PARTS:
                return
            kind = type(param).__name__
            if kind == "PerTensorScaleParameter":
                param.load_merged_column_weight(loaded_weight, shard_id=_PARTS)
            elif hasattr(param, "output_dim") and kind != "BlockQuantScaleParameter":
                # A block's scale may be that of real rows, too, and is loaded with them.
                rows = self.output_sizes[-1] // self.tp_size
                packed = getattr(param, "packed_factor", 1)
                if getattr(param, "packed_dim", None) == param.output_dim:
                    rows //= packed
                whole = param.data.shape[param.output_dim]
                param.data.narrow(param.output_dim, whole - rows, rows).zero_()

    module._KimiGDNMergedColumnParallelLinear = Padded
