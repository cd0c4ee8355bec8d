"""One token's attention over ragged rows against dense grouped SDPA over as many rows, in interleaved rounds.

No model runs: what is measured is one layer's call, of which a decode step makes one a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from hf_kvpolicy.backends import grouped_attention
from hf_kvpolicy.ragged_attention import attend_ragged
from hf_kvpolicy.storage import RaggedView

from .report import Measure
from .timing import Contender, interleaved

HEADS, GROUP, DIM, SCALING = 3, 3, 64, 0.125
# Per head and batch row; the mean of every batch row is 512.
SPREAD = ((64, 500, 972), (200, 400, 936), (136, 700, 700), (18, 18, 1500))
SLACK_ROWS = 16
# Microseconds a layer may take more than dense attention, by batch size.
TARGETS = {1: 40.0, 4: 150.0}
# A round is one call, so short that it mostly runs undisturbed; there are this many for each of the other parts'.
ROUNDS_FACTOR = 20


def _view(lengths: Sequence[int], device: str, dtype: torch.dtype) -> RaggedView:
    starts = [end - rows for end, rows in zip(accumulate(n + SLACK_ROWS for n in lengths), lengths, strict=True)]
    keys, values = (torch.randn(sum(lengths) + SLACK_ROWS * len(lengths), DIM).to(device, dtype) for _ in range(2))
    view = RaggedView(keys_ND=keys, values_ND=values, heads=HEADS, starts=tuple(starts), lengths=tuple(lengths))
    starts_O, base_lengths_O = view.on_device()
    return RaggedView(
        keys_ND=keys, values_ND=values, heads=HEADS, starts=view.starts, lengths=view.lengths,
        starts_O=starts_O, base_lengths_O=base_lengths_O,
    )  # fmt: skip


def _contender(name: str, call: Callable[[], object], device: str) -> Contender:
    def work() -> None:
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return Contender(name, lambda: work)


def ragged_measures(device: str, dtype: torch.dtype, batches: Sequence[int], rounds: int) -> Iterator[Measure]:
    """Microseconds a call over what dense grouped SDPA takes for the same number of rows."""
    for batch in batches:
        unequal = [rows for number in range(batch) for rows in SPREAD[number % len(SPREAD)]]
        mean_rows = sum(unequal) // len(unequal)
        query = torch.randn(batch, HEADS * GROUP, 1, DIM).to(device, dtype)
        keys, values = (torch.randn(batch, HEADS, mean_rows, DIM).to(device, dtype) for _ in range(2))
        views = {
            "unequal": _view(unequal, device, dtype),
            "equal in every batch row": _view(SPREAD[0] * batch, device, dtype),
            "all equal": _view([mean_rows] * (batch * HEADS), device, dtype),
        }
        contenders = [
            _contender(
                "dense", lambda q=query, k=keys, v=values: grouped_attention(q, k, v, None, scaling=SCALING), device
            )
        ]
        for name, view in views.items():
            contenders.append(
                _contender(name, lambda q=query, v=view: attend_ragged("sdpa", q, v, None, scaling=SCALING), device)
            )
        seconds = interleaved(contenders, rounds * ROUNDS_FACTOR)
        for name in views:
            yield _measure(name, batch, seconds[name], seconds["dense"])


def _measure(name: str, batch: int, seconds: list[float], dense: list[float]) -> Measure:
    added_us = [(a - b) * 1e6 for a, b in zip(seconds, dense, strict=True)]
    calm_us = [statistics.quantiles(times, n=10)[0] * 1e6 for times in (seconds, dense)]
    details = {
        "us": statistics.median(seconds) * 1e6, "dense us": statistics.median(dense) * 1e6,
        "ratio": statistics.median(a / b for a, b in zip(seconds, dense, strict=True)),
        # Of the fastest tenth of either side: what is left when others use the machine as well.
        "calm added us": calm_us[0] - calm_us[1], "rounds": len(added_us),
    }  # fmt: skip
    return Measure(
        "ragged us added", f"{name}, batch {batch}", statistics.median(added_us), "<=", TARGETS.get(batch), details
    )
