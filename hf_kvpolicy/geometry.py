"""What a model's attention looks like, read once from its config.

Letters used in this package: B batch rows, L layers, H KV heads, Q query heads, G query heads per KV head,
T query tokens, N rows of a view, C slots of a buffer, D head dimension, M map heads (H or 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, UnsupportedModelError

__all__ = ["NAME_BRANCHING_MODEL_TYPES", "CacheGeometry", "text_config", "trained_policy"]

# Families whose code compares config._attn_implementation with a stock name. Under our name they would take another
# branch, so they are refused until a patch handles them.
NAME_BRANCHING_MODEL_TYPES = frozenset(
    {
        "axk2",
        "decision_transformer",
        "deepseek_v32",
        "dots3_note",
        "gemma4",
        "gemma4_unified",
        "glm5_next",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl",
        "minimax_m3_vl",
        "mistral_large4",
        "qwen2_5_omni",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """The shapes every cache, store and score of one model agrees on."""

    model_type: str
    # Layers a policy acts on. In a model of full and sliding layers these are the full ones.
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    # Width of the model's own sliding window per layer, self included; None where attention is full.
    window_tokens: tuple[int | None, ...]
    # The model's numbers of the layers a policy acts on, and of those that transformers' own layers hold.
    model_layers: tuple[int, ...]
    foreign_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Reject shapes that no grouped-query attention has.

        Raises:
            UnsupportedModelError: query heads are not a multiple of KV heads, or a size is not positive.
        """
        sizes = (self.num_layers, self.num_query_heads, self.num_kv_heads, self.key_dim, self.value_dim)
        if min(sizes) < 1:
            raise UnsupportedModelError(f"A model needs positive attention sizes; {self} has one below 1.")
        if self.num_query_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_query_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "grouped-query attention needs a whole number of query heads per KV head."
            )

    @property
    def total_layers(self) -> int:
        """Layers of the model that hold keys and values."""
        return len(self.model_layers) + len(self.foreign_layers)

    def place_of(self, layer: int) -> tuple[int, bool]:
        """Return a model's layer as its number among the policy's layers or (True) among the others."""
        foreign = layer in self.foreign_layers
        return (self.foreign_layers if foreign else self.model_layers).index(layer), foreign

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def q_to_kv_head_map(self) -> tuple[int, ...]:
        """KV head read by each query head (contiguous groups)."""
        return tuple(head // self.group_size for head in range(self.num_query_heads))

    def row_bytes(self, element_bytes: int) -> int:
        """Bytes of one K/V row pair of one KV head."""
        return (self.key_dim + self.value_dim) * element_bytes

    def require(self, config: Any) -> None:
        """Refuse a model of another geometry.

        Raises:
            ConfigError: the config's geometry differs.
        """
        found = CacheGeometry.from_config(config)
        if found != self:
            raise ConfigError(
                f"This cache was made for {self}, but the model has {found}. Make the cache from this model."
            )

    @classmethod
    def from_config(cls, config: Any) -> CacheGeometry:
        """Read the geometry of a text decoder's config.

        Raises:
            UnsupportedModelError: the config lacks the fields of a decoder with K/V attention.
        """
        text = text_config(config)
        try:
            heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
            hidden = int(text.hidden_size)
        except AttributeError as error:
            raise UnsupportedModelError(
                f"{type(config).__name__} does not describe a K/V attention decoder ({error}). "
                "Give the config or model of a decoder-only language model."
            ) from None
        head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
        windows = _windows(text, layers)
        own, foreign = _shared_out(windows)
        return cls(
            model_type=str(text.model_type),
            num_layers=len(own),
            num_query_heads=heads,
            num_kv_heads=_kv_heads(text, heads),
            key_dim=head_dim,
            value_dim=int(getattr(text, "v_head_dim", None) or head_dim),
            window_tokens=tuple(windows[layer] for layer in own),
            model_layers=own,
            foreign_layers=foreign,
        )


def text_config(config: Any) -> Any:
    """Return the text decoder's part of a config (the config itself for text models)."""
    getter = getattr(config, "get_text_config", None)
    return getter(decoder=True) if getter is not None else config


def trained_policy(config: Any) -> Any:
    """Return what a config says its checkpoint was trained for (`kvpolicy`); None for an ordinary checkpoint."""
    return getattr(text_config(config), "kvpolicy", None)


def _kv_heads(config: Any, heads: int) -> int:
    named = getattr(config, "num_key_value_heads", None)
    if named:
        return int(named)
    # Falcon's names: one KV head, or groups in its newer architecture.
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else heads


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _shared_out(windows: tuple[int | None, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers a policy acts on and the others: full ones, or all where every layer slides."""
    full = tuple(layer for layer, window in enumerate(windows) if window is None)
    if not full:
        return tuple(range(len(windows))), ()
    return full, tuple(layer for layer in range(len(windows)) if layer not in full)
