"""A stand-in for the cache engine, and a tiny model with a tiny tokenizer, for tests of the harness alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.records import CacheRecord, QualityRecord, Row, TimingRecord

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }} {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def _composition() -> Any:
    return SimpleNamespace(
        minimum_rows=1,
        stored_heads=lambda geometry: geometry.num_kv_heads,
        budget=None,
        representation=SimpleNamespace(replaces_rows=False),
        quantizes=False,
        merges_layers=False,
    )


@dataclass
class FakeCache(DynamicCache):
    """Keeps the last `keep_rows` rows of a prompt (all when None); counts as an engine cache does."""

    keep_rows: int | None = None
    declares_tail: bool = True
    tail_rows: int = 0
    statistics: Any = field(
        default_factory=lambda: SimpleNamespace(forwards=0, publications=0, selections=0, rows_dropped=0)
    )
    composition: Any = field(default_factory=_composition)
    manifest: Any = field(default_factory=lambda: SimpleNamespace(sha256="0" * 64))

    def __post_init__(self) -> None:
        DynamicCache.__init__(self)

    @property
    def policy_layers(self) -> tuple[int, ...]:
        return tuple(range(len(self.layers)))

    def finish_prefill(self) -> None:
        for layer in self.layers:
            if self.keep_rows is not None and layer.keys.shape[2] > self.keep_rows:
                self.statistics.selections += 1
                self.statistics.rows_dropped += layer.keys.shape[1] * (layer.keys.shape[2] - self.keep_rows)
                layer.keys = layer.keys[:, :, -self.keep_rows :].clone()
                layer.values = layer.values[:, :, -self.keep_rows :].clone()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        self.statistics.forwards += layer_idx == 0
        self.statistics.publications += layer_idx == 0
        self.tail_rows += key_states.shape[1] * (key_states.shape[2] == 1)
        return super().update(key_states, value_states, layer_idx, *args, **kw)

    def stored_rows(self, layer: int) -> torch.Tensor:
        batch, heads, rows, _ = self.layers[layer].keys.shape
        return torch.full((batch, heads), rows)

    @property
    def total_rows(self) -> int:
        return sum(layer.keys.shape[0] * layer.keys.shape[1] * layer.keys.shape[2] for layer in self.layers)

    def ledger(self) -> Any:
        payload = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
        return SimpleNamespace(
            measured_bytes=payload,
            payload_bytes=payload,
            slack_bytes=0,
            transient_peak_bytes=payload,
            tail_rows=self.tail_rows if self.declares_tail else 0,
        )

    def fork(self) -> FakeCache:
        return copy.deepcopy(self)


def fake_builder(cell: Cell) -> FakeCache:
    """An engine that always acts: integer budgets are rows."""
    return FakeCache(keep_rows=cell.budget if isinstance(cell.budget, int) else None)


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, plus <s> and </s>."""
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab={**alphabet, "<s>": 256, "</s>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def tiny_loaded(*, chat: bool = True, max_position_embeddings: int = 2048) -> LoadedModel:
    """A random Llama of two layers with two KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = LlamaForCausalLM(config).eval()
    return LoadedModel(name="tiny", source="tiny", model=model, tokenizer=tiny_tokenizer(chat=chat))


def made_row(
    policy: str, index: int, *, budget: Any = None, answer: str = "7", output: str = "7", **changes: Any
) -> Row:
    """A record as the runner writes it, with hand-made numbers."""
    cell = Cell(task="needle_single_noise", length_tokens=512, policy=policy, budget=budget)
    rows = float(budget or 500)
    values: dict[str, Any] = {
        "row_key": f"{policy}-{budget}-{index}",
        "cell_key": f"{policy}-{budget}",
        "cell": cell.coordinates(),
        "example": {
            "id": f"example-{index}",
            "index": index,
            "answers": [answer],
            "prompt_tokens": 500,
            "depth_ratio": 0.5,
        },
        "status": "ok",
        "environment": "place",
        "quality": QualityRecord(
            score=float(answer in output),
            answer_nll=0.1 if answer in output else 3.0 + index / 10,
            answer_top1_rate=1.0,
            answer_tokens=7,
            output_text=output,
            output_tokens=3,
            finish_reason="eos",
        ),
        "cache": CacheRecord(
            prompt_rows_mean=rows,
            prompt_rows_min=int(rows),
            prompt_rows_max=int(rows),
            final_rows_mean=rows,
            final_rows_max=int(rows),
            kept_ratio=rows / 500,
            measured_bytes=int(rows) * 1024,
            payload_bytes=int(rows) * 1000,
            slack_bytes=0,
            transient_peak_bytes=0,
            full_kv_bytes=500 * 1000,
            budget_rows=budget,
            budget_binds=budget is not None,
            selections=1,
            rows_dropped=100,
            forwards=3,
            publications=3,
            manifest_sha256="0" * 64,
            rows_over_time_mean=rows,
        ),
        "timing": TimingRecord(prefill_s=1.0, decode_ms_per_token=10.0),
    }
    return Row(**{**values, **changes})
