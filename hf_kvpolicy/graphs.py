"""What torch.compile must not trace: the engine decides by numbers on the host, which no graph can hold.

A traced forward leaves its graph at these functions and enters the next one behind them; what lies between, the model's
projections, norms and MLPs, is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["ONE_GRAPH", "outside_graphs"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

ONE_GRAPH = (
    "a model that is attached for policy caches cannot be one graph, because rows are chosen by numbers on the host: "
    "compile it without fullgraph=True, or compile parts such as its MLPs; for other caches call "
    "hf_kvpolicy.detach(model) first"
)


def outside_graphs(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Function decorator: run it, and all that it calls, outside of any graph. With fullgraph=True that is refused."""
    disabled = torch.compiler.disable(function, reason=ONE_GRAPH)  # type: ignore[no-untyped-call]
    return cast("Callable[_Arguments, _Result]", disabled)
