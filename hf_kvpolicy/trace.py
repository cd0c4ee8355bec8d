"""Drawing what a policy does: which positions it keeps, step by step, on a tiny random model (nothing is loaded)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .compat import cache_argument
from .config import make_cache, policy_options
from .errors import ConfigError
from .registry import policy_class

__all__ = ["TraceRow", "describe", "draw", "headline", "paper", "save_picture", "trace"]

_KEPT, _DROPPED, _UNSEEN = "█", "·", " "
_COLOURS = {"not fed yet": "#ffffff", "dropped": "#dde3e8", "kept": "#1f6f9f"}
_PROMPT_COLOUR = "#d1495b"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """What one layer and head holds after so many tokens."""

    tokens: int
    positions: tuple[int, ...]


def headline(policy: str) -> str:
    """Return the first line of a policy file's documentation."""
    document = inspect.getdoc(inspect.getmodule(policy_class(policy))) or ""
    return document.splitlines()[0] if document else ""


def paper(policy: str) -> str:
    """Return the identifier of the paper that a policy file cites first, such as 'arXiv 2404.14469', or ''."""
    document = inspect.getdoc(inspect.getmodule(policy_class(policy))) or ""
    cited = re.search(r"arXiv \d{4}\.\d{4,5}", document)
    return cited[0] if cited else ""


def describe(policy: str) -> str:
    """Return a policy's documentation (paper, equations, deviations) and its options with their defaults."""
    cls = policy_class(policy)
    document = inspect.getdoc(inspect.getmodule(cls)) or ""
    parameters = inspect.signature(cls).parameters
    lines = [document, "", f"{cls.__name__}(model, ...)"]
    for name in policy_options(policy):
        default = parameters[name].default
        lines.append(f"  {name} = {'(required)' if default is inspect.Parameter.empty else repr(default)}")
    return "\n".join(lines)


def trace(
    policy: str, *, budget: int, prompt_tokens: int, decode_tokens: int, options: Mapping[str, Any], layer: int = 0
) -> list[list[TraceRow]]:
    """Run a policy on a tiny random Llama; return, per KV head, what is held after the prompt and each token.

    Raises:
        KVPolicyError: the options do not fit the policy.
    """
    model = _tiny_model()
    given = dict(options)
    if "budget" in policy_options(policy):
        given.setdefault("budget", budget)
    for newest in {"window", "recent"} & set(policy_options(policy)):
        given.setdefault(newest, max(1, budget // 3))
    cache = make_cache(policy, model, **given)
    ids = torch.randint(1, 60, (1, prompt_tokens + decode_tokens), generator=torch.Generator().manual_seed(0))
    rows: list[list[TraceRow]] = [[] for _ in range(cache.geometry.num_kv_heads)]
    chunks = [ids[:, :prompt_tokens], *(ids[:, i : i + 1] for i in range(prompt_tokens, ids.shape[1]))]
    with torch.inference_mode():
        for chunk in chunks:
            model(chunk, **{cache_argument(): cache}, use_cache=True, logits_to_keep=1)
            for head, tokens in enumerate(cache.positions(layer)[: len(rows)]):
                rows[head].append(TraceRow(tokens=cache.get_seq_length(), positions=tuple(tokens.tolist())))
    return rows


def draw(heads: Sequence[Sequence[TraceRow]]) -> str:
    """Draw a trace as text: a line a step, a column a token position, one block per KV head."""
    total = heads[0][-1].tokens
    lines = []
    for title, rows in _blocks(heads):
        lines.append(f"\n{title}; {_KEPT} kept")
        for row in rows:
            kept = set(row.positions)
            cells = (_KEPT if p in kept else _DROPPED if p < row.tokens else _UNSEEN for p in range(total))
            lines.append(f"{row.tokens:>5} tokens  {''.join(cells)}  {len(kept)} rows")
    return "\n".join(lines)


def save_picture(heads: Sequence[Sequence[TraceRow]], path: Path, title: str) -> None:
    """Draw a trace as a PNG: a line a step, a column a token position, one panel per KV head. Needs matplotlib.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    blocks, steps, total = _blocks(heads), len(heads[0]), heads[0][-1].tokens
    width = min(14.0, max(7.0, 2.0 + total * 0.2))
    height = min(9.0, max(1.6, 0.8 + steps * 0.2))
    figure = Figure(figsize=(width, height * len(blocks) + 0.9), layout="constrained")
    colours = ListedColormap(list(_COLOURS.values()))
    for panel, (name, rows) in zip(figure.subplots(len(blocks), 1, squeeze=False)[:, 0], blocks, strict=True):
        panel.pcolormesh(
            _edges(total), _edges(steps), _cells(rows, total), cmap=colours, vmin=0, vmax=2,
            edgecolor="white", linewidth=0.8 if total <= 100 and steps <= 100 else 0.0,
        )  # fmt: skip
        _label(panel, name, rows, total)
    legend = [Patch(facecolor=colour, edgecolor="#adb5bd", label=label) for label, colour in _COLOURS.items()][1:]
    figure.legend(handles=legend, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            FigureCanvasAgg(figure).print_png(file)
    except OSError as error:
        raise ConfigError(f"The picture {str(path)!r} cannot be written: {error}.") from error


def _blocks(heads: Sequence[Sequence[TraceRow]]) -> list[tuple[str, Sequence[TraceRow]]]:
    """One titled block where all heads agree, else one a head."""
    suffix = "of layer 0, random weights"
    if all(head == heads[0] for head in heads):
        return [(f"all KV heads {suffix}", heads[0])]
    return [(f"KV head {number} {suffix}", rows) for number, rows in enumerate(heads)]


def _edges(count: int) -> list[float]:
    """Cell edges such that each cell's middle is its number."""
    return [i - 0.5 for i in range(count + 1)]


def _cells(rows: Sequence[TraceRow], total: int) -> list[list[int]]:
    """Colour numbers, [steps, positions]."""
    cells = [[1] * row.tokens + [0] * (total - row.tokens) for row in rows]
    for line, row in zip(cells, rows, strict=True):
        for position in row.positions:
            line[position] = 2
    return cells


def _label(panel: Any, name: str, rows: Sequence[TraceRow], total: int) -> None:
    """Title, axes, the prompt's end, and how many rows each step leaves (every few steps where there are many)."""
    prompt, every = rows[0].tokens, -(-len(rows) // 24)
    ticks = range(0, len(rows), every)
    panel.set_title(name, loc="left", fontsize=10)
    panel.set(xlim=(-0.5, total - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="token position", ylabel="tokens fed")
    panel.set_yticks(list(ticks), [str(rows[i].tokens) for i in ticks], fontsize=8)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    for i in ticks:
        panel.annotate(
            f"{len(rows[i].positions)} rows", (1.0, i), xycoords=("axes fraction", "data"), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8, color="#495057",
        )  # fmt: skip
    if prompt < total:
        panel.axvline(prompt - 0.5, color=_PROMPT_COLOUR, linewidth=1.4)
        panel.annotate(
            "end of prompt", (prompt - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=8, color=_PROMPT_COLOUR,
        )  # fmt: skip


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()
