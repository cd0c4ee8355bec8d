"""What the cached tensors are: shapes, dtypes, axes, head ownership and position stage (0x01A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ManifestError
from ._checks import check_choice, check_int
from .canonical import sha256_of
from .codec import record_to_dict

__all__ = [
    "ATTENTION_POSITIONS",
    "HEAD_MAP_MODES",
    "KEY_POSITION_STAGES",
    "SCALAR_BYTES",
    "SOURCE_AXES",
    "VALUE_POSITION_STAGES",
    "TensorContract",
    "contiguous_head_map",
    "logical_cache_abi_of",
]

SCALAR_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SOURCE_AXES = (("layer", "kv_head", "token", "channel"), ("batch", "layer", "kv_head", "token", "channel"))
HEAD_MAP_MODES = ("contiguous_gqa", "explicit")
# no_rope: the position enters elsewhere (ALiBi bias, learned embeddings) and keys carry no rotation.
KEY_POSITION_STAGES = ("post_rope", "pre_rope", "no_rope")
VALUE_POSITION_STAGES = ("unpositioned",)
ATTENTION_POSITIONS = ("original", "cache_local")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorContract:
    """Shapes and meaning of the logical source keys [L, H_kv, T, d_k] and values [L, H_kv, T, d_v].

    `num_layers` counts cache-producing layers. `q_to_kv_head_map[q]` is the KV head that query head q reads;
    it may be None only for selections that do not distinguish heads. `attention_positions` says which
    position the attention consumes: the original one, or one counted inside the retained cache.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    key_dtype: str
    value_dtype: str
    q_to_kv_head_map: Sequence[int] | None
    q_to_kv_head_mode: str = "contiguous_gqa"
    source_axes: Sequence[str] = SOURCE_AXES[0]
    key_position_stage: str = "post_rope"
    value_position_stage: str = "unpositioned"
    attention_positions: str = "original"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_query_heads", "num_kv_heads", "head_dim_k", "head_dim_v"):
            check_int(name, getattr(self, name), minimum=1, error=ManifestError)
        for name in ("key_dtype", "value_dtype"):
            check_choice(name, getattr(self, name), tuple(SCALAR_BYTES), error=ManifestError)
        check_choice("key_position_stage", self.key_position_stage, KEY_POSITION_STAGES, error=ManifestError)
        check_choice("value_position_stage", self.value_position_stage, VALUE_POSITION_STAGES, error=ManifestError)
        check_choice("attention_positions", self.attention_positions, ATTENTION_POSITIONS, error=ManifestError)
        check_choice("q_to_kv_head_mode", self.q_to_kv_head_mode, HEAD_MAP_MODES, error=ManifestError)
        object.__setattr__(self, "source_axes", tuple(self.source_axes))
        if self.source_axes not in SOURCE_AXES:
            allowed = " or ".join(str(list(axes)) for axes in SOURCE_AXES)
            raise ManifestError(
                f"source_axes must be {allowed} in this order, but {list(self.source_axes)} was given. "
                "Describe the logical source; a physical layout belongs to the storage."
            )
        if self.q_to_kv_head_map is not None:
            object.__setattr__(self, "q_to_kv_head_map", tuple(self.q_to_kv_head_map))
            self._check_head_map(self.q_to_kv_head_map)

    def _check_head_map(self, head_map: Sequence[int]) -> None:
        if len(head_map) != self.num_query_heads:
            raise ManifestError(
                f"q_to_kv_head_map has length {len(head_map)}, but num_query_heads is "
                f"{self.num_query_heads}. Give exactly one KV head for every query head."
            )
        for query_head, kv_head in enumerate(head_map):
            if isinstance(kv_head, bool) or not isinstance(kv_head, int) or not 0 <= kv_head < self.num_kv_heads:
                raise ManifestError(
                    f"q_to_kv_head_map sends query head {query_head} to the owner {kv_head!r}, but KV heads "
                    f"are numbered 0 to {self.num_kv_heads - 1}. Name an existing KV head."
                )
        if self.q_to_kv_head_mode != "contiguous_gqa":
            return
        expected = contiguous_head_map(self.num_query_heads, self.num_kv_heads)
        if tuple(head_map) != expected:
            raise ManifestError(
                f"q_to_kv_head_map {list(head_map)} is not contiguous: contiguous_gqa with "
                f"{self.num_query_heads} query and {self.num_kv_heads} KV heads means {list(expected)}. Use "
                "q_to_kv_head_mode='explicit'."
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row: d_k * b_K + d_v * b_V (0x02A)."""
        return self.head_dim_k * SCALAR_BYTES[self.key_dtype] + self.head_dim_v * SCALAR_BYTES[self.value_dtype]


def contiguous_head_map(num_query_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return q // (H_q / H_kv) for every query head q.

    Raises ManifestError when the query heads do not divide evenly among the KV heads.
    """
    if num_kv_heads < 1 or num_query_heads < 1 or num_query_heads % num_kv_heads:
        raise ManifestError(
            f"Contiguous grouping needs a whole number of query heads per KV head, but {num_query_heads} "
            f"query and {num_kv_heads} KV heads were given. Give an explicit q_to_kv_head_map instead."
        )
    group = num_query_heads // num_kv_heads
    return tuple(q // group for q in range(num_query_heads))


def logical_cache_abi_of(tensor: TensorContract) -> str:
    """Return the digest of a tensor contract, the `logical_cache_abi_sha256` of a manifest."""
    return sha256_of(record_to_dict(tensor))
