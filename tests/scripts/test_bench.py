"""The bench's arithmetic: interleaving, ratios within a round, targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_lib import answer, merged, quantized
from bench_lib.curve import CONTROL, curve_measures, tenths
from bench_lib.memory import dynamic_cache_bytes, formula_bytes
from bench_lib.models import POLICIES, RAGGED, stock_twin
from bench_lib.report import Measure, print_report, write_json
from bench_lib.timing import Case, Contender, _ratio, decode_measures, interleaved, prefill_measures
from bench_lib.transient import evidence_transient_bytes, tracked_peak_bytes
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvpolicy.compat import cache_argument, mask_rule
from hf_kvpolicy.engine import evidence_blocks
from hf_kvpolicy.engine.ragged.prune import SeenByRecent
from hf_kvpolicy.engine.visibility import Visibility
from hf_kvpolicy.evidence import LayerObservation, RecentAttention, recent_attention
from hf_kvpolicy.geometry import CacheGeometry
from hf_kvpolicy.masks import MaskRecord
from hf_kvpolicy.storage import RowMap


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_rounds_rotate_and_the_first_is_not_counted() -> None:
    ran: list[str] = []

    def contender(name: str) -> Contender:
        def prepare() -> Callable[[], None]:
            return lambda: ran.append(name)

        return Contender(name, prepare)

    seconds = interleaved([contender("a"), contender("b"), contender("c")], rounds=2)
    assert "".join(ran) == "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is ten times slower in the second round; both sides are, so the ratio does not move.
    value, details = _ratio([1.1, 11.0, 1.1], [1.0, 10.0, 1.0], 1e3)
    assert value == pytest.approx(1.1)
    assert details["total"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("bound", "value", "met"),
    [
        ("<=", 1.05, True),
        ("<=", 1.0500001, False),
        ("<", 0.2, False),
        (">=", 0.6, True),
        ("==", 1.0, True),
        ("==", 1.0001, False),
    ],
)
def test_targets_are_read_unrounded(bound: str, value: float, met: bool) -> None:
    target = {"<=": 1.05, "<": 0.2, ">=": 0.6, "==": 1.0}[bound]
    assert Measure("group", "case", value, bound, target).met is met  # type: ignore[arg-type]


def test_formula_is_what_a_dynamic_cache_holds(model: LlamaForCausalLM) -> None:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.ones(3, 10, dtype=torch.long), **{cache_argument(): cache})
    assert dynamic_cache_bytes(cache) == formula_bytes(model, batch=3, rows=10)


def test_peak_counts_what_is_alive_at_once() -> None:
    mebibyte = 1 << 18  # fp32 elements

    def one_after_another() -> None:
        for _ in range(3):
            torch.empty(mebibyte)

    def together() -> list[torch.Tensor]:
        return [torch.empty(mebibyte) for _ in range(3)]

    assert tracked_peak_bytes(one_after_another) == 1 << 20
    assert tracked_peak_bytes(together) == 3 << 20


def test_evidence_transient_stays_within_the_workspace(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_blocks, "WORKSPACE_BYTES", 1 << 20)
    states_bytes = 4 * 2 * 1024
    assert evidence_transient_bytes(CacheGeometry.from_config(model.config), 1024) <= (1 << 20) + states_bytes


@pytest.mark.parametrize(("queries", "dtype"), [(40, torch.float32), (400, torch.float32), (400, torch.bfloat16)])
def test_votes_of_a_pruned_prompt_take_what_the_ledger_charges(
    monkeypatch: pytest.MonkeyPatch, queries: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(recent_attention, "_CPU_WORKSPACE_BYTES", 1 << 20)
    evidence, rows, heads, dim = RecentAttention(recent_ratio=0.2, distance_weight=1.2), 1024, 4, 8
    columns = torch.arange(rows, dtype=torch.int32)[None, None]
    table = RowMap(columns_BMW=columns, tokens_BMW=columns, live_BMW=torch.ones_like(columns).bool(), ordered=True)
    rule = MaskRecord("sdpa", {"mask_function": mask_rule(None)})
    visibility = Visibility(record=rule, columns_after=rows, dense=True, changed_mask_BF=None)
    observation = LayerObservation(
        layer=0,
        queries_BQWD=torch.randn(1, heads, queries, dim, dtype=dtype),
        observed_BW=None,
        keys_BHND=torch.randn(1, 1, rows, dim, dtype=dtype),
        tokens_BMN=columns,
        visibility=SeenByRecent(visibility=visibility, view=table, columns_BW=columns[0, :, rows - queries :].long()),
        scaling=dim**-0.5,
    )
    found = tracked_peak_bytes(lambda: evidence.votes(observation, group="mean", score_heads=1))
    assert found <= evidence.workspace_bytes(observation.queries_BQWD, rows) <= 1.5 * found


def test_an_answer_is_compared_at_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tokens in (("PROMPT_TOKENS", 90), ("WARM_UP_TOKENS", 40), ("RUN_TOKENS", 8)):
        monkeypatch.setattr(answer, name, tokens)
    with torch.inference_mode():
        (measure,) = answer.answer_measures("cpu", torch.float32, [1], rounds=2)
    assert measure.value > 0
    assert measure.details["rounds"] == 2
    rows = int(measure.name.split()[1])
    assert 100 < rows < 90 + 40 + 8


def test_quantized_rows_are_measured_against_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 96), ("PROMPT_TOKENS", 130), ("LONG_PROMPT_TOKENS", 600), ("POLICIES", ("snapkv",))):
        monkeypatch.setattr(quantized, name, value)
    with torch.inference_mode():
        int8, int4, held = quantized.quantized_measures("cpu", torch.float32, [1], rounds=2)
    assert (int8.target, int4.target) == (1.3, None)
    assert 0 < held.value < 96 / 600
    assert held.value == pytest.approx(1 / held.details["times smaller"])
    assert held.details["full cache"] == 8 * 3 * 600 * 2 * 64 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_layer_pairs_are_the_formula(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    twin = stock_twin(model).to(dtype)
    with torch.inference_mode():
        measures = list(merged.merged_byte_measures(twin, torch.randint(1, 64, (2, 60)), 40))
    assert [measure.met for measure in measures] == [True] * 4
    assert [measure.name.split(",")[0] for measure in measures[::2]] == ["minicache", "snapkv"]
    details = [measure.details for measure in measures[::2]]
    assert [each["rows of a pair and KV head"] for each in details] == [60, 40]
    # A twentieth of keys and of values is kept apart.
    assert details[0]["exceptions a row"] == details[1]["exceptions a row"] == pytest.approx(0.1)
    assert details[0]["bytes"] == merged.pair_formula_bytes(60, 6, 8, dtype.itemsize)
    assert details[1]["bytes"] == merged.pair_formula_bytes(40, 4, 8, dtype.itemsize)


def test_stock_twin_shares_weights_but_not_the_config(model: LlamaForCausalLM) -> None:
    twin = stock_twin(model)
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert twin.config is not model.config
    assert twin.model.layers[0].self_attn.config is twin.config


def test_a_curve_is_the_median_of_each_tenth() -> None:
    seconds = [0.001 * (1 + step // 4) for step in range(40)]
    seconds[1] = 5.0  # one slow step does not move a median
    assert tenths(seconds) == pytest.approx(list(range(1, 11)))


def test_the_curve_covers_every_policy_and_the_control() -> None:
    with torch.inference_mode():
        measures = list(curve_measures("cpu", steps=10))
    assert [measure.name.split(", ")[0] for measure in measures] == ["stock", *POLICIES]
    assert measures[0].name.startswith(CONTROL)
    assert all(len(measure.details["ms"]) == 10 and measure.details["ratios"][0] == 1.0 for measure in measures)
    assert {measure.name.split(", ")[0] for measure in measures if measure.target is None} == {
        "stock", "snapkv", "random", *RAGGED,
    }  # fmt: skip


def test_report_is_written_with_its_raw_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measures = [
        Measure("prefill", "snapkv", 1.01, "<=", 1.08, {"ratios": [1.0, 1.02], "stock ms": 12.5}),
        Measure("peak KV bytes", "snapkv", 0.3, "<", 0.2, {"peak": 3 * 2**20}),
    ]
    print_report({"model": "tiny"}, measures)
    printed = capsys.readouterr().out
    assert "1 of 2 targets met" in printed
    assert "peak 3.00 MiB" in printed
    write_json(tmp_path / "new" / "run.json", {"model": "tiny"}, measures)
    written = json.loads((tmp_path / "new" / "run.json").read_text(encoding="utf-8"))
    assert [row["met"] for row in written["measures"]] == [True, False]
    assert written["measures"][0]["details"]["ratios"] == [1.0, 1.02]


def test_chosen_policies_are_timed_beside_snapkv(model: LlamaForCausalLM) -> None:
    filler = torch.randint(1, model.config.vocab_size, (64,)).tolist()
    with torch.inference_mode():
        stock = stock_twin(model)
        found = list(decode_measures(model, stock, filler, Case(batch=1, context=48, rows=40), 1, ["adakv"]))
        assert [(measure.group, measure.name.split(",")[0]) for measure in found] == [
            ("decode ms/token", "snapkv"),
            ("decode ms/token", "adakv"),
            ("decode ms/token over snapkv", "adakv"),
        ]
        prefill = list(prefill_measures(model, stock, filler, Case(batch=1, context=48, rows=40), 1, ["h2o"]))
    assert [measure.name.split(",")[0] for measure in prefill] == ["h2o"]
