"""What is measured: how K and V are stored."""

import re
from dataclasses import dataclass
from typing import Any

from jaxkv.config import CacheConfig, EngineConfig, ModelConfig

REFERENCE = "float32"
DEFAULT_SETTINGS = (
    "float32",
    "bfloat16",
    "int8",
    "int8:float32",
    "float32:int8",
    "fp8_e4m3",
    "fp8_e4m3:float32",
    "float32:fp8_e4m3",
    "fp8_e5m2",
    "int4",
    "int4:float32",
    "float32:int4",
    "int4+rotation",
    "int4_asymmetric",
    "int4_asymmetric:float32",
    "float32:int4_asymmetric",
    "int4_asymmetric+rotation",
    "int4_asymmetric:float32+rotation",
    "float32:int4_asymmetric+rotation",
    "int8:int4_asymmetric+rotation",
)
_PATTERN = re.compile(
    r"(?P<dtype>[a-z0-9_]+(:[a-z0-9_]+)?)"
    r"(?P<rotation>\+rotation)?"
    r"(\+skip=(?P<layers>[0-9]+(,[0-9]+)*))?"
)


@dataclass(frozen=True)
class Setting:
    """One way to store K and V, as fields of `CacheConfig`."""

    kv_cache_dtype: str
    rotation: bool = False
    skip_layers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read FORMAT or K:V, then +rotation and +skip=LAYER,..., as wanted.

        Raises:
            ValueError: The text is something else. Formats and layers are checked when
                a cache is configured.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not FORMAT or K:V, and then +rotation, "
                "+skip=LAYER,... or both"
            )
        layers = match["layers"]
        return cls(
            kv_cache_dtype=match["dtype"],
            rotation=match["rotation"] is not None,
            skip_layers=() if layers is None else tuple(map(int, layers.split(","))),
        )

    def __str__(self) -> str:
        rotation = "+rotation" if self.rotation else ""
        layers = ",".join(map(str, self.skip_layers))
        return f"{self.kv_cache_dtype}{rotation}{f'+skip={layers}' if layers else ''}"

    @property
    def formats(self) -> tuple[str, str]:
        """The formats of K and of V."""
        k, _, v = self.kv_cache_dtype.partition(":")
        return k, v or k

    def cache_config(
        self, model: ModelConfig, *, num_blocks: int, block_size: int = 16
    ) -> CacheConfig:
        """Return the config of such a cache for a model.

        Raises:
            ValueError: There is no such format or layer.
        """
        return CacheConfig(
            num_layers=model.num_hidden_layers,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            dtype=model.dtype,
            skip_layers=self.skip_layers,
            rotation=self.rotation,
        )

    def engine_config(self, **fields: Any) -> EngineConfig:
        """Return the config of an engine with such a cache."""
        return EngineConfig(
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_skip_layers=self.skip_layers,
            kv_cache_rotation=self.rotation,
            **fields,
        )
