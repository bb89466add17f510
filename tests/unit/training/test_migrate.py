"""Other trainers' scripts and configurations, read and turned into ours; what comes out loads."""

import json
from pathlib import Path

import pytest

from training.config import PRESETS, TrainConfig, load_config
from training.errors import ConfigError
from training.migrate.convert import Migration, migrate

SCRIPT = """
import os
import torch
from datasets import load_dataset

dbutils.widgets.text("model", "openai/gpt-oss-20b")
MODEL = dbutils.widgets.get("model")
DATASET = os.environ.get("DATASET", "HuggingFaceH4/Multilingual-Thinking")
OUT = f"/Volumes/main/{os.getpid()}"

@distributed(gpus=8, gpu_type="h100", remote=True)
def run_train(rows=1, rate=2e-4):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, torch_dtype=torch.bfloat16, attn_implementation="eager", use_cache=False,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    peft = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", bias="none")
    data = load_dataset(DATASET, split="train")
    common = dict(seed=7)
    args = SFTConfig(
        output_dir=OUT, overwrite_output_dir=True, logging_dir="/tmp/logs",
        num_train_epochs=1, per_device_train_batch_size=rows, gradient_accumulation_steps=1 * 2,
        learning_rate=rate, warmup_ratio=0.03, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, max_length=2048, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, bf16=True, report_to="mlflow",
        fsdp="full_shard auto_wrap", fsdp_config={"fsdp_state_dict_type": "FULL_STATE_DICT"},
        save_steps=compute(), frobnicate=3, **common,
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, peft_config=peft)
    trainer.train()
    mlflow.transformers.log_model(model, registered_model_name="main.default.gpt-oss-20b-peft")
"""

AXOLOTL = """
base_model: openai/gpt-oss-20b
datasets:
  - path: HuggingFaceH4/Multilingual-Thinking
    type: chat_template
    field_thinking: thinking
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./out
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0
lora_target_linear: true
gradient_accumulation_steps: 8
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_torch_8bit
lr_scheduler: constant_with_warmup
learning_rate: 2e-4
bf16: true
flash_attention: true
gradient_checkpointing: true
warmup_ratio: 0.1
saves_per_epoch: 1
fsdp_version: 2
fsdp_config:
  offload_params: false
  state_dict_type: SHARDED_STATE_DICT
special_tokens:
"""

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,k_proj,v_proj,o_proj
dataset: identity,alpaca_en
dataset_dir: data
template: qwen3
cutoff_len: 2048
output_dir: saves/qwen3
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
val_size: 0.1
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(result: Migration, folder: Path) -> TrainConfig:
    return load_config(write(folder, "ours.yaml", result.yaml()))


def reasons(result: Migration) -> dict[str, str]:
    return {lost.key: lost.reason for lost in [*result.gone, *result.unread]}


def test_the_notebooks_script_becomes_the_preset(tmp_path: Path) -> None:
    result = migrate(write(tmp_path, "train.py", SCRIPT))
    config = load(result, tmp_path)
    preset = load_config("gpt-oss-20b")
    assert config.model == preset.model
    assert config.data == preset.data.model_copy(update={"train_on": "all"})
    assert config.lora == preset.lora
    assert config.optim == preset.optim.model_copy(update={"seed": 7})
    assert config.scaling == preset.scaling.model_copy(update={"strategy": "fsdp2"})
    assert (config.weights, config.precision, config.attention, config.recompute) == ("bf16", "bf16", "eager", "full")
    assert config.tracking.registered_model == "main.default.gpt-oss-20b-peft"


def test_each_key_is_named_with_what_became_of_it(tmp_path: Path) -> None:
    result = migrate(write(tmp_path, "train.py", SCRIPT))
    moved = {moved.key: moved.to for moved in result.moved}
    assert moved["SFTConfig.learning_rate"] == "optim.learning_rate"
    assert moved["SFTConfig.gradient_accumulation_steps"] == "optim.global_batch_size"
    assert moved["SFTConfig.fsdp"] == "scaling.strategy"
    assert moved["from_pretrained.torch_dtype"] == "precision"
    lost = reasons(result)
    assert "transformers 5 dropped it" in lost["SFTConfig.overwrite_output_dir"]
    assert "transformers 5 dropped it" in lost["SFTConfig.logging_dir"]
    assert "FSDP2" in lost["SFTConfig.fsdp_config"]
    assert "computed when the script runs" in lost["SFTConfig.output_dir"]
    assert "computed when the script runs" in lost["SFTConfig.save_steps"]
    assert lost["SFTConfig.frobnicate"] == "unknown here"
    named = {moved.key for moved in result.moved} | set(lost)
    assert {key for key in named if key.startswith("SFTConfig.")} >= {
        f"SFTConfig.{keyword}" for keyword in ("num_train_epochs", "report_to", "bf16", "lr_scheduler_kwargs")
    }


def test_what_a_script_leaves_out_is_its_trainers_default_not_ours(tmp_path: Path) -> None:
    text = (
        "AutoModelForCausalLM.from_pretrained('openai/gpt-oss-20b')\n"
        "load_dataset('json', data_files='rows.jsonl')\n"
        "LoraConfig(r=4)\nSFTConfig(output_dir='out')"
    )
    config = load(migrate(write(tmp_path, "short.py", text), gpus=2), tmp_path)
    assert (config.optim.learning_rate, config.optim.epochs, config.optim.schedule) == (2e-5, 3, "linear")
    assert (config.optim.global_batch_size, config.lora.alpha, config.data.max_length) == (16, 8, 1024)
    assert config.data.path == str(tmp_path / "rows.jsonl")


def test_a_notebook_is_read_without_its_magics(tmp_path: Path) -> None:
    lines = ["%pip install trl\n", "!ls\n", *SCRIPT.splitlines(keepends=True)]
    cells = [{"cell_type": "markdown", "source": ["# no code"]}, {"cell_type": "code", "source": lines}]
    notebook = write(tmp_path, "train.ipynb", json.dumps({"cells": cells}))
    assert migrate(notebook).values == migrate(write(tmp_path, "train.py", SCRIPT)).values


def test_axolotl(tmp_path: Path) -> None:
    result = migrate(write(tmp_path, "axolotl.yaml", AXOLOTL), gpus=8)
    config = load(result, tmp_path)
    assert (config.model.path, config.data.path) == ("openai/gpt-oss-20b", "HuggingFaceH4/Multilingual-Thinking")
    assert (config.data.max_length, config.data.packing, config.data.held_out_share) == (4096, True, 0.1)
    assert (config.lora.r, config.lora.alpha, config.lora.targets) == (16, 32, "all-linear")
    assert (config.optim.global_batch_size, config.optim.per_device_batch_size, config.optim.epochs) == (128, 2, 3)
    assert (config.optim.schedule, config.optim.learning_rate, config.optim.warmup_ratio) == ("constant", 2e-4, 0.1)
    assert config.scaling.workers == 8
    lost = reasons(result)
    assert "sinks" in lost["flash_attention"]
    assert "FSDP2" in lost["fsdp_config.state_dict_type"]
    assert "AdamW" in lost["optimizer"]
    assert not result.unread


def test_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "dataset_info.json", json.dumps({"identity": {"file_name": "identity.jsonl"}}))
    result = migrate(write(tmp_path, "lf.yaml", LLAMA_FACTORY))
    config = load(result, tmp_path)
    assert config.data.path == str(tmp_path / "data" / "identity.jsonl")
    assert (config.lora.r, config.lora.alpha, config.lora.targets) == (16, 32, "attention")
    assert (config.optim.global_batch_size, config.optim.schedule) == (8, "cosine")
    assert config.scaling.strategy == "fsdp2"
    assert "one data set" in reasons(result)["dataset[1]"]
    assert not result.unread


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.yaml", "a: 1", "of no known kind"),
        ("broken.py", "def f(:", "line 1 is not Python"),
        ("empty.py", "SFTConfig(learning_rate=1e-4)", "names no model"),
        ("broken.ipynb", "{}", "no notebook"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        migrate(write(tmp_path, name, text))


def test_a_name_with_two_values_is_not_guessed(tmp_path: Path) -> None:
    text = (
        "rate = 1e-4\nrate = 2e-4\nSFTConfig(learning_rate=rate)\n"
        "AutoModelForCausalLM.from_pretrained('openai/gpt-oss-20b')\nload_dataset('a/b')\n"
    )
    result = migrate(write(tmp_path, "two.py", text))
    assert reasons(result)["SFTConfig.learning_rate"].startswith("computed")


@pytest.mark.parametrize("preset", ["gpt-oss-20b", "gpt-oss-120b"])
def test_the_notebooks_become_their_presets(tmp_path: Path, preset: str) -> None:
    """Taken literally: every token is trained, in the weights and attention that the notebooks load."""
    result = migrate(PRESETS / "notebooks" / f"{preset.replace('-', '_')}.py")
    config = load(result, tmp_path)
    literal = load_config(preset, ["data.train_on=all", "weights=bf16", "attention=eager"])
    for section in ("model", "data", "lora", "optim"):
        assert getattr(config, section) == getattr(literal, section)
    assert (config.weights, config.attention, config.recompute) == ("bf16", "eager", "full")
    assert config.scaling.workers == 8
    assert not any("warmup_ratio" in note for note in result.notes)
    assert set(reasons(result)) >= {"SFTConfig.output_dir", "from_pretrained.use_cache"}


def test_options_of_the_command_line_stand_for_their_defaults(tmp_path: Path) -> None:
    text = (
        "parser.add_argument('-m', '--base-model', default='openai/gpt-oss-120b')\n"
        "parser.add_argument('--lr', type=float, default=1e-4)\nargs = parser.parse_args()\n"
        "AutoModelForCausalLM.from_pretrained(args.base_model)\nload_dataset('a/b')\n"
        "SFTConfig(learning_rate=args.lr, seed=other.lr)\n"
    )
    result = migrate(write(tmp_path, "options.py", text))
    config = load(result, tmp_path)
    assert (config.model.path, config.optim.learning_rate) == ("openai/gpt-oss-120b", 1e-4)
    assert reasons(result)["SFTConfig.seed"].startswith("computed")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("full.yaml", "base_model: a/b\ndatasets: [{path: a/c}]\n", "it trains all weights"),
        ("full.yaml", "model_name_or_path: a/b\ndataset: c\nfinetuning_type: full\n", "'full': the source trains more"),
        ("full.py", "AutoModelForCausalLM.from_pretrained('a/b')\nload_dataset('a/c')\n", "it trains all weights"),
    ],
)
def test_a_source_that_trains_all_weights_is_told_that_an_adapter_is_trained(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    result = migrate(write(tmp_path, name, text))
    assert says in " ".join([*result.notes, *reasons(result).values()])


def test_llama_factory_on_ray(tmp_path: Path) -> None:
    more = "ray_num_workers: 4\nray_run_name: eight b\nplacement_strategy: PACK\nddp_timeout: 180000000\n"
    result = migrate(write(tmp_path, "ray.yaml", LLAMA_FACTORY + more))
    config = load(result, tmp_path)
    assert (config.scaling.workers, config.scaling.placement, config.name) == (4, "PACK", "eight-b")
    assert config.scaling.timeout_s == 86_400, "as every example of theirs has it: more than five years"


def test_axolotls_fsdp_version_shards(tmp_path: Path) -> None:
    text = "base_model: a/b\nadapter: lora\ndatasets: [{path: a/c}]\nfsdp_version: 2\nfsdp_config: {offload_params: false}\n"
    assert load(migrate(write(tmp_path, "fsdp.yaml", text)), tmp_path).scaling.strategy == "fsdp2"
