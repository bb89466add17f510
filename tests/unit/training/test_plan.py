"""Plans: sizes to the byte, memory and speed against what was measured on an H200, advice that fits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.config import ModelConfig, load_config, parse_config
from training.errors import ConfigError
from training.plan import check_evaluation, check_memory, plan
from training.planning.costs import gpu_memory, mfu, step_s
from training.planning.sizes import KNOWN, Sizes, find_sizes

SMALL = Sizes.from_config(KNOWN["openai/gpt-oss-20b"])
LARGE = Sizes.from_config(KNOWN["openai/gpt-oss-120b"])
ROW = 2048


def test_sizes_are_openais_to_the_byte() -> None:
    assert (SMALL.disk_bytes, LARGE.disk_bytes) == (13_761_264_768, 65_248_815_744)
    assert SMALL.parameters == pytest.approx(20.91e9, rel=1e-3)
    assert LARGE.parameters == pytest.approx(116.8e9, rel=1e-3)
    assert SMALL.stored_bytes(2) == pytest.approx(41.8e9, rel=1e-3)
    assert SMALL.active_parameters == pytest.approx(3.6e9, rel=0.01)
    assert LARGE.active_parameters == pytest.approx(5.1e9, rel=0.02)


def test_sizes_of_a_local_checkpoint_are_its_bytes(random_base: Path) -> None:
    sizes = find_sizes(ModelConfig(path=str(random_base)))
    assert sizes is not None
    index = json.loads((random_base / "model.safetensors.index.json").read_text())
    assert sizes.disk_bytes == index["metadata"]["total_size"]


OUR_PEAKS_GIB = [
    (SMALL, 16, "full", 21.9),
    (SMALL, 8, "selective", 34.0),
    (SMALL, 8, "none", 47.7),
    (SMALL, 16, "none", 81.3),
    (SMALL, 24, "none", 115.2),
    (SMALL, 64, "full", 47.0),
    (LARGE, 8, "full", 69.9),
    (LARGE, 8, "none", 115.0),
]
"""In tests/benchmarks/training/h200-*.json."""


@pytest.mark.parametrize(("sizes", "rows", "recompute", "measured_gib"), OUR_PEAKS_GIB)
def test_memory_is_what_was_measured(sizes: Sizes, rows: int, recompute: str, measured_gib: float) -> None:
    adapter = sizes.adapter_parameters(8, experts=False)
    parts = gpu_memory(sizes, tokens=rows * ROW, weights="mxfp4", recompute=recompute, adapter_parameters=adapter)
    assert sum(parts.values()) == pytest.approx(measured_gib, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "settings", "measured_gib"),
    [
        (SMALL, {"tokens": 65_536, "weights": "mxfp4", "recompute": "full"}, 33.6),
        (SMALL, {"tokens": ROW, "weights": "bf16", "recompute": "full", "loss_tokens": ROW, "eager_length": ROW}, 44.0),
        (SMALL, {"tokens": 4 * ROW, "weights": "bf16", "recompute": "full", "loss_tokens": 4 * ROW}, 58.7),
        (SMALL, {"tokens": 8 * ROW, "weights": "bf16", "recompute": "full", "loss_tokens": 8 * ROW}, 78.3),
        # FSDP2 was measured with a loss over the logits of each row's last 1,024 tokens.
        (SMALL, {"tokens": 8 * ROW, "weights": "mxfp4", "recompute": "full", "shards": 2, "loss_tokens": 8192}, 38.8),
        (LARGE, {"tokens": 8 * ROW, "weights": "mxfp4", "recompute": "full", "shards": 2, "loss_tokens": 8192}, 63.8),
    ],
)
def test_memory_of_a_prototype(sizes: Sizes, settings: dict[str, object], measured_gib: float) -> None:
    """With TRL's loss: 15 bytes a logit, of 3,000 tokens where it was chunked."""
    settings = {"loss_tokens": 3000, "bytes_per_logit": 15} | settings
    total = sum(gpu_memory(sizes, adapter_parameters=sizes.adapter_parameters(8, experts=False), **settings).values())
    assert total == pytest.approx(measured_gib, rel=0.15)


@pytest.mark.parametrize(
    ("sizes", "rows", "weights", "recompute", "eager", "measured"),
    [
        (SMALL, 16, "mxfp4", "full", False, 24_944),
        (SMALL, 24, "mxfp4", "none", False, 33_243),
        (LARGE, 8, "mxfp4", "full", False, 12_466),
        (SMALL, 4, "bf16", "full", False, 10_259),
        (SMALL, 8, "bf16", "full", False, 10_572),
        (SMALL, 1, "bf16", "full", True, 877),
    ],
)
def test_speed_is_what_was_measured(
    sizes: Sizes, rows: int, weights: str, recompute: str, eager: bool, measured: float
) -> None:
    tokens = rows * ROW
    seconds = step_s(sizes, tokens=tokens, weights=weights, recompute=recompute, eager=eager, compute_rate=1.0)
    assert tokens / seconds == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(("preset", "steps"), [("gpt-oss-20b", 60), ("gpt-oss-120b", 30), ("gpt-oss-120b-16gpu", 30)])
def test_presets_fit_their_gpus(preset: str, steps: int) -> None:
    made = plan(load_config(preset))
    assert made.fits_requested is True
    assert made.steps == steps
    assert made.gpu_memory_gib is not None
    assert made.gpu_total_gib == pytest.approx(sum(made.gpu_memory_gib.values()), abs=0.05)
    assert made.total_s > made.training_s > 0
    assert json.loads(json.dumps(made.as_dict()))["advice"] == []


def test_a_run_that_does_not_fit_is_told_what_to_change() -> None:
    config = load_config("gpt-oss-120b", ["weights=bf16", "scaling.strategy=ddp"])
    made = plan(config)
    assert made.fits_requested is False
    assert any("weights=mxfp4" in advice for advice in made.advice)
    changed = plan(load_config("gpt-oss-120b", ["weights=mxfp4", "scaling.strategy=ddp"]))
    assert changed.fits_requested is True


def test_what_no_change_helps_is_said_to_need_more() -> None:
    made = plan(load_config("gpt-oss-120b", ["scaling.workers=1", "scaling.accelerator_type=L40S"]))
    assert made.fits_requested is False
    assert "more than 1 workers" in made.advice[-1]


def test_sharding_and_elastic_workers_are_counted() -> None:
    four, eight, sixteen = (plan(load_config("gpt-oss-120b", [f"scaling.workers={n}"])) for n in (4, 8, 16))
    assert four.gpu_memory_gib["weights"] == pytest.approx(2 * eight.gpu_memory_gib["weights"], rel=0.01)
    assert sixteen.gpu_memory_gib["weights"] == eight.gpu_memory_gib["weights"], "sharded within a node"
    elastic = plan(load_config("gpt-oss-120b", ["scaling.workers=[8, 16]"]))
    assert elastic.gpu_total_gib == eight.gpu_total_gib
    assert any("elastic" in note for note in elastic.notes)


@pytest.mark.parametrize(
    ("gpu", "rows", "chosen"), [("H200", 1, "none"), ("H100", 16, "selective"), ("H100", 24, "full"), (None, 1, "full")]
)
def test_recompute_is_the_fastest_that_fits(gpu: str | None, rows: int, chosen: str) -> None:
    changes = [f"scaling.accelerator_type={gpu or 'null'}", f"optim.per_device_batch_size={rows}", "recompute=auto"]
    config = load_config("gpt-oss-20b", changes).resolved()
    assert config.recompute == chosen
    assert config.resolved() == config
    assert f"recompute=auto is {chosen} here" in plan(load_config("gpt-oss-20b", changes)).notes


def test_frozen_experts_in_bf16_cost_memory_and_save_no_time() -> None:
    changes = ["scaling.accelerator_type=H200", "optim.per_device_batch_size=16", "recompute=none"]
    packed, frozen, theirs = (
        plan(load_config("gpt-oss-20b", [*changes, *more]))
        for more in (["weights=mxfp4"], ["weights=bf16"], ["weights=bf16", "experts=grouped_mm"])
    )
    more_gib = frozen.gpu_memory_gib["weights"] - packed.gpu_memory_gib["weights"]
    assert more_gib == pytest.approx(24 * 3 * 32 * 2880**2 * (2 - 17 / 32) / 2**30, abs=0.02)
    assert frozen.gpu_memory_gib["activations"] == packed.gpu_memory_gib["activations"]
    assert frozen.fits_requested is True
    assert theirs.fits_requested is False, "it keeps the experts' input, activation and output as well"
    assert frozen.tokens_per_s_per_gpu == packed.tokens_per_s_per_gpu


def test_selective_is_for_frozen_experts_too() -> None:
    changes = ["scaling.accelerator_type=H100", "optim.per_device_batch_size=8", "recompute=auto", "weights=bf16"]
    assert load_config("gpt-oss-20b", changes).resolved().recompute == "selective"
    assert load_config("gpt-oss-20b", [*changes, "experts=grouped_mm"]).resolved().recompute == "full"


def test_selective_lies_between_full_and_none() -> None:
    gib = [
        sum(gpu_memory(SMALL, tokens=8 * ROW, weights="mxfp4", recompute=way).values())
        for way in ("full", "selective", "none")
    ]
    assert gib == sorted(gib)
    seconds = [
        step_s(SMALL, tokens=8 * ROW, weights="mxfp4", recompute=way, eager=False, compute_rate=1.0)
        for way in ("none", "selective", "full")
    ]
    assert seconds == sorted(seconds)


class TestCheckMemory:
    LARGE = ("gpt-oss-120b", ["weights=bf16", "scaling.strategy=ddp"])

    def test_what_does_not_fit_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"needs 2\d\d\.\d GiB .*weights 21\d.*H100 has 79\.6") as caught:
            check_memory(load_config(*self.LARGE).resolved(), LARGE)
        assert "weights=mxfp4" in caught.value.hint
        assert "scaling.ignore_memory_plan=true" in caught.value.hint

    def test_it_starts_when_told_to(self) -> None:
        name, changes = self.LARGE
        check_memory(load_config(name, [*changes, "scaling.ignore_memory_plan=true"]).resolved(), LARGE)

    def test_the_card_that_is_there_counts(self) -> None:
        config = load_config("gpt-oss-20b", ["scaling.accelerator_type=null"]).resolved()
        check_memory(config, SMALL)
        check_memory(config, SMALL, "NVIDIA H100 80GB HBM3", 79.1)
        with pytest.raises(ConfigError, match=r"NVIDIA T4 has 14\.6"):
            check_memory(config, SMALL, "NVIDIA T4", 14.6)

    def test_presets_of_one_size_take_the_larger_card_of_a_kind(self) -> None:
        """Ray says A100; whether it is the one of 40 or 80 GB is seen by the worker."""
        config = load_config("gpt-oss-20b", ["scaling.accelerator_type=A100", "weights=bf16"]).resolved()
        check_memory(config, SMALL)


class TestCheckEvaluation:
    EXPERTS = ("lora.targets=attention+experts", "lora.dropout=0")

    def test_what_one_gpu_cannot_ask_is_refused_with_the_numbers(self) -> None:
        config = load_config("gpt-oss-120b", self.EXPERTS).resolved()
        with pytest.raises(ConfigError, match=r"the merged model, 21\d\.\d GiB, and H100 has 79\.6") as caught:
            check_evaluation(config, LARGE)
        assert "merge_format=mxfp4 (6" in caught.value.hint
        assert "evaluation=null" in caught.value.hint
        assert caught.value.field == "evaluation"

    def test_no_format_helps_a_base_that_is_too_large_itself(self) -> None:
        config = load_config("gpt-oss-120b", ["scaling.accelerator_type=L40S"]).resolved()
        with pytest.raises(ConfigError, match=r"the base, 6\d\.\d GiB, and L40S") as caught:
            check_evaluation(config, LARGE)
        assert "merge_format" not in caught.value.hint

    def test_any_gpu_counts_where_none_is_asked_for(self) -> None:
        with pytest.raises(ConfigError, match="B200"):
            check_evaluation(
                load_config("gpt-oss-120b", [*self.EXPERTS, "scaling.accelerator_type=null"]).resolved(), LARGE
            )

    @pytest.mark.parametrize(
        ("preset", "changes", "sizes"),
        [
            ("gpt-oss-120b", (), LARGE),
            ("gpt-oss-120b", (*EXPERTS, "merge_format=mxfp4"), LARGE),
            ("gpt-oss-120b", (*EXPERTS, "scaling.ignore_memory_plan=true"), LARGE),
            ("gpt-oss-120b", (*EXPERTS, "scaling.accelerator_type=unheard-of"), LARGE),
            ("gpt-oss-120b", EXPERTS, None),
            ("gpt-oss-20b", EXPERTS, SMALL),
        ],
    )
    def test_what_fits_or_is_not_known_passes(self, preset: str, changes: tuple[str, ...], sizes: Sizes | None) -> None:
        check_evaluation(load_config(preset, changes).resolved(), sizes)


def test_mfu_is_four_flops_a_parameter_and_token() -> None:
    assert mfu(SMALL, "NVIDIA H200", 54_800) == pytest.approx(1, rel=0.01)
    assert mfu(LARGE, "NVIDIA H100 80GB HBM3", 38_700) == pytest.approx(1, rel=0.02)
    assert mfu(SMALL, "NVIDIA A100-SXM4-80GB", 1000) > 3 * mfu(SMALL, "NVIDIA H200", 1000)
    assert mfu(SMALL, "NVIDIA T4", 1000) is mfu(None, "NVIDIA H200", 1000) is mfu(SMALL, None, 1000) is None


def test_local_rows_give_steps_and_a_local_model_its_size(random_base: Path, rows_file: Path) -> None:
    config = parse_config(
        {
            "model": {"path": str(random_base)},
            "data": {"path": str(rows_file), "held_out_path": str(rows_file)},
            "optim": {"epochs": 3, "global_batch_size": 2},
            "scaling": {"device": "cpu"},
        }
    )
    made = plan(config)
    assert (made.rows, made.steps, made.gpu_memory_gib) == (4, 6, None)
    assert made.host_memory_gib > 0.5
    assert made.tokens > 4 * 75


def test_rows_with_unicode_line_separators_in_their_texts_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"user": "one\u2028two", "final": "three\u0085four"}\n', encoding="utf-8")
    assert plan(parse_config({"model": {"path": "someone/unheard-of"}, "data": {"path": str(rows)}})).rows == 1


def test_an_unknown_model_and_unknown_rows_leave_gaps_not_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{not json\n")
    made = plan(parse_config({"model": {"path": "someone/unheard-of"}, "data": {"path": str(bad)}}))
    assert (made.gpu_memory_gib, made.rows, made.steps) == (None, None, None)
    assert len(made.notes) == 3


def test_plans_need_no_torch() -> None:
    code = "import sys, training.plan; sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
