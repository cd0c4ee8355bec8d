"""The processes of one launch: `accelerate launch`, `torchrun` and MPI start one command many times, anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from .extras import require

__all__ = ["Processes", "launched"]

_T = TypeVar("_T")

# How many processes there are, by launcher: torchrun and accelerate, then those of MPI that accelerate reads.
_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# Nobody waits for long but at the end, where one process may have hours left: a run ends when its last example does.
_PATIENCE = timedelta(weeks=52)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """This process, `rank` of `size`, and `local_rank` of the `local_size` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes what belongs to all, and prints."""
        return self.rank == 0

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            torch.distributed.barrier()

    def total(self, count: int) -> int:
        """The sum of all processes' counts; every process has to ask."""
        if self.size == 1:
            return count
        summed = torch.tensor(count)
        torch.distributed.all_reduce(summed)
        return int(summed)

    def leaders(self, value: _T) -> _T:
        """What the leading process gave; every process has to ask."""
        if self.size == 1:
            return value
        shared = [value]
        torch.distributed.broadcast_object_list(shared)
        return shared[0]

    def device(self, asked: str) -> str:
        """The device of this process: "cuda" is its own card."""
        if asked != "cuda" or self.size == 1:
            return asked
        return f"cuda:{self.local_rank % max(1, torch.cuda.device_count())}"


@contextmanager
def launched() -> Iterator[Processes]:
    """Join the other processes of this launch; without a launcher, or with one process, there is nothing to join.

    They meet on CPUs (gloo), whatever the model runs on: all they exchange is a word at the beginning and at the end.

    Raises:
        ConfigError: accelerate is not installed.
    """
    if max(int(os.environ.get(name, "1")) for name in _SIZE_NAMES) <= 1:
        yield Processes()
        return
    require("accelerate", "A run of several processes")
    from accelerate import PartialState

    state = PartialState(cpu=True, timeout=_PATIENCE)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
    try:
        yield Processes(
            rank=state.process_index,
            size=state.num_processes,
            local_rank=state.local_process_index,
            local_size=local_size,
        )
    finally:
        state.destroy_process_group()
