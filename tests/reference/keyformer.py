"""Plain oracle of Keyformer (Adnan et al., arXiv 2403.09054; contract 0x06G-H), one unpadded sequence, in float64.

f[j] += reduce_group(softmax((x + g) / tau)[j]) over the rows held then, x = K q / sqrt(d), g given from outside as a
pure function. tau = tau_init in a prompt segment, tau_init + t (tau_end - tau_init) / T at the t-th decode token after
it. What stays is chosen as in H2O. variant="reference": tau never stops rising, and key rows are chosen by prompt
segments only: in decode they stay whatever their scores, and a row that leaves the recent window goes. (Where a short
prompt left room in the budget, the highest scores of such rows fill it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .h2o import H2O, Array, Kept, best, softmax

# layer, query heads, query token, key tokens -> one row of noise per query head
Noise = Callable[[int, list[int], int, list[int]], Array]


def temperature(step: int, tau_init: float, tau_end: float, expected_steps: int, after_end: str) -> float:
    """Return tau of the `step`-th decode token; step 0 is a prompt segment."""
    if after_end == "clamp":
        step = min(step, expected_steps)
    return tau_init + step * (tau_end - tau_init) / expected_steps


class Keyformer(H2O):
    """One sequence; see `H2O` for append, choose, publish."""

    def __init__(
        self, layers: int, kv_heads: int, noise: Noise, *, budget: int, recent_ratio: float = 0.3,
        tau_init: float = 1.0, tau_end: float = 2.0, expected_steps: int = 100, after_end: str = "clamp",
        group: str = "sum", unit: str = "head", variant: str = "paper", protect: Sequence[int] = (),
        normalize: bool = False, grace: int = 0, tolerance: float = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(
            layers, kv_heads, budget=budget, recent_ratio=recent_ratio, group=group, unit=unit, protect=protect,
            normalize=normalize, grace=grace, tolerance=tolerance,
        )  # fmt: skip
        self.noise, self.frozen, self.step = noise, variant == "reference", 0
        self.schedule = (tau_init, tau_end, expected_steps, "continue" if self.frozen else after_end)
        self.key_rows: Kept = []

    @property
    def tau(self) -> float:
        """The temperature of the forward fed last."""
        return temperature(self.step, *self.schedule)

    def append(self, queries_LQTD: Array, keys_LHTD: Array) -> None:
        """Feed one forward. More than one token, or the very first, is a prompt segment."""
        self.step = self.step + 1 if keys_LHTD.shape[2] == 1 and self.tokens else 0
        super().append(queries_LQTD, keys_LHTD)

    def probabilities(self, logits_GN: Array, layer: int, query_heads: list[int], rows: list[int]) -> Array:
        """Return the noisy, tempered probabilities; the model's own attention is not these."""
        noise_GN = self.noise(layer, query_heads, self.tokens, rows)
        return np.array([softmax((x + g) / self.tau) for x, g in zip(logits_GN, noise_GN, strict=True)])

    def choose(self) -> Kept:
        """Return what should be published now."""
        if not self.frozen or not self.step:
            return super().choose()
        return [
            [
                best(o.rows, self.scores(i, h), [*self.key_rows[i][h], *self.always(o.rows)], self.budget)
                for h, o in enumerate(owners)
            ]
            for i, owners in enumerate(self.owners)
        ]

    def publish(self, kept: Kept) -> None:
        """Drop what is not kept; what a prompt segment kept for its score (not for its age) are its key rows."""
        super().publish(kept)
        if not self.step:
            self.key_rows = [[[t for t in rows if t not in self.always(rows)] for rows in layer] for layer in kept]
