"""gpt-oss-20b with LoRA and DDP on 8 H100: the notebook's training function, for transformers 5 and TRL 1.

One import is another: `from ray_app import distributed`. README.md here lists what the libraries forced. Run it with
`polythink run configs/notebooks/gpt_oss_20b.py:train`, or from a cell: `train.distributed()`.
"""

from ray_app import distributed

MODEL = "openai/gpt-oss-20b"
DATASET = "HuggingFaceH4/Multilingual-Thinking"
OUTPUT_DIR = "gpt-oss-20b-multilingual-reasoner"


@distributed(gpus=8, gpu_type="H100")
def train(model_name=MODEL, dataset_path=DATASET, output_dir=OUTPUT_DIR):
    """Trains the adapter into `output_dir`; returns the mean loss and the number of steps."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config, set_seed
    from trl import SFTConfig, SFTTrainer

    from training.notebook import gpu_memory, require_process_group, trainable_parameters

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
    ).to(dtype)  # experts are dequantised to bf16, whatever `dtype` says
    gpu_memory("after loading")

    set_seed(42)
    peft_config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, peft_config)
    trainable_parameters(model)
    dataset = load_dataset(dataset_path, split="train")

    training_args = SFTConfig(
        output_dir=output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        warmup_steps=0.03,  # a share of the steps: what warmup_ratio was
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_length=2048,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=on_gpu,
        ddp_find_unused_parameters=False,
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
