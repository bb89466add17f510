"""TRL's `SFTTrainer`, told how rows are dealt, how replicas agree, and what a checkpoint is."""

import dataclasses
import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from training.config import TrainConfig
from training.durable import checkpoints
from training.model.lora import adapter_files, load_adapter
from training.model.loss import Sums, has_plain_head, install_loss, trained_positions
from training.model.recompute import checkpoint_arguments
from training.rows.batches import Collator, DealtBatches, Rows, row_seed
from training.tracking.measures import Measures, without_waiting

BUCKET_MB = 64
"""Of gradients that travel together: an attention adapter is one bucket, expert adapters several, which overlap the backward."""

_OPTIMIZER, _SCHEDULER, _TRAINER_STATE = "optimizer.pt", "scheduler.pt", "trainer_state.json"


def arguments(config: TrainConfig, rows: int, world_size: int, output_dir: Path) -> SFTConfig:
    """`config` in TRL's words. `rows` is the number of sequences of an epoch.

    Mixed precision, batching, packing and saving are ours (see `Trainer`), so TRL's own are off.
    """
    optim = config.optim
    steps_per_epoch = DealtBatches(rows, optim, 0, world_size).steps_per_epoch
    floor = {"min_lr_rate": optim.min_lr_rate} if optim.schedule == "cosine_with_min_lr" else {}
    return SFTConfig(
        output_dir=str(output_dir),
        max_steps=optim.max_steps or max(1, round(optim.epochs * steps_per_epoch)),
        per_device_train_batch_size=optim.per_device_batch_size,
        gradient_accumulation_steps=optim.accumulation_steps(world_size),
        average_tokens_across_devices=True,  # the loss is the mean over all trained tokens of an optimizer step
        learning_rate=optim.learning_rate,
        lr_scheduler_type=optim.schedule,
        lr_scheduler_kwargs=floor,
        warmup_steps=optim.warmup_ratio,  # transformers 5 takes a share below 1
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        router_aux_loss_coef=optim.router_aux_loss_coef,
        seed=optim.seed,
        bf16=False,
        gradient_checkpointing=config.recompute != "none",
        gradient_checkpointing_kwargs=checkpoint_arguments(config.recompute),
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        save_strategy="steps",
        save_steps=config.checkpoint.every_steps,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not finite must be seen
        report_to="none",
        disable_tqdm=True,
        use_cpu=config.scaling.device == "cpu",
        ddp_backend=("gloo" if config.scaling.device == "cpu" else "nccl") if dist.is_initialized() else None,
    )


class Trainer(SFTTrainer):
    """Trains the adapter of `model` on ready-made examples.

    With our loss it never waits for the GPU before the next step's work was given to it: transformers fetches loss and gradient
    norm after each step, here a step is logged once the next one's first pass is under way. What fails or saves logs first.

    Args:
        model: frozen base (whole or sharded) with an adapter that is replicated on every rank.
        config: the resolved configuration.
        examples: `input_ids`, `labels`, and `position_ids` when packed.
        saves: where checkpoints go; rank 0 uses it.
    """

    def __init__(
        self,
        model: PeftModel,
        config: TrainConfig,
        examples: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        saves: checkpoints.Background,
        callbacks: list[TrainerCallback],
    ):
        self.config = config
        self.examples = examples
        self.saves = saves
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._group = (0, 0)  # (optimizer step, forward passes of it that were begun)
        self._rate = 0.0  # learning rate of the step that was gathered last
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._rows = Rows(
            examples.with_format("numpy"), pad
        )  # 10 times faster than lists: 9 ms for 16 rows of 2,048 tokens
        self._collator = Collator(pad, multiple=_length_multiple(config))
        super().__init__(
            model=model,
            args=arguments(config, len(examples), self.world_size, saves.root),
            train_dataset=examples,
            data_collator=self._collator,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        self.measures = Measures(self.args.device)
        base = model.get_base_model()
        assert isinstance(base, PreTrainedModel)
        self._own_loss = has_plain_head(base) and not self.aux_loss_enabled
        if self._own_loss:
            install_loss(base)
        self.remove_callback(PrinterCallback)  # its dictionaries would drown the log; `Reporter` says what matters

    def get_train_dataloader(self) -> DataLoader:
        dealt = DealtBatches(len(self.examples), self.config.optim, self.rank, self.world_size)
        return _EpochLoader(self._rows, batch_sampler=dealt, collate_fn=self._collator, on_wait=self.measures.add_wait)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """DDP over the adapter alone: frozen parameters, sharded or not, are none of its business.

        Also for a single worker of a process group: accelerate would wrap it otherwise, base and all, and search for unused
        parameters at each step.
        """
        if not training or not dist.is_initialized() or isinstance(model, DistributedDataParallel):
            return model
        frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
        frozen += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
        return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)

    def compute_loss_context_manager(self) -> ExitStack:
        stack = super().compute_loss_context_manager()
        stack.enter_context(
            torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")
        )
        return stack

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        step = self.state.global_step
        done = self._group[1] if self._group[0] == step else 0
        self._group = (step, done + 1)
        torch.manual_seed(row_seed(self.args.seed, step, done * self.world_size + self.rank))
        self.measures.add_tokens(int((inputs["input_ids"] != self._collator.pad_token_id).sum()))
        if self._own_loss:  # found where the batch still is, on the CPU: on the GPU their number would be waited for
            inputs["trained"] = trained_positions(inputs["labels"])
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._report()
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Any:
        """Trained tokens of an optimizer step, on all ranks."""
        if not self._own_loss:
            return super()._get_num_items_in_batch(batch_samples, device)
        trained = torch.tensor(sum(len(trained_positions(batch["labels"])) for batch in batch_samples))
        trained = without_waiting(trained, device)
        if dist.is_initialized():
            dist.all_reduce(trained)
        return trained

    def _prepare_input(self, data: Any) -> Any:
        on_host = isinstance(data, Tensor) and data.device.type == "cpu"
        return without_waiting(data, self.args.device) if on_host else super()._prepare_input(data)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over all trained tokens of the optimizer step, on all ranks: this pass's sum over their number."""
        if "trained" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        sums: Sums = model(**inputs, use_cache=False)
        self.measures.add_loss(sums, len(inputs["trained"]))
        # DDP averages gradients over ranks, and the logged loss is averaged too
        return sums.loss / num_items_in_batch.clamp(min=1) * self.world_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: transformers walks all parameters for it at every pass, and `Reporter` tells the MFU."""
        return 0

    def train(self, *args: Any, **options: Any) -> Any:
        self.measures.begin()
        try:
            return super().train(*args, **options)
        finally:
            self._report()

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **options: Any) -> None:
        """Gathers the step, which `_report` logs, and saves it if it is to be."""
        if self.state.global_step > self._globalstep_last_logged:  # every rank is here
            self._globalstep_last_logged = self.state.global_step  # transformers, asked below, has nothing left to log
            self._rate = options["learning_rate"]
            self.measures.gather(tr_loss, torch.as_tensor(grad_norm))
            tr_loss.zero_()
        if not self._own_loss:  # TRL's own figures are of the passes up to now
            self._report()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)

    def _report(self) -> None:
        """Logs the step that was gathered last, if it is not yet; `state` is still of that step."""
        found = self.measures.read()
        if found:
            self._total_loss_scalar += found["loss"]
            self.log(found | {"learning_rate": self._rate})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Rank 0 saves, and nobody waits for it: what it saves is replicated, and when it fails the others' next
        collective does too."""
        self._report()
        if self.rank == 0:
            self.saves.save(self.state.global_step, self._files())

    def _files(self) -> dict[str, bytes]:
        """A checkpoint of this moment; training may go on while it is written."""
        assert isinstance(self.model, PeftModel)
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        return {
            **adapter_files(self.model),
            _OPTIMIZER: _pickled(self.optimizer.state_dict()),
            _SCHEDULER: _pickled(self.lr_scheduler.state_dict()),
            _TRAINER_STATE: json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True).encode(),
        }

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        assert isinstance(self.model, PeftModel)
        load_adapter(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        # Through host memory: transformers maps to "cpu:0" on several CPU workers, which torch refuses.
        for part, name in ((self.optimizer, _OPTIMIZER), (self.lr_scheduler, _SCHEDULER)):
            part.load_state_dict(torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing to load: `training_step` seeds every forward pass."""


def _pickled(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _length_multiple(config: TrainConfig) -> int:
    """What lengths are rounded up to: compiled layers see at most 8 of them, flex attention works in blocks of 128."""
    if config.scaling.device == "cpu":
        return 1
    return max(128, config.data.max_length // 8 if config.compile else 128)


class _EpochLoader(DataLoader):
    """Tells its batch sampler the epoch, as transformers' Trainer expects of a loader, and `on_wait` the seconds training
    waited for each batch, which is read while the one before is trained on.

    Not so for the rest of an epoch after a resume within it: accelerate skips batches with a loader of its own."""

    def __init__(self, *args: Any, on_wait: Callable[[float], None], **options: Any):
        super().__init__(*args, **options)
        self._on_wait = on_wait

    def __iter__(self) -> Any:
        batches = super().__iter__()
        with ThreadPoolExecutor(1, "batches") as ahead:  # reads the next batch while the GPU works on this one
            coming = ahead.submit(next, batches, None)
            while True:
                started = time.perf_counter()
                batch = coming.result()
                self._on_wait(time.perf_counter() - started)
                if batch is None:
                    return
                coming = ahead.submit(next, batches, None)
                yield batch

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
