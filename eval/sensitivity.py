"""What one input of a workload changes, and what it does not (0x10C-0x10D): bytes and visibility by formula.

A small ledger with a written-out table of attention: no model runs, and nothing here is a measurement or a quality. It
shows what a cache ratio hides: equal bytes need not show equal history.

Every owner (a KV head of a layer) keeps its first rows, its newest rows, and of the rest those with the most attention
from the last queries of the prompt; rows that decode adds all stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..contract.costs import Ratio, full_payload_bytes, row_bytes, visible_payload_bytes
from ..errors import ConfigError, did_you_mean

__all__ = [
    "BASE",
    "CONTROLS",
    "ONE_CONTROL_CASES",
    "Probe",
    "Workload",
    "derive",
    "lines_of",
    "probe",
    "selected_positions",
    "text_of",
]

# Attention in hundredths that queries pay to positions of the prompt; queries are counted from its end, 1 the last.
_ATTENTION: Mapping[int, Mapping[int, int]] = {
    1: {20: 30, 9: 20, 14: 10, 5: 10},
    2: {20: 20, 9: 20, 14: 15, 23: 5},
    3: {5: 15, 9: 10, 20: 10, 11: 5},
    4: {14: 15, 5: 10, 20: 10, 17: 5},
    **{query: {7: 15, 11: 12} for query in (5, 6, 7, 8)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The declared inputs. Rows are of one owner; `None` gives every layer, and every head of a layer, the same."""

    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    scalar_bytes: int = 2
    prompt_rows: int = 32
    decode_rows: int = 8
    budget_rows: int = 10
    sink_rows: int = 2
    recent_rows: int = 4
    observation_queries: int = 4
    # Rows of all heads of each layer together.
    layer_rows: tuple[int, ...] | None = None
    # Rows of each head of each layer.
    head_rows: tuple[tuple[int, ...], ...] | None = None
    # From the prompt's end back to the row that a later question needs.
    delayed_distance: int = 18

    def __post_init__(self) -> None:
        """Reject what no cache could hold.

        Raises:
            ConfigError: a count is not positive, rows of heads do not add up to those of their layer, or an owner has
                fewer rows than it protects or more than there are.
        """
        for name in _COUNTS:
            value, least = getattr(self, name), 0 if name in _MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}; got {value!r}.")
        heads = self.head_rows
        if not (self.layer_rows is None or _are_counts(self.layer_rows)):
            raise ConfigError(f"layer_rows must be a whole number for each layer; got {self.layer_rows!r}.")
        if not (heads is None or (isinstance(heads, tuple) and all(map(_are_counts, heads)))):
            raise ConfigError(f"head_rows must be a list of whole numbers for each layer; got {heads!r}.")
        if self.delayed_distance > self.prompt_rows:
            raise ConfigError(
                f"delayed_distance {self.delayed_distance} points before the first of {self.prompt_rows} prompt rows."
            )
        protected = self.sink_rows + self.recent_rows
        for rows in self.owner_rows():
            if not protected <= rows <= self.prompt_rows:
                raise ConfigError(
                    f"An owner would keep {rows} prompt rows; it protects {protected}, and the prompt has "
                    f"{self.prompt_rows}. Give it as many as lie between."
                )

    def rows_by_layer(self) -> tuple[int, ...]:
        """Rows of all heads of each layer: as declared, or the budget of every head."""
        if self.layer_rows is None:
            return (self.budget_rows * self.kv_heads,) * self.layers
        if len(self.layer_rows) != self.layers:
            raise ConfigError(f"layer_rows {self.layer_rows} must have one number for each of {self.layers} layers.")
        return self.layer_rows

    def owner_rows(self) -> list[int]:
        """Rows of each owner, layer by layer."""
        totals = self.rows_by_layer()
        if self.head_rows is None:
            if any(total % self.kv_heads for total in totals):
                raise ConfigError(f"layer_rows {totals} do not go evenly into {self.kv_heads} heads. Give head_rows.")
            return [total // self.kv_heads for total in totals for _ in range(self.kv_heads)]
        if [len(heads) for heads in self.head_rows] != [self.kv_heads] * self.layers:
            raise ConfigError(f"head_rows must have {self.layers} layers of {self.kv_heads} heads.")
        if tuple(map(sum, self.head_rows)) != totals:
            raise ConfigError(f"head_rows {self.head_rows} do not add up to the layers' {totals} rows.")
        return [rows for heads in self.head_rows for rows in heads]


def _are_counts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, int) and item >= 0 for item in value)


_MAY_BE_ZERO = ("decode_rows", "sink_rows", "recent_rows")
_COUNTS = tuple(field.name for field in fields(Workload) if field.name not in ("layer_rows", "head_rows"))

BASE = Workload()
# What may be changed, one at a time, and an example of each; layers and head_dim only scale what the others show.
ONE_CONTROL_CASES: Mapping[str, Any] = {
    "prompt_rows": 64,
    "decode_rows": 32,
    "budget_rows": 8,
    "recent_rows": 6,
    "sink_rows": 4,
    "observation_queries": 8,
    "layer_rows": (28, 22, 18, 12),
    "head_rows": ((14, 6),) * 4,
    "scalar_bytes": 1,
    "kv_heads": 4,
    "delayed_distance": 21,
}
CONTROLS = tuple(ONE_CONTROL_CASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One control changed, and every derived value before and after."""

    control: str
    before: Any
    after: Any
    changed: Mapping[str, tuple[Any, Any]]
    unchanged: tuple[str, ...]


def selected_positions(workload: Workload, rows: int) -> list[int]:
    """Prompt positions that an owner with this many rows keeps, ascending; of equal scores the later stays."""
    first, last = workload.sink_rows, workload.prompt_rows - workload.recent_rows
    scores = {
        position: sum(
            _ATTENTION.get(query, {}).get(position, 0) for query in range(1, workload.observation_queries + 1)
        )
        for position in range(first, last)
    }
    by_score = sorted(scores, key=lambda position: (scores[position], position), reverse=True)
    scored = by_score[: rows - workload.sink_rows - workload.recent_rows]
    return sorted([*range(first), *scored, *range(last, workload.prompt_rows)])


def derive(workload: Workload) -> dict[str, Any]:
    """Everything that follows from the inputs; values of owners are one where all owners agree, else a list."""
    rows = workload.owner_rows()
    one_row = row_bytes(
        head_dim_k=workload.head_dim,
        head_dim_v=workload.head_dim,
        key_scalar_bytes=workload.scalar_bytes,
        value_scalar_bytes=workload.scalar_bytes,
    )
    full = full_payload_bytes(
        layers=workload.layers,
        kv_heads=workload.kv_heads,
        tokens=workload.prompt_rows + workload.decode_rows,
        bytes_per_row=one_row,
    )
    kept = visible_payload_bytes([count + workload.decode_rows for count in rows], bytes_per_row=one_row)
    positions = [selected_positions(workload, count) for count in rows]
    reference = workload.prompt_rows - workload.delayed_distance
    return {
        "owners": len(rows),
        "row_bytes": one_row,
        "full_payload_bytes": full,
        "policy_payload_bytes": kept,
        "full_to_policy_ratio": Ratio(numerator=full, denominator=kept).value,
        "owner_rows": _shared(rows),
        "score_slots": _shared([count - workload.sink_rows - workload.recent_rows for count in rows]),
        "selected_positions": _shared(positions),
        "reference_position": reference,
        "owners_that_see_the_reference": Ratio(
            numerator=sum(reference in kept_positions for kept_positions in positions), denominator=len(rows)
        ),
    }


def probe(control: str, value: Any, base: Workload = BASE) -> Probe:
    """Change exactly one input.

    Args:
        control: one of `CONTROLS`.
        value: its new value; lists become tuples.
        base: where everything else comes from.

    Raises:
        ConfigError: there is no such control, the value is the base's, or nothing could hold it.
    """
    if control not in CONTROLS:
        raise ConfigError(
            f"There is no control {control!r}; there are {', '.join(CONTROLS)}.{did_you_mean(control, CONTROLS)}"
        )
    after, before = _frozen(value), getattr(base, control)
    if after == before:
        raise ConfigError(f"{control} is {before!r} already. Give another value.")
    old, new = derive(base), derive(replace(base, **{control: after}))
    return Probe(
        control=control,
        before=before,
        after=after,
        changed={name: (old[name], new[name]) for name in old if old[name] != new[name]},
        unchanged=tuple(name for name in old if old[name] == new[name]),
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _shared(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def lines_of(found: Probe) -> Iterator[str]:
    """A probe as lines of text."""
    yield f"{found.control}: {text_of(found.before)} -> {text_of(found.after)}"
    for name, (old, new) in found.changed.items():
        yield f"  {name}: {text_of(old)} -> {text_of(new)}"
    yield f"  unchanged: {', '.join(found.unchanged)}"


def text_of(value: Any) -> str:
    """A derived value, or an input, for people."""
    if isinstance(value, Ratio):
        return f"{value.numerator} of {value.denominator}"
    if isinstance(value, float):
        return f"{value:.4f}x"
    if value is None:
        return "uniform"
    return f"{value:,}" if isinstance(value, int) else _nested(value)


def _nested(value: Any) -> str:
    """Lists of owners, equal ones counted: `2 x [0, 1]`."""
    if not value or not isinstance(value[0], list | tuple):
        return f"[{', '.join(map(str, value))}]"
    counted = Counter(_nested(item) for item in value)
    return "; ".join(f"{count} x {text}" for text, count in counted.items())
