"""The layers a transformers `Cache` shows: thin windows on one `PolicyCache`, without state of their own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .compat import stock_layers
from .engine import SUPERSEDED
from .errors import ConfigError, StaleGenerationError
from .frame import active_cache
from .geometry import CacheGeometry
from .graphs import outside_graphs

if TYPE_CHECKING:
    from .cache import PolicyCache
    from .engine import Runtime
    from .registry import ModelPatch

__all__ = [
    "ANOTHER_MODEL",
    "NOT_ATTACHED",
    "CacheFace",
    "ForeignAccess",
    "ForeignLayer",
    "HybridLayer",
    "LayerWithoutAttention",
    "PolicyLayer",
    "StateLayer",
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


class LayerWithoutAttention:
    """One layer's face to transformers; of a layer without attention that is all. Every call goes to the cache."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: PolicyCache, layer: int) -> None:
        # The base classes would give the layer tensors of its own.
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
    def is_croppable(self) -> bool:
        """Whether what this layer holds lets tokens be taken back; what the policy dropped may still forbid it."""
        return True

    @property
    def record_past(self) -> bool:
        """Whether finished forwards wait for acceptance by `crop`."""
        return self.cache.is_recording_past(self._layer)

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.cache.set_recording(on)

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

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens are taken back from all layers at once, by the cache.

        Raises:
            ConfigError: always; the message names the call to make.
        """
        raise ConfigError(
            f"Layer {self._layer} of a policy cache cannot be cropped alone. Call cache.crop({tokens_to_remove}) once."
        )

    def activate_past_recording(self) -> None:
        """Let finished forwards wait for acceptance."""
        self.cache.set_recording(True)

    def get_max_length(self) -> int:
        """Return -1: any number of tokens may be fed."""
        return -1


class CacheFace(LayerWithoutAttention, CacheLayerMixin):  # type: ignore[misc]
    """The face of a layer with attention."""

    @property
    def is_initialized(self) -> bool:
        """Whether a token was ever fed."""
        return self.cache.get_seq_length() > 0

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


class ForeignLayer(CacheFace):
    """The face of a sliding or chunked layer beside full ones: what transformers' own layer holds, in versions."""

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


class StateLayer(LayerWithoutAttention, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The face of a layer with linear attention: what transformers' own layer holds, in the cache's versions.

    Models write states in place. What they are given inside a forward is that forward's copy; outside it is one that
    nobody reads again.
    """

    @property
    def number_of_states(self) -> int:
        """Convolutions, or recurrences, of this layer."""
        return int(self.cache.foreign_layer(self._layer).number_of_states)

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The last inputs of each convolution, [B, channels, kernel]; None before the first token."""
        return self.cache.states_of(self._layer, "conv_states")

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The state of each recurrence; None before the first token, and where there is none."""
        return self.cache.states_of(self._layer, "recurrent_states")

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether a token was fed, as this layer tells the model."""
        return dict(self.cache.foreign_layer(self._layer).has_previous_state)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: not from a recurrence, and unknown before the first token."""
        return bool(self.cache.foreign_layer(self._layer).is_croppable)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: states are made by the first forward."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take the new inputs of a convolution; return all that it reads."""
        found: Tensor = self.cache.working_layer(self._layer).update_conv_state(conv_states, state_idx, **kwargs)
        return found

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take the state of a recurrence after this forward's tokens."""
        working = self.cache.working_layer(self._layer)
        found: Tensor = working.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return found


class HybridLayer(PolicyLayer, StateLayer):
    """The face of a layer with attention, on whose rows the policy acts, and linear attention beside it."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""


class ForeignAccess:
    """What a `PolicyCache` says of layers, or parts of layers, that no policy acts on."""

    layers: list[Any]
    _geometry: CacheGeometry
    _patch: ModelPatch
    _runtime: Runtime

    def require_rules(self, config: Any) -> None:
        """Refuse a model that biases, or slides, otherwise than the config this cache was made from.

        Raises:
            ConfigError: it does.
        """
        both = self._runtime.foreign, stock_layers(config, self._geometry.foreign_layers)
        made, found = ([getattr(layer, "sliding_window", None) for layer in layers] for layers in both)
        if made != found or self._patch.alibi(config) != self._runtime.alibi:
            raise ConfigError(
                "This cache was made from a config with other sliding windows, or another bias by distance (ALiBi), "
                "than this model has. Make the cache from this model."
            )

    @outside_graphs
    def foreign_layer(self, layer: int) -> Any:
        """Return transformers' own layer behind what no policy acts on, as it is now. Read it; do not change it."""
        return self._runtime.foreign[self._geometry.foreign_layers.index(layer)]

    @outside_graphs
    def working_layer(self, layer: int) -> Any:
        """Return that layer inside a forward, which may change it.

        Raises:
            ConfigError: no forward of this cache runs in this thread.
            StaleGenerationError: another forward of this cache began meanwhile.
        """
        if active_cache() is not self or not self._runtime.begun_here():
            raise ConfigError(NOT_ATTACHED)
        if self._runtime.step is None or not self._runtime.is_latest():
            raise StaleGenerationError(SUPERSEDED)
        return self.foreign_layer(layer)

    @outside_graphs
    def states_of(self, layer: int, name: str) -> dict[int, Tensor | None]:
        """Return a layer's states: those of the forward that runs here, or copies of what is published."""
        states: dict[int, Tensor | None] = getattr(self.foreign_layer(layer), name)
        if active_cache() is self and self._runtime.is_latest():
            return states
        return {number: None if part is None else part.clone() for number, part in states.items()}

    def end_forward(self) -> None:
        """Publish the forward that runs here; called as the decoder of a model with linear attention returns."""
        step = self._runtime.step
        if step is None or not self._runtime.is_latest():
            raise StaleGenerationError(SUPERSEDED)
        step.finish()

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer has no attention, for each layer of the model."""
        return [not isinstance(layer, CacheLayerMixin) for layer in self.layers]


def layer_faces(cache: PolicyCache, geometry: CacheGeometry) -> list[LayerWithoutAttention]:
    """Return one face for each layer of the model."""
    return [_face(geometry, layer)(cache, layer) for layer in range(geometry.total_layers)]


def _face(geometry: CacheGeometry, layer: int) -> type[LayerWithoutAttention]:
    states = layer in geometry.state_layers
    if layer in geometry.model_layers:
        return HybridLayer if states else PolicyLayer
    if states:
        return StateLayer
    return ForeignLayer if layer in geometry.foreign_layers else LayerWithoutAttention


def policy_layer(geometry: CacheGeometry, layer: int, batch: int, *, batch_rows: int) -> int:
    """Return the policy's number of a model's layer.

    Raises:
        ConfigError: there is no such layer or batch row, or the policy does not act on the layer.
    """
    if geometry.leaves_alone(layer):
        raise ConfigError(
            f"The policy does not act on layer {layer}: whatever it holds is in transformers' own cache layer. The "
            f"policy's layers (cache.policy_layers) are {', '.join(map(str, geometry.model_layers))}."
        )
    if layer not in geometry.model_layers or not 0 <= batch < batch_rows:
        raise ConfigError(
            f"Layer {layer}, batch row {batch} was asked for; this cache has layers 0..{geometry.total_layers - 1} "
            f"and batch rows 0..{batch_rows - 1}."
        )
    return geometry.place_of(layer)[0]
