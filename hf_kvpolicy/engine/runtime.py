"""The one mutable owner of a cache's state: what is published, what is in flight, what waits for acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..contract import GenerationClock, Generations, Phase, Transaction
from ..errors import CapacityError, ConfigError, StaleGenerationError
from ..frame import Reader
from ..geometry import CacheGeometry
from ..positions import AlibiSpec, RotarySpec
from ..storage import stored_tensors
from .composition import Composition
from .crop import accepted_of, cropped, refuse_untakeable
from .deferred import absorb_held, decide_appended, laid_behind
from .exclusive import SUPERSEDED, Exclusive, exclusive
from .foreign import ForeignLayers, blank_layers
from .inputs import read_inputs
from .plan import MAX_ROLLBACK_TOKENS, budget_rows, plan_step, selects_segments
from .published import RunStatistics, Visible, Waiting
from .ragged import decide_appended_ragged, laid_behind_ragged
from .replacing import with_due
from .snapshot import Frontier, Snapshot
from .step import Step

__all__ = ["Runtime"]


class Runtime(Exclusive):
    """Runs forwards as transactions over one published `Snapshot`."""

    def __init__(
        self,
        composition: Composition,
        geometry: CacheGeometry,
        *,
        rotary: Callable[[], RotarySpec],
        element_bytes: Callable[[], int],
        alibi: AlibiSpec | None = None,
        foreign: ForeignLayers = (),
    ) -> None:
        """Start empty.

        Args:
            rotary: returns how the bound model rotates keys (asked for only by cache-local positions).
            element_bytes: returns the size of one K/V element of the bound model (asked for by byte budgets).
            alibi: how logits are biased by distance, in families without positions in keys.
            foreign: empty cache layers of transformers for the layers no policy acts on.
        """
        super().__init__()
        self.composition, self.geometry = composition, geometry
        self.rotary, self.element_bytes, self.alibi = rotary, element_bytes, alibi
        start = Generations(request=1, cache=0, policy=1, state=0)
        self.clock = GenerationClock(start)
        self._visible = Visible(Snapshot(generations=start, frontier=Frontier(), foreign=foreign))
        self.parent: Generations | None = None
        self.step: Step | None = None
        self.statistics = RunStatistics()
        # Called at every phase of every transaction; tests inject failures with it.
        self.observer: Callable[[int, Phase], None] | None = None
        self._recording = False
        self._recorded_any = False
        self.warned_segments = False

    @property
    def snapshot(self) -> Snapshot:
        """What is published."""
        return self._visible.snapshot

    @property
    def waiting(self) -> Waiting | None:
        """The finished forward that waits for acceptance."""
        return self._visible.waiting

    # -- a forward ----------------------------------------------------------------------------------------------------

    @exclusive
    def begin(self, module: torch.nn.Module, arguments: Mapping[str, Any], reader: Reader | None) -> None:
        """Open a forward: drop what a dead one left, validate, accept what waits, plan."""
        self.prefetch()
        with stored_tensors():
            kinds, moves = self.composition.token_kinds, self.composition.moves_keys
            inputs = read_inputs(module, arguments, self._visible.newest, reader, kinds, moves_keys=moves)
            self.accept(0, by_crop=False)
            if inputs.length == 1 and self.snapshot.open_segment is not None:
                self.finish_prefill()
            self.step = plan_step(self, inputs)
        self.note_begun()
        self.statistics = replace(self.statistics, forwards=self.statistics.forwards + 1)

    @exclusive
    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, foreign: bool = False
    ) -> tuple[Step, torch.Tensor, torch.Tensor]:
        """Hand a layer's new rows to the forward that this thread began; return it and what its attention reads.

        Raises:
            StaleGenerationError: another forward of this cache began since this thread's own.
        """
        step = self.step
        if step is None or not self.is_latest():
            raise StaleGenerationError(SUPERSEDED)
        take = step.update_foreign if foreign else step.update
        return step, *take(layer, keys, values)

    @property
    def foreign(self) -> ForeignLayers:
        """Transformers' own layers as of now: of the forward in flight, of the one that waits, or published."""
        return self._visible.newest.foreign if self.step is None else self.step.foreign

    def require_current(self, step: Step) -> None:
        """Refuse a layer of a forward that is no longer the one in flight.

        Raises:
            StaleGenerationError: another forward began, or the cache was rolled back, in between.
        """
        if self.step is not step:
            raise StaleGenerationError(SUPERSEDED)

    @exclusive
    def publish(self, step: Step, successor: Snapshot) -> None:
        """Make a finished forward visible, in all layers at once; or let it wait for acceptance."""
        self.require_current(step)
        transient = max(self.statistics.transient_peak_bytes, step.transient_bytes)
        self.statistics = replace(self.statistics, transient_peak_bytes=transient)
        if self._recording:
            first = step.inputs.length > 1 and not self._recorded_any
            self._recorded_any = self._recorded_any or first
            # Acceptance opens a transaction of its own: how many of these tokens it will take is not known yet.
            step.transaction.abort("the tokens wait for acceptance")
            self._visible = replace(self._visible, waiting=Waiting(successor, step.inputs.length, first))
        else:
            self._swap(step.transaction, successor, dropped=step.candidate_rows - self._rows_of(successor))
        self.step = None
        self.note_ended()

    @exclusive
    def rollback(self) -> None:
        """Drop the forward in flight, if any; what is published stays as it is."""
        step, self.step = self.step, None
        if step is not None and step.transaction.is_open:
            step.transaction.abort("the forward did not finish")

    # -- acceptance ---------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether finished forwards wait for acceptance."""
        return self._recording

    @exclusive
    def set_recording(self, on: bool) -> None:
        """Start recording, or stop it and accept what waits."""
        if on and not self._recording:
            self._recorded_any = False
        if not on:
            self.accept(0, by_crop=False)
        self._recording = on

    @exclusive
    def accept(self, rejected: int, *, by_crop: bool) -> None:
        """Accept the waiting tokens but the last `rejected`; only they are scored, selected and counted.

        Raises:
            CapacityError: a waiting prompt would be cut deeper than its queries were held.
        """
        if self.waiting is not None:
            self.prefetch()
        waiting, policy = self.waiting, self.composition
        if waiting is None:
            return
        if rejected >= waiting.length:
            self._visible = replace(self._visible, waiting=None)
            return
        # What was accepted decides, not what was fed: a draft rejected whole leaves one decode token. The first token
        # ever is a prompt, as it is without recording.
        segment = waiting.length - rejected > 1 or not self.snapshot.frontier.columns
        is_prompt = segment and (waiting.is_first or not by_crop)
        if not is_prompt and self.snapshot.open_segment is not None:
            # Decode tokens end a held prompt, as they do when they are fed.
            self._close_prompt(waiting)
            waiting = self.waiting or waiting
        holds = policy.carries_scores or (is_prompt and policy.evidence.window_queries > 0)
        if holds and rejected > MAX_ROLLBACK_TOKENS:
            raise CapacityError(
                f"{rejected} tokens of a waiting prompt were rejected, but its queries are held for only "
                f"{MAX_ROLLBACK_TOKENS} tokens beyond the window. Reject fewer, or feed the prompt before recording."
            )
        accepted = accepted_of(self, waiting, rejected)
        keep_open = policy.chunked_prefill == "hold" and not by_crop
        if is_prompt and keep_open:
            if policy.carries_scores and policy.families is None:
                accepted = absorb_held(self, accepted)
                if waiting.length == 1 and self.snapshot.open_segment is None:
                    accepted = replace(accepted, open_segment=None)  # one token opens no segment
            self._republish(accepted)
        elif policy.bounds_every_step or (is_prompt and selects_segments(policy, self.snapshot)):
            self._decide(accepted, ends_prompt=is_prompt)
        else:
            self._republish(accepted if is_prompt else replace(accepted, open_segment=None))

    @exclusive
    def crop(self, removed: int) -> None:
        """Accept all waiting tokens but the last `removed`; beyond them, take back published ones.

        Raises:
            StaleGenerationError: rows were dropped since, so the earlier state no longer exists.
            ConfigError: more is removed than was ever fed.
        """
        self.rollback()
        total = self.columns
        if removed > total:
            raise ConfigError(f"crop(-{removed}) removes more than the {total} tokens the cache has been fed.")
        with stored_tensors():
            waiting = 0 if self.waiting is None else self.waiting.length
            if waiting and removed <= waiting:
                self.accept(removed, by_crop=True)
                return
            left = self.snapshot.frontier.columns - (removed - waiting)
            successor = cropped(self.snapshot, removed - waiting) if left >= self.snapshot.evicted_at_column else None
            refuse_untakeable(self.snapshot, successor, self.composition, removed, left)
            if removed > waiting and successor is not None:
                self._republish(successor)

    @property
    def columns(self) -> int:
        """Columns ever fed, waiting ones included."""
        return self._visible.newest.frontier.columns

    # -- selections outside a forward ---------------------------------------------------------------------------------

    @exclusive
    def finish_prefill(self) -> None:
        """End a held prompt: accept what waits and select now."""
        self.prefetch()
        with stored_tensors():
            self.accept(0, by_crop=False)
            if self.snapshot.open_segment is not None:
                self._close_prompt(None)

    @exclusive
    def batch(self, index: list[int]) -> None:
        """Select, repeat or reorder batch rows of everything held, in one publication."""
        self.rollback()
        with stored_tensors():
            successor = self._visible.each(lambda snapshot: snapshot.batch(index))
            if self.snapshot.buffers:
                self._republish(successor.snapshot, waiting=successor.waiting)
            else:
                self._visible = successor

    @exclusive
    def offload(self, layer: int | None) -> None:
        """Move a layer, or all for None, to the CPU, and what layers share with the last one; nothing else changes."""
        self.rollback()
        with stored_tensors():
            self._visible = self._visible.offloaded(layer)

    @exclusive
    def prefetch(self, layer: int | None = None) -> None:
        """Bring a layer, or all, and what layers share, back to where it was."""
        self.rollback()
        if self._visible.is_offloaded:
            with stored_tensors():
                self._visible = self._visible.brought_back(layer)

    @exclusive
    def reset(self) -> None:
        """Forget everything and serve a new request; numbers are never reused."""
        self.rollback()
        generations = self.clock.successor(self.snapshot.generations, request=True)
        foreign = blank_layers(self.snapshot.foreign)
        self._visible = Visible(Snapshot(generations=generations, frontier=Frontier(), foreign=foreign))
        self._recording, self._recorded_any = False, False
        self.parent = None
        self.statistics = RunStatistics()
        self.warned_segments = False

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Work on a copy; what was published before is published again when the block ends, however it ends.

        Slots that are live now may be reused inside, so the copy is real.
        """
        with self._lock:
            self.rollback()
            kept, recording, recorded_any = self._visible, self._recording, self._recorded_any
            with stored_tensors():
                self._visible = kept.copied()
        try:
            yield
        finally:
            with self._lock:
                self.rollback()
                self._recording, self._recorded_any = recording, recorded_any
                self._republish(kept.snapshot, waiting=kept.waiting)

    @exclusive
    def fork(self, *, rotary: Callable[[], RotarySpec], element_bytes: Callable[[], int]) -> Runtime:
        """Return an independent runtime with the same content (buffers copied, maps shared: they never change)."""
        self.rollback()
        twin = Runtime(self.composition, self.geometry, rotary=rotary, element_bytes=element_bytes, alibi=self.alibi)
        with stored_tensors():
            twin._visible = self._visible.copied()
        twin.clock = GenerationClock(self.clock.highest)
        twin.parent, twin.statistics = self.parent, self.statistics
        twin._recording, twin._recorded_any = self._recording, self._recorded_any
        twin.warned_segments = self.warned_segments
        return twin

    def restore(
        self,
        snapshot: Snapshot,
        *,
        highest: Generations,
        parent: Generations | None,
        statistics: RunStatistics,
        recording: bool,
        recorded_any: bool,
    ) -> None:
        """Become what was saved; called on a new runtime, before its first forward."""
        self._visible, self.clock = Visible(snapshot), GenerationClock(highest)
        self.parent, self.statistics = parent, statistics
        self._recording, self._recorded_any = recording, recorded_any

    @property
    def recorded_any(self) -> bool:
        """Whether a multi-token forward was recorded since recording began."""
        return self._recorded_any

    def published_bytes(self) -> int:
        """Return the bytes of published K/V buffers (slack included)."""
        return sum(t.nbytes for rows in self.snapshot.buffers for t in rows.tensors())

    # -- publication --------------------------------------------------------------------------------------------------

    def open_transaction(self, *, state: bool) -> Transaction:
        """Open the next transaction on what is published."""
        successor = self.clock.successor(self.snapshot.generations, state=state)
        return Transaction(self.snapshot.generations, successor, self.geometry.num_layers, self.observer)

    def _close_prompt(self, waiting: Waiting | None) -> None:
        """Choose from the held prompt; tokens that wait are laid behind what stays, as if they were fed now."""
        if selects_segments(self.composition, self.snapshot):
            self._decide(self.snapshot, ends_prompt=True, waiting=waiting)
        else:
            self._republish(replace(self.snapshot, open_segment=None), waiting=waiting)

    def _decide(self, appended: Snapshot, *, ends_prompt: bool, waiting: Waiting | None = None) -> None:
        transaction = self.open_transaction(state=True)
        budget = budget_rows(self, appended.frontier, appended.batch_size)
        try:
            decide = decide_appended_ragged if appended.ragged else decide_appended
            successor = decide(self, appended, transaction, budget, ends_prompt=ends_prompt)
            if waiting is not None:
                lay = laid_behind_ragged if successor.ragged else laid_behind
                waiting = replace(waiting, snapshot=lay(successor, waiting.snapshot, waiting.length))
            dropped = self._rows_of(appended) - self._rows_of(successor)
            self._swap(transaction, successor, dropped=dropped, waiting=waiting)
        except BaseException:
            if transaction.is_open:
                transaction.abort("the selection did not finish")
            raise

    def _rows_of(self, snapshot: Snapshot) -> int:
        return snapshot.total_rows(self.geometry.num_layers, self.composition.stored_heads(self.geometry))

    def _republish(self, successor: Snapshot, *, waiting: Waiting | None = None) -> None:
        """Publish a snapshot that keeps every row of its parent (or takes accepted ones in)."""
        transaction = self.open_transaction(state=False)
        for layer in range(self.geometry.num_layers):
            transaction.enter_through(layer, Phase.PACK)
        self._swap(transaction, replace(successor, generations=transaction.successor), dropped=0, waiting=waiting)

    def _swap(
        self, transaction: Transaction, successor: Snapshot, *, dropped: int, waiting: Waiting | None = None
    ) -> None:
        due = successor if waiting is not None else with_due(self.composition, successor)
        # A forward has noted its own peak.
        alive = () if self.step is not None and due is successor else (*self._visible.snapshots, successor, due)
        parent = self.snapshot.generations
        transaction.publish(parent)
        # The one assignment that makes all layers' successors visible.
        self._visible = Visible(due, waiting)
        self.parent = parent
        self.statistics = self.statistics.published(dropped, alive)
        transaction.release()
        transaction.export()
