"""From a directory to a model that answers, and what is refused on the way."""

import json
import shutil

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.engines.engine import EngineError
from serving.models.loading import (
    EngineSettings,
    cache_bytes,
    check_complete,
    fits_beside,
    load_served_model,
    stop_ids,
    uses_vllm,
)
from serving.models.names import ModelSource
from serving.models.served import ServedModel
from training.errors import ModelError
from training.model import load as models


@pytest.fixture
def copy(random_base, tmp_path):
    return shutil.copytree(random_base, tmp_path / "copy")


def load(directory, **settings):
    return load_served_model(ModelSource("copy", directory), EngineSettings(device="cpu", **settings))


def test_stop_ids_are_the_models_own_list(random_base):
    listed = json.loads((random_base / "generation_config.json").read_text())["eos_token_id"]
    assert stop_ids(random_base) == set(listed)
    assert len(listed) == 3


def test_a_model_without_stop_ids_is_refused(copy):
    (copy / "generation_config.json").write_text("{}")
    with pytest.raises(ModelError, match="eos_token_id"):
        load(copy)


def test_a_missing_weight_is_refused_by_every_engine(copy):
    for shard in copy.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors.pop("model.layers.0.self_attn.q_proj.weight", None)
        save_file(tensors, shard, metadata={"format": "pt"})
    index = copy / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"].pop("model.layers.0.self_attn.q_proj.weight")
    index.write_text(json.dumps(entries))
    with pytest.raises(ModelError, match="q_proj"):
        load(copy)
    with pytest.raises(ModelError, match="lacks 1 weights"):
        check_complete(copy)


def test_a_whole_checkpoint_is_complete(random_base):
    check_complete(random_base)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="holds no model"):
        load(tmp_path)


def test_without_vllm_its_engine_says_how_to_get_it(random_base):
    if uses_vllm("auto", "cuda"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(ModelError, match="vLLM") as caught:
        load(random_base, engine="vllm")
    assert "polythink[vllm]" in caught.value.hint


def test_memory_for_keys_and_values():
    assert cache_bytes(EngineSettings(), "cpu") == 2 * 1024**3
    assert cache_bytes(EngineSettings(cache_gib=0.5), "cpu") == 512 * 1024**2


def test_it_has_answered_before_it_counts_as_loaded(random_base, monkeypatch):
    probed, closed = [], []

    async def probe(model, adapter=None):
        probed.append(model)
        if len(probed) == 2:
            raise EngineError("it does not answer")

    monkeypatch.setattr(ServedModel, "probe", probe)
    monkeypatch.setattr(ServedModel, "close", lambda model: closed.append(model) or model.engine.close())
    model = load(random_base)
    assert probed == [model]
    model.close()
    with pytest.raises(EngineError):
        load(random_base)
    assert closed == probed, "one that does not answer is not left behind"


def test_what_closed_models_left_is_given_back_before_memory_is_measured(random_base, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: calls.append("measured") or (10**12, 10**12))
    assert fits_beside(ModelSource("x", random_base), EngineSettings(device="cuda"))
    assert calls == ["given back", "measured"]


def test_memory_is_asked_for_before_a_model_is_loaded_beside_another(random_base, monkeypatch):
    class Memory:
        available = 0

    source, settings = ModelSource("x", random_base), EngineSettings(device="cpu")
    assert fits_beside(source, settings)
    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert not fits_beside(source, settings)
    weights = sum(value.numel() * 4 for value in models.load(random_base).state_dict().values())
    Memory.available = 4 * weights
    assert fits_beside(source, settings)
    Memory.available = weights
    assert not fits_beside(source, settings), "what is loaded is larger than what is stored"
