"""Which policy stands beside which press, with what options, and what no option can make alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# SnapKVPress has these as its defaults, and average pooling and the mean of a group without a choice.
WINDOW, KERNEL = 64, 5
VOTES = {"kernel_size": KERNEL, "pooling": "avg", "group": "mean", "on_append": "append"}
# A press falls back to equal layers where its top layer would keep less than the window: 12.8 of 128 rows here.
PYRAMID_WINDOW, PYRAMID_BETA = 8, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Press:
    """A press by its class; `wrapper` is a press around it, which takes no ratio of its own."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str | None = None
    wrapper_options: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    # Layers of unequal length have no common mask: the question is then fed token by token.
    one_token_at_a_time: bool = False
    # Whether the ratio is cut down to a whole number of rows; else a layer's own number is rounded.
    cuts_down: bool = True

    def ratio(self, tokens: int, rows: int) -> float:
        """The compression ratio at which `rows` of `tokens` stay."""
        # Half a row more: a ratio that falls short by a rounding error would lose a whole one.
        return 1.0 - (rows + 0.5 * self.cuts_down) / tokens

    def __str__(self) -> str:
        """The press as calls, without the ratio."""
        inner = call(self.name, self.options)
        return f"{call(self.wrapper, self.wrapper_options)} around {inner}" if self.wrapper else inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One policy beside one press, at one number of rows; without rows nothing is dropped."""

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    press: Press | None = None
    rows: int | None = None
    differences: str = "none"

    @property
    def key(self) -> str:
        """What names the pair in the files of a run."""
        return self.label if self.rows is None else f"{self.label} @ {self.rows}"


FULL = Contender(label="full", policy="full")


def contenders(budgets: Sequence[int]) -> Iterator[Contender]:
    """Every pair, the full caches first."""
    yield FULL
    for rows in budgets:
        yield from contenders_at(rows)


def contenders_at(rows: int) -> list[Contender]:
    snap = {"window_size": WINDOW, "kernel_size": KERNEL}
    adaptive = {"policy": "adakv", "rows": rows}
    return [
        Contender(
            label="snapkv",
            policy="snapkv",
            options={"window": WINDOW, **VOTES},
            press=Press(name="SnapKVPress", options=snap),
            rows=rows,
        ),
        Contender(
            label="pyramidkv",
            policy="pyramidkv",
            options={"window": PYRAMID_WINDOW, "beta": pyramid_beta(rows), **VOTES},
            press=Press(
                name="PyramidKVPress",
                options={"window_size": PYRAMID_WINDOW, "kernel_size": KERNEL, "beta": PYRAMID_BETA},
                one_token_at_a_time=True,
                cuts_down=False,
            ),
            rows=rows,
            differences="the press counts the window into its line: the same line has another beta. It rounds each "
            "layer by itself, we by largest remainder",
        ),
        Contender(
            label="streaming_llm",
            policy="streaming_llm",
            options={"sinks": 4, "positions": "original"},
            press=Press(name="StreamingLLMPress", options={"n_sink": 4}),
            rows=rows,
            differences="the press keeps every later token; we drop the oldest row for each, sinks aside",
        ),
        Contender(
            label="h2o(mean, no recent)",
            policy="h2o",
            options={"normalize": True, "recent_ratio": 0.0},
            press=Press(name="ObservedAttentionPress", attention="eager"),
            rows=rows,
            differences="not H2O: the mean attention per query that saw a row, and no newest rows. The press keeps "
            "every later token, we drop the lowest row for each: no policy of ours scores so and appends",
        ),
        Contender(
            label="adakv(fully adaptive)",
            options={"window": WINDOW, "alpha": 1.0, **VOTES},
            press=_adaptive_press(0.0),
            **adaptive,
        ),
        Contender(
            label="adakv",
            options={"window": WINDOW, "alpha": 0.8, **VOTES},
            press=_adaptive_press(0.2),
            **adaptive,
            differences="beside the window, every head of ours has 0.2 of an equal share and the rest by score. The "
            "press lets all rows compete and sees that no head keeps less than 0.2 of an equal share, its window "
            "counted: with 64 rows of that, never below 325 rows",
        ),
    ]


def pyramid_beta(rows: int) -> float:
    """Our beta for the press's line, which falls to rows / beta at the top with the window inside."""
    return (rows - PYRAMID_WINDOW) / (rows / PYRAMID_BETA - PYRAMID_WINDOW)


def call(name: str, options: Mapping[str, Any]) -> str:
    """A constructor call as text."""
    return f"{name}({', '.join(f'{key}={_text(value)}' for key, value in options.items())})"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _adaptive_press(safeguard: float) -> Press:
    return Press(
        name="SnapKVPress",
        options={"window_size": WINDOW, "kernel_size": KERNEL},
        wrapper="AdaKVPress",
        wrapper_options={"alpha_safeguard": safeguard},
    )
