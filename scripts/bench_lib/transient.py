"""The transient of H2O's evidence: does it stay flat when the prompt is twice as long?

Method: one layer's prompt attention with its evidence, exactly as a prefill runs it, on random queries, keys and values
of the model's shape in fp32 on the CPU. The profiler reports every allocation and release of tensor memory in order;
the peak is the largest running sum. The output, which attention without evidence allocates as well, is taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_kvpolicy.compat import mask_rule
from hf_kvpolicy.engine.evidence_blocks import SegmentQueries, attend_queries
from hf_kvpolicy.engine.visibility import Visibility
from hf_kvpolicy.evidence import CumulativeAttention
from hf_kvpolicy.geometry import CacheGeometry
from hf_kvpolicy.masks import MaskRecord
from hf_kvpolicy.storage import RowMap

from .report import Measure

TRANSIENT_TARGET = 1.1


def tracked_peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of CPU tensors that `work` held at once, beyond those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def evidence_transient_bytes(geometry: CacheGeometry, tokens: int) -> int:
    """Peak bytes of one layer's evidence over a prompt of `tokens`, without the attention output."""
    torch.manual_seed(0)
    dim, heads = geometry.key_dim, geometry.num_kv_heads
    query = torch.randn(1, geometry.num_query_heads, tokens, dim)
    keys, values = torch.randn(1, heads, tokens, dim), torch.randn(1, heads, tokens, dim)
    positions = torch.arange(tokens, dtype=torch.int32)[None]
    rows = RowMap(
        columns_BMW=positions[None],
        tokens_BMW=positions[None],
        live_BMW=torch.ones((1, 1, tokens), dtype=torch.bool),
        ordered=True,
    )
    rule = MaskRecord("sdpa", {"mask_function": mask_rule(None)})
    queries = SegmentQueries(
        layer=0,
        queries_BQTD=query,
        columns_BT=positions,
        query_tokens_BT=positions.long(),
        real_BT=None,
        clock_BT=torch.zeros_like(positions),
        keys_BSND=keys,
        view=rows,
        visibility=Visibility(record=rule, columns_after=tokens, dense=True, changed_mask_BF=None),
        scaling=dim**-0.5,
    )
    evidence = CumulativeAttention()

    def work() -> None:
        states = torch.zeros((1, heads, tokens, evidence.channels))
        attend_queries(evidence, "sum", states, queries, values)

    output_bytes = 4 * geometry.num_query_heads * tokens * dim
    return tracked_peak_bytes(work) - output_bytes


def transient_measure(model: Any, short: int, long: int) -> Measure:
    """Peak of the evidence at `long` tokens over that at `short` tokens."""
    geometry = CacheGeometry.from_config(model.config)
    peaks = {tokens: evidence_transient_bytes(geometry, tokens) for tokens in (short, long)}
    name = f"h2o, {long} tokens / {short} tokens, one layer"
    details = {f"at {tokens}": peak for tokens, peak in peaks.items()}
    return Measure("evidence transient", name, peaks[long] / peaks[short], "<=", TRANSIENT_TARGET, details)
