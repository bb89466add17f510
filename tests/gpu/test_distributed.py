"""`@distributed` and a whole job on the GPUs of a real Ray, by the tiny base.

On CPU (`POLYTHINK_GPU_TESTS_ON=cpu`) over gloo, with the same numbers of workers.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ray_app import distributed
from serving.engines.engine import Sampling
from serving.models.loading import EngineSettings, load_served_model
from serving.models.names import ModelSource
from tests.conftest import TINY
from tests.gpu.shapes import DEVICE, ON_GPU, marks
from training.errors import ConfigError
from training.run_dir import RunDir

pytestmark = [*marks, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]


class Diverged(Exception):
    """An error type that only this file knows."""

    def __init__(self, rank: int, loss: float):
        super().__init__(f"loss is {loss} on rank {rank}")
        self.rank = rank


@distributed(gpus=8, gpu_type="H100", remote=True)
def fine_tune(model_name: str, rows: str, output_dir: str) -> dict[str, Any]:
    """A cookbook's fine-tuning as a notebook's cell holds it, expert adapters included."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
    from trl import SFTConfig, SFTTrainer

    dataset = load_dataset("json", data_files=rows, split="train").select(range(16))
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model_kwargs = {
        "attn_implementation": "eager",
        "dtype": torch.bfloat16,  # torch_dtype
        "quantization_config": Mxfp4Config(dequantize=True),
        "use_cache": False,
    }
    model = AutoModelForCausalLM.from_pretrained(model_name, **model_kwargs)
    peft_config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules="all-linear",
        target_parameters=["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
    )
    peft_model = get_peft_model(model, peft_config)
    peft_model.print_trainable_parameters()
    training_args = SFTConfig(
        learning_rate=2e-3,
        gradient_checkpointing=True,
        num_train_epochs=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=512,
        warmup_steps=0.03,  # warmup_ratio
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        bf16=torch.cuda.is_available(),  # True
        ddp_find_unused_parameters=True,  # an expert that no token chose
        output_dir=output_dir,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model=peft_model, args=training_args, train_dataset=dataset, processing_class=tokenizer)
    result = trainer.train()
    trainer.save_model(output_dir)
    return {
        "rank": int(os.environ["RANK"]),
        "device": str(next(trainer.model.parameters()).device),
        "steps": result.global_step,
        "loss": result.training_loss,
    }


@distributed(gpus=8, gpu_type="H100")
def look_around(device: str) -> dict[str, Any]:
    """As programs for torchrun begin."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available()
    if device == "cuda":
        device = f"cuda:{local_rank}"
        assert torch.cuda.current_device() == local_rank, "set before the function begins"
    total = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(total)
    dist.barrier()
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SET_IN_A_CELL")
    return {
        "env": [os.environ.get(name) for name in names],
        "master": (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        "backend": dist.get_backend(),
        "gpus": torch.cuda.device_count() if has_gpu else 0,
        "total": total,
    }


@distributed(gpus=8, gpu_type="H100")
def diverge(device: str) -> None:
    """The last rank fails while the others wait for it."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank == dist.get_world_size() - 1:
        raise Diverged(rank, float("nan"))
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    print(total.item())


@pytest.fixture(params=[1, 2])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many there are, in the place of what the decorators above ask for."""
    number: int = request.param
    if ON_GPU and torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, there is {torch.cuda.device_count()}")
    override = f"gpus={number},gpu_type={gpu_type().lower()}" if ON_GPU else f"workers={number}"
    monkeypatch.setenv("POLYTHINK_DISTRIBUTED", f"{override},remote=false")
    return number


def gpu_type() -> str:
    """This machine's, as Ray spells it."""
    import ray

    (node,) = ray.nodes()
    prefix = "accelerator_type:"
    return next((name.removeprefix(prefix) for name in node["Resources"] if name.startswith(prefix)), "any")


def test_a_training_function_of_2025_trains(workers: int, tmp_path: Path) -> None:
    values = fine_tune.distributed(str(TINY / "base"), str(TINY / "train.jsonl"), str(tmp_path))
    devices = [f"cuda:{rank}" if ON_GPU else "cpu" for rank in range(workers)]
    assert [(value["rank"], value["device"]) for value in values] == list(enumerate(devices))
    assert {value["steps"] for value in values} == {4 // workers}
    assert len({value["loss"] for value in values}) == 1
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert all(value.isfinite().all() for value in adapter.values())
    for kind in ("self_attn.q_proj", "mlp.experts"):
        moved = [value.abs().max().item() for name, value in adapter.items() if kind in name and "lora_B" in name]
        assert max(moved) > 1e-5, f"{kind} begins at 0"


def test_workers_find_what_torchrun_gives(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_IN_A_CELL", f"by {workers}")  # after Ray began
    values = look_around.distributed(DEVICE)
    for rank, value in enumerate(values):
        assert value["env"] == [str(rank), str(workers), str(workers), f"by {workers}"]
        assert (value["backend"], value["gpus"]) == (("nccl", workers) if ON_GPU else ("gloo", 0))
        assert value["total"].tolist() == [sum(range(1, workers + 1))] * 4
        assert value["total"].device.type == "cpu", "it must be readable where there is no GPU"
    assert len({value["master"] for value in values}) == 1


def test_an_error_of_the_last_rank_is_raised_here(workers: int) -> None:
    with pytest.raises(Diverged, match=f"loss is nan on rank {workers - 1}") as caught:
        diverge.distributed(DEVICE)
    assert caught.value.rank == workers - 1
    (note,) = caught.value.__notes__
    assert f"Raised by rank {workers - 1} of {workers}" in note
    assert 'raise Diverged(rank, float("nan"))' in note


def test_workers_on_cpu_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTHINK_DISTRIBUTED", "workers=1")
    (value,) = look_around.distributed("cpu")
    assert (value["backend"], value["gpus"]) == ("gloo", 0)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU that Ray can name")
def test_gpus_of_another_type_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = gpu_type()
    monkeypatch.setenv("POLYTHINK_DISTRIBUTED", f"gpus=1,gpu_type={'a100' if there != 'A100' else 'h100'}")
    with pytest.raises(ConfigError, match=r"asked for 1 [AH]100 GPUs, and the cluster has 0") as caught:
        look_around.distributed(DEVICE)
    assert there in caught.value.hint
    override = caught.value.hint.split("'")[1]
    monkeypatch.setenv("POLYTHINK_DISTRIBUTED", override)
    (value,) = look_around.distributed(DEVICE)
    assert value["backend"] == "nccl"


def test_a_job_trains_merges_proves_and_its_model_answers(home: Path) -> None:
    """`polythink train` in a few steps; then the built-in engine on what came of it."""
    import ray

    overrides = ["optim.max_steps=8", "compile=false", "evaluation.prompts=5", "evaluation.sample_every_steps=null"]
    done = subprocess.run(
        [sys.executable, "-m", "training", "tiny", f"scaling.device={DEVICE}", "scaling.workers=1", *overrides],
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (root,) = (home / "runs").iterdir()
    result = RunDir(root).result()
    assert result is not None
    assert (result["status"], result["registration"]) == ("SUCCEEDED", "registered")
    assert result["effective"]["weights"] == ("mxfp4" if ON_GPU else "bf16")
    assert result["effective"]["device"] == (torch.cuda.get_device_name() if ON_GPU else "cpu")
    assert result["proof"]["merged"]["kl_mean"] < result["proof"]["base"]["kl_mean"]

    settings = EngineSettings(engine="transformers", device=DEVICE, cache_gib=0.5)
    model = load_served_model(ModelSource("trained", Path(result["model"])), settings)
    try:
        answer = asyncio.run(_first_tokens(model, "¿Cuál es el capital de Australia?", 12))
    finally:
        model.close()
    assert answer.startswith("<|channel|>analysis<|message|>"), answer


async def _first_tokens(model: Any, question: str, number: int) -> str:
    prompt = model.renderer.prompt_ids([{"role": "user", "content": question}])
    sampling = Sampling(max_new_tokens=number, stop_ids=model.stop_ids)
    ids = [i async for chunk in model.engine.generate(prompt, sampling) for i in chunk.ids]
    return str(model.renderer.tokenizer.decode(ids))
