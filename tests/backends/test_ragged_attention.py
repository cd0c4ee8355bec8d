"""Attention over owners of unequal length is exact, whichever implementation reads the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_kvpolicy import backends
from hf_kvpolicy.errors import BackendAdmissionError
from hf_kvpolicy.ragged_attention import admit_ragged, attend_ragged, choose, flash_varlen, owners, ragged_backend
from hf_kvpolicy.ragged_attention.owners import attend_owners, buckets
from hf_kvpolicy.ragged_attention.reference import attend_eager, attend_reference
from hf_kvpolicy.storage import RaggedView

from ._ragged import ragged_masks, ragged_query, ragged_view, written_out

SCALING = 0.3
PATHS: list[Callable[..., Tensor]] = [attend_reference, attend_eager, attend_owners]
# Batch rows x heads; a row of pads only has no rows at all.
LENGTHS = [((5, 1, 9), 3), ((4, 4, 4, 7, 7, 2), 2), ((0, 0, 3, 6), 2), ((6, 6, 6), 1), ((3,), 1), ((0, 0), 1)]


def _close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("lengths", "heads"), LENGTHS)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_every_path_equals_the_written_out_one(
    path: Callable[..., Tensor], lengths: tuple[int, ...], heads: int, group: int, tokens: int, masked: bool
) -> None:
    """NaN lies in every slot that no owner names."""
    view = ragged_view(lengths, heads)
    query = ragged_query(view, group, tokens)
    masks = ragged_masks(view, tokens) if masked else None
    found = path(query, view, masks, scaling=SCALING)
    assert found.shape == (view.batch, tokens, heads * group, 8)
    assert found.is_contiguous()
    _close(found, written_out(query, view, masks, SCALING))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_layout_of_one_token_changes_nothing(threads: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    view = ragged_view((5, 1, 9, 9, 0, 12), 3)
    query = ragged_query(view, group, 1)
    for masks in (None, ragged_masks(view, 1)):
        _close(attend_owners(query, view, masks, scaling=SCALING), written_out(query, view, masks, SCALING))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_values_may_have_another_dimension(path: Callable[..., Tensor], tokens: int) -> None:
    view = ragged_view((5, 5, 2, 7), 2, key_dim=8, value_dim=6)
    query = ragged_query(view, 3, tokens)
    for masks in (None, ragged_masks(view, tokens)):
        _close(path(query, view, masks, scaling=SCALING), written_out(query, view, masks, SCALING))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_half_precision(path: Callable[..., Tensor], tokens: int) -> None:
    view = ragged_view((40, 3, 17), 3, dtype=torch.bfloat16)
    query = ragged_query(view, 3, tokens)
    found = path(query, view, None, scaling=SCALING)
    assert found.dtype == torch.bfloat16
    _close(found, written_out(query, view, None, SCALING), 3e-2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [(4, 6), (5, 5)])
def test_a_query_that_sees_nothing_gets_zeros(path: Callable[..., Tensor], lengths: tuple[int, ...]) -> None:
    view = ragged_view(lengths, 2)
    query, masks = ragged_query(view, 2, 3), ragged_masks(view, 3)
    masks[1][1] = False
    found = path(query, view, masks, scaling=SCALING)
    assert not found[0, 1, 2:].any()
    _close(found, written_out(query, view, masks, SCALING))


@pytest.mark.parametrize("path", PATHS)
def test_one_owner_may_go_without_a_mask(path: Callable[..., Tensor]) -> None:
    view = ragged_view((6, 6), 2)
    query = ragged_query(view, 2, 3)
    masks: list[Tensor | None] = [None, ragged_masks(view, 3)[1]]
    _close(path(query, view, masks, scaling=SCALING), written_out(query, view, masks, SCALING))


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 3]),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_lengths_and_gaps(batch: int, heads: int, group: int, tokens: int, data: st.DataObject) -> None:
    count = batch * heads
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    view = ragged_view(lengths, heads, gaps=gaps)
    query = ragged_query(view, group, tokens)
    masks = ragged_masks(view, tokens) if data.draw(st.booleans()) else None
    wanted = attend_reference(query, view, masks, scaling=SCALING)
    _close(wanted, written_out(query, view, masks, SCALING))
    _close(attend_owners(query, view, masks, scaling=SCALING), wanted)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_a_rectangle_is_the_dense_attention(tokens: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ragged_view((7,) * 6, 3, gaps=(2,) * 6)
    query = ragged_query(view, 3, tokens)
    masks = ragged_masks(view, tokens) if masked else None
    rectangle = view.rectangle()
    assert rectangle is not None
    mask = None if masks is None else torch.stack(masks).view(2, 3, tokens, 7)
    dense = backends.grouped_attention(query, *rectangle, mask, scaling=SCALING)
    seen = _spy(monkeypatch)
    found = attend_owners(query, view, masks, scaling=SCALING)
    assert [keys.data_ptr() for keys, _ in seen] == [view.keys_ND[2].data_ptr()], "one call, on the stored rows"
    torch.testing.assert_close(found, dense, atol=0, rtol=0)
    monkeypatch.setattr(RaggedView, "rectangle", lambda self: None)
    monkeypatch.setattr(owners, "buckets", lambda view: [])
    _close(attend_owners(query, view, masks, scaling=SCALING), dense)


def test_equal_owners_share_a_call_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch rows of the same lengths per head lie evenly spaced: one call a head."""
    view = ragged_view((5, 2, 9) * 4, 3)
    query = ragged_query(view, 3, 1)
    seen = _spy(monkeypatch)
    found = attend_owners(query, view, None, scaling=SCALING)
    assert sorted(keys.shape for keys, _ in seen) == [(1, 4, 2, 8), (1, 4, 5, 8), (1, 4, 9, 8)]
    storages = {view.keys_ND.untyped_storage().data_ptr(), view.values_ND.untyped_storage().data_ptr()}
    assert {part.untyped_storage().data_ptr() for pair in seen for part in pair} == storages
    _close(found, written_out(query, view, None, SCALING))


def _spy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    seen: list[tuple[Tensor, Tensor]] = []
    original = owners.grouped_attention

    def spied(query: Tensor, keys: Tensor, values: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        seen.append((keys, values))
        return original(query, keys, values, mask, **kwargs)

    monkeypatch.setattr(owners, "grouped_attention", spied)
    return seen


@pytest.mark.parametrize(
    ("lengths", "gaps", "wanted"),
    [
        ((3, 3, 3), (0, 1, 1), [[0, 1, 2]]),
        ((3, 3, 3), (0, 1, 2), [[0, 1], [2]]),
        ((3, 5, 3, 5), (0, 0, 0, 0), [[0, 2], [1, 3]]),
        ((1, 2, 3), (0, 0, 0), [[0], [1], [2]]),
    ],
)
def test_buckets_are_equally_long_and_evenly_spaced(
    lengths: Sequence[int], gaps: Sequence[int], wanted: list[list[int]]
) -> None:
    assert buckets(ragged_view(lengths, 1, gaps=gaps)) == wanted


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("lengths", [(6, 4, 9), (6, 6, 6)])
def test_causal_means_the_last_rows_are_the_queries_own(backend: str, tokens: int, lengths: tuple[int, ...]) -> None:
    view = ragged_view(lengths, 3)
    query = ragged_query(view, 2, tokens)
    masks = [torch.tensor([[n <= rows - tokens + t for n in range(rows)] for t in range(tokens)]) for rows in lengths]
    found = attend_ragged(backend, query, view, None, scaling=SCALING, causal=True)
    _close(found, written_out(query, view, masks, SCALING))


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2", "flash_attention_3"])
def test_masks_that_are_all_none_mask_nothing(backend: str) -> None:
    view = ragged_view((6, 4), 2)
    query = ragged_query(view, 2, 1)
    found = attend_ragged(backend, query, view, [None, None], scaling=SCALING)
    _close(found, written_out(query, view, None, SCALING))


def test_dropout_reaches_every_owner() -> None:
    view = ragged_view((40, 30, 20), 3)
    query = ragged_query(view, 2, 1)
    for backend in ("sdpa", "eager"):
        kept = attend_ragged(backend, query, view, None, scaling=SCALING)
        dropped = attend_ragged(backend, query, view, None, scaling=SCALING, dropout=0.5)
        changed = (kept - dropped).abs().amax(-1).flatten()
        assert (changed > 1e-4).all()


@pytest.mark.parametrize("backend", ["flex_attention", "paged|sdpa"])
def test_what_cannot_read_ragged_rows_is_refused(backend: str) -> None:
    view = ragged_view((6, 4), 2)
    with pytest.raises(BackendAdmissionError, match=r"attach\(model, backend=\"sdpa\"\)"):
        admit_ragged(backend)
    with pytest.raises(BackendAdmissionError, match="rows of unequal number"):
        attend_ragged(backend, ragged_query(view, 2, 1), view, None, scaling=SCALING)


class _OnCuda:
    """A query as the choice sees it, on a device that is not here."""

    def __init__(self, tokens: int = 1, dtype: torch.dtype = torch.float16, requires_grad: bool = False) -> None:
        self.shape, self.dtype, self.requires_grad = (1, 4, tokens, 8), dtype, requires_grad
        self.device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backend", "query", "gaps", "options", "wanted"),
    [
        ("sdpa", _OnCuda(), (1, 1), {}, "triton"),
        ("sdpa", _OnCuda(dtype=torch.float32), (0, 0), {}, "triton"),
        ("sdpa", _OnCuda(tokens=3), (0, 0), {}, "owners"),
        ("sdpa", _OnCuda(), (0, 0), {"masked": True}, "owners"),
        ("sdpa", _OnCuda(), (0, 0), {"dropout": 0.1}, "owners"),
        ("sdpa", _OnCuda(requires_grad=True), (0, 0), {}, "owners"),
        ("sdpa", _OnCuda(dtype=torch.float64), (0, 0), {}, "owners"),
        ("eager", _OnCuda(), (0, 0), {}, "eager"),
        ("flash_attention_2", _OnCuda(), (3, 0), {}, "flash_varlen"),
        ("flash_attention_3", _OnCuda(tokens=3), (0, 0), {}, "flash_varlen"),
        ("flash_attention_2", _OnCuda(), (0, 1), {}, "triton"),
        ("flash_attention_2", _OnCuda(tokens=3), (0, 1), {}, "owners"),
        ("flash_attention_2", _OnCuda(dtype=torch.float32), (0, 0), {}, "triton"),
        ("flash_attention_2", _OnCuda(tokens=3), (0, 0), {"masked": True}, "owners"),
    ],
)
def test_the_choice_on_cuda(
    backend: str, query: Any, gaps: tuple[int, int], options: dict[str, Any], wanted: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(choose, "_triton_runs", lambda device: True)
    monkeypatch.setattr(flash_varlen, "varlen_function", lambda backend: print)
    view = ragged_view((6, 4), 2, gaps=gaps)
    assert ragged_backend(backend, query, view, **{"masked": False, **options}) == wanted


def test_without_triton_and_flash_owners_are_attended_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_triton_runs", lambda device: False)
    monkeypatch.setattr(flash_varlen, "varlen_function", lambda backend: None)
    query: Any = _OnCuda()
    for backend in ("sdpa", "flash_attention_2"):
        assert ragged_backend(backend, query, ragged_view((6, 4), 2, gaps=(0, 0)), masked=False) == "owners"


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_statistics", [False, True])
def test_flash_varlen_is_given_one_sequence_per_owner(
    tokens: int, causal: bool, with_statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that follows flash-attn's documentation, sequence by sequence, on the stored rows themselves."""
    view = ragged_view((5, 3, 8, 4), 2, gaps=(2, 0, 0, 0))
    query = ragged_query(view, 3, tokens)

    def varlen(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        assert k.data_ptr() == view.keys_ND[2].data_ptr()
        assert v.data_ptr() == view.values_ND[2].data_ptr()
        assert (q.shape[1:], k.shape[1:]) == ((3, 8), (1, 8))
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (tokens, 8)
        assert given["cu_seqlens_q"].dtype == given["cu_seqlens_k"].dtype == torch.int32
        output = torch.empty_like(q)
        ends_q, ends_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
        for owner in range(len(ends_q) - 1):
            rows_q, rows_k = slice(*ends_q[owner : owner + 2]), slice(*ends_k[owner : owner + 2])
            logits = torch.einsum("tgd,nd->gtn", q[rows_q], k[rows_k, 0]) * given["softmax_scale"]
            if given["causal"]:
                seen = torch.ones(logits.shape[1:], dtype=torch.bool).tril(logits.shape[2] - logits.shape[1])
                logits = logits.masked_fill(~seen, float("-inf"))
            output[rows_q] = torch.einsum("gtn,nd->tgd", logits.softmax(-1), v[rows_k, 0])
        return (output, torch.zeros(1)) if with_statistics else output

    monkeypatch.setattr(flash_varlen, "varlen_function", lambda backend: varlen)
    found = flash_varlen.attend_flash_varlen("flash_attention_2", query, view, scaling=SCALING, causal=causal)
    _close(found, attend_ragged("sdpa", query, view, None, scaling=SCALING, causal=causal))


def test_flash_admits_only_what_it_reads_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_varlen, "varlen_function", lambda backend: print)
    query: Any = _OnCuda()
    packed = ragged_view((5, 3), 2, gaps=(2, 0))
    assert flash_varlen.flash_admits("flash_attention_2", query, packed)
    for view in (
        ragged_view((5, 3), 2, gaps=(0, 1)),
        ragged_view((5, 3), 2, gaps=(0, 0), key_dim=8, value_dim=16),
        ragged_view((5, 3), 2, gaps=(0, 0), key_dim=6),
        ragged_view((5, 3), 2, gaps=(0, 0), key_dim=264),
    ):
        assert not flash_varlen.flash_admits("flash_attention_2", query, view)
    assert not flash_varlen.flash_admits("flash_attention_2", torch.randn(1, 4, 1, 8).half(), packed), "not on CUDA"
