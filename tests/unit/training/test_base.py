"""Where a node of a run finds the base that the driver's node has."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.training.runs import make_run, run_workers
from training.config import ModelConfig
from training.errors import ModelError, StorageError
from training.model import base as base_module
from training.model.base import on_this_node
from training.run_dir import RunDir
from training.worker import train_loop

COMMIT = "6cee5e81ee83917806bbde320786a8fb61efebee"


def test_a_local_model_that_this_node_lacks_is_named_with_the_node(random_base: Path, tmp_path: Path) -> None:
    assert on_this_node(ModelConfig(path=str(random_base)), random_base) == random_base
    with pytest.raises(StorageError, match="has no directory /nowhere/base") as caught:
        on_this_node(ModelConfig(path="/nowhere/base"), Path("/nowhere/base"))
    assert (caught.value.field, "on every node" in caught.value.hint) == ("model.path", True)


def test_a_hub_model_is_fetched_at_the_drivers_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def from_hub(model: ModelConfig, progress: bool) -> Path:
        asked.append((model.path, model.revision))
        snapshot = tmp_path / COMMIT
        snapshot.mkdir(exist_ok=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "model.safetensors").write_text("")
        return snapshot

    monkeypatch.setattr(base_module, "_from_hub", from_hub)
    drivers = Path("/drivers/hub/snapshots") / COMMIT
    assert on_this_node(ModelConfig(path="a/b", revision="main"), drivers) == tmp_path / COMMIT
    assert asked == [("a/b", COMMIT)]


def test_a_copied_cache_serves_where_there_is_no_network(random_base: Path) -> None:
    model = ModelConfig(path="some-owner/some-model")  # tests are offline
    assert on_this_node(model, random_base) == random_base
    with pytest.raises(ModelError, match="cannot fetch some-owner/some-model"):
        on_this_node(model, Path("/nowhere") / COMMIT)


def rank_on_its_own_disk(root: Path, bases: list[Path]) -> None:
    """As `train_loop` is called on every node, each of which has the hub's cache elsewhere."""
    base_module._from_hub = lambda model, progress: bases[dist.get_rank()]
    train_loop({"run_dir": root, "base": Path("/drivers/hub/snapshots") / COMMIT, "probe": "probe"})


def test_workers_of_two_nodes_train_from_their_own_copies(random_base: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "job", random_base, scaling__workers=2, optim__max_steps=1)
    config = run_dir.config()
    hub = config.model_copy(update={"model": ModelConfig(path="a/b")})
    run_dir.config_path.write_text(hub.model_dump_json())
    other = tmp_path / "other"
    other.symlink_to(random_base)
    run_workers(2, rank_on_its_own_disk, run_dir.root, [random_base, other])
    assert (RunDir(run_dir.root).adapter / "adapter_config.json").is_file()
