"""What tests share: a gpt-oss checkpoint of random weights, the trained tiny base, a few rows, a home, a Ray cluster.

Nothing here needs a network, a fixed port, or files outside of the repository.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_app.cluster.parts import SERVE_VARIABLES  # loads none of what reads these variables

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    RAY_USAGE_STATS_ENABLED="0",
    **SERVE_VARIABLES,  # as in every installation
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",  # several processes share few cores; torch's threads would fight over them
)

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny"

ROWS = [
    {
        "reasoning_language": "German",
        "developer": "Answer in one sentence.",
        "user": "What is the capital of France?",
        "analysis": "Gefragt ist nach der Hauptstadt von Frankreich. Das ist Paris.",
        "final": "The capital of France is Paris.",
    },
    {
        "reasoning_language": "Spanish",
        "developer": "",
        "user": "Welche Farbe hat der Schnee?",
        "analysis": "La pregunta es por el color de la nieve. La nieve es blanca.",
        "final": "Der Schnee ist weiß.",
    },
    {
        "reasoning_language": "French",
        "developer": "You are a patient teacher.",
        "user": "Quanto fa due più tre?",
        "analysis": "Il faut ajouter trois à deux. Cela fait cinq.",
        "final": "Due più tre fa cinque.",
    },
    {
        "reasoning_language": "English",
        "developer": "",
        "user": "¿Qué día viene después del lunes?",
        "analysis": "The days are Monday, Tuesday, Wednesday. After Monday comes Tuesday.",
        "final": "Después del lunes viene el martes.",
    },
]
"""Rows in Multilingual-Thinking's columns, without `messages`, which `rows_file` adds."""


def with_messages(row: dict[str, str]) -> dict[str, object]:
    """`row` with the `messages` column that the data set derives from its other columns."""
    system = f"reasoning language: {row['reasoning_language']}\n\n{row['developer']}".rstrip()
    return row | {
        "messages": [
            {"role": "system", "content": system, "thinking": None},
            {"role": "user", "content": row["user"], "thinking": None},
            {"role": "assistant", "content": row["final"], "thinking": row["analysis"]},
        ]
    }


@pytest.fixture(scope="session")
def random_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss MXFP4 checkpoint of random weights: 2 layers, hidden 64, with a tokenizer learnt from `ROWS`."""
    from training.tiny.base import build_tokenizer, chat_template, write_checkpoint

    texts = [text for row in ROWS for text in row.values()] + [chat_template()]
    tokenizer = build_tokenizer(texts, vocab_size=512)
    return write_checkpoint(tmp_path_factory.mktemp("base"), tokenizer, initializer_range=0.1)


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """The trained base that the repository ships."""
    return TINY / "base"


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """`ROWS` as JSONL."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(with_messages(row), ensure_ascii=False) for row in ROWS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty POLYTHINK_HOME; nothing of the surrounding configuration reaches the test."""
    for name in list(os.environ):
        if name.startswith(("POLYTHINK_", "MLFLOW_TRACKING_", "MLFLOW_REGISTRY_")):
            monkeypatch.delenv(name)
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("POLYTHINK_HOME", str(path))
    return path


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this machine for a file of tests, since others' tests end theirs: 4 logical CPUs, no dashboard."""
    import ray

    ray.init(
        address="local",  # without it Ray joins whatever cluster this machine last started
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=150 * 1024**2,
        configure_logging=False,
        runtime_env={"env_vars": {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}},
    )
    yield
    ray.shutdown()
