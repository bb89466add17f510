"""Looking at the reasoning language in the middle of training must not change the training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, TrainerControl, TrainerState

from tests.conftest import ROWS, with_messages
from tests.unit.training.runs import run_workers
from training.config import parse_config
from training.data import parse_rows
from training.model.load import decoder_layers, load
from training.model.lora import attach
from training.reasoning.watch import leave_prompts, watch_of
from training.rows.packing import install_masks
from training.run_dir import RunDir
from training.worker import compile_layers

torch.set_num_threads(1)

ARGUMENTS: Any = None  # the Trainer gives its own; nothing of them matters here


def config_of(base, **scaling):
    return parse_config(
        {
            "model": {"path": str(base)},
            "data": {"path": "./rows.jsonl", "current_date": "2025-08-05"},
            "scaling": {"device": "cpu", **scaling},
            "evaluation": {"sample_every_steps": 2, "sample_prompts": 2, "max_new_tokens": 8},
        }
    ).resolved()


@pytest.fixture
def run_dir(random_base, tmp_path):
    config = config_of(random_base)
    run_dir = RunDir.create(tmp_path / "run", config)
    rows = parse_rows((f"rows:{number}", with_messages(row)) for number, row in enumerate(ROWS))
    leave_prompts(config, run_dir, rows)
    return run_dir


def looks(run_dir):
    return [json.loads(line) for line in (run_dir.evaluation / "during.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("packed", [False, True])
def test_it_looks_every_so_many_steps_and_leaves_the_model_training(random_base, run_dir, packed):
    logged = []
    config = run_dir.config()
    model = attach(load(random_base), config.lora, "base").train()
    install_masks(model.get_base_model().get_decoder(), packed=packed)
    watch = watch_of(config, run_dir, AutoTokenizer.from_pretrained(random_base), 0, lambda *line: logged.append(line))
    state, control = TrainerState(), TrainerControl()
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    watch.on_train_begin(ARGUMENTS, state, control, model=model)
    for step in range(1, 5):
        state.global_step = step
        watch.on_step_end(ARGUMENTS, state, control, model=model)
    assert torch.equal(torch.rand(2), expected)
    assert model.training
    assert [look["step"] for look in looks(run_dir)] == [0, 2, 4]
    assert [step for _, step in logged] == [0, 2, 4]
    assert logged[0][0]["sample/trace_match"] == looks(run_dir)[0]["sample/trace_match"]
    assert len(looks(run_dir)[0]["traces"]) == 2
    ids = torch.arange(6)[None]  # a training step still has its gradients, also with masks made while looking
    model(input_ids=ids, position_ids=ids, labels=ids).loss.backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)


def test_what_is_compiled_is_for_training_alone(random_base, run_dir, monkeypatch):
    """A length that is seen once is no reason to compile: past a limit torch would no longer compile what trains."""
    compiled_calls = []

    def compile(forward, **_):
        def compiled(*args, **kwargs):
            compiled_calls.append(args)
            return forward(*args, **kwargs)

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    config = run_dir.config()
    model = attach(load(random_base), config.lora, "base").train()
    compile_layers(model.get_base_model())
    watch = watch_of(config, run_dir, AutoTokenizer.from_pretrained(random_base), 0, lambda *_: None)
    watch.on_train_begin(ARGUMENTS, TrainerState(), TrainerControl(), model=model)
    assert looks(run_dir)
    assert compiled_calls == []
    ids = torch.arange(6)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(compiled_calls) == len(decoder_layers(model.get_base_model()))


def test_with_ddp_only_the_first_rank_looks(random_base, run_dir):
    assert watch_of(run_dir.config(), run_dir, AutoTokenizer.from_pretrained(random_base), 1, print) is None


def test_nothing_is_watched_unless_asked(random_base, tmp_path):
    config = config_of(random_base)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"sample_every_steps": None})})
    run_dir = RunDir.create(tmp_path / "run", config)
    leave_prompts(config, run_dir, parse_rows([("rows:1", with_messages(ROWS[0]))]))
    assert not run_dir.evaluation.exists()
    assert watch_of(config, run_dir, None, 0, print) is None


def sharded_rank(base: Path, root: Path) -> None:
    config = config_of(base, strategy="fsdp2", workers=2)
    model = load(base, mesh=init_device_mesh("cpu", (2,)))
    watch = watch_of(config, RunDir.open(root), AutoTokenizer.from_pretrained(base), dist.get_rank(), lambda *_: None)
    watch.on_train_begin(ARGUMENTS, TrainerState(), TrainerControl(), model=model)


def test_sharded_ranks_look_together_and_see_what_one_sees(random_base, run_dir):
    run_workers(2, sharded_rank, random_base, run_dir.root)
    together = looks(run_dir)
    watch = watch_of(run_dir.config(), run_dir, AutoTokenizer.from_pretrained(random_base), 0, lambda *_: None)
    watch.on_train_begin(ARGUMENTS, TrainerState(), TrainerControl(), model=load(random_base))
    assert looks(run_dir) == together * 2
