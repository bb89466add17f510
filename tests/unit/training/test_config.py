"""What a configuration accepts, what it says about what it refuses, and that every preset loads and means the notebooks."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from training.config import PRESETS, TrainConfig, apply_override, load_config, parse_config, presets
from training.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"path": "openai/gpt-oss-20b"}, "data": {"path": "./rows.jsonl"}}


def values(**changes: Any) -> dict[str, Any]:
    """`MINIMAL` with dotted keys (`optim__epochs`) set."""
    config = MINIMAL
    for key, value in changes.items():
        config = apply_override(config, key.replace("__", "."), value)
    return config


def refusal(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(values(**changes))
    return caught.value


class TestRefusals:
    def test_unknown_key_names_the_nearest_one(self) -> None:
        error = refusal(optim__learning_rat=1e-3)
        assert error.field == "optim.learning_rat"
        assert "unknown key" in error.message
        assert "optim.learning_rate" in error.hint

    def test_unknown_section(self) -> None:
        error = refusal(optimizer={})
        assert (error.field, error.hint) == ("optimizer", "Did you mean optim?")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("optim__learning_rate", 0),
            ("optim__learning_rate", "fast"),
            ("optim__learning_rate", float("nan")),
            ("optim__learning_rate", float("inf")),
            ("optim__global_batch_size", 0),
            ("optim__global_batch_size", 2.5),
            ("optim__seed", -1),
            ("data__max_length", 10**9),
            ("data__train_on", "everything"),
            ("data__current_date", "yesterday"),
            ("lora__r", 0),
            ("lora__dropout", 1),
            ("lora__targets", []),
            ("lora__targets", "mlp"),
            ("scaling__workers", 0),
            ("scaling__workers", [3, 2]),
            ("scaling__workers", [0, 2]),
            ("scaling__workers", [1, 2, 3]),
            ("scaling__strategy", "fsdp1"),
            ("scaling__device", "tpu"),
            ("evaluation__prompts", 0),
            ("evaluation__languages", []),
            ("name", "../escape"),
            ("name", "x; touch /tmp/pwn"),
            ("tracking__alias", "two words"),
            ("model__path", ""),
        ],
    )
    def test_value_out_of_range_names_its_field(self, key: str, value: Any) -> None:
        error = refusal(**{key: value})
        assert error.field == key.replace("__", ".") or error.field == key.split("__")[0]

    @pytest.mark.parametrize(
        ("key", "value", "limit"),
        [
            ("checkpoint__keep", 1e30, 1000),
            ("checkpoint__every_steps", 1e30, 10**7),
            ("optim__max_steps", 10**8, 10**7),
            ("optim__weight_decay", 1e30, 10),
            ("optim__max_grad_norm", 1e30, 10**6),
            ("optim__router_aux_loss_coef", 1e30, 100),
            ("lora__alpha", 1e30, 10**4),
            ("scaling__workers", 10**6, 1024),
            ("scaling__workers", 1e30, 1024),
            ("scaling__workers", [1, 10**6], 1024),
            ("scaling__workers", [1, 1e30], 1024),
            ("scaling__max_failures", 1e30, 10**4),
            ("scaling__max_preemptions", 1e30, 10**4),
            ("scaling__resize_check_s", 1e30, 86_400),
            ("evaluation__batch_size", 1e30, 10**4),
            ("evaluation__sample_every_steps", 1e30, 10**7),
        ],
    )
    def test_an_absurd_number_is_refused_with_field_value_and_limit(self, key: str, value: Any, limit: int) -> None:
        error = refusal(**{key: value})
        field = key.replace("__", ".")
        shown = value[1] if isinstance(value, list) else value
        assert error.field == field
        assert error.message.count(field) == 1
        assert str(int(shown)) in error.message or repr(shown) in error.message
        assert str(limit) in error.message

    def test_every_number_has_an_upper_bound(self) -> None:
        """Of the JSON schema, so that new fields are seen."""

        def unbounded(schema: dict[str, Any], path: str) -> Iterator[str]:
            for part in schema.get("anyOf", schema.get("oneOf", [schema])):
                if part.get("type") in ("integer", "number") and not part.keys() & {"maximum", "exclusiveMaximum"}:
                    yield path

        schema = TrainConfig.model_json_schema()
        sections = {"": schema} | schema["$defs"]
        found = [
            fault
            for name, section in sections.items()
            for key, field in section.get("properties", {}).items()
            for fault in unbounded(field, f"{name}.{key}")
        ]
        assert found == []

    def test_unknown_language_names_near_ones(self) -> None:
        error = refusal(evaluation__languages=["fr", "Germn"])
        assert error.field == "evaluation.languages"
        assert "'Germn'" in error.message
        assert "German" in error.hint

    def test_message_gives_the_value(self) -> None:
        assert "given: 'fast'" in refusal(optim__learning_rate="fast").message

    def test_long_values_are_cut(self) -> None:
        assert len(refusal(optim__learning_rate="9" * 10_000).message) < 300

    def test_all_faults_in_one_message(self) -> None:
        message = refusal(optim__epochs=-1, lora__r=0, data__packng=True).message
        assert all(part in message for part in ("optim.epochs", "lora.r", "data.packng"))

    @pytest.mark.parametrize("given", [None, [], "text", 3])
    def test_not_a_mapping(self, given: Any) -> None:
        with pytest.raises(ConfigError):
            parse_config(given)

    def test_missing_sections(self) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_config({})
        assert "model" in caught.value.message
        assert "data" in caught.value.message

    def test_expert_adapters_take_no_dropout(self) -> None:
        error = refusal(lora={"targets": "attention+experts", "dropout": 0.05})
        assert "dropout" in error.message

    def test_flex_attention_needs_cuda(self) -> None:
        error = refusal(attention="flex_attention", scaling__device="cpu")
        assert "scaling.device=cuda" in error.message

    @pytest.mark.parametrize("changes", [{"experts": "grouped_mm"}, {"scaling__device": "cpu"}])
    def test_selective_recompute_keeps_nothing_of_transformers_experts(self, changes: dict[str, Any]) -> None:
        error = refusal(weights="bf16", recompute="selective", **changes)
        assert error.field == "recompute"
        assert "experts=frozen" in error.message
        assert parse_config(values(weights="bf16", recompute="selective", **changes | {"experts": "frozen"}))

    def test_accelerator_on_cpu(self) -> None:
        assert "H100" in refusal(scaling={"device": "cpu", "accelerator_type": "H100"}).message


class TestResolved:
    def test_no_auto_is_left_and_it_is_idempotent(self) -> None:
        for device in ("cuda", "cpu"):
            config = parse_config(values(scaling__device=device)).resolved()
            assert "auto" not in yaml.safe_dump(config.model_dump(mode="json"))
            assert config.resolved() == config

    def test_choices_follow_the_device(self) -> None:
        cuda, cpu = (parse_config(values(scaling__device=device)).resolved() for device in ("cuda", "cpu"))
        assert (cuda.weights, cuda.precision, cuda.attention, cuda.recompute) == (
            "mxfp4",
            "bf16",
            "flex_attention",
            "full",
        )
        assert (cpu.weights, cpu.precision, cpu.attention, cpu.recompute) == ("bf16", "fp32", "eager", "none")

    def test_what_was_asked_for_stays(self) -> None:
        config = parse_config(values(weights="bf16", recompute="none", precision="fp32", attention="eager")).resolved()
        assert (config.weights, config.recompute, config.precision, config.attention) == (
            "bf16",
            "none",
            "fp32",
            "eager",
        )

    def test_today_becomes_a_day(self) -> None:
        days = {datetime.now(UTC).date(), parse_config(MINIMAL).resolved().data.current_date, datetime.now(UTC).date()}
        assert parse_config(MINIMAL).resolved().data.current_date in days
        assert parse_config(values(data__current_date="2026-01-02")).resolved().data.current_date.isoformat() == (  # type: ignore[union-attr]
            "2026-01-02"
        )

    def test_survives_json(self) -> None:
        config = parse_config(values(scaling__workers=[8, 16])).resolved()
        assert TrainConfig.model_validate_json(config.model_dump_json()) == config
        assert config.scaling.worker_range == (8, 16)


@pytest.mark.parametrize(
    ("global_batch", "per_device", "world", "expected"),
    [(16, 1, 8, 2), (32, 1, 8, 4), (32, 1, 16, 2), (16, 1, 9, 2), (16, 1, 15, 2), (16, 2, 3, 3), (1, 4, 8, 1)],
)
def test_accumulation_covers_the_global_batch(global_batch: int, per_device: int, world: int, expected: int) -> None:
    optim = parse_config(values(optim={"global_batch_size": global_batch, "per_device_batch_size": per_device})).optim
    assert optim.accumulation_steps(world) == expected
    assert expected * per_device * world >= global_batch > (expected - 1) * per_device * world


class TestLoading:
    def write(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    def test_overrides_go_over_the_file(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, yaml.safe_dump(MINIMAL | {"optim": {"epochs": 3}}))
        config = load_config(path, ["optim.learning_rate=1e-3", "scaling.workers=[8, 16]", "evaluation=null"])
        assert (config.optim.learning_rate, config.optim.epochs) == (1e-3, 3)
        assert config.scaling.workers == (8, 16)
        assert config.evaluation is None

    def test_a_mapping_override_merges(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, yaml.safe_dump(MINIMAL | {"optim": {"epochs": 3, "seed": 1}}))
        assert load_config(path, ["optim={seed: 2}"]).optim.model_dump(include={"epochs", "seed"}) == {
            "epochs": 3,
            "seed": 2,
        }

    @pytest.mark.parametrize("override", ["", "=1", "optim.epochs", "optim.epochs=[1", "name.first=x"])
    def test_bad_overrides(self, tmp_path: Path, override: str) -> None:
        path = self.write(tmp_path, yaml.safe_dump(MINIMAL | {"name": "x"}))
        with pytest.raises(ConfigError):
            load_config(path, [override])

    def test_relative_paths_start_at_the_file(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "model: {path: ../base}\ndata: {path: ./rows.jsonl}\n")
        config = load_config(path)
        assert config.model.path == str((tmp_path.parent / "base").resolve())
        assert config.data.path == str((tmp_path / "rows.jsonl").resolve())

    def test_hub_ids_stay(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "model: {path: openai/gpt-oss-20b}\ndata: {path: org/rows}\n")
        assert load_config(path).model.path == "openai/gpt-oss-20b"

    def test_json_is_yaml(self, tmp_path: Path) -> None:
        path = tmp_path / "job.json"
        path.write_text('{"model": {"path": "a/b"}, "data": {"path": "a/c"}}')
        assert load_config(path).data.path == "a/c"

    @pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "", "just words"])
    def test_files_that_are_no_configuration(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(self.write(tmp_path, text))
        assert "job.yaml" in caught.value.message

    def test_binary_file(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError):
            load_config(path)

    @pytest.mark.parametrize("source", ["nothing.yaml", "nothing", "../configs/gpt-oss-20b", "", "gpt-oss-20b;ls"])
    def test_no_such_preset_or_file(self, source: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(source)
        assert caught.value.field == "preset"

    def test_a_misspelt_preset_lists_those_there_are(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config("gpt-oss-20")
        assert "gpt-oss-20b" in caught.value.hint


# The two notebooks, and the second's run on 16 GPUs, as their authors wrote them.
NOTEBOOK_20B = {
    "model.path": "openai/gpt-oss-20b",
    "data.path": "HuggingFaceH4/Multilingual-Thinking",
    "data.max_length": 2048,
    "data.packing": False,
    "lora.r": 8,
    "lora.alpha": 16,
    "lora.dropout": 0.05,
    "lora.targets": "all-linear",
    "optim.learning_rate": 2e-4,
    "optim.schedule": "cosine_with_min_lr",
    "optim.min_lr_rate": 0.1,
    "optim.warmup_ratio": 0.03,
    "optim.epochs": 1,
    "optim.max_steps": None,
    "optim.per_device_batch_size": 1,
    "optim.global_batch_size": 16,
    "scaling.workers": 8,
    "scaling.device": "cuda",
    "scaling.accelerator_type": "H100",
    "scaling.strategy": "ddp",
    "weights": "mxfp4",
    "precision": "bf16",
    "recompute": "full",
}
NOTEBOOK_120B = NOTEBOOK_20B | {
    "model.path": "openai/gpt-oss-120b",
    "lora.r": 16,
    "optim.learning_rate": 1.5e-4,
    "optim.schedule": "cosine",
    "optim.global_batch_size": 32,
    "scaling.strategy": "fsdp2",
}
NOTEBOOKS = {
    "gpt-oss-20b": (NOTEBOOK_20B, 2),
    "gpt-oss-120b": (NOTEBOOK_120B, 4),
    "gpt-oss-120b-16gpu": (NOTEBOOK_120B | {"scaling.workers": 16, "scaling.placement": "PACK"}, 2),
}


@pytest.mark.parametrize("preset", NOTEBOOKS)
def test_presets_are_the_notebooks(preset: str) -> None:
    expected, accumulation = NOTEBOOKS[preset]
    config = load_config(preset).resolved()
    found = {key: _at(config, key) for key in expected}
    assert found == expected
    assert config.optim.accumulation_steps(config.scaling.worker_range[0]) == accumulation


def _at(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("preset", NOTEBOOKS)
def test_the_notebooks_literal_recipe_is_one_override_away(preset: str) -> None:
    assert load_config(preset, ["weights=bf16"]).resolved().weights == "bf16"


def test_presets_are_those_files() -> None:
    assert set(NOTEBOOKS) <= set(presets())


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads_and_resolves(preset: str) -> None:
    config = load_config(preset).resolved()
    assert load_config(PRESETS / f"{preset}.yaml").resolved() == config


def test_the_service_configuration_is_yaml_that_names_the_builder() -> None:
    serve = yaml.safe_load((PRESETS / "serve.yaml").read_text())
    assert serve["applications"][0]["import_path"] == "ray_app.app:build_app"
    assert serve["http_options"]["host"] == "127.0.0.1"
