"""The layers a transformers `Cache` shows: thin windows on one `PolicyCache`, without state of their own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .errors import ConfigError
from .geometry import CacheGeometry

if TYPE_CHECKING:
    from .cache import PolicyCache

__all__ = [
    "ANOTHER_MODEL",
    "NOT_ATTACHED",
    "CacheFace",
    "ForeignLayer",
    "PolicyLayer",
    "layer_faces",
    "policy_layer",
]


NOT_ATTACHED = (
    "This model was not made ready for policy caches, so the cache would run without its attention step. "
    "Call hf_kvpolicy.attach(model) once (making the cache from the model does it), and call the whole "
    "model rather than single layers."
)
ANOTHER_MODEL = (
    "This cache belongs to another {}; rows of one model mean nothing to another. Make a cache for this model."
)


class CacheFace(CacheLayerMixin):  # type: ignore[misc]
    """One layer's face to transformers. Every call goes to the cache, which changes all layers together."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PolicyCache, layer: int) -> None:
        # The base class would give the layer tensors of its own.
        self._cache = weakref.ref(cache)
        self._layer = layer

    @property
    def cache(self) -> PolicyCache:
        """The cache this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise ReferenceError("The cache of this layer no longer exists.")
        return cache

    @property
    def is_initialized(self) -> bool:
        """Whether a token was ever fed."""
        return self.cache.get_seq_length() > 0

    @property
    def record_past(self) -> bool:
        """Whether finished forwards wait for acceptance by `crop`."""
        return self.cache.is_recording_past(self._layer)

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.cache.set_recording(on)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: buffers are made by the first publication."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand this layer's new rows to the cache."""
        return self.cache.update(key_states, value_states, self._layer, *args, **kwargs)

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Return what the cache says of this layer: (columns a mask is about, the first of them)."""
        return self.cache.get_mask_sizes(query_length, self._layer)

    def get_seq_length(self) -> int:
        """Return the columns ever fed."""
        return self.cache.get_seq_length()

    def offload(self) -> None:
        """Move what this layer holds to the CPU."""
        self.cache.offload(self._layer)

    def prefetch(self) -> None:
        """Bring this layer back to the device it was on before `offload`."""
        self.cache.prefetch(self._layer)

    def reset(self) -> None:
        """Empty the cache: one layer of it cannot be forgotten alone."""
        self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: beams are reordered in all layers at once, by the cache.

        Raises:
            ConfigError: always; the message names the call to make.
        """
        raise ConfigError(
            f"Layer {self._layer} of a policy cache cannot be reordered alone: its layers share rows, scores and "
            "counters. Call cache.reorder_cache(beam_idx) once."
        )

    def activate_past_recording(self) -> None:
        """Let finished forwards wait for acceptance."""
        self.cache.set_recording(True)


class PolicyLayer(CacheFace):
    """The face of a layer the policy acts on."""

    is_sliding = False

    @property
    def keys(self) -> Tensor | None:
        """Keys in this layer's slots, [B, S, W, D]; None before the first token. Slot order carries no meaning."""
        return self.cache.stored_view(self._layer)[0]

    @property
    def values(self) -> Tensor | None:
        """Values in this layer's slots, [B, S, W, D]."""
        return self.cache.stored_view(self._layer)[1]

    def get_max_length(self) -> int:
        """Return -1: any number of tokens may be fed."""
        return -1


class ForeignLayer(CacheFace):
    """The face of a sliding layer beside full ones: what transformers' own layer holds, in the cache's versions."""

    is_sliding = True

    @property
    def keys(self) -> Tensor | None:
        """Keys of the newest tokens, [B, H, n, D]; None before the first token."""
        found: Tensor | None = self.cache.foreign_layer(self._layer).keys
        return found

    @property
    def values(self) -> Tensor | None:
        """Values of the newest tokens, [B, H, n, D]."""
        found: Tensor | None = self.cache.foreign_layer(self._layer).values
        return found

    def get_max_length(self) -> int:
        """Return the width of the window."""
        return int(self.cache.foreign_layer(self._layer).get_max_length())


def layer_faces(cache: PolicyCache, geometry: CacheGeometry) -> list[CacheFace]:
    """Return one face for each layer of the model."""
    kinds = (geometry.place_of(layer)[1] for layer in range(geometry.total_layers))
    return [(ForeignLayer if foreign else PolicyLayer)(cache, layer) for layer, foreign in enumerate(kinds)]


def policy_layer(geometry: CacheGeometry, layer: int, batch: int, *, batch_rows: int) -> int:
    """Return the policy's number of a model's layer.

    Raises:
        ConfigError: there is no such layer or batch row, or the policy does not act on the layer.
    """
    if layer in geometry.foreign_layers:
        raise ConfigError(
            f"The policy does not act on layer {layer}: it slides, and transformers' own cache layer holds it. The "
            f"policy's layers (cache.policy_layers) are {', '.join(map(str, geometry.model_layers))}."
        )
    if layer not in geometry.model_layers or not 0 <= batch < batch_rows:
        raise ConfigError(
            f"Layer {layer}, batch row {batch} was asked for; this cache has layers 0..{geometry.total_layers - 1} "
            f"and batch rows 0..{batch_rows - 1}."
        )
    return geometry.place_of(layer)[0]
