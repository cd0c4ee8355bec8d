"""Running a decoder's layers several times in one forward: a forward bound on one model's decoder.

The class's own forward runs each time, over all of the call's tokens or some of them; the forward in flight says which
ones, and how often. In a forward of any other cache, or of none, it runs once, as ever. `own_attention.unbind` removes
it. No state is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from .errors import UnsupportedModelError
from .frame import LayerRun, active_cache
from .graphs import outside_graphs
from .own_attention import BoundForward, place, refuse_replaced
from .registry import ModelPatch

__all__ = ["refuse_unrepeatable", "repeat_layers"]


def refuse_unrepeatable(patch: ModelPatch, decoder: torch.nn.Module) -> None:
    """Refuse a decoder that is not known to give the same when it is run again, or whose forward was replaced.

    Raises:
        UnsupportedModelError: it is of such a family, or somebody else replaced its forward.
    """
    if not patch.repeats_layers:
        raise UnsupportedModelError(
            f"This checkpoint was trained with layers that are run several times over a prompt, but of the family of "
            f"{type(decoder).__name__} it is not known that its decoder can be. Use a Llama or Mistral checkpoint, or "
            "let the family's patch say so (repeats_layers), see CONTRIBUTING.md."
        )
    refuse_replaced([decoder])


def repeat_layers(decoder: torch.nn.Module, backend: str) -> None:
    """Let the forward in flight say how often a decoder's layers run. Idempotent."""
    place(decoder, _RepeatedForward(backend))


class _RepeatedForward(BoundForward):
    """A decoder's forward, as often as the forward in flight asks."""

    @outside_graphs
    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward once, or once a run."""
        own, cache = type(module).forward, active_cache()
        step = None if cache is None else cache.in_flight
        runs = None if step is None else step.layer_runs()
        if cache is None or runs is None:
            return own(module, *args, **kwargs)
        arguments = {**dict(zip(_parameters(own)[1:], args, strict=False)), **kwargs}
        as_tuple = arguments.pop("return_dict", getattr(module.config, "return_dict", True)) is False
        if arguments.get("position_ids") is None:
            arguments["position_ids"] = _positions(arguments, cache.get_seq_length())
        output = _joined(list(_outputs(own, module, arguments, runs)))
        return output.to_tuple() if as_tuple else output


def _outputs(own: Any, module: Any, arguments: Mapping[str, Any], runs: Iterator[LayerRun]) -> Iterator[Any]:
    for run in runs:
        with torch.set_grad_enabled(run.is_output and torch.is_grad_enabled()):
            output = own(module, **_of_tokens(arguments, run.tokens), return_dict=True)
        if run.is_output:
            yield output


def _of_tokens(arguments: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """Return a call's arguments for some of its tokens, behind which the others have not come yet."""
    found = dict(arguments)
    length = arguments["position_ids"].shape[1]
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if found.get(name) is not None:
            found[name] = found[name][:, tokens]
    mask = found.get("attention_mask")
    if mask is not None:
        found["attention_mask"] = mask[:, : mask.shape[1] - length + tokens.stop]
    return found


def _positions(arguments: Mapping[str, Any], fed: int) -> torch.Tensor:
    given = arguments.get("input_ids")
    given = arguments["inputs_embeds"] if given is None else given
    return torch.arange(fed, fed + given.shape[1], device=given.device)[None]


def _joined(outputs: list[Any]) -> Any:
    """Return the last output, over the tokens of all."""
    joined = outputs[-1]
    if len(outputs) > 1:
        joined["last_hidden_state"] = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        if joined.get("hidden_states") is not None:
            layers = zip(*(output.hidden_states for output in outputs), strict=True)
            joined["hidden_states"] = tuple(torch.cat(layer, dim=1) for layer in layers)
    return joined


@lru_cache(maxsize=32)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)
