"""What a model's attention looks like, read once from its config.

Letters used in this package: B batch rows, L layers, H KV heads, Q query heads, G query heads per KV head,
T query tokens, N rows of a view, C slots of a buffer, D head dimension, M map heads (H or 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, UnsupportedModelError

__all__ = ["NAME_BRANCHING_MODEL_TYPES", "NO_ATTENTION", "STATE_LAYERS", "CacheGeometry", "text_config"]

# What `layer_types` calls layers with states of linear attention or short convolutions, and layers without attention.
STATE_LAYERS = frozenset({"conv", "hybrid", "linear_attention"})
NO_ATTENTION = frozenset({"conv", "linear_attention", "mlp", "moe"})

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
    # Layers a policy acts on: those with full attention, or all with attention where every one of them slides.
    num_layers: int
    # Layers of the model, whatever they do.
    total_layers: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    # Width of the model's own sliding window per layer, self included; None where attention is full.
    window_tokens: tuple[int | None, ...]
    # The model's numbers of the layers a policy acts on, and of those that hold what no policy acts on, in
    # transformers' own cache layers: rows of sliding and chunked attention, states of linear attention.
    model_layers: tuple[int, ...]
    foreign_layers: tuple[int, ...] = ()
    # The foreign ones with states. A hybrid layer has both: rows that the policy acts on, and states.
    state_layers: tuple[int, ...] = ()

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
    def attending_foreign(self) -> tuple[int, ...]:
        """The layers whose keys and values transformers' own cache layers hold."""
        return tuple(layer for layer in self.foreign_layers if layer not in self.state_layers)

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """The layers that call attention, in order."""
        return tuple(sorted(self.model_layers + self.attending_foreign))

    def leaves_alone(self, layer: int) -> bool:
        """Whether a layer of the model is none of the policy's."""
        return 0 <= layer < self.total_layers and layer not in self.model_layers

    def place_of(self, layer: int) -> tuple[int, bool]:
        """Return an attending layer as its number among the policy's layers or (True) among the foreign ones."""
        foreign = layer not in self.model_layers
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
        kinds = tuple(getattr(text, "layer_types", None) or ("full_attention",) * layers)
        own, foreign, states = _shared_out(kinds, windows)
        return cls(
            model_type=str(text.model_type),
            num_layers=len(own),
            total_layers=len(windows),
            num_query_heads=heads,
            num_kv_heads=_kv_heads(text, heads),
            key_dim=head_dim,
            value_dim=int(getattr(text, "v_head_dim", None) or head_dim),
            window_tokens=tuple(windows[layer] for layer in own),
            model_layers=own,
            foreign_layers=foreign,
            state_layers=states,
        )


def text_config(config: Any) -> Any:
    """Return the text decoder's part of a config (the config itself for text models)."""
    getter = getattr(config, "get_text_config", None)
    return getter(decoder=True) if getter is not None else config


def _kv_heads(config: Any, heads: int) -> int:
    named = getattr(config, "num_key_value_heads", None)
    if named:
        return int(named)
    # Falcon's names: one KV head, or groups in its newer architecture.
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else heads


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """Return how many tokens a layer's attention reaches back, self included; None for all, or no attention."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if types is None:
        return (None if window is None else int(window),) * layers
    chunk = getattr(config, "attention_chunk_size", None)
    found = ({"sliding_attention": window, "chunked_attention": chunk}.get(kind) for kind in types)
    return tuple(None if tokens is None else int(tokens) for tokens in found)


def _shared_out(
    kinds: Sequence[str], windows: Sequence[int | None]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the layers a policy acts on, those that transformers' own cache layers hold, and those with states."""
    layers = range(len(windows))
    states = tuple(layer for layer in layers if kinds[layer] in STATE_LAYERS)
    attending = [layer for layer in layers if kinds[layer] not in NO_ATTENTION]
    own = tuple(layer for layer in attending if windows[layer] is None) or tuple(attending)
    foreign = tuple(layer for layer in layers if layer in states or (layer in attending and layer not in own))
    return own, foreign, states
