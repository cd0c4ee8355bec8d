"""Decode tokens/s, peak memory and K/V traffic of a whole model's shape, against transformers' own cache.

Method. A context is prefilled once per contender with random tokens, one prompt in one forward, on the clock. Caches of
larger batches repeat that cache's rows (`batch_repeat_interleave`): how long a decode step takes depends on how many
rows lie where, not on what is in them. Decode then runs in interleaved rounds, every block from the same length. Before
that each contender runs one block off the clock, whose peak is taken. transformers' own cache also runs with as many
rows as the policies hold: what then is left between the two is the policy's own work.

K/V moved in a step is counted by formula. Attention reads every stored row once; transformers' own cache concatenates,
which reads and writes every row once more. A cell that does not fit, or that there is no time for, is reported with its
reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .memory import formula_bytes
from .models import forward, new_cache, stock_twin
from .report import Measure
from .room import (
    cache_bytes,
    copy_bytes_per_s,
    decode_need_bytes,
    device_bytes,
    missing,
    prefill_need_bytes,
    rise_bytes,
    weight_bytes,
)
from .shapes import Shape
from .timing import BLOCK_TOKENS, Contender, cropped_contender, interleaved

STOCK = "DynamicCache"
# Of decode after a prompt selection: rows in a rectangle, and rows that differ by head.
POLICIES = ("snapkv", "adakv")
# Reads and writes of every row in a step of transformers' own cache: `torch.cat` reads and writes, attention reads.
STOCK_PASSES = 3
UNFORESEEN = "out of memory, though by estimate it fits"


@dataclass(slots=True, kw_only=True)
class Subject:
    """A cache under test. `cache` is None before its prefill, and once a cell did not fit; `lost` then tells why."""

    name: str
    policy: str | None
    model: Any
    # Prompt tokens it is fed, and the rows that a KV head then holds in the mean.
    tokens: int
    rows: int
    cache: Any = None
    batch: int = 1
    lost: str | None = None

    def lose(self, reason: str) -> None:
        self.cache, self.lost = None, reason


class DeviceBench:
    """One run over a shape's cells."""

    def __init__(
        self,
        shape: Shape,
        model: Any,
        *,
        rounds: int,
        memory_bytes: int | None,
        time_limit_s: float,
        note: Callable[[str], None],
    ) -> None:
        """Take the model (it gets attached) and its stock twin; memory_bytes=None asks the device."""
        self.shape, self.model, self.stock = shape, model, stock_twin(model)
        self.rounds, self.note = rounds, note
        self.device = model.device
        self.memory_bytes = device_bytes(self.device) if memory_bytes is None else memory_bytes
        self.weight_bytes = weight_bytes(model)
        self.ends = time.monotonic() + time_limit_s
        self.prefills: list[tuple[int, float]] = []
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, max(shape.contexts)), generator=generator)
        self.ids = ids.to(self.device)

    def measures(self) -> Iterator[Measure]:
        """Measure every cell, short contexts first.

        Raises:
            RuntimeError: the model's random weights give logits that are not finite.
        """
        self.copy_bytes_per_s = copy_bytes_per_s(self.device)
        details = {"weights": self.weight_bytes}
        if self.memory_bytes is not None:
            details["memory"] = self.memory_bytes
        yield Measure("device copy GB/s", "read + written", self.copy_bytes_per_s / 1e9, ">=", None, details)
        self._warm_up()
        for context in self.shape.contexts:
            subjects = self._subjects(context)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            for subject in subjects:
                yield from self._prefill(subject, subjects)
            for batch in self.shape.batches:
                yield from self._decode(subjects, context, batch)

    def _subjects(self, context: int) -> list[Subject]:
        budgets = self.shape.budgets
        subjects = [Subject(name=STOCK, policy=None, model=self.stock, tokens=context, rows=context)]
        subjects += [
            Subject(name=f"{policy}, {rows} rows", policy=policy, model=self.model, tokens=context, rows=rows)
            for policy in POLICIES
            for rows in budgets
        ]
        equal = [Subject(name=_equal(n), policy=None, model=self.stock, tokens=n, rows=n) for n in budgets]
        return subjects + equal

    def _warm_up(self) -> None:
        ids = self.ids[:, : min(self.shape.contexts) // 2]
        self.note(f"warm-up: {ids.shape[1]} tokens")
        if not self.stock(input_ids=ids, logits_to_keep=1, use_cache=False).logits.isfinite().all():
            raise RuntimeError(f"The random weights of {self.shape.name} give logits that are not finite.")
        for policy in (None, *POLICIES):
            model = self.stock if policy is None else self.model
            cache = new_cache(policy, model, min(self.shape.budgets))
            for part in (ids, ids[:, :1]):
                forward(model, part, cache)

    def _held_bytes(self, subjects: list[Subject]) -> int:
        return self.weight_bytes + sum(cache_bytes(s.cache) for s in subjects if s.cache is not None)

    def _prefill(self, subject: Subject, subjects: list[Subject]) -> Iterator[Measure]:
        """Fill a subject's cache with one prompt; the short ones of `DynamicCache` are not worth a line."""
        tokens, held_bytes = subject.tokens, self._held_bytes(subjects)
        need_bytes = prefill_need_bytes(self.model, tokens, keeps_all=subject.policy is None)
        subject.lost = missing(self.memory_bytes, held_bytes, need_bytes) or self._no_time(tokens)
        seconds, details = None, {}
        if subject.lost is None:
            self.note(f"prefill: {subject.name}, {tokens} tokens")
            cache, ids = new_cache(subject.policy, subject.model, subject.rows), self.ids[:, :tokens]
            begin = time.perf_counter()
            try:
                rise = rise_bytes(self.device, lambda: forward(subject.model, ids, cache))
                seconds = time.perf_counter() - begin
                details = {"tokens/s": tokens / seconds, **self._peak_details(rise, 0)}
                subject.cache = cache
            except torch.OutOfMemoryError:
                subject.lost = UNFORESEEN
        if tokens in self.shape.contexts:
            if seconds is not None:
                self.prefills.append((tokens, seconds))
            details = details if seconds is not None else {"reason": subject.lost}
            yield Measure("prefill s", f"{subject.name}, context {tokens}, batch 1", seconds, "<=", None, details)

    def _no_time(self, tokens: int) -> str | None:
        """Why there is no time for a prefill, told from those so far: linear in fewer tokens, quadratic in more."""
        expected = max((s * tokens / n * max(1.0, tokens / n) for n, s in self.prefills), default=0.0)
        left = max(0.0, self.ends - time.monotonic())
        if expected < left:
            return None
        return f"no time: may take {expected:.0f} s, left are {left:.0f} s"

    def _peak_details(self, rise: int | None, own_bytes: int) -> dict[str, int]:
        """The peak as it would be were this cache alone on the device with the weights."""
        return {} if rise is None else {"peak": self.weight_bytes + own_bytes + rise}

    def _widen(self, subject: Subject, batch: int, subjects: list[Subject]) -> None:
        """Repeat a subject's rows to this batch size, or lose it."""
        if subject.cache is None or subject.batch == batch:
            return
        held_bytes = self._held_bytes(subjects) - cache_bytes(subject.cache)
        reason = missing(self.memory_bytes, held_bytes, decode_need_bytes(self.model, batch, subject.rows))
        if reason is None:
            try:
                subject.cache.batch_repeat_interleave(batch // subject.batch)
                subject.batch = batch
            except torch.OutOfMemoryError:
                reason = UNFORESEEN
        if reason is not None:
            subject.lose(reason)

    def _decode(self, subjects: list[Subject], context: int, batch: int) -> Iterator[Measure]:
        ids, contenders, facts = self.ids[:, :BLOCK_TOKENS].expand(batch, -1), {}, {}
        # The largest comes last: what does not fit must not push the others out.
        for subject in sorted(subjects, key=lambda s: s.rows):
            if time.monotonic() > self.ends and subject.lost is None:
                subject.lose("no time")
            self._widen(subject, batch, subjects)
            if subject.cache is None:
                continue
            contender = cropped_contender(subject.name, subject.model, subject.cache, ids)
            try:
                facts[subject.name] = self._settle(subject, contender)
                contenders[subject.name] = contender
            except torch.OutOfMemoryError:
                subject.lose(UNFORESEEN)
        self.note(f"decode: context {context}, batch {batch}, {self.rounds} rounds of {len(contenders)} caches")
        seconds = interleaved(list(contenders.values()), self.rounds) if contenders else {}
        for subject in subjects:
            name = f"{subject.name}, context {context}, batch {batch}"
            if subject.name not in seconds:
                yield Measure("decode tokens/s", name, None, ">=", None, {"reason": subject.lost})
                continue
            subject.cache.crop(-BLOCK_TOKENS)
            step_s, details = self._step(subject, seconds, facts[subject.name])
            yield Measure("decode tokens/s", name, batch / step_s, ">=", None, details)

    def _settle(self, subject: Subject, contender: Contender) -> dict[str, Any]:
        """Run a block off the clock, in which buffers grow; return bytes moved, held and peak, from its beginning."""
        own_bytes = cache_bytes(subject.cache)
        facts = {"moved": self._moved_bytes(subject), "cache": own_bytes}
        if subject.policy is not None:
            rows = torch.stack([subject.cache.stored_rows(layer) for layer in subject.cache.policy_layers])
            facts["rows a head"] = f"{int(rows.min())}-{int(rows.max())}"
        return facts | self._peak_details(rise_bytes(self.device, contender.prepare()), own_bytes)

    def _moved_bytes(self, subject: Subject) -> int:
        """K/V bytes that a step reads and writes, of the rows held at the beginning of a block."""
        if subject.policy is not None:
            return int(subject.cache.ledger().payload_bytes)
        return STOCK_PASSES * formula_bytes(self.model, subject.batch, subject.rows)

    def _step(
        self, subject: Subject, seconds: dict[str, list[float]], facts: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Seconds of a step, and what they are read against: copy bandwidth, and `DynamicCache` in the same rounds."""
        own = seconds[subject.name]
        step_s = statistics.median(own) / BLOCK_TOKENS
        quarters = statistics.quantiles(own, n=4) if len(own) > 1 else [own[0]] * 3
        details: dict[str, Any] = {
            "ms/step": step_s * 1e3,
            "quartiles": "{:.2f}-{:.2f}".format(*(q / BLOCK_TOKENS * 1e3 for q in (quarters[0], quarters[2]))),
        }
        for label, baseline in (("x full", STOCK), ("x equal rows", _equal(subject.rows))):
            if subject.policy is not None and baseline in seconds:
                details[label] = statistics.median(b / a for a, b in zip(own, seconds[baseline], strict=True))
        share = facts["moved"] / step_s / self.copy_bytes_per_s
        return step_s, {**details, **facts, "moved/copy": share, "seconds": own}


def _equal(rows: int) -> str:
    """Name transformers' own cache that holds as many rows as a policy."""
    return f"{STOCK}, {rows} rows"
