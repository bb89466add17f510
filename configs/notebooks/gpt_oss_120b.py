"""gpt-oss-120b with LoRA and FSDP on 8 H100: the notebook's training function, for transformers 5 and TRL 1.

As `gpt_oss_20b.py`, but for the rank, the schedule, the batch, and FSDP with its blocks; on two nodes with `--gpus 16`.
On CPU accelerate takes DDP where FSDP was asked for; the adapter is the same.
"""

from ray_app import distributed

MODEL = "openai/gpt-oss-120b"
DATASET = "HuggingFaceH4/Multilingual-Thinking"
OUTPUT_DIR = "gpt-oss-120b-multilingual-reasoner"


@distributed(gpus=8, gpu_type="H100")
def train(model_name=MODEL, dataset_path=DATASET, output_dir=OUTPUT_DIR):
    """Trains the adapter into `output_dir`; returns the mean loss and the number of steps."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config, set_seed
    from trl import SFTConfig, SFTTrainer

    from training.notebook import block_classes, require_process_group

    require_process_group()
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    model = AutoModelForCausalLM.from_pretrained(
        model_name,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=dtype,
        attn_implementation="eager",
        use_cache=False,
    ).to(dtype)

    set_seed(42)
    peft_config = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, peft_config)
    dataset = load_dataset(dataset_path, split="train")

    fsdp_config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": [block.__name__ for block in block_classes(model)],
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "FULL_STATE_DICT",
    }
    training_args = SFTConfig(
        output_dir=output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=1.5e-4,
        warmup_steps=0.03,
        lr_scheduler_type="cosine",
        max_length=2048,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=on_gpu,
        fsdp=on_gpu,  # what "full_shard auto_wrap" was
        fsdp_config=fsdp_config if on_gpu else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model=model, args=training_args, train_dataset=dataset, processing_class=tokenizer)
    result = trainer.train()
    trainer.save_model(output_dir)
    return {"loss": result.training_loss, "steps": result.global_step}


if __name__ == "__main__":
    print(train.distributed())
