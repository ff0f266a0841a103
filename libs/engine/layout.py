"""How a block's bytes are laid out: `arena[block][layer][k|v][kv_head][token][head_dim]`.

One fact for the engine that computes, the pool that allocates and the transfer that moves.
"""

from dataclasses import dataclass

from engine.errors import EngineError
from engine.model_folder import ModelConfig
from kvhash import BLOCK_TOKENS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one block. `layers` counts the layers this instance holds, `layer` counts within them."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype_name: str

    def __post_init__(self) -> None:
        sizes = (
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("block_tokens", self.block_tokens),
            ("head_dim", self.head_dim),
        )
        for field, value in sizes:
            if value < 1:
                raise EngineError(f"KVLayout.{field} must be at least 1, not {value}")
        if self.dtype_name not in DTYPE_BYTES:
            raise EngineError(f"KVLayout.dtype_name {self.dtype_name!r} is none of {', '.join(DTYPE_BYTES)}")

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        block_tokens: int = BLOCK_TOKENS,
        layers: range | None = None,
        dtype_name: str = "float32",
    ) -> "KVLayout":
        """The layout of `config`'s KV, or of a range of its layers."""
        held = config.layers if layers is None else len(layers)
        return cls(held, config.kv_heads, block_tokens, config.head_dim, dtype_name)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block: its K and its V."""
        return 2 * self.kv_heads * self.block_tokens * self.head_dim * DTYPE_BYTES[self.dtype_name]

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.block_bytes // self.block_tokens

    def layer_range(self, layer: int) -> tuple[int, int]:
        """(offset within a block, length in bytes) of one layer's K and V."""
        if not 0 <= layer < self.layers:
            raise EngineError(f"layer {layer} is outside 0..{self.layers - 1}")
        return layer * self.layer_bytes, self.layer_bytes
