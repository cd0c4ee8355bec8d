"""The one mutable owner of a cache's state: what is published, what is in flight, what waits for acceptance."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..contract import GenerationClock, Generations, Phase, Transaction
from ..errors import CapacityError, ConfigError, StaleGenerationError
from ..geometry import CacheGeometry
from ..positions import RotarySpec
from .append import AppendStep
from .composition import Composition
from .crop import cropped
from .deferred import decide_appended
from .inputs import ForwardInputs, read_inputs
from .ring import RingStep
from .segment import SegmentStep
from .snapshot import Frontier, Snapshot
from .step import Step

__all__ = ["MAX_ROLLBACK_TOKENS", "RunStatistics", "Runtime"]

# Queries held beyond the observation window while a prompt waits for acceptance.
MAX_ROLLBACK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """What a cache has done since it was made or reset."""

    forwards: int = 0
    publications: int = 0
    # Publications that dropped at least one row.
    selections: int = 0
    # Row instances (over layers, owners and batch rows) dropped so far.
    rows_dropped: int = 0
    # Highest bytes alive at once in any forward: published, unpublished and workspace.
    transient_peak_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A finished forward whose tokens are not accepted yet."""

    snapshot: Snapshot
    length: int
    # First multi-token forward since recording began: a prompt segment however it is accepted.
    is_first: bool


class Runtime:
    """Runs forwards as transactions over one published `Snapshot`."""

    def __init__(
        self,
        composition: Composition,
        geometry: CacheGeometry,
        *,
        rotary: Callable[[], RotarySpec],
        element_bytes: Callable[[], int],
    ) -> None:
        """Start empty.

        Args:
            rotary: returns how the bound model rotates keys (asked for only by cache-local positions).
            element_bytes: returns the size of one K/V element of the bound model (asked for by byte budgets).
        """
        self.composition, self.geometry = composition, geometry
        self.rotary, self._element_bytes = rotary, element_bytes
        start = Generations(request=1, cache=0, policy=1, state=0)
        self.clock = GenerationClock(start)
        self.snapshot = Snapshot(generations=start, frontier=Frontier())
        self.parent: Generations | None = None
        self.step: Step | None = None
        self.waiting: _Waiting | None = None
        self.statistics = RunStatistics()
        # Called at every phase of every transaction; tests inject failures with it.
        self.observer: Callable[[int, Phase], None] | None = None
        self._recording = False
        self._recorded_any = False
        self._warned_segments = False

    # -- a forward ----------------------------------------------------------------------------------------------------

    def begin(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        """Open a forward: drop what a dead one left, accept what waits, validate, plan."""
        self.rollback()
        with torch.inference_mode(False), torch.no_grad():
            self.accept(0, by_crop=False)
            inputs = read_inputs(module, arguments, self.snapshot)
            if inputs.length == 1 and self.snapshot.open_segment is not None:
                self.finish_prefill()
            self.step = self._plan(inputs)
        self.statistics = replace(self.statistics, forwards=self.statistics.forwards + 1)

    def require_current(self, step: Step) -> None:
        """Refuse a layer of a forward that is no longer the one in flight.

        Raises:
            StaleGenerationError: another forward began, or the cache was rolled back, in between.
        """
        if self.step is not step:
            raise StaleGenerationError(
                "This forward is no longer the one in flight: another forward of the same cache began, or the cache was "
                "rolled back, before it ended. Use one cache for one forward at a time."
            )

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
            self.waiting = _Waiting(successor, step.inputs.length, first)
            self.step = None
            return
        self._swap(step.transaction, successor, dropped=_dropped(step.candidate_counts, successor.counts))
        self.step = None

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

    def set_recording(self, on: bool) -> None:
        """Start recording, or stop it and accept what waits."""
        if on and not self._recording:
            self._recorded_any = False
        if not on:
            self.accept(0, by_crop=False)
        self._recording = on

    def accept(self, rejected: int, *, by_crop: bool) -> None:
        """Accept the waiting tokens but the last `rejected`; only they are scored, selected and counted.

        Raises:
            CapacityError: a waiting prompt would be cut deeper than its queries were held.
        """
        waiting = self.waiting
        if waiting is None:
            return
        if rejected >= waiting.length:
            self.waiting = None
            return
        policy = self.composition
        accepted = cropped(waiting.snapshot, rejected)
        multi = waiting.length > 1
        is_prompt = multi and (waiting.is_first or not by_crop)
        if is_prompt and policy.evidence.window_queries and rejected > MAX_ROLLBACK_TOKENS:
            raise CapacityError(
                f"{rejected} tokens of a waiting prompt were rejected, but its queries are held for only "
                f"{MAX_ROLLBACK_TOKENS} tokens beyond the window. Reject fewer, or feed the prompt before recording."
            )
        keep_open = policy.chunked_prefill == "hold" and not by_crop and not policy.is_positional
        if policy.schedule == "every_step":
            self._decide(accepted)
        elif is_prompt and self._selects_segments() and not keep_open:
            self._decide(accepted)
        else:
            if not is_prompt:
                accepted = replace(accepted, open_segment=self.snapshot.open_segment)
            self._republish(accepted)
        self.waiting = None

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
        with torch.inference_mode(False), torch.no_grad():
            waiting = 0 if self.waiting is None else self.waiting.length
            if waiting and removed <= waiting:
                self.accept(removed, by_crop=True)
                return
            left = self.snapshot.frontier.columns - (removed - waiting)
            if left < self.snapshot.evicted_at_column:
                raise StaleGenerationError(
                    f"crop(-{removed}) goes back to column {left}, but rows were dropped for good at column "
                    f"{self.snapshot.evicted_at_column}. Call cache.activate_past_recording() before the forwards that may "
                    "be taken back."
                )
            self.waiting = None
            if removed > waiting:
                self._republish(cropped(self.snapshot, removed - waiting))

    @property
    def columns(self) -> int:
        """Columns ever fed, waiting ones included."""
        current = self.snapshot if self.waiting is None else self.waiting.snapshot
        return current.frontier.columns

    # -- selections outside a forward -----------------------------------------------------------------------------------

    def finish_prefill(self) -> None:
        """End a held prompt: select now."""
        if self.snapshot.open_segment is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._selects_segments():
                self._decide(self.snapshot)
            else:
                self._republish(replace(self.snapshot, open_segment=None))

    def batch(self, index: list[int]) -> None:
        """Select, repeat or reorder batch rows of everything held, in one publication."""
        self.rollback()
        with torch.inference_mode(False), torch.no_grad():
            if self.waiting is not None:
                self.waiting.snapshot = self.waiting.snapshot.batch(index)
            if self.snapshot.rows:
                self._republish(self.snapshot.batch(index))
            elif self.snapshot.batch_size:
                self.snapshot = self.snapshot.batch(index)

    def reset(self) -> None:
        """Forget everything and serve a new request; numbers are never reused."""
        self.rollback()
        self.waiting, self._recording, self._recorded_any = None, False, False
        generations = self.clock.successor(self.snapshot.generations, request=True)
        self.snapshot = Snapshot(generations=generations, frontier=Frontier())
        self.parent = None
        self.statistics = RunStatistics()
        self._warned_segments = False

    def fork(self, *, rotary: Callable[[], RotarySpec], element_bytes: Callable[[], int]) -> Runtime:
        """Return an independent runtime with the same content (buffers copied, maps shared: they never change)."""
        self.rollback()
        twin = Runtime(self.composition, self.geometry, rotary=rotary, element_bytes=element_bytes)
        with torch.inference_mode(False), torch.no_grad():
            twin.snapshot = _copied(self.snapshot)
            if self.waiting is not None:
                twin.waiting = replace(self.waiting, snapshot=_copied(self.waiting.snapshot))
        twin.clock = GenerationClock(self.clock.highest)
        twin.parent, twin.statistics = self.parent, self.statistics
        twin._recording, twin._recorded_any = self._recording, self._recorded_any
        twin._warned_segments = self._warned_segments
        return twin

    def published_bytes(self) -> int:
        """Return the bytes of published K/V buffers (slack included)."""
        return sum(t.numel() * t.element_size() for rows in self.snapshot.rows for t in rows.tensors())

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan(self, inputs: ForwardInputs) -> Step:
        policy, snapshot = self.composition, self.snapshot
        held = policy.chunked_prefill == "hold" and not policy.is_positional
        if (
            self._recording
            or policy.schedule == "never"
            or (policy.schedule == "end_of_prefill" and self._appends(inputs))
        ):
            return self._append_step(inputs, held)
        budget = self.budget_rows(inputs.frontier_after, inputs.batch)
        if policy.schedule == "every_step" and inputs.length == 1 and snapshot.width and not _tail_width(snapshot):
            return RingStep(self, snapshot, inputs, self._open(state=True), budget)
        self._warn_consecutive(inputs)
        return SegmentStep(self, snapshot, inputs, self._open(state=True), budget)

    def _appends(self, inputs: ForwardInputs) -> bool:
        """Whether an end-of-prefill policy takes these rows without choosing."""
        policy = self.composition
        if inputs.length == 1 and self.snapshot.frontier.columns:
            return True
        if policy.on_append == "append" and self.snapshot.evicted_at_column:
            return True
        return policy.chunked_prefill == "hold" and not policy.is_positional

    def _append_step(self, inputs: ForwardInputs, held: bool) -> AppendStep:
        policy = self.composition
        step = AppendStep(self, self.snapshot, inputs, self._open(state=False))
        if inputs.length > 1 and self._selects_segments() and (held or self._recording):
            rollback = MAX_ROLLBACK_TOKENS if self._recording else 0
            wanted = policy.evidence.window_queries
            step.hold(wanted + rollback if wanted else 0)
        return step

    def _selects_segments(self) -> bool:
        policy = self.composition
        if policy.schedule != "end_of_prefill":
            return False
        return policy.on_append == "recompress" or not self.snapshot.evicted_at_column

    def _warn_consecutive(self, inputs: ForwardInputs) -> None:
        policy = self.composition
        unplanned = policy.chunked_prefill is None and not policy.is_positional and self.snapshot.last_was_segment
        if unplanned and inputs.length > 1 and not self._warned_segments:
            self._warned_segments = True
            warnings.warn(
                f"{policy.policy}: two prompt segments follow one another without a decode step; each is compressed on its "
                "own. If this is one prompt fed in chunks, make the cache with chunked_prefill='hold' (one selection at "
                "the end) or 'bounded' (the budget holds after every chunk).",
                stacklevel=2,
            )

    def budget_rows(self, frontier: Frontier, batch: int) -> tuple[int, ...]:
        """Return the rows each owner may keep per batch row; fixed at the end of the first prompt."""
        if self.snapshot.budget_rows is not None:
            return self.snapshot.budget_rows
        policy, geometry = self.composition, self.geometry
        assert policy.budget is not None, "a policy that selects has a budget"
        heads = geometry.num_query_heads if policy.owner == "query_head" else geometry.num_kv_heads
        return tuple(
            policy.budget.resolve_rows(
                prompt_tokens=frontier.tokens,
                owners_per_row=geometry.num_layers * heads,
                row_bytes=geometry.row_bytes(self._element_bytes() if policy.budget.kind == "bytes" else 1),
                minimum_rows=policy.minimum_rows,
            )
        )

    # -- publication --------------------------------------------------------------------------------------------------

    def _open(self, *, state: bool) -> Transaction:
        successor = self.clock.successor(self.snapshot.generations, state=state)
        return Transaction(self.snapshot.generations, successor, self.geometry.num_layers, self.observer)

    def _decide(self, appended: Snapshot) -> None:
        transaction = self._open(state=True)
        budget = self.budget_rows(appended.frontier, appended.batch_size)
        try:
            successor, decider = decide_appended(self, appended, transaction, budget)
            self._swap(transaction, successor, dropped=_dropped(appended.counts, decider.kept_counts))
        except BaseException:
            if transaction.is_open:
                transaction.abort("the selection did not finish")
            raise

    def _republish(self, successor: Snapshot) -> None:
        """Publish a snapshot that keeps every row of its parent (or takes accepted ones in)."""
        transaction = self._open(state=False)
        for layer in range(self.geometry.num_layers):
            transaction.enter_through(layer, Phase.PACK)
        self._swap(transaction, replace(successor, generations=transaction.successor), dropped=0)

    def _swap(self, transaction: Transaction, successor: Snapshot, *, dropped: int) -> None:
        transaction.publish(self.snapshot.generations)
        parent = self.snapshot.generations
        self.snapshot = successor  # the one assignment that makes all layers' successors visible
        self.parent = parent
        transaction.release()
        transaction.export()
        heads = self.geometry.num_query_heads if self.composition.owner == "query_head" else self.geometry.num_kv_heads
        old = self.statistics
        self.statistics = replace(
            old,
            publications=old.publications + 1,
            selections=old.selections + (dropped > 0),
            rows_dropped=old.rows_dropped + dropped * heads * self.geometry.num_layers,
        )


def _dropped(candidates: tuple[int, ...], kept: tuple[int, ...]) -> int:
    return sum(candidates) - sum(kept)


def _copied(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, rows=tuple(rows.copied() for rows in snapshot.rows))


def _tail_width(snapshot: Snapshot) -> int:
    return 0 if snapshot.tail is None else snapshot.tail.width
