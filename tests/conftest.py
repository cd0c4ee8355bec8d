"""Rules every test runs under: one thread, no network, fixed seeds, and no deprecated transformers call."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

# Before the first import of transformers: both read the environment once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from proofs import CapabilityRecorder

# What transformers writes when a call of ours has a limited life.
DEPRECATION_WORDS = ("deprecated", "will be removed", "is going to be removed")


class DeprecationRecorder(logging.Handler):
    """Collects the log records of transformers that announce a removal."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if any(word in message.lower() for word in DEPRECATION_WORDS):
            self.messages.append(message)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--capabilities", type=Path, metavar="FILE", help="write what the marked tests proved to this file"
    )
    parser.addoption(
        "--capabilities-run", metavar="COMMAND", help="this command runs all of them: replace what the file says"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "allow_deprecated: may use what transformers deprecates, on purpose")
    if config.option.capabilities:
        config.pluginmanager.register(CapabilityRecorder(config.option.capabilities, config.option.capabilities_run))
    torch.set_num_threads(1)


def pytest_report_header() -> list[str]:
    import transformers

    import hf_kvpolicy

    place = Path(hf_kvpolicy.__file__).parent
    if os.environ.get("KVPOLICY_TEST_INSTALLED") and not place.is_relative_to(sys.prefix):
        raise pytest.UsageError(
            f"The tests are to run against the installed package, but hf_kvpolicy was imported from {place}. "
            "Run them with scripts/test, or unset KVPOLICY_TEST_INSTALLED to test the sources."
        )
    return [f"hf_kvpolicy: {place}", f"torch {torch.__version__}, transformers {transformers.__version__}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seed(request: pytest.FixtureRequest) -> None:
    """The seed depends on the test's name only, so order and selection of tests change nothing."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def no_deprecated_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A deprecation notice of transformers, logged or warned, fails the test that caused it."""
    if request.node.get_closest_marker("allow_deprecated"):
        yield
        return
    recorder = DeprecationRecorder()
    logger = logging.getLogger("transformers")
    logger.addHandler(recorder)
    try:
        with warnings.catch_warnings():
            # transformers announces removals as FutureWarning, attributed to whichever module made the call.
            warnings.filterwarnings("error", category=FutureWarning, message=r"(?s).*(deprecated|removed)")
            yield
    finally:
        logger.removeHandler(recorder)
    assert not recorder.messages, f"transformers calls this deprecated: {recorder.messages}"
