"""One worker's training: the loss that is logged, what recompute and packing leave equal, and exact resume."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import datasets
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.unit.training.runs import adapter, effective, largest_difference, losses, make_run, train
from training.durable import checkpoints
from training.errors import PolythinkError, StorageError, TrainingError
from training.merging.shards import Checkpoint
from training.model.load import load
from training.rows.batches import Collator, DealtBatches
from training.run_dir import RunDir
from training.worker import load_examples

MakeRun = Callable[..., RunDir]


@pytest.fixture
def run(tmp_path: Path, random_base: Path) -> MakeRun:
    """Makes a run directory and trains it on one worker."""

    def make(name: str = "job", **changes: object) -> RunDir:
        run_dir = make_run(tmp_path / name, random_base, **changes)  # type: ignore[arg-type]
        train(run_dir, random_base)
        return run_dir

    return make


def hand_computed_loss(run_dir: RunDir, base: Path, step: int) -> float:
    """Mean cross-entropy over all trained tokens of an optimizer step, by the untouched base."""
    examples = load_examples(run_dir)
    optim = run_dir.config().optim
    model = load(base)
    rows = [i for group in list(DealtBatches(len(examples), optim, 0, 1))[step * 4 : step * 4 + 4] for i in group]
    total, count = 0.0, 0
    for row in rows:
        batch = Collator(0)([examples[row]])
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[0, :-1]
        total += cross_entropy(logits, batch["labels"][0, 1:], reduction="sum").item()
        count += int((batch["labels"][0, 1:] != -100).sum())
    return total / count


def test_the_logged_loss_is_the_cross_entropy_alone(run: MakeRun, random_base: Path) -> None:
    """The base declares a router coefficient of 0.9, whose loss would add about 2."""
    assert json.loads((random_base / "config.json").read_text())["router_aux_loss_coef"] == 0.9
    run_dir = run()
    assert losses(run_dir)[0] == pytest.approx(hand_computed_loss(run_dir, random_base, 0), abs=1e-4)
    assert effective(run_dir)["router_aux_loss_coef"] == 0


def test_a_router_coefficient_that_is_asked_for_is_used(run: MakeRun, random_base: Path) -> None:
    run_dir = run(optim__router_aux_loss_coef=0.9)
    assert effective(run_dir)["router_aux_loss_coef"] == 0.9
    assert losses(run_dir)[0] > hand_computed_loss(run_dir, random_base, 0) + 0.5


def test_it_learns_and_leaves_the_base_alone(run: MakeRun, random_base: Path) -> None:
    before = {path.name: path.read_bytes() for path in random_base.iterdir()}
    run_dir = run(optim__max_steps=15)
    assert losses(run_dir)[-1] < losses(run_dir)[0] - 0.3
    assert {path.name: path.read_bytes() for path in random_base.iterdir()} == before
    assert {path.name for path in run_dir.adapter.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}


def test_what_really_runs_is_recorded(run: MakeRun) -> None:
    found = effective(run(weights="mxfp4", recompute="full", lora__r=2))
    assert (found["workers"], found["weights"], found["attention"], found["recompute"]) == (1, "mxfp4", "eager", "full")
    assert (found["accumulation_steps"], found["global_batch_size"], found["total_steps"]) == (4, 4, 4)
    assert found["trainable_parameters"] == 2 * 2 * (64 + 128 + 2 * (64 + 64) + 128 + 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full"},
        {"recompute": "selective", "weights": "mxfp4"},
        {"weights": "mxfp4"},
        {"recompute": "selective", "experts": "frozen"},
        {"lora__targets": "all-linear"},
    ],
)
def test_what_must_not_change_the_result(run: MakeRun, changes: dict[str, object]) -> None:
    plain, changed = run("plain"), run("changed", **changes)
    assert losses(changed) == pytest.approx(losses(plain), abs=1e-5)
    assert largest_difference(adapter(changed), adapter(plain)) < 1e-4


@pytest.mark.parametrize(
    ("weights", "experts", "recompute"),
    [("mxfp4", "packed", "full"), ("mxfp4", "packed", "selective"), ("mxfp4", "packed", "none"), ("bf16", "frozen", "selective")],
)  # fmt: skip
def test_expert_adapters_train_the_same_on_our_experts(
    run: MakeRun, weights: str, experts: str, recompute: str
) -> None:
    plain = run("plain", lora__targets="attention+experts")
    ours = run("ours", lora__targets="attention+experts", weights=weights, experts="frozen", recompute=recompute)
    assert [effective(ours)[key] for key in ("weights", "experts", "recompute")] == [weights, experts, recompute]
    assert losses(ours) == pytest.approx(losses(plain), abs=1e-5)
    assert largest_difference(adapter(ours), adapter(plain)) < 1e-4


def test_rows_in_a_forward_pass_do_not_matter(run: MakeRun) -> None:
    one, three = run("one"), run("three", optim__per_device_batch_size=3)
    assert losses(three) == pytest.approx(losses(one), abs=1e-5)


def test_packed_rows_train_as_unpacked_ones(run: MakeRun) -> None:
    """All rows in one step: the mean over trained tokens is the same however they are laid out."""
    rows = {"rows": 6, "optim__max_steps": 3, "optim__global_batch_size": 6}
    unpacked, packed = run("unpacked", **rows), run("packed", data__packing=True, data__max_length=1024, **rows)
    assert len(load_examples(packed)) < len(load_examples(unpacked))
    assert effective(packed)["packing"] is True
    assert losses(packed) == pytest.approx(losses(unpacked), abs=1e-4)
    assert largest_difference(adapter(packed), adapter(unpacked)) < 1e-3


def test_a_repeated_run_is_the_same(run: MakeRun) -> None:
    one, two = (run(name, lora__dropout=0.2) for name in ("one", "two"))
    assert losses(one) == losses(two)
    assert largest_difference(adapter(one), adapter(two)) == 0


def test_dropout_matters_and_follows_the_seed(run: MakeRun) -> None:
    plain, dropped = run("plain"), run("dropped", lora__dropout=0.5)
    assert losses(plain)[1:] != pytest.approx(losses(dropped)[1:], abs=1e-6)


def test_the_last_partial_step_is_trained(run: MakeRun) -> None:
    run_dir = run(rows=10, optim__max_steps=None, optim__epochs=1)
    assert [line["step"] for line in run_dir.metrics()] == [1, 2, 3]  # 4 + 4 + 2 rows
    tokens = sum(len(example["input_ids"]) for example in load_examples(run_dir))
    assert run_dir.metrics()[-1]["num_tokens"] == tokens, "each row once, padding not counted"


@pytest.mark.parametrize("epochs", [0.5, 2.5])
def test_epochs_become_steps(run: MakeRun, epochs: float) -> None:
    run_dir = run(rows=16, optim__max_steps=None, optim__epochs=epochs)
    assert len(losses(run_dir)) == 4 * epochs


class TestResume:
    SETTINGS: ClassVar[dict[str, object]] = {
        "lora__dropout": 0.1,
        "optim__max_steps": 8,
        "checkpoint__every_steps": 3,
        "checkpoint__keep": 9,
    }

    @pytest.mark.parametrize("packing", [False, True])
    @pytest.mark.parametrize("step", [3, 6])
    def test_equals_the_uninterrupted_run(self, run: MakeRun, random_base: Path, step: int, packing: bool) -> None:
        """18 rows in steps of 4 are 5 steps an epoch: step 3 lies within the first, 6 within the second. Packed, they
        are 6 sequences: step 3 lies within the second epoch, whose last step is half empty."""
        run_dir = run(**self.SETTINGS, data__packing=packing, data__max_length=1024)
        assert len(load_examples(run_dir)) == (6 if packing else 18)
        expected_losses, expected = losses(run_dir), adapter(run_dir)
        rates, tokens = ([line[key] for line in run_dir.metrics()] for key in ("learning_rate", "num_tokens"))
        self.go_back_to(run_dir, step)
        train(run_dir, random_base)
        assert run_dir.metrics()[8]["step"] == step + 1, "it went on from the checkpoint"
        assert losses(run_dir) == pytest.approx(expected_losses, abs=1e-6)
        assert [line["learning_rate"] for line in run_dir.metrics()][8:] == pytest.approx(rates[step:])
        assert [line["num_tokens"] for line in run_dir.metrics()][8:] == tokens[step:]
        assert largest_difference(adapter(run_dir), expected) < 1e-6

    def test_from_the_last_step_trains_no_further(self, run: MakeRun, random_base: Path) -> None:
        """Killed between the last checkpoint and the adapter; 8 steps are no multiple of the 5 of an epoch."""
        run_dir = run(**self.SETTINGS)
        expected = adapter(run_dir)
        newest = checkpoints.newest(run_dir.checkpoints)
        assert newest is not None
        assert checkpoints.step_of(newest) == 8
        shutil.rmtree(run_dir.adapter)
        train(run_dir, random_base)
        assert len(run_dir.metrics()) == 8, "no step was trained"
        assert largest_difference(adapter(run_dir), expected) == 0

    def test_a_torn_checkpoint_is_passed_over(self, run: MakeRun, random_base: Path) -> None:
        run_dir = run(**self.SETTINGS)
        expected = adapter(run_dir)
        self.go_back_to(run_dir, 6)
        weights = run_dir.checkpoints / "step-00000006" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-40])
        train(run_dir, random_base)
        assert run_dir.metrics()[8]["step"] == 4
        assert largest_difference(adapter(run_dir), expected) < 1e-6

    def test_a_checkpoint_that_is_written_steps_later_is_of_its_own_step(
        self, run: MakeRun, random_base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = checkpoints.save

        def late(root: Path, step: int, files: dict[str, bytes], *, keep: int) -> Path:
            deadline = time.monotonic() + 60
            while RunDir(root.parent).metrics()[-1]["step"] < min(step + 2, 8):
                assert time.monotonic() < deadline, "training does not go on"
                time.sleep(0.02)
            return plain(root, step, files, keep=keep)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "save", late)
            run_dir = run(**self.SETTINGS)
        expected_losses, expected = losses(run_dir), adapter(run_dir)
        self.go_back_to(run_dir, 3)
        train(run_dir, random_base)
        assert losses(run_dir) == pytest.approx(expected_losses, abs=1e-6)
        assert largest_difference(adapter(run_dir), expected) < 1e-6

    def test_checkpoints_hold_no_base_and_are_bounded(self, run: MakeRun) -> None:
        run_dir = run(**self.SETTINGS | {"checkpoint__keep": 2})
        kept = sorted(path.name for path in run_dir.checkpoints.iterdir())
        assert kept == ["step-00000006", "step-00000008"]
        size = sum(file.stat().st_size for file in (run_dir.checkpoints / kept[0]).iterdir())
        assert size < 5 * (run_dir.adapter / "adapter_model.safetensors").stat().st_size + 40_000

    def go_back_to(self, run_dir: RunDir, step: int) -> None:
        shutil.rmtree(run_dir.adapter)
        for checkpoint in run_dir.checkpoints.iterdir():
            if checkpoints.step_of(checkpoint) > step:
                shutil.rmtree(checkpoint)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, random_base: Path) -> None:
    base = shutil.copytree(random_base, tmp_path / "base")
    norm = Checkpoint.open(base).entries["model.norm.weight"]
    with norm.path.open("r+b") as file:
        file.seek(norm.start)
        file.write(b"\xff" * norm.size)  # NaN
    run_dir = make_run(tmp_path / "job", base)
    with pytest.raises(PolythinkError) as caught:
        train(run_dir, base)
    assert isinstance(caught.value, TrainingError)
    assert "learning_rate" in caught.value.hint
    assert not run_dir.adapter.exists()


def test_a_step_that_fails_leaves_the_lines_of_those_before(tmp_path: Path, random_base: Path) -> None:
    """Each step is logged while the next one runs."""
    run_dir = make_run(tmp_path / "job", random_base, optim__max_steps=4)
    broken = list(DealtBatches(18, run_dir.config().optim, 0, 1))[2 * 4 + 1][0]  # in the middle of the third step
    rows = [dict(row) for row in load_examples(run_dir)]
    rows[broken]["input_ids"] = [10**6] * 8
    rows[broken]["labels"] = [10**6] * 8
    shutil.rmtree(run_dir.data)
    datasets.Dataset.from_list(rows).save_to_disk(str(run_dir.data))
    with pytest.raises(IndexError):
        train(run_dir, random_base)
    assert [line["step"] for line in run_dir.metrics()] == [1, 2]


def test_each_step_has_one_line_with_its_own_figures(run: MakeRun) -> None:
    run_dir = run(optim__max_steps=6, checkpoint__every_steps=2, optim__schedule="linear")
    lines = run_dir.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2 * (6 - step) / 6 for step in range(6)])
    assert [line["epoch"] for line in lines] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2], abs=0.05)
    state = json.loads((run_dir.checkpoints / "step-00000006" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == [1, 2, 3, 4, 5, 6]


def test_a_worker_that_does_not_see_the_run_directory_says_so(tmp_path: Path, random_base: Path) -> None:
    run_dir = make_run(tmp_path / "job", random_base)
    (run_dir.root / ".probe").write_text("another driver's")
    with pytest.raises(StorageError, match="does not see the run directory"):
        train(run_dir, random_base)
