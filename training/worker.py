"""What each Ray Train worker does: load its share, attach the adapter, train, save. Runs in the worker's own process."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback

from training.config import TrainConfig
from training.durable import checkpoints
from training.durable.preemption import AnswerRequests
from training.durable.run_mirror import RunMirror
from training.errors import StorageError
from training.model.base import on_this_node
from training.model.experts import FrozenExperts
from training.model.load import decoder_layers
from training.model.lora import attach, load_adapter, save_adapter
from training.model.recompute import recompute_of
from training.model.share import load_share
from training.planning.costs import mfu
from training.planning.sizes import sizes_of
from training.reasoning.watch import watch_of
from training.rows.packing import install_masks
from training.run_dir import Phase, RunDir, write_json
from training.tracking.reporting import Reporter
from training.trainer import Trainer

if TYPE_CHECKING:
    from training.tracking.run import Tracking


@dataclass(frozen=True)
class Setup:
    """What the driver tells every worker; plain values, so that it pickles."""

    run_dir: Path
    base: Path
    """On the driver's node; see `on_this_node`."""
    probe: str
    """Content of the probe file that the driver left in the run directory."""
    mlflow_run_id: str | None = None
    mlflow_uri: str | None = None
    storage: str | None = None
    """URL of the storage root, where nodes need not share a disk."""


def train_loop(settings: dict[str, Any]) -> None:
    """One worker's part of a run.

    Args:
        settings: the fields of a `Setup`.

    Raises:
        StorageError: this worker sees the run directory neither on its disk nor at the storage URL, or not the base.
        TrainingError: something that was asked for is not what was set up, or the loss is not finite.
    """
    setup = Setup(**settings)
    run_dir, mirror = _run_dir(setup)
    config = run_dir.config()
    if config.scaling.device == "cpu":
        torch.set_num_threads(max(1, int(config.scaling.cpus_per_worker)))
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(config.optim.seed)

    base = _base(config, setup, progress=rank == 0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model, load_measures = load_share(config, base, progress=rank == 0)
    examples = load_examples(run_dir)
    if config.attention == "flex_attention" or config.data.packing:
        install_masks(model.get_decoder(), packed=config.data.packing)
    adapted = attach(model, config.lora, config.model.path)
    if config.compile:
        compile_layers(model)
    tracking = _tracking(setup) if rank == 0 else None
    log_metrics = tracking.log_metrics if tracking else _nowhere
    reporter = Reporter(run_dir, log_metrics) if rank == 0 else None
    then = (mirror.push_checkpoint,) if mirror else ()
    saves = checkpoints.Background(run_dir.checkpoints, config.checkpoint.keep, *then)
    callbacks: list[TrainerCallback] = [reporter, AnswerRequests(run_dir.root, saves.finish)] if reporter else []
    watch = watch_of(config, run_dir, tokenizer, rank, log_metrics)
    if watch:
        callbacks.append(watch)
    trainer = Trainer(adapted, config, examples, tokenizer, saves, callbacks)
    if reporter:
        reporter.watch(
            trainer.measures,
            world_size=trainer.world_size,
            mfu=partial(mfu, sizes_of(model.config.to_dict()), _gpu_name(config)),
            load=load_measures,
            on_begin=lambda: write_json(run_dir.effective_path, effective(config, model, trainer)),
        )

    checkpoint = _resume_from(run_dir, mirror)
    if checkpoint and checkpoints.step_of(checkpoint) >= trainer.args.max_steps:  # transformers would train a step more
        load_adapter(adapted, checkpoint)
    else:
        with mirror.pushing() if mirror and rank == 0 else nullcontext():
            _train(trainer, saves, checkpoint)
    if rank == 0:
        _publish(adapted, run_dir)
        if mirror:
            mirror.push_adapter()
    if tracking:
        tracking.flush()
    if dist.is_initialized():
        dist.barrier()


def _run_dir(setup: Setup) -> tuple[RunDir, RunMirror | None]:
    """The run directory as this node sees it: the driver's own, or one brought from the storage URL."""
    run_dir, probe = RunDir(setup.run_dir), setup.run_dir / PROBE
    mirror = RunMirror(run_dir, setup.storage) if setup.storage else None
    shared = probe.is_file() and probe.read_text() == setup.probe
    if not shared and not (mirror and mirror.bring(probe, setup.probe)):
        raise StorageError(
            f"node {os.uname().nodename} does not see the run directory {setup.run_dir}, which its driver wrote to"
            + (f", nor {mirror.url}" if mirror else ""),
            hint="Put POLYTHINK_HOME on storage that every node mounts at the same path, or set POLYTHINK_STORAGE to a URL.",
        )
    return run_dir, mirror


def _base(config: TrainConfig, setup: Setup, *, progress: bool) -> Path:
    """The base on this node. All wait for one that must fetch it first, longer than a collective would. Collective."""
    base = on_this_node(config.model, setup.base, progress=progress)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        store.set(f"base/{dist.get_rank()}", "here")
        store.wait([f"base/{rank}" for rank in range(dist.get_world_size())], FETCH_TIMEOUT)
    return base


def _train(trainer: Trainer, saves: checkpoints.Background, checkpoint: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        saves.finish()


def _publish(adapted: PeftModel, run_dir: RunDir) -> None:
    """Puts the finished adapter in place whole: a run that has it needs no more training."""
    beside = run_dir.root / ".adapter.partial"
    shutil.rmtree(beside, ignore_errors=True)
    save_adapter(adapted, beside)
    shutil.rmtree(run_dir.adapter, ignore_errors=True)
    beside.rename(run_dir.adapter)


PROBE = ".probe"
FETCH_TIMEOUT = timedelta(hours=6)  # 65 GB at 3 MB/s


def _gpu_name(config: TrainConfig) -> str | None:
    return torch.cuda.get_device_name() if config.scaling.device == "cuda" else None


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each decoder layer's forward; one compilation serves all layers of a kind.

    The forward alone, so that FSDP's and checkpointing's hooks around it stay as they are. `Collator` pads to few lengths,
    each of which is compiled once.
    """
    torch._dynamo.config.recompile_limit = 64  # two kinds of layer times a dozen lengths, per code object
    for layer in decoder_layers(model):
        layer.forward = _compiled_for_gradients(layer.forward)  # type: ignore[method-assign]


def _compiled_for_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, compiled where gradients are wanted, as it is elsewhere.

    Answers that are generated while training have another length at every token. Each would be compiled, up to torch's limit,
    past which training too would run as it is, without a word.
    """
    compiled = torch.compile(forward, dynamic=False)

    @wraps(forward)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return choose


def effective(config: TrainConfig, model: PreTrainedModel, trainer: Trainer) -> dict[str, Any]:
    """What really runs, read off the objects rather than off the configuration."""
    first = next(model.parameters())
    held = next((module.held for module in model.modules() if isinstance(module, FrozenExperts)), None)
    recompute = recompute_of(model)
    if recompute == "selective" and held is None:  # transformers' experts: nothing is kept
        recompute = "full"
    return {
        "workers": trainer.world_size,
        "strategy": "fsdp2" if isinstance(first, DTensor) else "ddp",
        "shards": first.device_mesh.size() if isinstance(first, DTensor) else 1,
        "weights": "mxfp4" if held == "packed" else "bf16",
        "precision": str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "experts": held or model.config._experts_implementation,
        "compile": config.compile,
        "recompute": recompute,
        "packing": config.data.packing,
        "accumulation_steps": trainer.args.gradient_accumulation_steps,
        "global_batch_size": config.optim.global_batch_size,
        "total_steps": trainer.args.max_steps,
        "trainable_parameters": sum(value.numel() for value in model.parameters() if value.requires_grad),
        "router_aux_loss_coef": trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0,
        "device": _gpu_name(config) or "cpu",
        "torch": torch.__version__,
    }


def load_examples(run_dir: RunDir) -> Any:
    """The tokenised rows that the driver left, memory-mapped."""
    import datasets

    return datasets.load_from_disk(str(run_dir.data))


def _resume_from(run_dir: RunDir, mirror: RunMirror | None) -> Path | None:
    """The newest whole checkpoint; rank 0 looks, so that all ranks start from the same."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if mirror and rank == 0:
        mirror.bring_checkpoints()
    found = [checkpoints.newest(run_dir.checkpoints) if rank == 0 else None]
    if mirror and found[0]:
        mirror.push_checkpoint(found[0])
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    if mirror and found[0]:
        mirror.bring_checkpoints(found[0])
    if found[0] is not None and rank == 0:
        run_dir.write_progress(Phase.RUNNING, message=f"resuming from step {checkpoints.step_of(found[0])}")
    return found[0]


def _tracking(setup: Setup) -> "Tracking | None":
    if setup.mlflow_run_id is None or setup.mlflow_uri is None:
        return None
    from training.tracking.run import Tracking

    return Tracking.attach(setup.mlflow_run_id, setup.mlflow_uri)


def _nowhere(metrics: dict[str, float], step: int) -> None:
    """Where metrics go when no MLflow run was given."""
