"""How far a run is: a line an example, with the running mean of every cell and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Listener", "Progress"]


class Listener(Protocol):
    """Hears of every new row of an example."""

    def scored(self, label: str, score: float) -> None:
        """A cell answered."""
        ...

    def failed(self, label: str, reason: str) -> None:
        """A cell failed, and is not run again."""
        ...

    def noted(self, note: str) -> None:
        """Something is to be known of a task point; may be told more than once."""
        ...


class Progress:
    """Says plain lines, which read the same on a terminal and in a log."""

    def __init__(self, say: Callable[[str], None], examples_per_point: Sequence[int]) -> None:
        """Args: where lines go, and how many examples this process runs at each task point."""
        self._say, self._counts = say, list(examples_per_point)
        self._started = time.perf_counter()
        self._scores: dict[str, list[float]] = {}
        self._noted: set[str] = set()
        self._point, self._title, self._here, self._ran_examples, self._ran_here = 0, "", 0, 0, False

    def begin(self, point: int, title: str) -> None:
        """A task point begins."""
        self._point, self._title, self._here, self._scores = point, title, 0, {}

    def scored(self, label: str, score: float) -> None:
        """A cell answered an example."""
        self._scores.setdefault(label, []).append(score)
        self._ran_here = True

    def failed(self, label: str, reason: str) -> None:
        """A cell failed, and is not run again."""
        self._say(f"{self._title}, {label}: {reason}")
        self._ran_here = True

    def noted(self, note: str) -> None:
        """Something is to be known of a task point; said once."""
        if note not in self._noted:
            self._say(f"warning: {note}")
        self._noted.add(note)

    def example_done(self) -> None:
        """Every cell has seen the example; nothing is said of one that was done before."""
        self._here += 1
        if not self._ran_here:
            return
        self._ran_here = False
        self._ran_examples += 1
        left = sum(self._counts[self._point + 1 :]) + self._counts[self._point] - self._here
        seconds = (time.perf_counter() - self._started) / self._ran_examples * left
        of = f"example {self._here} of {self._counts[self._point]}"
        self._say(f"{self._title}: {of}, about {_duration(seconds)} left")

    def end(self) -> None:
        """A task point ends: the mean score of each cell that ran."""
        for label, scores in self._scores.items():
            self._say(f"{self._title}, {label}: score {sum(scores) / len(scores):.2f} on {len(scores)} new")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 2 else f"{60 * minutes + rest} s"
