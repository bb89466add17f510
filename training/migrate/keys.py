"""Where the keys of other trainers went: tables for `training.migrate.convert`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Converted = tuple[Any, str]
"""The value in our words, and a note on it."""


def _same(value: Any) -> Converted:
    return value, ""


@dataclass(frozen=True)
class Move:
    """A key that lives on as `to`; one that starts with `_` goes into a key that several make together, named by `note`."""

    to: str
    convert: Callable[[Any], Converted] = _same
    note: str = ""


@dataclass(frozen=True)
class Gone:
    """A key without a meaning here, and why."""

    reason: str


def _number(value: Any) -> Converted:
    try:
        return float(value), ""
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None


def _whole(value: Any) -> Converted:
    try:
        return int(value), ""
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a whole number") from None


def _max_steps(value: Any) -> Converted:
    if _whole(value)[0] < 1:
        raise ValueError("no limit was set; optim.epochs decides")
    return _whole(value)


_SCHEDULES = {
    "linear": ("linear", ""),
    "cosine": ("cosine", ""),
    "constant": ("constant", ""),
    "cosine_with_min_lr": ("cosine_with_min_lr", ""),
    "constant_with_warmup": ("constant", "without the warm-up"),
    "cosine_warmup_with_min_lr": ("cosine_with_min_lr", ""),
}


def _schedule(value: Any) -> Converted:
    name = str(value).rpartition(".")[2].lower()
    if name not in _SCHEDULES:
        raise ValueError(
            f"there is no schedule {value!r} here: {', '.join(dict.fromkeys(n for n, _ in _SCHEDULES.values()))}"
        )
    return _SCHEDULES[name]


def _scheduler_kwargs(value: Any) -> Converted:
    if isinstance(value, dict) and "min_lr_rate" in value:
        return value["min_lr_rate"], ""
    raise ValueError("only min_lr_rate has a key here (optim.min_lr_rate), a share of the learning rate")


def _targets(value: Any) -> Converted:
    if value in ("all-linear", "all"):
        return "all-linear", ""
    names = value.replace(" ", "").split(",") if isinstance(value, str) else list(value)
    if set(names) == {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return "attention", "the same four modules"
    return names, ""


def _expert_targets(value: Any) -> Converted:
    if value and all("experts" in str(name) for name in value):
        return "attention+experts", "attention as well, whose modules PEFT's target_parameters leave out"
    raise ValueError("only expert parameters can be targets here (lora.targets: attention+experts)")


def _linear_targets(value: Any) -> Converted:
    if value:
        return "all-linear", ""
    raise ValueError("it was off; lora_target_modules decide")


def _dtype(value: Any) -> Converted:
    name = str(value).rpartition(".")[2]
    if name in ("bfloat16", "bf16"):
        return "bf16", ""
    if name in ("float32", "fp32"):
        return "fp32", ""
    raise ValueError(f"{value!r}: bf16 on GPUs and fp32 on CPU are what is computed in (precision)")


def _bf16(value: Any) -> Converted:
    if value in (True, "auto"):
        return "bf16", ""
    raise ValueError("it was off; precision decides")


def _attention(value: Any) -> Converted:
    if value in ("eager", "flex_attention"):
        return value, "flex_attention is 12 times faster on GPUs" if value == "eager" else ""
    raise ValueError(f"{value!r}: `auto` takes flex_attention on GPUs (sinks, sliding window) and eager on CPU")


def _recompute(value: Any) -> Converted:
    return ("full" if value in (True, "unsloth", "offload") else "none"), ""


def _fsdp(value: Any) -> Converted:
    if not value or value == "no_shard":
        raise ValueError("it was off; every worker holds the base (scaling.strategy: ddp)")
    return "fsdp2", "FSDP2: FSDP1 fails with adapters on gpt-oss; sharding is always full, by decoder layer"


def _deepspeed(value: Any) -> Converted:
    if "zero3" in str(value) or "zero_3" in str(value) or "z3" in str(value):
        return "fsdp2", "FSDP2 shards as ZeRO 3 does"
    raise ValueError("the frozen base has no optimizer states to shard; ddp holds the base, fsdp2 shards it")


def _sharded(value: Any) -> Converted:
    return "fsdp2", "FSDP2 is the only version"


def _placement(value: Any) -> Converted:
    return str(value).upper(), ""


def _timeout(value: Any) -> Converted:
    seconds, most = _number(value)[0], 86_400
    return min(seconds, most), f"a day at most: {seconds:g} s would hide a worker that hangs" if seconds > most else ""


def _adapter(value: Any) -> Converted:
    if value in ("lora", "qlora"):
        raise ValueError("the adapter is LoRA")
    raise ValueError(f"{value!r}: the source trains more than a LoRA adapter, which is what is trained here (lora)")


def _only_assistant(value: Any) -> Converted:
    return ("assistant" if value else "all"), ""


def _on_inputs(value: Any) -> Converted:
    return ("all" if value else "assistant"), ""


def _held_out(value: Any) -> Converted:
    number = _number(value)[0]
    if 0 <= number < 1:
        return number, "held out by prompt, for the evaluation of the reasoning language"
    raise ValueError(f"a number of rows ({value}); a share of the prompts is held out here (data.held_out_share)")


def _accelerator(value: Any) -> Converted:
    if value is None or str(value).lower() == "any":
        raise ValueError("any GPU is what is taken when scaling.accelerator_type is left out")
    return str(value).upper(), ""


def _name(value: Any) -> Converted:
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in str(value)).strip("._-")
    if not kept.isascii() or not kept:
        raise ValueError("names have letters, digits, `.`, `_` and `-`")
    return kept[:100], ""


def _mxfp4(value: Any) -> Converted:
    if value is True:  # Mxfp4Config(dequantize=True)
        return "bf16", "`auto` keeps the experts in MXFP4 on GPUs, in a third of the memory"
    raise ValueError("`auto` keeps the experts in MXFP4 on GPUs")


_DATA_LOADING = Gone("rows are tokenised once by the driver, and read by the workers from the run directory")
_ALWAYS_LOGGED = Gone("every step's metrics go to MLflow and to metrics.jsonl of the run")
_RUN_DIRECTORY = Gone("a run has its own directory, POLYTHINK_HOME/runs/ID, which is never overwritten")
_NO_TRAINER_EVALUATION = Gone("the reasoning language is measured before and after, on held-out prompts (evaluation)")
_ADAM = Gone("AdamW is the optimizer; the adapter is small, so its states are")
_PUSH = Gone("models are registered in MLflow (tracking.registered_model)")
_CHECKPOINTS = Gone("checkpoints are saved by steps (checkpoint.every_steps)")
_FSDP1 = Gone("FSDP2 shards each decoder layer fully, and loads a shard per rank; there is nothing to set")
_QUANTIZED = Gone("gpt-oss's experts stay in MXFP4 (weights: mxfp4); other models train in bf16")
_KERNELS = Gone("Polythink's own kernels and chunked loss are used on GPUs")
_REMOTE_CODE = Gone("code from a model's repository is never run")
_TEMPLATE = Gone("the model's own chat template renders, in training and in serving")
_DDP = Gone("only the adapter is synchronised, and all of it is used")
_PRECISION = Gone("bf16 on GPUs and fp32 on CPU are what is computed in (precision)")
_MATMUL = Gone("torch's default is kept")

TRAINER: dict[str, Move | Gone] = {
    "per_device_train_batch_size": Move("optim.per_device_batch_size", _whole),
    "gradient_accumulation_steps": Move("_accumulation", _whole, note="optim.global_batch_size"),
    "num_train_epochs": Move("optim.epochs", _number),
    "max_steps": Move("optim.max_steps", _max_steps),
    "learning_rate": Move("optim.learning_rate", _number),
    "lr_scheduler_type": Move("optim.schedule", _schedule),
    "lr_scheduler_kwargs": Move("optim.min_lr_rate", _scheduler_kwargs),
    "warmup_ratio": Move("optim.warmup_ratio", _number),
    "warmup_steps": Move("_warmup_steps", _number, note="optim.warmup_ratio"),
    "weight_decay": Move("optim.weight_decay", _number),
    "max_grad_norm": Move("optim.max_grad_norm", _number),
    "seed": Move("optim.seed", _whole),
    "data_seed": Gone("optim.seed deals the rows as well"),
    "gradient_checkpointing": Move("recompute", _recompute),
    "activation_checkpointing": Move("recompute", _recompute),
    "bf16": Move("precision", _bf16),
    "fsdp": Move("scaling.strategy", _fsdp),
    "deepspeed": Move("scaling.strategy", _deepspeed),
    "save_steps": Move("checkpoint.every_steps", _whole),
    "save_total_limit": Move("checkpoint.keep", _whole),
    "run_name": Move("name", _name),
    "ddp_timeout": Move("scaling.timeout_s", _timeout),
    "packing": Move("data.packing", note="rows packed together do not see each other here"),
    "output_dir": _RUN_DIRECTORY,
    "overwrite_output_dir": Gone(
        "transformers 5 dropped it, and a run has a directory of its own, POLYTHINK_HOME/runs/ID"
    ),
    "logging_dir": Gone("transformers 5 dropped it, and every step's metrics go to MLflow and metrics.jsonl"),
    "logging_steps": _ALWAYS_LOGGED,
    "logging_strategy": _ALWAYS_LOGGED,
    "logging_first_step": _ALWAYS_LOGGED,
    "log_level": _ALWAYS_LOGGED,
    "disable_tqdm": _ALWAYS_LOGGED,
    "report_to": Gone("MLflow is the ledger (tracking)"),
    "include_num_input_tokens_seen": _ALWAYS_LOGGED,
    "include_tokens_per_second": Gone("transformers 5 dropped it; tokens per second and GPU are among the metrics"),
    "save_strategy": _CHECKPOINTS,
    "save_safetensors": Gone("transformers 5 dropped it: safetensors is the only format"),
    "save_only_model": Gone("checkpoints hold what resuming needs"),
    "evaluation_strategy": Gone("transformers 5 renamed it to eval_strategy; " + _NO_TRAINER_EVALUATION.reason),
    "eval_strategy": _NO_TRAINER_EVALUATION,
    "eval_steps": _NO_TRAINER_EVALUATION,
    "do_eval": _NO_TRAINER_EVALUATION,
    "do_train": Gone("a configuration trains"),
    "per_device_eval_batch_size": _NO_TRAINER_EVALUATION,
    "load_best_model_at_end": _NO_TRAINER_EVALUATION,
    "metric_for_best_model": _NO_TRAINER_EVALUATION,
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
    "hub_strategy": _PUSH,
    "hub_private_repo": _PUSH,
    "optim": _ADAM,
    "adam_beta1": _ADAM,
    "adam_beta2": _ADAM,
    "adam_epsilon": _ADAM,
    "gradient_checkpointing_kwargs": Gone(
        "recomputation is non-reentrant, the only form that works with a frozen base"
    ),
    "activation_checkpointing_kwargs": Gone(
        "recomputation is non-reentrant, the only form that works with a frozen base"
    ),
    "fp16": _PRECISION,
    "tf32": _MATMUL,
    "bf16_full_eval": _PRECISION,
    "half_precision_backend": Gone("transformers 5 dropped it"),
    "torch_compile": Gone("decoder layers are compiled on GPUs (compile)"),
    "use_liger_kernel": _KERNELS,
    "use_cpu": Gone("scaling.device: cpu trains on CPU"),
    "no_cuda": Gone("transformers 5 dropped it; scaling.device: cpu trains on CPU"),
    "fsdp_config": _FSDP1,
    "fsdp_config.*": _FSDP1,
    "fsdp_min_num_params": Gone("transformers 5 dropped it; " + _FSDP1.reason),
    "fsdp_transformer_layer_cls_to_wrap": Gone("transformers 5 dropped it; " + _FSDP1.reason),
    "group_by_length": Gone("transformers 5 dropped it; rows are dealt in one order, whatever the number of workers"),
    "length_column_name": Gone("rows are dealt in one order, whatever the number of workers"),
    "local_rank": Gone("Ray Train starts the workers"),
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_backend": Gone("NCCL on GPUs, gloo on CPU"),
    "dataloader_num_workers": _DATA_LOADING,
    "dataloader_pin_memory": _DATA_LOADING,
    "dataloader_drop_last": Gone("no row is left out: what is missing in the last step is filled with masked rows"),
    "dataloader_prefetch_factor": _DATA_LOADING,
    "dataloader_persistent_workers": _DATA_LOADING,
    "remove_unused_columns": _DATA_LOADING,
    "label_names": _DATA_LOADING,
    "resume_from_checkpoint": Gone("`polythink jobs resume` goes on from the newest whole checkpoint"),
    "trust_remote_code": _REMOTE_CODE,
    "neftune_noise_alpha": Gone("there is no noise on embeddings here"),
    "label_smoothing_factor": Gone("there is no label smoothing here"),
}
"""Keys of transformers' TrainingArguments, which LLaMA-Factory has as well."""

SCRIPT: dict[str, Move | Gone] = {
    **{f"SFTConfig.{key}": rule for key, rule in TRAINER.items()},
    "SFTConfig.max_length": Move("data.max_length", _whole),
    "SFTConfig.max_seq_length": Move("data.max_length", _whole, note="TRL renamed it to max_length"),
    "SFTConfig.assistant_only_loss": Move("data.train_on", _only_assistant),
    "SFTConfig.completion_only_loss": Move("data.train_on", _only_assistant),
    "SFTConfig.router_aux_loss_coef": Move("optim.router_aux_loss_coef", _number),
    "SFTConfig.dataset_text_field": Gone("rows hold `messages`, or the columns user, analysis and final"),
    "SFTConfig.dataset_num_proc": _DATA_LOADING,
    "SFTConfig.dataset_kwargs": _DATA_LOADING,
    "SFTConfig.shuffle_dataset": Gone("every epoch is shuffled by optim.seed"),
    "SFTConfig.padding_free": Gone("documents that are packed do not see each other (data.packing)"),
    "SFTConfig.packing_strategy": Gone("rows are packed whole (data.packing)"),
    "SFTConfig.eval_packing": _NO_TRAINER_EVALUATION,
    "SFTConfig.chat_template_path": _TEMPLATE,
    "SFTConfig.eos_token": _TEMPLATE,
    "SFTConfig.pad_token": _TEMPLATE,
    "SFTConfig.loss_type": _KERNELS,
    "SFTConfig.model_init_kwargs": Gone("`precision`, `weights` and `attention` say how the model is loaded"),
    "SFTConfig.activation_offloading": Gone("activations are recomputed (recompute), not moved"),
    "LoraConfig.r": Move("lora.r", _whole),
    "LoraConfig.lora_alpha": Move("lora.alpha", _number),
    "LoraConfig.lora_dropout": Move("lora.dropout", _number),
    "LoraConfig.target_modules": Move("lora.targets", _targets),
    "LoraConfig.target_parameters": Move("lora.targets", _expert_targets),
    "LoraConfig.bias": Gone("biases are not trained: an adapter with them does not merge exactly"),
    "LoraConfig.task_type": Gone("the models are causal language models"),
    "LoraConfig.inference_mode": Gone("adapters are trained"),
    "LoraConfig.modules_to_save": Gone("only the adapter is trained"),
    "LoraConfig.use_rslora": Gone("the scale is alpha / r"),
    "LoraConfig.use_dora": Gone("adapters are plain LoRA, which merges"),
    "from_pretrained.0": Move("model.path"),
    "from_pretrained.pretrained_model_name_or_path": Move("model.path"),
    "from_pretrained.revision": Move("model.revision"),
    "from_pretrained.torch_dtype": Move("precision", _dtype, note="transformers 5 calls it dtype"),
    "from_pretrained.dtype": Move("precision", _dtype),
    "from_pretrained.attn_implementation": Move("attention", _attention),
    "from_pretrained.use_cache": Gone("training keeps no cache"),
    "from_pretrained.device_map": Gone("every worker has its own GPU"),
    "from_pretrained.low_cpu_mem_usage": Gone("each rank reads what it keeps, tensor by tensor"),
    "from_pretrained.trust_remote_code": _REMOTE_CODE,
    "Mxfp4Config.dequantize": Move("weights", _mxfp4),
    "BitsAndBytesConfig.*": _QUANTIZED,
    "load_dataset.path": Move("data.path"),
    "load_dataset.split": Move("data.split"),
    "load_dataset.revision": Move("data.revision"),
    "load_dataset.*": Gone("`data.path`, `data.revision` and `data.split` say what is read"),
    "distributed.gpus": Move("scaling.workers", _whole),
    "distributed.gpu_type": Move("scaling.accelerator_type", _accelerator),
    "distributed.remote": Gone("`polythink train` runs here, `polythink jobs submit` on the service's cluster"),
    "set_experiment.0": Move("tracking.experiment"),
    "set_experiment.experiment_name": Move("tracking.experiment"),
    "set_tracking_uri.0": Move("tracking.uri"),
    "set_registry_uri.0": Move("tracking.registry_uri"),
    "registered_model_name": Move("tracking.registered_model"),
}

AXOLOTL: dict[str, Move | Gone] = {
    **{key: rule for key, rule in TRAINER.items() if key not in ("per_device_train_batch_size", "num_train_epochs")},
    "base_model": Move("model.path"),
    "revision_of_model": Move("model.revision"),
    "model_type": Gone("the model's own config says it"),
    "tokenizer_type": Gone("the model's own config says it"),
    "datasets.path": Move("data.path"),
    "datasets.data_files": Move("data.path", lambda value: (value[0] if isinstance(value, list) else value, "")),
    "datasets.split": Move("data.split"),
    "datasets.revision": Move("data.revision"),
    "datasets.*": Gone("rows hold `messages`, or the columns user, analysis and final"),
    "datasets[]": Gone("one data set is trained on; join them into one file"),
    "test_datasets": Gone("data.held_out_path holds a file of rows to evaluate on"),
    "dataset_prepared_path": _DATA_LOADING,
    "dataset_processes": _DATA_LOADING,
    "shuffle_merged_datasets": Gone("every epoch is shuffled by optim.seed"),
    "val_set_size": Move("data.held_out_share", _held_out),
    "sequence_len": Move("data.max_length", _whole),
    "sample_packing": Move("data.packing"),
    "eval_sample_packing": _NO_TRAINER_EVALUATION,
    "sample_packing_eff_est": Gone("rows are packed whole (data.packing)"),
    "pad_to_sequence_len": Gone("rows are padded to a few lengths"),
    "excess_length_strategy": Gone("rows over data.max_length are cut and counted (data.max_lost_share)"),
    "train_on_inputs": Move("data.train_on", _on_inputs),
    "micro_batch_size": Move("optim.per_device_batch_size", _whole),
    "num_epochs": Move("optim.epochs", _number),
    "lr_scheduler": Move("optim.schedule", _schedule),
    "cosine_min_lr_ratio": Move("optim.min_lr_rate", _number, note="with optim.schedule: cosine_with_min_lr"),
    "optimizer": _ADAM,
    "adapter": Move("_adapter", _adapter),
    "lora_r": Move("lora.r", _whole),
    "lora_alpha": Move("lora.alpha", _number),
    "lora_dropout": Move("lora.dropout", _number),
    "lora_target_modules": Move("lora.targets", _targets),
    "lora_target_linear": Move("lora.targets", _linear_targets),
    "lora_target_parameters": Move("lora.targets", _expert_targets),
    "lora_modules_to_save": Gone("only the adapter is trained"),
    "lora_model_dir": Gone("a run starts from the base, or resumes its own checkpoint"),
    "lora_fan_in_fan_out": Gone("linear layers are torch's"),
    "lora_mlp_kernel": _KERNELS,
    "lora_qkv_kernel": _KERNELS,
    "lora_o_kernel": _KERNELS,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "model_quantization_config": _QUANTIZED,
    "model_quantization_config_kwargs": _QUANTIZED,
    "attn_implementation": Move("attention", _attention),
    "flex_attention": Move("attention", lambda on: ("flex_attention" if on else "auto", "")),
    "eager_attention": Move("attention", lambda on: ("eager" if on else "auto", "")),
    "flash_attention": Gone("flash attention 2 has no attention sinks; `auto` takes flex_attention on GPUs"),
    "sdp_attention": Gone("SDPA has no attention sinks; `auto` takes flex_attention on GPUs"),
    "xformers_attention": Gone("xformers has no attention sinks; `auto` takes flex_attention on GPUs"),
    "experts_implementation": Gone("`auto` multiplies experts with grouped products on GPUs (experts)"),
    "use_kernels": _KERNELS,
    "plugins": _KERNELS,
    "activation_offloading": Gone("activations are recomputed (recompute), not moved"),
    "experimental_skip_move_to_device": Gone("each rank reads what it keeps, tensor by tensor"),
    "fsdp_version": Move("scaling.strategy", _sharded),
    "saves_per_epoch": Gone("checkpoints are saved by steps (checkpoint.every_steps)"),
    "evals_per_epoch": _NO_TRAINER_EVALUATION,
    "eval_table_size": _NO_TRAINER_EVALUATION,
    "early_stopping_patience": _NO_TRAINER_EVALUATION,
    "mlflow_tracking_uri": Move("tracking.uri"),
    "mlflow_experiment_name": Move("tracking.experiment"),
    "mlflow_run_name": Move("name", _name),
    "hf_mlflow_log_artifacts": Gone("the model and its figures are logged"),
    "wandb_project": Gone("MLflow is the ledger (tracking)"),
    "wandb_entity": Gone("MLflow is the ledger (tracking)"),
    "wandb_watch": Gone("MLflow is the ledger (tracking)"),
    "wandb_name": Gone("MLflow is the ledger (tracking)"),
    "wandb_log_model": Gone("MLflow is the ledger (tracking)"),
    "chat_template": _TEMPLATE,
    "special_tokens": _TEMPLATE,
    "eot_tokens": _TEMPLATE,
    "strict": Gone("unknown keys are always refused"),
    "debug": _ALWAYS_LOGGED,
}

LLAMA_FACTORY: dict[str, Move | Gone] = {
    **TRAINER,
    "model_name_or_path": Move("model.path"),
    "model_revision": Move("model.revision"),
    "stage": Gone("stage sft is what this is"),
    "finetuning_type": Move("_adapter", _adapter),
    "dataset": Move("data.path", note="a file rather than a registered name"),
    "dataset[]": Gone("one data set is trained on; join them into one file"),
    "dataset_dir": Gone("data.path names the file"),
    "template": _TEMPLATE,
    "cutoff_len": Move("data.max_length", _whole),
    "max_samples": Gone("all rows are trained on; shorten the file"),
    "overwrite_cache": _DATA_LOADING,
    "preprocessing_num_workers": _DATA_LOADING,
    "neat_packing": Move("data.packing"),
    "train_on_prompt": Move("data.train_on", _on_inputs),
    "mask_history": Gone("only the last turn is trained (data.train_on)"),
    "val_size": Move("data.held_out_share", _held_out),
    "lora_rank": Move("lora.r", _whole),
    "lora_alpha": Move("lora.alpha", _number),
    "lora_dropout": Move("lora.dropout", _number),
    "lora_target": Move("lora.targets", _targets),
    "flash_attn": Gone("`auto` takes flex_attention on GPUs and eager on CPU (attention)"),
    "enable_liger_kernel": _KERNELS,
    "quantization_bit": _QUANTIZED,
    "quantization_method": _QUANTIZED,
    "plot_loss": _ALWAYS_LOGGED,
    "enable_thinking": _TEMPLATE,
    "ray_num_workers": Move("scaling.workers", _whole),
    "ray_run_name": Move("name", _name),
    "ray_storage_path": _RUN_DIRECTORY,
    "ray_init_kwargs": Gone("`polythink up` and `join` make the cluster"),
    "placement_strategy": Move("scaling.placement", _placement),
    "resources_per_worker": Gone("a worker has a GPU and scaling.cpus_per_worker"),
}

_TRANSFORMERS = {"optim.schedule": "linear", "optim.warmup_ratio": 0.0, "optim.epochs": 3.0}

DEFAULTS: dict[str, dict[str, Any]] = {
    "script": _TRANSFORMERS
    | {
        "optim.per_device_batch_size": 8,
        "optim.learning_rate": 2e-5,
        "data.max_length": 1024,
        "data.train_on": "all",
        "lora.alpha": 8,
    },
    "axolotl": {
        "optim.schedule": "cosine",
        "optim.warmup_ratio": 0.0,
        "optim.per_device_batch_size": 1,
        "optim.epochs": 1.0,
    },
    "llama-factory": _TRANSFORMERS
    | {"optim.per_device_batch_size": 8, "optim.learning_rate": 5e-5, "lora.r": 8, "lora.targets": "all-linear"},
}
"""Our key: the value that the source's trainer takes when it says nothing, where ours differs (TRL 0.2x, transformers 4.5x)."""
