"""Several workers over gloo, without Ray: any number and either strategy trains what one worker trains."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.unit.training.runs import (
    adapter,
    dequantised,
    effective,
    largest_difference,
    losses,
    make_run,
    run_workers,
    train,
)
from training.durable import checkpoints
from training.errors import ModelError, StorageError
from training.run_dir import RunDir
from training.trainer import Trainer
from training.worker import load_examples, train_loop

SETTINGS = {
    "lora__dropout": 0.1,
    "optim__max_steps": 6,  # 18 rows in steps of 4: the fifth is partial, the sixth lies in the second epoch
    "checkpoint__every_steps": 3,
    "checkpoint__keep": 9,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, random_base: Path) -> RunDir:
    """The run on one worker that all others must equal."""
    run_dir = make_run(tmp_path_factory.mktemp("alone") / "job", random_base, **SETTINGS)
    train(run_dir, random_base)
    return run_dir


def assert_same(run_dir: RunDir, expected: RunDir) -> None:
    assert losses(run_dir) == pytest.approx(losses(expected), abs=1e-5)
    assert largest_difference(adapter(run_dir), adapter(expected)) < 1e-4


@pytest.mark.parametrize(
    ("workers", "strategy", "weights"),
    [(2, "ddp", "bf16"), (2, "fsdp2", "bf16"), (3, "fsdp2", "mxfp4"), (5, "ddp", "bf16")],
)
def test_every_number_of_workers_and_strategy_trains_the_same(
    tmp_path: Path, random_base: Path, alone: RunDir, workers: int, strategy: str, weights: str
) -> None:
    run_dir = make_run(
        tmp_path / "job", random_base, **SETTINGS, scaling__strategy=strategy, scaling__workers=workers, weights=weights
    )
    train(run_dir, random_base, workers)
    found = effective(run_dir)
    assert (found["workers"], found["strategy"], found["weights"]) == (workers, strategy, weights)
    assert_same(run_dir, alone)
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step-00000003", "step-00000006"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_sixteen_workers_train_what_one_does(
    tmp_path: Path, random_base: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """17 rows a step: each worker takes two forward passes, all but one of the second are empty."""
    monkeypatch.setattr("tests.unit.training.runs.START_TIMEOUT_S", 600)
    settings = SETTINGS | {"optim__global_batch_size": 17, "optim__max_steps": 4}
    one, sixteen = (make_run(tmp_path / name, random_base, **settings, rows=36) for name in ("one", "sixteen"))
    config = json.loads(sixteen.config_path.read_text())
    config["scaling"] |= {"strategy": strategy, "workers": 16}
    sixteen.config_path.write_text(json.dumps(config))
    train(one, random_base)
    train(sixteen, random_base, 16)
    assert (effective(sixteen)["workers"], effective(sixteen)["accumulation_steps"]) == (16, 2)
    assert_same(sixteen, one)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 3)])
def test_a_resized_run_equals_the_fixed_one(
    tmp_path: Path, random_base: Path, alone: RunDir, first: int, then: int
) -> None:
    run_dir = make_run(tmp_path / "job", random_base, **SETTINGS, scaling__strategy="fsdp2")
    train(run_dir, random_base, first)
    shutil.rmtree(run_dir.adapter)
    shutil.rmtree(run_dir.checkpoints / "step-00000006")
    train(run_dir, random_base, then)
    assert run_dir.metrics()[6]["step"] == 4, "it went on from the checkpoint of another size"
    assert_same(run_dir, alone)


def test_a_group_of_one_wraps_the_adapter_alone(tmp_path: Path, random_base: Path, alone: RunDir) -> None:
    """As under Ray with one worker, where accelerate would wrap the base too."""
    run_dir = make_run(tmp_path / "job", random_base, **SETTINGS)
    run_workers(1, _wrapped_parameters, {"run_dir": run_dir.root, "base": random_base, "probe": "probe"})
    assert_same(run_dir, alone)


def _wrapped_parameters(settings: dict[str, object]) -> None:
    seen: list[int] = []
    wrap = Trainer._wrap_model

    def wrapped(self: Trainer, *args: object, **options: object) -> object:
        model = wrap(self, *args, **options)  # type: ignore[arg-type]
        seen.append(len(model._module_parameters))  # type: ignore[arg-type]
        return model

    Trainer._wrap_model = wrapped  # type: ignore[method-assign,assignment]  # in this process alone
    train_loop(settings)
    assert seen == [2 * 2 * 4], seen  # A and B of q, k, v and o in two layers


def _on_a_node_of_two(settings: dict[str, object]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    train_loop(settings)


def test_two_nodes_shard_within_each(tmp_path: Path, random_base: Path, alone: RunDir) -> None:
    run_dir = make_run(tmp_path / "job", random_base, **SETTINGS, scaling__strategy="fsdp2", weights="mxfp4")
    run_workers(4, _on_a_node_of_two, {"run_dir": run_dir.root, "base": random_base, "probe": "probe"})
    found = effective(run_dir)
    assert (found["workers"], found["strategy"], found["shards"]) == (4, "fsdp2", 2)
    assert_same(run_dir, alone)


@pytest.mark.parametrize(
    ("change", "experts", "runs"),
    [
        (0.0, "frozen", ("mxfp4", "packed", "selective")),
        (0.01, "frozen", ("bf16", "frozen", "selective")),
        (0.01, "eager", ("bf16", "eager", "full")),
    ],
)
def test_a_bf16_checkpoint_is_packed_where_that_is_exact(
    tmp_path: Path, random_base: Path, change: float, experts: str, runs: tuple[str, str, str]
) -> None:
    """The value that cannot be packed lies in the second rank's share."""
    base = dequantised(random_base, tmp_path / "base", change)
    for file in random_base.glob("*token*"):
        shutil.copy(file, base)
    shutil.copy(random_base / "chat_template.jinja", base)
    settings = {"weights": "mxfp4", "experts": experts, "recompute": "selective"}
    run_dir = make_run(tmp_path / "job", base, scaling__strategy="fsdp2", **settings)
    train(run_dir, base, 2)
    found = effective(run_dir)
    assert (found["weights"], found["experts"], found["recompute"]) == runs


def test_every_rank_reports_its_memory(tmp_path: Path, random_base: Path) -> None:
    run_dir = make_run(tmp_path / "job", random_base)
    train(run_dir, random_base, 2)
    lines = run_dir.metrics()
    assert all(line["host_rss_gib"] == max(line["rank_0/host_rss_gib"], line["rank_1/host_rss_gib"]) for line in lines)
    assert all(line["data_wait_s"] >= 0 for line in lines)
    assert lines[0]["load_s"] > 0
    assert lines[0]["load/rank_1/host_rss_gib"] > 0
    assert "load_s" not in lines[1], "logged once"


def test_packed_rows_under_fsdp2_equal_one_worker(tmp_path: Path, random_base: Path) -> None:
    settings = SETTINGS | {"data__packing": True, "optim__global_batch_size": 3}
    one, two = (make_run(tmp_path / name, random_base, **settings, scaling__strategy="fsdp2") for name in ("1", "2"))
    train(one, random_base)
    train(two, random_base, 2)
    assert_same(two, one)


@pytest.mark.parametrize(
    ("weights", "experts", "recompute"), [("bf16", "eager", "full"), ("mxfp4", "auto", "selective"), ("bf16", "frozen", "none")]
)  # fmt: skip
def test_expert_adapters_under_fsdp2_equal_one_worker(
    tmp_path: Path, random_base: Path, weights: str, experts: str, recompute: str
) -> None:
    settings = {"lora__targets": "attention+experts", "scaling__strategy": "fsdp2"}
    settings |= {"weights": weights, "experts": experts, "recompute": recompute}
    one, two = (make_run(tmp_path / name, random_base, **settings) for name in ("1", "2"))
    train(one, random_base)
    train(two, random_base, 2)
    assert_same(two, one)
    assert any("experts" in name for name in adapter(two))


def test_a_sharded_load_names_what_is_missing(tmp_path: Path, random_base: Path) -> None:
    base = shutil.copytree(random_base, tmp_path / "base")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.sinks"
    file = base / index["weight_map"].pop(name)
    state = load_file(file)
    del state[name]
    save_file(state, file, metadata={"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    run_dir = make_run(tmp_path / "job", base, scaling__strategy="fsdp2")
    with pytest.raises(ModelError, match=name):
        train(run_dir, base, 2)


def test_a_rank_that_fails_while_saving_ends_all(tmp_path: Path, random_base: Path) -> None:
    run_dir = make_run(tmp_path / "job", random_base, **SETTINGS)
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / ".step-00000003.partial").write_text("a file where a directory will be made")
    with pytest.raises(StorageError):
        train(run_dir, random_base, 2)
    assert not run_dir.adapter.exists()


@pytest.mark.parametrize("packing", [False, True])
def test_a_worker_killed_within_an_accumulation_window_leaves_a_run_that_resumes_exactly(
    tmp_path: Path, random_base: Path, packing: bool
) -> None:
    settings = SETTINGS | {"data__packing": packing, "data__max_length": 1024}
    whole, cut = (make_run(tmp_path / name, random_base, **settings) for name in ("whole", "cut"))
    assert len(load_examples(whole)) == (6 if packing else 18)
    train(whole, random_base, 2)
    with pytest.raises(BaseException):  # noqa: B017, PT011  # whatever the peer's broken connection becomes
        run_workers(2, _train_and_die, cut.root, random_base, 4)
    assert max(line["step"] for line in cut.metrics()) == 4
    newest = checkpoints.newest(cut.checkpoints)
    assert newest is not None
    assert checkpoints.step_of(newest) == 3
    train(cut, random_base, 2)
    assert cut.metrics()[4]["step"] == 4, "it went on from the checkpoint"
    assert losses(cut) == pytest.approx(losses(whole), abs=1e-6)
    assert largest_difference(adapter(cut), adapter(whole)) < 1e-6


def _train_and_die(root: Path, base: Path, at_step: int) -> None:
    """Rank 1 is killed in the second of the two forward passes of a step; it never says goodbye."""
    from training.trainer import Trainer

    step = Trainer.training_step

    def step_or_die(self: Trainer, *args: object, **kwargs: object) -> object:
        if dist.get_rank() == 1 and self._group == (at_step, 1):
            os.kill(os.getpid(), 9)
        return step(self, *args, **kwargs)  # type: ignore[arg-type]

    Trainer.training_step = step_or_die  # type: ignore[method-assign,assignment]
    train(RunDir.open(root), base)
