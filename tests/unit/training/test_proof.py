"""A proof must hold for what `merge` writes, and fail for a single wrong byte of it."""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoTokenizer

from tests.conftest import ROWS as ROWS_OF_TEXT
from tests.conftest import with_messages
from tests.unit.training.adapters import load, logits, make_adapter, with_adapter
from training import proof as proof_module
from training.errors import MergeError
from training.harmony import Renderer
from training.merge import RECORD, merge
from training.merging.adapter import Adapter
from training.merging.layerwise import adapted_weights, layerwise_logits, plain_weights
from training.merging.proof_files import check_adapted, check_copied
from training.merging.routing import Routing
from training.merging.shards import Checkpoint
from training.merging.smoke import Smoke, answer_prompt, form_positions, read_along
from training.proof import prove

ROWS = [[(7 * i) % 500 for i in range(24)], [(11 * i + 3) % 500 for i in range(40)]]


@pytest.fixture(scope="module")
def adapter(random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(random_base, tmp_path_factory.mktemp("adapters") / "attention")


@pytest.fixture(scope="module")
def expert_adapter(random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(random_base, tmp_path_factory.mktemp("adapters") / "experts", experts=True)


@pytest.fixture
def merged(random_base: Path, adapter: Path, tmp_path: Path) -> Path:
    merge(random_base, adapter, tmp_path / "merged", progress=False)
    return tmp_path / "merged"


def change_byte(directory: Path, name: str) -> None:
    entry = Checkpoint.open(directory).entries[name]
    with entry.path.open("r+b") as file:
        file.seek(entry.start + entry.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_proof_holds_and_its_numbers_tell_the_models_apart(random_base, adapter, merged):
    proof = prove(random_base, adapter, merged, ROWS, ROWS[0])
    base, result = Checkpoint.open(random_base), Checkpoint.open(merged)
    assert proof.adapted_exact == 8
    assert proof.copied_identical == len(base.entries) - 8
    recorded = json.loads((merged / RECORD).read_text())["copied_xxh128"]
    assert proof.copied_xxh128 == check_copied(base, Adapter.open(adapter, base), result)[1] == recorded
    assert proof.tokens == 64
    assert proof.merged.kl_mean < 1e-4 < proof.base.kl_mean
    assert proof.merged.top1 > proof.base.top1
    assert proof.max_kl == 1e-4
    assert proof.smoke is not None
    assert not proof.smoke.well_formed  # random weights
    assert proof.as_dict()["merged"]["kl_mean"] == proof.merged.kl_mean


def test_no_more_of_a_row_is_read_than_eager_attention_can_hold(random_base, adapter, merged, monkeypatch):
    monkeypatch.setattr(proof_module, "ROW_TOKENS", 10)
    assert prove(random_base, adapter, merged, ROWS, ROWS[0]) == prove(
        random_base, adapter, merged, [row[:10] for row in ROWS], []
    )


def test_layer_by_layer_gives_the_same_logits(random_base, adapter, merged):
    checkpoint = Checkpoint.open(random_base)
    positions = [list(range(24)), list(range(24))]
    rows = (torch.arange(48).view(2, 24) * 7 % 500).tolist()
    reference = logits(with_adapter(random_base, adapter)).flatten(0, 1)
    weights = adapted_weights(checkpoint, Adapter.open(adapter, checkpoint))
    torch.testing.assert_close(layerwise_logits(random_base, weights, rows, positions), reference, rtol=1e-4, atol=1e-4)
    proof = prove(random_base, adapter, merged, ROWS, [], layerwise=True)
    whole = prove(random_base, adapter, merged, ROWS, [])
    assert proof.layerwise
    assert proof.smoke is whole.smoke is None
    assert proof.base.kl_mean == pytest.approx(whole.base.kl_mean, rel=1e-3)
    assert proof.merged.kl_mean == pytest.approx(whole.merged.kl_mean, rel=0.2)


def test_layer_by_layer_reads_padded_rows_as_alone(random_base):
    weights = plain_weights(Checkpoint.open(random_base))
    together = layerwise_logits(random_base, weights, ROWS, [[23], [39]])
    alone = torch.cat([layerwise_logits(random_base, weights, [row], [[len(row) - 1]]) for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_proof_of_expert_adapters(random_base, expert_adapter, tmp_path, format, layerwise):
    merge(random_base, expert_adapter, tmp_path / "merged", format=format, progress=False)
    proof = prove(random_base, expert_adapter, tmp_path / "merged", ROWS, [], layerwise=layerwise)
    assert proof.adapted_exact == 12
    assert proof.max_kl == (1e-4 if format == "bf16" else None)
    assert proof.merged.kl_median < proof.base.kl_median


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.self_attn.q_proj.weight", r"q_proj.* differs from W \+ scale"),
        ("model.layers.1.mlp.experts.down_proj_blocks", r"down_proj_blocks .* is not the base's"),
        ("model.layers.0.self_attn.sinks", r"sinks .* is not the base's"),
    ],
)
def test_a_single_wrong_bit_fails_the_proof(random_base, adapter, merged, tensor, message):
    change_byte(merged, tensor)
    with pytest.raises(MergeError, match=message):
        prove(random_base, adapter, merged, ROWS, [])


def test_base_that_changed_after_the_merge_fails(random_base, adapter, merged, tmp_path):
    """The same byte changed in both: they agree with each other, and not with what was merged."""
    base = tmp_path / "base"
    shutil.copytree(random_base, base)
    for directory in (base, merged):
        change_byte(directory, "model.layers.0.self_attn.sinks")
    with pytest.raises(MergeError, match="copied tensors have XXH3"):
        prove(base, adapter, merged, ROWS, [])


def test_base_passed_off_as_merged_fails(random_base, adapter, tmp_path):
    shutil.copytree(random_base, tmp_path / "copy")
    with pytest.raises(MergeError, match=r"differs from W \+ scale"):
        prove(random_base, adapter, tmp_path / "copy", ROWS, [])


def test_adapter_for_another_model_fails(random_base, adapter, merged, tmp_path):
    other = make_adapter(random_base, tmp_path / "other", seed=5)
    with pytest.raises(MergeError, match=r"differs from W \+ scale"):
        prove(random_base, other, merged, ROWS, [])


def test_wrong_behaviour_fails_even_when_the_files_are_right(random_base, adapter, merged):
    """A config that lost its rope: every weight is right, and the model is another one."""
    text = (merged / "config.json").read_text()
    (merged / "config.json").write_text(text.replace("150000", "10000"))
    checkpoints = (
        Checkpoint.open(random_base),
        Adapter.open(adapter, Checkpoint.open(random_base)),
        Checkpoint.open(merged),
    )
    assert check_adapted(*checkpoints) == 8
    with pytest.raises(MergeError, match="not base \\+ adapter: mean KL"):
        prove(random_base, adapter, merged, ROWS, [])


def test_held_experts_leave_rounding_alone_to_compare(tiny_base, tmp_path):
    """A trained model's routers have near-ties: rounding turns some, and each turn moves its token by far more than rounding."""
    adapter = make_adapter(tiny_base, tmp_path / "adapter", seed=1, std=0.02, r=16, lora_alpha=32)
    merge(tiny_base, adapter, tmp_path / "merged", progress=False)
    proof = prove(tiny_base, adapter, tmp_path / "merged", [_row(tiny_base)], _prompt(tiny_base))
    assert proof.merged.kl_mean < 1e-4
    assert proof.base.kl_mean > 100 * proof.merged.kl_mean
    assert proof.routing_changed is not None
    assert proof.routing_changed < 0.01
    assert proof.smoke is not None
    assert proof.smoke.well_formed
    by_layers = prove(tiny_base, adapter, tmp_path / "merged", [_row(tiny_base)], _prompt(tiny_base), layerwise=True)
    assert by_layers.merged.kl_mean == pytest.approx(proof.merged.kl_mean, rel=0.2)
    assert by_layers.smoke is not None
    assert by_layers.smoke.text.startswith("<|channel|>analysis<|message|>")
    assert by_layers.smoke.well_formed


def test_repeated_choices_are_the_noted_ones(random_base, adapter):
    base, adapted = load(random_base), with_adapter(random_base, adapter)
    routing, alone, own = Routing(), logits(adapted), Routing()
    with routing.noted(base):
        logits(base)
    with routing.repeated(adapted):
        moved = logits(adapted)
    with own.noted(adapted):
        logits(adapted)
    with own.repeated(adapted):
        kept = logits(adapted)
    assert routing.changed_share is not None
    assert routing.changed_share > 0
    assert own.changed_share == 0
    assert not torch.equal(moved, alone)
    torch.testing.assert_close(kept, alone)
    assert Routing().changed_share is None


def _renderer(base: Path) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(base), date(2026, 1, 1))


def _messages() -> list[dict[str, str]]:
    row = with_messages(ROWS_OF_TEXT[0])
    return [{key: value for key, value in message.items() if value} for message in row["messages"]]


def _row(base: Path) -> list[int]:
    return _renderer(base).training_ids(_messages())[0]


def _prompt(base: Path) -> list[int]:
    return _renderer(base).prompt_ids(_messages()[:-1])


def test_form_is_read_where_harmony_leaves_no_choice(tiny_base):
    row, prompt = _row(tiny_base), _prompt(tiny_base)
    positions = form_positions(tiny_base, row, prompt)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    following = [row[position + 1] for position in positions]
    assert tokenizer.decode(following) == "<|channel|>analysis<|message|><|start|>assistant<|channel|>final<|message|>"
    assert form_positions(tiny_base, row, prompt[1:]) == form_positions(tiny_base, row, []) == []

    def read(merged: str, base: str) -> Smoke | None:
        """What comes of models that like these tokens best."""
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (merged, base)]
        return read_along(tiny_base, *(one_hot(torch.tensor(i), len(tokenizer)) for i in ids), row, positions)

    form = tokenizer.decode(following)
    assert read(form, form) == Smoke(form, True, "read along")
    assert not read(form.replace("final", "analysis"), form).well_formed
    assert read(form.replace("final", "analysis"), form.replace("final", "user")).well_formed
    assert read(form, "<|end|>" * len(following)) is None


def test_smoke_reads_control_tokens_by_name(random_base):
    tokenizer = AutoTokenizer.from_pretrained(random_base)

    def smoke(text: str) -> Smoke:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        model = type(
            "Model", (), {"generate": lambda self, prompt, **options: torch.cat([prompt, torch.tensor([ids])], 1)}
        )
        return answer_prompt(model(), random_base, [1, 2, 3], "cpu")

    whole = (
        "<|channel|>analysis<|message|>Gefragt ist.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>"
    )
    assert smoke(whole).well_formed
    assert smoke("<|channel|>analysis<|message|>Gefragt ist").well_formed
    assert not smoke("Gefragt ist<|return|>").well_formed
    assert not smoke("<|channel|>analysis<|message|>Gefragt ist.<|return|>").well_formed
    assert not smoke("<|channel|>finalx<|message|>Paris.<|return|>").well_formed


def test_only_a_base_that_answers_in_harmony_makes_smoke_a_failure():
    good, bad = Smoke("fine", True, "stop"), Smoke("noise", False, "length")
    proof_module._judge_smoke(good, good)
    proof_module._judge_smoke(bad, bad)
    with pytest.raises(MergeError, match="'noise', which is not well-formed harmony"):
        proof_module._judge_smoke(bad, good)
