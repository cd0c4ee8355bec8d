"""`PolicyCache`: a transformers cache that holds what its policy keeps."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .compat import stock_layers
from .contract import KVPolicyState, KVVisibilityPolicyManifest, PackedKVViewReceipt
from .engine import Composition, RunStatistics, Runtime, Step
from .errors import ConfigError, IntegrityError
from .fingerprint import checkpoint_fingerprint
from .frame import STEP, LayerStep, Reader, active_cache, weakly
from .geometry import CacheGeometry, text_config
from .graphs import outside_graphs
from .integrity import integrity_faults
from .layers import ANOTHER_MODEL, NOT_ATTACHED, ForeignAccess, layer_faces, policy_layer
from .ledger import Ledger, account
from .positions import RotarySpec
from .pruning import prune_between
from .records import Identity, manifest_of, positions_of, prefix_digest, receipt_of, state_of
from .registry import ModelPatch, check_options, model_patch
from .spans import spans_of

__all__ = ["PolicyCache"]


class PolicyCache(ForeignAccess, Cache):  # type: ignore[misc]
    """Base of all policy caches. Pass it to `model(...)` or `model.generate(...)` like any transformers cache.

    `get_seq_length()` counts every column ever fed, pads included; `stored_rows(layer)` counts what is stored.

    Stored rows carry no gradient: run under `torch.no_grad()` or `torch.inference_mode()`, or expect all gradients of a
    first forward alone; in a later one none flows through keys and values, those of its own tokens included.
    """

    # Selection units a policy can have; the others are refused.
    units: ClassVar[tuple[str, ...]] = ("head", "layer", "token")

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options of the wrong type before a policy's constructor computes with them."""
        # Copying and unpickling make an object without calling its constructor.
        if args or options:
            check_options(cls, options)
        made: Self = super().__new__(cls)
        return made

    def __init__(self, model_or_config: PreTrainedModel | PreTrainedConfig, composition: Composition) -> None:
        """Make an empty cache; given a model, attach it too.

        Raises:
            UnsupportedModelError: the family is not supported, or not with these positions.
            ConfigError: neither a model nor a config was given.
        """
        from .attach import attach, family_of, model_and_config, unwrap

        model, config = model_and_config(model_or_config)
        self._patch: ModelPatch = model_patch(config) if model is None else family_of(unwrap(model))
        self._geometry = CacheGeometry.from_config(config)
        self._decoder: weakref.ref[torch.nn.Module] | None = None
        self._rotary: RotarySpec | None = None
        self._identity = Identity(request_id=uuid.uuid4().hex)
        self._manifest: KVVisibilityPolicyManifest | None = None
        self._runtime = Runtime(
            composition,
            self._geometry,
            rotary=weakly(self._rotary_spec),
            element_bytes=weakly(self._element_bytes),
            alibi=self._patch.alibi(text_config(config)),
            foreign=stock_layers(config, self._geometry.foreign_layers),
        )
        composition.check_model(self._geometry, text_config(config))
        super().__init__(layers=layer_faces(self, self._geometry))
        if model is not None:
            attach(model)
            self._bind(self._patch.decoder(unwrap(model)))

    # -- what transformers calls --------------------------------------------------------------------------------------

    def begin_forward(self, decoder: PreTrainedModel, arguments: Mapping[str, Any], reader: Reader | None) -> None:
        """Open a forward; called by the hook that `attach` installs."""
        bound = None if self._decoder is None else self._decoder()
        if bound is None and (self._decoder is None or not self._runtime.columns):
            text = text_config(decoder.config)
            self._geometry.require(text)
            self.require_rules(text)
            self.composition.check_model(self._geometry, text)
            self._bind(decoder)
        elif bound is not decoder:  # or the model is gone, and its rows are here
            raise ConfigError(ANOTHER_MODEL.format(type(decoder).__name__))
        self._runtime.begin(decoder, arguments, reader)
        if self._runtime.step is not None and self._runtime.step.prunes:
            prune_between(self._patch.decoder_layers(decoder))

    @property
    def in_flight(self) -> Step | None:
        """The forward in flight, asked by what stands between the model's loop and its layers."""
        return self._runtime.step

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new rows and return the view its attention reads (called by the model)."""
        # A layer before this one whose attention never came: what a dead forward left open let an unattached model in.
        unattended = STEP.get() is not None
        if unattended or active_cache() is not self or not self._runtime.begun_here():
            raise ConfigError(NOT_ATTACHED)
        layer, foreign = self._geometry.place_of(layer_idx)
        step, keys, values = self._runtime.update(layer, key_states, value_states, foreign=foreign)
        STEP.set(LayerStep(step, layer, keys, values, model_layer=layer_idx, foreign=foreign))
        return keys, values

    @outside_graphs
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns ever fed, pads and waiting tokens included."""
        return self._runtime.columns

    @outside_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (columns after this forward, 0), not slots; a layer no policy acts on answers as transformers' own."""
        if layer_idx in self._geometry.attending_foreign:
            return tuple(self.foreign_layer(layer_idx).get_mask_sizes(int(query_length)))
        return self._runtime.columns + int(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: any number of tokens may be fed."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """False: shapes are not static."""
        return False

    @property
    def batch_size(self) -> int:
        """Batch rows held, or -1 before the first forward."""
        return self._runtime.snapshot.batch_size or -1

    @property
    def is_initialized(self) -> bool:
        """Whether a token was ever fed."""
        return self._runtime.columns > 0

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Move what one layer holds, or everything, to the CPU; the next forward brings it back by itself.

        What layers share leaves with the last of them; what waits for acceptance moves along. There is no
        `offloading=True`, which swaps layers during a forward: here one publishes all layers at once.
        """
        # Layers no policy acts on stay where they are.
        if layer_idx is None or not self._geometry.leaves_alone(layer_idx):
            self._runtime.offload(None if layer_idx is None else self._checked(layer_idx))

    def prefetch(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Bring one layer, or everything, back to the device it was on before `offload`; nothing else changes."""
        # transformers counts on in a circle after the last layer.
        layer = None if layer_idx is None else layer_idx % len(self.layers)
        if layer is None or not self._geometry.leaves_alone(layer):
            self._runtime.prefetch(None if layer is None else self._checked(layer))

    def reset(self) -> None:
        """Forget everything; the cache then serves a new request."""
        self._runtime.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 accepts everything that waits.

        Raises:
            ConfigError: the number is positive, or larger than what was fed.
            StaleGenerationError: rows were dropped since; the message names `activate_past_recording()`.
        """
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}) is ambiguous; give what to remove as a negative number.")
        self._runtime.crop(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder batch rows (beam search); scores, maps, counters and waiting tokens move along."""
        self._runtime.batch(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times in place."""
        held = (self._runtime.waiting or self._runtime).snapshot.batch_size
        self._runtime.batch([row for row in range(held) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these batch rows, in this order (a bool mask works too)."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._runtime.batch(rows.tolist())

    def activate_past_recording(self) -> None:
        """Let finished forwards wait: `crop(-r)` then accepts all but the last r tokens, exactly."""
        self.set_recording(True)

    def set_recording(self, on: bool) -> None:
        """Turn past recording on, or off (which accepts what waits)."""
        self._runtime.set_recording(on)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Whether finished forwards wait for acceptance."""
        return self._runtime.recording

    # -- what a user asks ---------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers the policy acts on."""
        return self._geometry.num_layers

    @property
    def policy_layers(self) -> tuple[int, ...]:
        """The model's numbers of the layers the policy acts on: the full ones, beside layers of other kinds."""
        return self._geometry.model_layers

    @property
    def geometry(self) -> CacheGeometry:
        """The attention shapes this cache was made for."""
        return self._geometry

    @property
    def family(self) -> ModelPatch:
        """What serves this model's family."""
        return self._patch

    @property
    def composition(self) -> Composition:
        """The axes this policy is made of."""
        return self._runtime.composition

    @property
    def statistics(self) -> RunStatistics:
        """What the cache has done since it was made or reset."""
        return self._runtime.statistics

    def positions(self, layer: int, batch: int = 0) -> list[Tensor]:
        """Return, per KV head, the ascending token positions of the rows one layer holds for one batch row.

        Raises:
            ConfigError: no such layer or batch row.
        """
        return positions_of(self._runtime, self._checked(layer, batch), batch)

    def source_spans(self, layer: int, batch: int = 0) -> list[Tensor]:
        """Return, per KV head, the first and last token position behind each row of `positions`, int64 [n, 2]."""
        return spans_of(self._runtime, self._checked(layer, batch), batch)

    def stored_rows(self, layer: int) -> Tensor:
        """Return how many rows each owner of a layer has, int64 [B, H_kv] (H_q columns for owner='query_head')."""
        heads = self.composition.stored_heads(self._geometry)
        return torch.tensor(self._runtime.snapshot.owner_rows(self._checked(layer), heads))

    @property
    def total_rows(self) -> int:
        """Stored rows of all layers, heads and batch rows; the device is not asked."""
        return self._runtime.snapshot.total_rows(self.num_layers, self.composition.stored_heads(self._geometry))

    def stored_view(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return (keys, values) of a layer's published slots, dead ones included; None before any.

        Dense storage gives [B, S, W, D] (of a merged pair, what it restores), ragged storage the flat slots [N, D].
        """
        return self._runtime.snapshot.view(self._checked(layer))

    @property
    def manifest(self) -> KVVisibilityPolicyManifest:
        """The immutable meaning of this cache's policy on this model."""
        if self._manifest is None:
            dtype, decoder = self._dtype(), self._decoder
            self._manifest = manifest_of(
                self.composition,
                self._geometry,
                self._patch.key_stage if self._runtime.alibi is None else "no_rope",
                dtype,
                # Not a method of the cache: a manifest that somebody keeps must not keep the cache's rows.
                lambda: checkpoint_fingerprint(None if decoder is None else decoder()),
                self._patch.proof,
            )
        return self._manifest

    @property
    def state(self) -> KVPolicyState:
        """What is published now; its positions can be read while this generation is current."""
        return state_of(self._runtime, self.manifest, self._identity)

    @property
    def receipt(self) -> PackedKVViewReceipt:
        """The receipt of the last publication."""
        return receipt_of(self._runtime, self.manifest, self._identity)

    def ledger(self) -> Ledger:
        """Return what the cache holds, byte for byte: by formula, and measured from tensor storages."""
        return account(self._runtime)

    def check_integrity(self) -> None:
        """Verify stored state against itself and the byte ledger.

        Raises:
            IntegrityError: with every fault found.
        """
        faults = [*integrity_faults(self._runtime), *self.ledger().faults()]
        if faults:
            raise IntegrityError("The cache contradicts itself: " + "; ".join(faults))

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def rollback(self) -> None:
        """Drop the candidates of a forward that did not finish; what is published stays."""
        self._runtime.rollback()

    def finish_prefill(self) -> None:
        """End a prompt fed in chunks (chunked_prefill='hold'): select now."""
        self._runtime.finish_prefill()

    def fork(self) -> Self:
        """Return an independent cache with the same content; neither sees what the other does next."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._identity = Identity(request_id=uuid.uuid4().hex)
        twin._runtime = self._runtime.fork(rotary=weakly(twin._rotary_spec), element_bytes=weakly(twin._element_bytes))
        twin.layers = layer_faces(twin, self._geometry)
        return twin

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write this cache to a directory; `hf_kvpolicy.load_cache(directory, model)` continues it bit for bit.

        Raises:
            ConfigError: tokens wait for acceptance (call `crop(0)` first), or the directory holds something else.
        """
        from .persistence import save_cache

        save_cache(self, directory)

    @contextmanager
    def branch(self) -> Iterator[Self]:
        """One context, many questions: what is fed inside the block leaves no trace after it.

        with cache.branch():
            model.generate(question_1, cache=cache)
        with cache.branch():
            model.generate(question_2, cache=cache)   # starts where question 1 started
        """
        with self._runtime.branch():
            yield self

    def prefix_digest(self, token_ids: Sequence[int]) -> str:
        """Return the identity under which these rows may be reused for another request with the same tokens.

        Raises:
            ManifestError: the cache is lossy; its rows depend on what the policy saw, not on the tokens alone.
            ConfigError: the tokens are not the ones a single-row cache was fed, by their number.
        """
        return prefix_digest(self._runtime, self.manifest, token_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Deep copies are forks; the model is not copied."""
        return self.fork()

    def __repr__(self) -> str:
        """Name the policy, the budget and what is held."""
        budget = "none" if self.composition.budget is None else self.composition.budget.declared
        return f"{type(self).__name__}(budget={budget}, columns={self._runtime.columns}, rows={self.total_rows})"

    # -- internals ----------------------------------------------------------------------------------------------------

    def _bind(self, decoder: torch.nn.Module) -> None:
        self._decoder, self._manifest = weakref.ref(decoder), None
        if self.composition.moves_keys and self._runtime.alibi is None:
            self._rotary = self._patch.rotary(decoder, self._geometry.model_layers)
        if self.composition.pruning is not None:
            self._patch.decoder_layers(decoder)  # refuses families whose layers cannot lose tokens

    def _checked(self, layer: int, batch: int = 0) -> int:
        return policy_layer(self._geometry, layer, batch, batch_rows=max(1, self._runtime.snapshot.batch_size))

    def _rotary_spec(self) -> RotarySpec:
        assert self._rotary is not None, "cache-local caches are bound to a model before they run"
        return self._rotary

    def _dtype(self) -> torch.dtype:
        stored = self._runtime.snapshot.dtype
        decoder = None if self._decoder is None else self._decoder()
        if stored is not None:
            return stored
        if decoder is None:
            raise ConfigError(
                "The manifest names the dtype of rows, which a cache made from a config learns at its first use."
            )
        return next(decoder.parameters()).dtype

    def _element_bytes(self) -> int:
        return self._dtype().itemsize
