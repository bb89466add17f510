"""What a merge must keep equal, and what it must refuse."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.unit.training.adapters import divergence, edit_weights, load, logits, make_adapter, with_adapter
from training.errors import MergeError, ModelError, StorageError
from training.merge import RECORD, convert, finished_merge, merge
from training.merging import layout, shards
from training.merging import rewrite as rewriting
from training.merging.adapter import Adapter, expert_stem, write_provenance
from training.merging.proof_files import check_adapted, check_copied
from training.merging.rewrite import read_expert
from training.merging.shards import Checkpoint
from training.model import mxfp4


@pytest.fixture(scope="module")
def adapter(random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(random_base, tmp_path_factory.mktemp("adapters") / "attention")


@pytest.fixture(scope="module")
def expert_adapter(random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(random_base, tmp_path_factory.mktemp("adapters") / "experts", experts=True)


def copied(adapter: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "adapter"
    copy.mkdir()
    for path in adapter.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_adapted_tensors_are_exact_and_all_others_identical(random_base, adapter, tmp_path):
    report = merge(random_base, adapter, tmp_path / "out", progress=False)
    base, merged = Checkpoint.open(random_base), Checkpoint.open(tmp_path / "out")
    assert list(base.entries) == list(merged.entries)
    pairs = load_file(adapter / "adapter_model.safetensors")
    adapted = 0
    for name, entry in base.entries.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in pairs:
            assert entry.xxh128() == merged.entries[name].xxh128(), name
            continue
        adapted += 1
        delta = 2.0 * (pairs[f"{prefix}.lora_B.weight"].double() @ pairs[f"{prefix}.lora_A.weight"].double())
        expected = (entry.read().float() + delta.float()).to(torch.bfloat16)
        assert torch.equal(expected, merged.entries[name].read()), name
        assert not torch.equal(entry.read(), expected)
    assert adapted == report.adapted_tensors == 4 * 2
    assert report.copied_tensors == len(base.entries) - adapted
    assert report.survival["plain"]["kept_share"] == pytest.approx(1, abs=0.02)


def test_values_do_not_depend_on_how_many_are_computed_at_once(random_base, tmp_path, monkeypatch):
    adapter = make_adapter(random_base, tmp_path / "adapter", r=32)
    merge(random_base, adapter, tmp_path / "whole", progress=False)
    monkeypatch.setattr(rewriting, "CHUNK_VALUES", 200)
    merge(random_base, adapter, tmp_path / "pieces", progress=False)
    for shard in Checkpoint.open(tmp_path / "whole").shards:
        assert (tmp_path / "whole" / shard).read_bytes() == (tmp_path / "pieces" / shard).read_bytes()


def test_merged_model_loads_anew_and_answers_as_base_plus_adapter(random_base, adapter, tmp_path):
    merge(random_base, adapter, tmp_path / "out", progress=False)
    merged = logits(load(tmp_path / "out"))
    reference = logits(with_adapter(random_base, adapter))
    # The median: rounding to bf16 may turn a router's near-tie, and that token takes another expert.
    assert divergence(reference, merged).median() < 2e-5
    assert (merged - logits(load(random_base))).abs().max() > 0.1
    tokenizer, base_tokenizer = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", random_base))
    assert tokenizer.chat_template == base_tokenizer.chat_template
    for name in ("generation_config.json", "model.safetensors.index.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (random_base / name).read_bytes()


def test_config_is_the_bases_with_rope_in_both_forms(random_base, adapter, tmp_path):
    merge(random_base, adapter, tmp_path / "out", progress=False)
    config, base = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", random_base))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 150000
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "yarn"
    rope = {"rope_theta", "rope_scaling", "rope_parameters"}
    assert {k: v for k, v in config.items() if k not in rope} == {k: v for k, v in base.items() if k not in rope}
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert load(tmp_path / "out").config.rope_parameters == load(random_base).config.rope_parameters


@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 3}}]
)
def test_scales_and_ranks_follow_peft(random_base, tmp_path, options):
    adapter = make_adapter(random_base, tmp_path / "adapter", **options)
    merge(random_base, adapter, tmp_path / "out", progress=False)
    reference = logits(with_adapter(random_base, adapter))
    assert divergence(reference, logits(load(tmp_path / "out"))).median() < 2e-5
    assert divergence(reference, logits(load(random_base))).median() > 1e-3


def test_expert_adapter_in_bf16_equals_peft(random_base, expert_adapter, tmp_path):
    """Each expert has its own B: pairing A and B of different experts would show."""
    merge(random_base, expert_adapter, tmp_path / "out", format="bf16", progress=False)
    reference = with_adapter(random_base, expert_adapter).merge_and_unload().state_dict()
    merged = Checkpoint.open(tmp_path / "out")
    assert set(merged.entries) == set(reference) | ({"lm_head.weight"} & set(merged.entries))
    for name, entry in merged.entries.items():
        expected = reference[name].to(torch.bfloat16)
        assert expected.shape == entry.shape
        torch.testing.assert_close(entry.read(), expected, rtol=2**-8, atol=0)  # one bf16 step: sums in another order
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    reference_logits = logits(with_adapter(random_base, expert_adapter))
    assert divergence(reference_logits, logits(load(tmp_path / "out"))).median() < 2e-5


def test_expert_adapter_in_mxfp4_keeps_its_layout_and_reports_what_survived(random_base, expert_adapter, tmp_path):
    report = merge(random_base, expert_adapter, tmp_path / "out", format="mxfp4", progress=False)
    base, merged = Checkpoint.open(random_base), Checkpoint.open(tmp_path / "out")
    assert {n: (e.dtype, e.shape, e.start) for n, e in base.entries.items()} == {
        n: (e.dtype, e.shape, e.start) for n, e in merged.entries.items()
    }
    reference = with_adapter(random_base, expert_adapter).merge_and_unload().state_dict()
    for stem in (name for name in reference if ".experts." in name and not name.endswith("bias")):
        for expert in range(reference[stem].shape[0]):
            before, after = (read_expert(checkpoint, stem, expert) for checkpoint in (base, merged))
            wanted = reference[stem][expert].T
            assert (after - wanted).norm() < 0.15 * wanted.norm()
            assert (after - wanted).norm() < (before - wanted).norm()
    survival = report.survival["experts"]
    assert 0.5 < survival["kept_share"] < 1.2
    assert survival["relative_error"] > report.survival["plain"]["relative_error"]


def test_expert_adapter_cannot_keep_the_original_blocks(random_base, expert_adapter, tmp_path):
    with pytest.raises(MergeError, match="MXFP4 expert") as caught:
        merge(random_base, expert_adapter, tmp_path / "out", progress=False)
    assert "--format bf16" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def _drop(tensors):
    return dict(list(tensors.items())[:-2])


def _half(tensors):
    return dict(list(tensors.items())[:-1])


def _rename(tensors):
    first = next(iter(tensors))
    return {
        ("base_model.model.model.layers.99.x.lora_A.weight" if key == first else key): t for key, t in tensors.items()
    }


def _slice(tensors):
    return {k: t[: len(t) // 2].contiguous() if "lora_B" in k else t for k, t in tensors.items()}


def _poison(tensors):
    return {k: t * float("nan") if "layers.1.self_attn.v_proj.lora_B" in k else t for k, t in tensors.items()}


def _untrain(tensors):
    return {k: t * 0 if "lora_B" in k else t for k, t in tensors.items()}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_drop, r"lacks 1 of the weights .*self_attn"),
        (_half, r"has lora_A but not the other half"),
        (_rename, r"layers\.99.* belongs to no weight"),
        (_slice, r"the base needs A \[4, 64\] and B"),
        (_poison, r"layers\.1\.self_attn\.v_proj.*not finite"),
        (_untrain, r"would equal the base"),
    ],
)
def test_broken_adapters_are_refused_and_nothing_stays(random_base, adapter, tmp_path, edit, message):
    broken = copied(adapter, tmp_path)
    edit_weights(broken, edit)
    with pytest.raises(MergeError, match=message):
        merge(random_base, broken, tmp_path / "target" / "out", progress=False)
    assert not list((tmp_path / "target").glob("*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 8}, "at r=8"),
        ({"r": None}, "r is wrong"),
        ({"lora_alpha": "much"}, "lora_alpha is wrong"),
        ({"target_modules": "("}, "no regular expression"),
        ({"rank_pattern": {"(": 8}}, "rank_pattern.*no regular expression"),
    ],
)
def test_other_kinds_of_adapter_are_refused(random_base, adapter, tmp_path, changes, message):
    other = copied(adapter, tmp_path)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(MergeError, match=message):
        merge(random_base, other, tmp_path / "out", progress=False)


def test_paths_that_hold_something_else_are_refused(random_base, tiny_like_base, adapter, tmp_path):
    file = tmp_path / "file"
    file.write_text("neither model nor adapter")
    for base, given, out, error, message in [
        (random_base, file, "out", MergeError, "is not an adapter"),
        (random_base, adapter / "adapter_model.safetensors", "out", MergeError, "is not an adapter"),
        (random_base, random_base, "out", MergeError, "is not an adapter"),
        (adapter, adapter, "out", ModelError, "holds no safetensors weights"),
        (file, adapter, "out", ModelError, "holds no safetensors weights"),
        (random_base, adapter, "file/out", StorageError, "cannot"),
        (random_base, adapter, "x" * 300, StorageError, "too long"),
    ]:
        with pytest.raises(error, match=message):
            merge(base, given, tmp_path / out, progress=False)
    (tiny_like_base / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        merge(tiny_like_base, adapter, tmp_path / "out", progress=False)
    (tiny_like_base / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        merge(tiny_like_base, adapter, tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "sibling"]


def test_base_that_is_not_finite_is_refused(tiny_like_base, adapter, tmp_path):
    entry = Checkpoint.open(tiny_like_base).entries["model.layers.1.self_attn.k_proj.weight"]
    with entry.path.open("r+b") as file:
        file.seek(entry.start)
        file.write(b"\x80\x7f")  # infinity in bf16
    with pytest.raises(MergeError, match=r"k_proj\.weight would hold values that are not finite"):
        merge(tiny_like_base, adapter, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["sibling"]


def test_adapter_of_another_base_is_refused(random_base, tiny_like_base, adapter, tmp_path):
    mine = copied(adapter, tmp_path)
    write_provenance(mine, random_base, model="some/model", revision="main")
    merge(random_base, mine, tmp_path / "out", progress=False)
    with pytest.raises(MergeError, match="trained on some/model@main"):
        merge(tiny_like_base, mine, tmp_path / "other", progress=False)


@pytest.fixture
def tiny_like_base(random_base: Path, tmp_path: Path) -> Path:
    """The same shapes as `random_base` with one byte of a weight changed."""
    sibling = tmp_path / "sibling"
    sibling.mkdir()
    for path in random_base.iterdir():
        (sibling / path.name).write_bytes(path.read_bytes())
    entry = Checkpoint.open(sibling).entries["model.layers.0.self_attn.q_proj.weight"]
    with entry.path.open("r+b") as file:
        file.seek((entry.start + entry.end) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return sibling


def test_incomplete_bases_are_refused(tiny_like_base, adapter, tmp_path):
    shard = tiny_like_base / Checkpoint.open(tiny_like_base).shards[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ModelError, match="header says"):
        merge(tiny_like_base, adapter, tmp_path / "out", progress=False)
    shard.unlink()
    with pytest.raises(ModelError, match="missing"):
        merge(tiny_like_base, adapter, tmp_path / "out", progress=False)


def test_existing_target_is_refused_untouched(random_base, adapter, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(StorageError, match="already exists"):
        merge(random_base, adapter, tmp_path / "out", progress=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_full_disk_is_said_before_and_during(random_base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StorageError, match=r"needs 0\.0 GiB"):
        merge(random_base, adapter, tmp_path / "out", progress=False)
    monkeypatch.undo()
    monkeypatch.setattr(os, "posix_fallocate", _full)
    with pytest.raises(StorageError, match="filled up"):
        merge(random_base, adapter, tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


def _full(descriptor: int, offset: int, size: int) -> None:
    raise OSError(28, "No space left on device")


def test_disk_that_gives_back_other_bytes_is_caught(random_base, adapter, tmp_path, monkeypatch):
    def write_wrong(descriptor: int, data: bytearray, offset: int) -> int:
        return write_at(descriptor, bytearray(len(data)), offset)

    write_at = shards.write_at
    monkeypatch.setattr(shards, "write_at", write_wrong)
    with pytest.raises(StorageError, match="other bytes than were written"):
        merge(random_base, adapter, tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_same_merge_is_recognised_after_a_crash(random_base, adapter, tmp_path):
    report = merge(random_base, adapter, tmp_path / "out", progress=False)
    assert finished_merge(random_base, adapter, tmp_path / "out") == report
    other = make_adapter(random_base, tmp_path / "other", seed=1)
    assert finished_merge(random_base, other, tmp_path / "out") is None
    assert finished_merge(random_base, adapter, tmp_path / "nothing") is None


def test_progress_counts_every_byte(random_base, adapter, tmp_path):
    seen: list[tuple[int, int]] = []
    report = merge(random_base, adapter, tmp_path / "out", progress=False, on_progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] == report.size_bytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_model_is_on_the_disk_before_it_is_one(random_base, adapter, tmp_path, monkeypatch):
    synced, seen = set(), {}
    fsync, rename = os.fsync, os.rename

    def note(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def look(source, target):
        seen.update({path.name: path.stat().st_ino in synced for path in Path(source).iterdir()})
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", look)
    merge(random_base, adapter, tmp_path / "out", progress=False)
    assert {"config.json", "tokenizer.json", RECORD} < set(seen)
    assert [name for name, on_disk in seen.items() if not on_disk] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from training.merge import merge

def kill(done, total):
    if done > total * 0.6:
        os.kill(os.getpid(), signal.SIGKILL)

merge(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), progress=False, on_progress=kill)
"""


def test_killed_merge_leaves_no_model_and_is_taken_up(random_base, adapter, tmp_path, monkeypatch):
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, random_base, adapter, out], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert (tmp_path / ".out.merging").is_dir()

    written = []
    write_tensor = rewriting._write_tensor
    monkeypatch.setattr(rewriting, "_write_tensor", lambda plan, *a: written.append(a[0]) or write_tensor(plan, *a))
    report = merge(random_base, adapter, out, progress=False)
    taken_up, written = written, []
    fresh = merge(random_base, adapter, tmp_path / "fresh", progress=False)
    assert len(taken_up) < 0.8 * len(written)
    assert (report.survival, report.copied_xxh128) == (fresh.survival, fresh.copied_xxh128)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for path in (tmp_path / "fresh").iterdir():
        if path.name != RECORD:
            assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def test_what_another_merge_left_is_not_taken_up(random_base, adapter, tmp_path):
    left = tmp_path / ".out.merging"
    left.mkdir()
    (left / ".journal").write_text('{"format": "original"}\n["model.layers.0.self_attn.q_proj.weight", {}]\n')
    (left / "junk.safetensors").write_bytes(b"junk")
    merge(random_base, adapter, tmp_path / "out", progress=False)
    merge(random_base, adapter, tmp_path / "fresh", progress=False)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "fresh").iterdir()}
    for shard in Checkpoint.open(tmp_path / "out").shards:
        assert (tmp_path / "out" / shard).read_bytes() == (tmp_path / "fresh" / shard).read_bytes()


def test_two_merges_into_one_target_do_not_mix(random_base, adapter, tmp_path):
    def second(done: int, total: int) -> None:
        with pytest.raises(MergeError, match="another merge is writing"):
            merge(random_base, adapter, tmp_path / "out", progress=False)

    merge(random_base, adapter, tmp_path / "out", progress=False, on_progress=second)


def test_interrupted_merge_removes_its_work(random_base, adapter, tmp_path):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(random_base, adapter, tmp_path / "out", progress=False, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_hub_cache_of_links_merges_into_real_files(random_base, adapter, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in random_base.iterdir():
        (snapshot / path.name).symlink_to(path)
    merge(snapshot, adapter, tmp_path / "out", progress=False)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_expert_adapter_over_plain_experts_needs_no_format(random_base, expert_adapter, tmp_path):
    convert(random_base, tmp_path / "plain", "bf16", progress=False)
    report = merge(tmp_path / "plain", expert_adapter, tmp_path / "out", progress=False)
    merge(random_base, expert_adapter, tmp_path / "direct", format="bf16", progress=False)
    assert report.adapted_tensors == 12
    for shard in Checkpoint.open(tmp_path / "out").shards:
        assert (tmp_path / "out" / shard).read_bytes() == (tmp_path / "direct" / shard).read_bytes()


def plain_base(random_base: Path, directory: Path, dtype: torch.dtype) -> Path:
    """`random_base` with every weight in `dtype`, experts dequantised."""
    convert(random_base, directory, "bf16", progress=False)
    checkpoint = Checkpoint.open(directory)
    for shard in checkpoint.shards:
        weights = {name: value.to(dtype) for name, value in load_file(directory / shard).items()}
        save_file(weights, directory / shard, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("format", ["original", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_expert_adapter_keeps_the_dtype_of_plain_experts(random_base, expert_adapter, tmp_path, dtype, format):
    base = plain_base(random_base, tmp_path / "base", dtype)
    seen = []
    merge(
        base,
        expert_adapter,
        tmp_path / "out",
        format=format,
        progress=False,
        on_progress=lambda *done: seen.append(done),
    )
    assert seen[-1][0] == seen[-1][1]
    source, result = Checkpoint.open(base), Checkpoint.open(tmp_path / "out")
    stem = "model.layers.1.mlp.experts.down_proj"
    delta = Adapter.open(expert_adapter, source).updates[stem].expert_delta(2)
    expected = (read_expert(source, stem, 2) + delta).to(dtype)
    assert torch.equal(read_expert(result, stem, 2), expected.float())
    assert {entry.dtype for entry in result.entries.values()} == {entry.dtype for entry in source.entries.values()}
    adapter = Adapter.open(expert_adapter, source)
    assert check_adapted(source, adapter, result) == 12
    check_copied(source, adapter, result)


def test_expert_values_too_large_for_their_dtype_are_refused(random_base, expert_adapter, tmp_path):
    base = plain_base(random_base, tmp_path / "base", torch.float16)
    mine = copied(expert_adapter, tmp_path)
    edit_weights(mine, lambda all: {name: value * (1e4 if "experts" in name else 1) for name, value in all.items()})
    with pytest.raises(MergeError, match=r"experts\..* not finite"):
        merge(base, mine, tmp_path / "out", progress=False)


def test_conversion_to_bf16_and_back_loses_nothing(random_base, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "SHARD_BYTES", 60_000)
    convert(random_base, tmp_path / "plain", "bf16", progress=False)
    convert(tmp_path / "plain", tmp_path / "packed", "mxfp4", progress=False)
    base, plain, packed = (Checkpoint.open(path) for path in (random_base, tmp_path / "plain", tmp_path / "packed"))
    assert len(plain.shards) > 1
    torch.testing.assert_close(logits(load(tmp_path / "plain")), logits(load(random_base)), rtol=0, atol=0)
    for name, entry in base.entries.items():
        stem = expert_stem(name)
        if stem is None:
            assert entry.xxh128() == packed.entries[name].xxh128() == plain.entries[name].xxh128()
        elif name.endswith("_blocks"):
            for expert in range(entry.shape[0]):
                assert torch.equal(read_expert(base, stem, expert), read_expert(packed, stem, expert))
    assert (
        json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    )


def test_searched_scales_round_no_worse_than_any_other():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    blocks = weight.unflatten(-1, (-1, mxfp4.BLOCK))

    def error(quantized):
        return (mxfp4.dequantize(*quantized, torch.float32).unflatten(-1, (-1, mxfp4.BLOCK)) - blocks).square().sum(-1)

    plain, searched = mxfp4.quantize(weight), mxfp4.quantize(weight, search_scales=True)
    exponent = plain[1].int() - 127
    best = torch.stack([error(mxfp4.encode(blocks, exponent + offset)) for offset in range(-3, 4)]).amin(0)
    assert torch.equal(error(searched), best)
    assert error(searched).sum() < error(plain).sum()
