"""Who runs a sweep: this process, all processes of a launch, or the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, did_you_mean
from .sweep import SweepConfig

__all__ = ["EVERYTHING", "Execution", "execute"]

_ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How much of a sweep is run, and by whom.

    `part` (i, n) is the i-th of n equal parts of every cell's examples, i from 1; None is all, or what a launcher
    leaves to this process. `workers` counts those of the engine "ray"; None takes all that the cluster has room for.
    """

    limit: int | None = None
    part: tuple[int, int] | None = None
    allow_mixed: bool = False
    engine: str = "local"
    workers: int | None = None

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ConfigError: an unknown engine, workers without one that has them, or a part of what is split already.
        """
        if self.engine not in _ENGINES:
            raise ConfigError(
                f"There is no engine {self.engine!r}; there are {', '.join(_ENGINES)}."
                f"{did_you_mean(self.engine, _ENGINES)}"
            )
        if self.workers is not None and self.engine != "ray":
            raise ConfigError(
                "--workers counts the workers of a Ray cluster. Add --engine ray; on one machine without Ray, start "
                "`torchrun --nproc-per-node N -m hf_kvpolicy eval run` instead."
            )
        if self.part is not None and self.engine == "ray":
            raise ConfigError("Ray splits the examples by itself. Leave out --part, or --engine ray.")


EVERYTHING = Execution()


def execute(config: SweepConfig, out: Path, how: Execution, *, say: Callable[[str], None]) -> int:
    """Run a sweep into `out` and return how many rows failed.

    Raises:
        ConfigError: the model, the folder, or the cluster is refused.
        typer.Exit: in a process that follows: the leading one goes on, and its status tells of all.
    """
    if how.engine == "ray":
        from .ray_engine import run_on_ray

        outcome = run_on_ray(config, out, how, say=say)
        say(f"{outcome}: {out}")
        return outcome.failed
    return _run_here(config, out, how, say)


def _run_here(config: SweepConfig, out: Path, how: Execution, say: Callable[[str], None]) -> int:
    """Run this process's part; the leading one of a launch returns the failed rows of all when the last has ended."""
    import typer

    from .engine import EngineBuilder
    from .feasible import check_lengths
    from .model_loading import load_for_command
    from .processes import launched
    from .run_directory import RunDirectory
    from .runner import SweepWorker, run_part

    with launched() as processes:
        if processes.size > 1 and how.part is not None:
            raise ConfigError("A launcher splits the examples among its processes. Leave out --part, or the launcher.")
        part = how.part or (processes.rank + 1, processes.size)
        # A folder that is named after the hour is the leading one's.
        out = processes.leaders(out)
        loaded = load_for_command(config.model.name, config.model.dtype, processes.device(config.model.device))
        check_lengths(config, loaded.model.config)
        directory = RunDirectory(out, rank=part[0] - 1, follows=not processes.leads)
        if not processes.leads:
            processes.wait()
        with directory.claimed():
            worker = SweepWorker(
                config,
                loaded,
                directory,
                EngineBuilder(loaded.model, loaded.tokenizer),
                allow_mixed=how.allow_mixed,
                jobs=processes.local_size,
            )
            if processes.leads:
                processes.wait()
            outcome = run_part(worker, limit=how.limit, part=part, say=say if processes.leads else lambda line: None)
        say(f"{f'process {part[0]} of {part[1]}: ' if processes.size > 1 else ''}{outcome}: {out}")
        failed = processes.total(outcome.failed)
        if not processes.leads:
            # With another status the launcher would end the leading process, which may have scores to print.
            raise typer.Exit(0)
        return failed
