"""How many rows hold most of a head's attention, in the mean over prompts: what ZigZagKV measures on each prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...allocation import minimum_rows_for_mass
from ...profiles import Profile
from ..model_loading import LoadedModel
from ..prompting import PromptEncoder
from ..tasks.haystack import Haystack
from .attention import Reader
from .plan import Plan, check_model, needle_task, profile_of

__all__ = ["calibrate_zigzagkv"]


def calibrate_zigzagkv(
    loaded: LoadedModel,
    haystack: Haystack,
    plan: Plan,
    *,
    window: int = 32,
    mass: float = 0.9,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure MBA per (layer, query head): the fewest rows that hold `mass` of the last `window` queries' attention.

    The profile's `layers_L` is LMBA in the mean over prompts. `ZigZagKVCache` measures every prompt itself and reads no
    profile; this one shows how unequal the layers of a checkpoint are.

    Raises:
        ConfigError: a length is too small, or `mass` is no share.
        UnsupportedModelError: the family is not supported, or has a sliding window.
    """
    check_model(loaded)
    encoder, task = PromptEncoder(loaded.tokenizer), needle_task(haystack, plan)
    measured = []
    for example in plan.prompts(task, encoder):
        prompt = encoder.encode(example).token_ids
        _, attention_LQWN = Reader(loaded.model, prompt[:-window]).feed(prompt[-window:])
        measured.append(minimum_rows_for_mass(attention_LQWN.mean(2), mass).double())
        least, most = (float(measured[-1].mean(1).aminmax()[i]) for i in (0, 1))
        say(f"prompt {len(measured)}, {len(prompt)} tokens: {least:.0f} to {most:.0f} rows a layer")
    facts = {"prompts": len(measured), "window": window, "mass": mass}
    return profile_of("zigzagkv", loaded, encoder, task, facts, torch.stack(measured).mean(0), plan)
