"""What tests prove: `@pytest.mark.proves("beams")` says which mode, the parameters say for which policy and family.

With `--capabilities FILE` a run that passes writes what its marked tests proved, and with `--collect-only` what they
would prove. `--capabilities-run COMMAND` says that the run is a whole one and by which command: its record replaces the
one that is there, where otherwise it renews a part. `scripts/capabilities` makes docs/capabilities.md of it.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FULL, EVICTING = "At full budget", "Evicting"
PROPERTY = "proves"
# The parameters and fixtures that carry a policy's or a tiny model's name, alone or as the first of a tuple.
PARAMETERS = ("policy", "name", "case", "any_case", "family", "pair")


@dataclass(frozen=True, slots=True)
class Mode:
    """A column of the matrix."""

    group: str
    head: str
    says: str


MODES: dict[str, Mode] = {
    "parity": Mode(FULL, "one prompt", "ids and logits equal those of transformers' own cache"),
    "parity_padded": Mode(FULL, "padding", "the same for a left-padded batch"),
    "parity_beams": Mode(FULL, "beams", "the same under beam search"),
    "parity_sampling": Mode(FULL, "sampling", "the same under sampling with one seed"),
    "parity_turns": Mode(FULL, "turns", "the same over several turns on one cache"),
    "parity_chunked": Mode(FULL, "chunks", "the same when the prompt is fed in chunks"),
    "parity_assisted": Mode(FULL, "assisted", "the same under assisted decoding or prompt lookup"),
    "parity_half": Mode(FULL, "half precision", "the same in bf16 and fp16, to the rounding of the dtype"),
    "kept_rows": Mode(EVICTING, "rows", "the kept positions equal those of the method's plain reference"),
    "logits": Mode(EVICTING, "logits", "logits equal dense attention over the kept rows"),
    "evidence": Mode(EVICTING, "evidence", "scores equal those of the attention the model itself reports"),
    "padded": Mode(EVICTING, "padding", "a row of a padded batch equals that prompt alone"),
    "beams": Mode(EVICTING, "beams", "beams of a padded batch equal those of each prompt alone"),
    "turns": Mode(EVICTING, "turns", "a later turn of a padded batch equals that of each prompt alone"),
    "chunked": Mode(EVICTING, "chunks", "a padded prompt in chunks equals each prompt alone in these chunks"),
    "recorded": Mode(EVICTING, "assisted", "rejected drafts leave what never feeding them leaves"),
    "cache_local": Mode(EVICTING, "cache_local", "logits equal those of keys rotated, or biased, by slot"),
    "ragged": Mode(EVICTING, "ragged", "ragged rows: totals met to the row, or rows and logits those of dense storage"),
    "quantized": Mode(EVICTING, "quantized", "int8 or int4 rows: logits and choices are those of rows held as read"),
    "merged": Mode(EVICTING, "merged", "rows merged over layer pairs: logits and rows are those of a plain loop"),
    "saved": Mode(EVICTING, "saved", "a loaded cache goes on bit for bit"),
    "offloaded": Mode(EVICTING, "offloaded", "a cache that was moved away meanwhile goes on unchanged"),
    "branched": Mode(EVICTING, "branched", "questions asked in branches all start from one state"),
    "half": Mode(EVICTING, "half precision", "bf16 and fp16: rows in the model's dtype, scores in fp32, bytes exact"),
    "gradients": Mode(EVICTING, "gradients", "a first forward has all of them, and stored rows carry no graph"),
    "weights_away": Mode(EVICTING, "weights away", "with weights that accelerate fetches from CPU or disk: the same"),
    "device_map": Mode(EVICTING, "device_map", "with layers on disk, or on several devices: the same"),
    "compiled": Mode(EVICTING, "compiled", "under torch.compile: the same, and decode steps compile nothing new"),
    "one_graph": Mode(EVICTING, "one graph", "under torch.compile(fullgraph=True)"),
    "failures": Mode(EVICTING, "failures", "a forward that fails anywhere leaves the cache as it was"),
}
# A pair that is refused in every mode.
ANY = "any"

# The tests' tiny models: their model type, and what sets a model apart where a policy may behave differently.
MODELS: dict[str, tuple[str, str]] = {
    "llama": ("llama", ""),
    "llama_head_dim": ("llama", ""),
    "llama-llama3": ("llama", ""),
    "mistral": ("mistral", ""),
    "mistral_window": ("mistral", "sliding window"),
    "mixtral-window": ("mixtral", "sliding window"),
    "qwen2-mixed": ("qwen2", "full and sliding layers"),
    "qwen2-yarn": ("qwen2", ""),
    "qwen2_moe": ("qwen2_moe", ""),
    "qwen3": ("qwen3", ""),
    "qwen3_moe": ("qwen3_moe", ""),
    "olmo2": ("olmo2", ""),
    "smollm3": ("smollm3", ""),
    "phi3-partial": ("phi3", ""),
    "gpt_neox": ("gpt_neox", ""),
    "glm": ("glm", ""),
    "glm4": ("glm4", ""),
    "gemma2": ("gemma2", "full and sliding layers"),
    "gemma3": ("gemma3_text", "full and sliding layers"),
    "gpt_oss": ("gpt_oss", "full and sliding layers"),
    "qwen3_next": ("qwen3_next", "full and linear attention"),
    "qwen3_5": ("qwen3_5_text", "full and linear attention"),
    "lfm2": ("lfm2", "full attention and convolutions"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "full and linear attention"),
    "lfm2_moe": ("lfm2_moe", "full attention and convolutions"),
    "bamba": ("bamba", "full and linear attention"),
    "granitemoehybrid": ("granitemoehybrid", "full and linear attention"),
    "jamba": ("jamba", "full and linear attention"),
    "falcon_h1": ("falcon_h1", "full and linear attention"),
    "nemotron_h": ("nemotron_h", "full and linear attention"),
    "olmo_hybrid": ("olmo_hybrid", "full and linear attention"),
    "llama4": ("llama4_text", "full and chunked layers"),
    "llama4-rotated": ("llama4_text", ""),
    "opt": ("opt", ""),
    "gpt2": ("gpt2", ""),
    "llava": ("llava", ""),
    "idefics3": ("idefics3", ""),
    "smolvlm": ("smolvlm", ""),
    "mistral3": ("mistral3", ""),
    "internvl": ("internvl", ""),
    "llama4_images": ("llama4", "full and chunked layers"),
    "gemma3_images": ("gemma3", "full and sliding layers"),
    "qwen2_vl": ("qwen2_vl", ""),
    "qwen2_5_vl": ("qwen2_5_vl", ""),
    "qwen3_vl": ("qwen3_vl", ""),
    "qwen3_5_images": ("qwen3_5", "full and linear attention"),
    "mpt": ("mpt", ""),
    "mpt_6_heads": ("mpt", ""),
    "bloom": ("bloom", ""),
    "bloom_6_heads": ("bloom", ""),
    "falcon": ("falcon", "rotary"),
    "falcon_grouped": ("falcon", "rotary"),
    "falcon_heads": ("falcon", "rotary"),
    "falcon_alibi": ("falcon", "ALiBi"),
    "falcon_alibi_12_heads": ("falcon", "ALiBi"),
}


def family_name(model: str) -> str:
    """Return a tiny model's row of the matrix."""
    model_type, trait = MODELS[model]
    return f"{model_type} ({trait})" if trait else model_type


class Proof(NamedTuple):
    """A cell that one test function fills."""

    test: str
    mode: str
    verdict: str  # "proved" or "refused"
    family: str
    policy: str


def proofs_of(item: pytest.Item) -> list[Proof]:
    """Return what a collected test proves when it passes.

    Raises:
        pytest.UsageError: If a marker names an unknown mode, or neither it nor a parameter names a policy and a family.
    """
    found = []
    for mark in item.iter_markers("proves"):
        policy, family = _named(item, mark)
        unknown = [mode for mode in mark.args if mode not in MODES and mode != ANY]
        if unknown or not mark.args or policy is None or family is None:
            raise pytest.UsageError(
                f"{item.nodeid}: 'proves' needs modes of tests/proofs.py, a policy and a family, but found modes "
                f"{mark.args}, policy {policy}, family {family}. Name what no parameter carries: "
                'proves("beams", policy="snapkv", family="llama").'
            )
        verdict = "refused" if mark.kwargs.get("refused") else "proved"
        test = item.nodeid.partition("[")[0]
        found += [Proof(test, mode, verdict, family_name(family), policy) for mode in mark.args]
    return found


def _named(item: pytest.Item, mark: pytest.Mark) -> tuple[str | None, str | None]:
    from hf_kvpolicy import available_policies

    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    values = [parameters[name] for name in PARAMETERS if name in parameters]
    words = [str(value[0] if isinstance(value, tuple) else value) for value in values]
    policy = next((word for word in words if word in available_policies()), None)
    family = next((word for word in words if word in MODELS), None)
    return mark.kwargs.get("policy", policy), mark.kwargs.get("family", family)


class CapabilityRecorder:
    """Collects what passed tests proved, and writes it when the whole run has passed."""

    def __init__(self, file: Path, run: str | None = None) -> None:
        self.file, self.run = file, run
        self.passed: Counter[Proof] = Counter()
        self.passed_tests = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            found = proofs_of(item)
            # Travels with the reports of a worker process.
            item.user_properties += [(PROPERTY, list(proof)) for proof in found]
            if config.option.collectonly:
                self.passed.update(found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed_tests += 1
            self.passed.update(Proof(*proof) for name, proof in report.user_properties if name == PROPERTY)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and not hasattr(session.config, "workerinput"):
            write_record(self.file, self.passed, run=self.run, passed_tests=self.passed_tests)


def read_record(file: Path) -> dict[str, Any]:
    """Return a record; its `proofs` count the passed tests of each cell."""
    record = json.loads(file.read_text(encoding="utf-8"))
    record["proofs"] = Counter(
        {Proof(*cells, policy): count for *cells, policies in record["proofs"] for policy, count in policies.items()}
    )
    return record


def write_record(file: Path, passed: Counter[Proof], *, run: str | None = None, passed_tests: int = 0) -> None:
    """Write what was proved by a whole run, or renew a part of what an existing file says."""
    import torch
    import transformers

    today = datetime.date.today().isoformat()
    facts: dict[str, Any] = {
        "date": today,
        "run": run,
        "tests": passed_tests,
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    if run is None and file.exists():
        record = read_record(file)
        ran = {proof.test for proof in passed}
        passed = passed + Counter({proof: count for proof, count in record["proofs"].items() if proof.test not in ran})
        facts = {name: value for name, value in record.items() if name != "proofs"} | {"renewed": today}
    rows: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for proof, count in sorted(passed.items()):
        rows[proof[:-1]][proof.policy] = count
    lines = ",\n".join(json.dumps([*row, policies]) for row, policies in rows.items())
    head = json.dumps(facts)[1:-1]
    file.write_text(f'{{{head}, "proofs": [\n{lines}\n]}}\n', encoding="utf-8")
