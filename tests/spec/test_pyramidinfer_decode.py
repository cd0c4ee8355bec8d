"""pyramidinfer chooses among the tokens of its answer, block by block: equal to its oracle over long answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference.pyramidinfer import PyramidLlama
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import BlockDecay
from hf_kvpolicy.compat import cache_argument

from ._models import VOCAB, kept, tokens

LAYERS = 3
OPTIONS: dict[str, Any] = {
    "decay": 0.6, "recent_ratio": 0.2, "sinks": 2, "min_context": 2, "distance_weight": 1.5, "decode_block": 5,
    "decode_decay": 0.3,
}  # fmt: skip


def llama(kv_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=kv_heads, initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Answer:
    """A left-padded batch that decodes, and an oracle for each of its rows."""

    def __init__(self, model: LlamaForCausalLM, prompts: tuple[int, ...], **options: Any) -> None:
        self.model, self.cache = model, kv.PyramidInferCache(model, **options)
        self.oracles = [PyramidLlama(model, **options) for _ in prompts]
        width = max(prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        self.mask = torch.zeros_like(ids)
        for row, length in enumerate(prompts):
            ids[row, width - length :] = tokens(length, seed=row)
            self.mask[row, width - length :] = 1
        self.fed = width
        self._compare(self._run(ids), [o.prompt(ids[i, width - n :].tolist()) for i, (o, n) in
                                       enumerate(zip(self.oracles, prompts, strict=True))])  # fmt: skip

    def decode(self, steps: int, finished: tuple[int, ...] = ()) -> None:
        """Feed tokens; a finished row gets pads."""
        for _ in range(steps):
            self.fed += 1
            ids = tokens(1, len(self.oracles), seed=self.fed)
            new = torch.tensor([[0 if row in finished else 1] for row in range(len(self.oracles))])
            self.mask = torch.cat([self.mask, new], dim=1)
            logits = self._run(ids)
            expected = [
                None if row in finished else oracle.token(int(ids[row, 0])) for row, oracle in enumerate(self.oracles)
            ]
            self._compare(logits, expected)

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.oracles, self.mask = [self.oracles[row] for row in rows], self.mask[rows]

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"attention_mask": self.mask, "position_ids": positions, "logits_to_keep": 1}
        with torch.inference_mode():
            return self.model(ids, **given, **{cache_argument(): self.cache}).logits[:, -1]

    def _compare(self, logits: torch.Tensor, expected: list[Any]) -> None:
        for row, (oracle, wanted) in enumerate(zip(self.oracles, expected, strict=True)):
            heads = self.model.config.num_key_value_heads
            assert kept(self.cache, row) == [[layer] * heads for layer in oracle.kept], f"row {row}, column {self.fed}"
            if wanted is not None:
                np.testing.assert_allclose(logits[row].double().numpy(), wanted, atol=1e-5)
        self.cache.check_integrity()

    @property
    def rows(self) -> list[int]:
        return [int(self.cache.stored_rows(layer)[0, 0]) for layer in range(LAYERS)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("budget", [None, 9])
@pytest.mark.parametrize("prompts", [(30,), (30, 12)], ids=["solo", "padded"])
def test_a_long_answer(kv_heads: int, budget: int | None, prompts: tuple[int, ...]) -> None:
    answer = Answer(llama(kv_heads), prompts, budget=budget, **OPTIONS)
    answer.decode(70)
    held = answer.rows
    # Not trivial: several blocks were cut, deeper layers keep fewer rows, and not the newest ones.
    assert answer.cache._runtime.snapshot.settled_tokens[0] > 30 + 5 * OPTIONS["decode_block"]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"decode_block": 1}, {"decode_block": 16, "decode_ratio": 0.5}, {"decode_ratio": 1.0, "decode_decay": 1.0},
        {"decode_ratio": 0.1}, {"distance_weight": 1.0}, {"recent_ratio": 0.0}, {"recent_ratio": 0.5},
        {"protect": (24, 31, 32, 33, 40)}, {"decode_block": None}, {"sinks": 0}, {"interval": 2},
    ],
    ids=str,
)  # fmt: skip
def test_options(change: dict[str, Any]) -> None:
    answer = Answer(llama(), (20, 9), **OPTIONS | change)
    answer.decode(60)


def test_a_short_prompt_and_sinks_in_the_answer() -> None:
    Answer(llama(), (1, 1), **OPTIONS | {"sinks": 6}).decode(40)


def test_a_row_that_has_finished() -> None:
    """Its pads change nothing of it; the other row goes on."""
    answer = Answer(llama(), (20, 11), **OPTIONS)
    answer.decode(17)
    answer.decode(15, finished=(1,))
    answer.decode(12)
    answer.decode(15, finished=(0,))


def test_beams() -> None:
    model = llama()
    answer = Answer(model, (20, 11), **OPTIONS)
    answer.decode(23)
    answer.reorder([1, 0])
    answer.decode(20)
    answer.reorder([0, 1])
    answer.decode(11)


def test_counts_of_the_published_configuration() -> None:
    """Of 16 tokens the first of 32 layers keeps 14, the middle one 7, the last one 1."""
    schedule = BlockDecay(tokens=16, ratio=0.9, decay=0.1)
    assert [schedule.kept_rows(layer, 32) for layer in (0, 16, 31)] == [14, 7, 1]


def test_a_block_waits_until_it_is_older_than_the_recent_tokens() -> None:
    """A prompt of 100 tokens is kept whole: with t answered, 1 + int(0.2 (100 + t)) are recent; 16 more at t = 46."""
    published = {"decode_block": 16, "decode_ratio": 0.9, "decode_decay": 0.1, "distance_weight": 1.2}
    answer = Answer(llama(), (100,), **OPTIONS | published | {"decay": 1.0})
    answer.decode(45)
    assert answer.rows == [145] * LAYERS
    answer.decode(1)
    # int(14.4 r'): 14, then r' = 0.775 and 0.325.
    assert answer.rows == [146 - 16 + rows for rows in (14, 11, 4)]


def test_bytes_really_go() -> None:
    model = llama()
    chosen, appended = (Answer(model, (30,), **OPTIONS | {"decode_block": block}) for block in (4, None))
    for answer in (chosen, appended):
        answer.decode(120)
    ledgers = [answer.cache.ledger() for answer in (chosen, appended)]
    assert ledgers[0].payload_bytes < 0.75 * ledgers[1].payload_bytes
    assert ledgers[0].measured_bytes < 0.8 * ledgers[1].measured_bytes


def test_a_later_prompt_settles_the_answer() -> None:
    answer = Answer(llama(), (20,), **OPTIONS)
    answer.decode(12)
    ids = tokens(15, seed=77)
    answer.mask = torch.cat([answer.mask, torch.ones_like(ids)], dim=1)
    logits = answer._run(ids)
    answer._compare(logits, [answer.oracles[0].prompt(ids[0].tolist())])
    assert answer.cache._runtime.snapshot.scores_LBSWX is None
    answer.decode(40)


class TestTakingBack:
    def test_part_of_an_answer_is_refused(self) -> None:
        answer = Answer(llama(), (30,), **OPTIONS | {"decay": 1.0})
        answer.decode(3)
        for removed in (1, 2):
            with pytest.raises(kv.StaleGenerationError, match=r"cache\.fork\(\)"):
                answer.cache.crop(-removed)
        answer.decode(30)
        with pytest.raises(kv.StaleGenerationError, match="merged for good"):
            answer.cache.crop(-33)
        answer.decode(10)

    def test_all_of_it_and_some_of_the_prompt(self) -> None:
        model = llama()
        answer = Answer(model, (30,), **OPTIONS | {"decay": 1.0})
        answer.decode(6)
        for removed, left in ((6, 30), (4, 26)):
            answer.cache.crop(-removed)
            answer.mask = answer.mask[:, :left]
            answer.oracles = [PyramidLlama(model, **OPTIONS | {"decay": 1.0})]
            answer.oracles[0].prompt(tokens(30, seed=0)[0, :left].tolist())
            assert answer.cache._runtime.snapshot.scores_LBSWX is None
        answer.decode(40)

    def test_where_an_answer_is_only_appended(self) -> None:
        answer = Answer(llama(), (30,), **OPTIONS | {"decode_block": None})
        answer.decode(6)
        answer.cache.crop(-5)
        assert answer.cache.get_seq_length() == 31

    def test_tokens_that_wait_are_refused(self) -> None:
        answer = Answer(llama(), (5,), **OPTIONS)
        answer.cache.activate_past_recording()
        for length in (1, 3):
            with pytest.raises(kv.ConfigError, match="Decode without it"):
                answer.model(tokens(length), **{cache_argument(): answer.cache})
        answer.cache.set_recording(False)
        answer.decode(10)


@pytest.mark.parametrize(
    "change", [{"decode_block": 0}, {"decode_block": 1.5}, {"decode_ratio": 0.0}, {"decode_decay": 1.5}], ids=str
)
def test_options_outside_their_range(change: dict[str, Any]) -> None:
    with pytest.raises(kv.ConfigError, match=next(iter(change))):
        kv.PyramidInferCache(llama().config, **change)
