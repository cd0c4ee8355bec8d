"""What a calibration asks for, and what every profile records about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ...attach import unwrap
from ...errors import ConfigError, UnsupportedModelError, did_you_mean
from ...fingerprint import weights_fingerprint
from ...geometry import CacheGeometry, text_config
from ...profiles import Profile
from ...registry import model_patch
from ..environment import package_versions
from ..model_loading import LoadedModel
from ..prompting import PromptEncoder
from ..tasks.base import Example, ExampleRequest
from ..tasks.haystack import Haystack
from ..tasks.needle import NeedleTask

__all__ = ["PROBES", "Plan"]

PROBES = ("reasoning", "retrieval")
_SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Prompts of a calibration: needles at every depth of every length."""

    probe: str = "reasoning"
    # Tokens of a prompt and its answer.
    lengths: tuple[int, ...] = (500, 750, 1000)
    # Per length, spread evenly over the depths.
    examples: int = 10
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    # Needles with other keys in the same text.
    distractors: int = 3
    max_new_tokens: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse an unknown probe.

        Raises:
            ConfigError: with the closest known one.
        """
        if self.probe not in PROBES:
            raise ConfigError(
                f"The probe {self.probe!r} is unknown; there are {', '.join(PROBES)}.{did_you_mean(self.probe, PROBES)}"
            )

    def prompts(self, task: NeedleTask, encoder: PromptEncoder) -> Iterator[Example]:
        """Yield the examples of every length.

        Raises:
            ConfigError: a length is too small for the question, or the examples do not divide over the depths.
        """
        for length in self.lengths:
            request = ExampleRequest(
                length_tokens=length,
                depths=self.depths,
                num_examples=self.examples,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
            )
            yield from task.examples(request, encoder)


def needle_task(haystack: Haystack, plan: Plan) -> NeedleTask:
    """Return the task whose prompts a plan asks for."""
    return NeedleTask(name="calibration", haystack=haystack, num_distractors=plan.distractors)


def check_model(loaded: LoadedModel) -> CacheGeometry:
    """Return the geometry of a model that can be calibrated.

    Raises:
        UnsupportedModelError: the family has no patch, or layers see a window only.
    """
    config = text_config(unwrap(loaded.model).config)
    model_patch(config)
    geometry = CacheGeometry.from_config(config)
    if geometry.foreign_layers or any(window is not None for window in geometry.window_tokens):
        raise UnsupportedModelError(
            f"{loaded.name!r} has layers with a sliding window, whose attention does not reach a needle that lies "
            "further back. Profiles are measured on models with full attention."
        )
    return geometry


def profile_of(
    kind: str,
    loaded: LoadedModel,
    encoder: PromptEncoder,
    task: NeedleTask,
    measurement: dict[str, Any],
    mean_LQ: Tensor,
    plan: Plan,
) -> Profile:
    """Return the record of a measurement; numbers are rounded to six significant digits."""
    inner = unwrap(loaded.model)
    config = text_config(inner.config)
    asked = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(plan).items()}
    return Profile(
        kind=kind,
        model=loaded.name,
        weights_sha256=weights_fingerprint(model_patch(config).decoder(inner)),
        tokenizer_sha256=encoder.tokenizer_sha256,
        data=task.provenance,
        measurement={**asked, **measurement, "dtype": str(inner.dtype).removeprefix("torch.")},
        versions=package_versions(),
        num_kv_heads=CacheGeometry.from_config(config).num_kv_heads,
        query_heads_LQ=tuple(_rounded(layer) for layer in mean_LQ.tolist()),
    )


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{number:.{_SIGNIFICANT_DIGITS}g}") for number in numbers)
