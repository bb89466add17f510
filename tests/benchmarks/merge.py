"""How fast and in how much memory a merge runs, on synthetic checkpoints of gpt-oss's true shapes.

    python -m tests.benchmarks.merge [PIECE] [--rounds 5] [--directory DIR]

Without a piece: all of them. `20b` and `120b` alternate `cp` of the same files (the least that any copy takes) and a merge;
`peft` compares with merge_and_unload + save_pretrained on the largest slice of 20b that fits. Pieces add their rounds to
merge.json and draw docs/merge.png anew, so that a long run can be made of short ones; `--fresh` forgets earlier rounds.
Needs 28 GB of disk, which it gives back.

Fairness: both sides read cold files (the page cache is dropped before every run; a cache below this machine's kernel is not),
the order changes from round to round, and both are timed twice: when the program returns, and when every byte is on the disk
(fsync). The merge also hashes what it copies, reads it back and compares; cp does not.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_suffix(".json")
FIGURE = Path(__file__).parents[2] / "docs" / "merge.png"
GIB = 2**30
SETTLE_S = 10
"""Between a deletion and the next run: a virtual machine gives freed memory back to its host within seconds and pays for each
page that it takes again. cp would start before that, and a merge, which imports first, after."""

SHAPES: dict[str, dict[str, Any]] = {
    "20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "120b": {"num_hidden_layers": 1, "num_local_experts": 128},
}
TRUE_CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
RANK = 8


def write_base(directory: Path, shape: dict[str, Any]) -> Path:
    """A checkpoint of random values in gpt-oss's names, dtypes and shapes, written without holding more than a buffer."""
    import torch

    from training.merging.layout import Layout, Tensors
    from training.merging.shards import INDEX
    from training.tiny.base import shapes

    directory.mkdir(parents=True, exist_ok=True)
    config = TRUE_CONFIG | shape
    config["layer_types"] = ["sliding_attention", "full_attention"] * (shape["num_hidden_layers"] // 2 + 1)
    config["layer_types"] = config["layer_types"][: shape["num_hidden_layers"]]
    tensors: Tensors = {}
    for name, size in shapes(config).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, out = size
            tensors[f"{name}_blocks"] = ("U8", (experts, out, inputs // 32, 16), experts * out * inputs // 2)
            tensors[f"{name}_scales"] = ("U8", (experts, out, inputs // 32), experts * out * inputs // 32)
        else:
            tensors[name] = ("BF16", size, 2 * torch.Size(size).numel())
    layout = Layout.new(tensors)
    generator = torch.Generator().manual_seed(0)
    bf16 = (torch.randn(32 << 20, generator=generator) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    codes = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    scales = torch.randint(116, 122, (4 << 20,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    for file in layout.sizes:
        with (directory / file).open("wb") as shard:
            shard.write(layout.headers[file])
            for number, name in enumerate(name for name, place in layout.places.items() if place[0] == file):
                data = codes if name.endswith("_blocks") else scales if name.endswith("_scales") else bf16
                left, start = tensors[name][2], 4096 * number % (len(data) // 2)
                while left:
                    left -= shard.write(data[start : start + min(left, len(data) - start)])
                    start = 0
    weight_map = {name: file for name, (file, _) in layout.places.items()}
    index = {"metadata": {"total_size": sum(size for _, _, size in tensors.values())}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_adapter(directory: Path, base: Path) -> Path:
    """A random rank-8 adapter of all attention projections, in PEFT's layout."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    from training.merging.shards import Checkpoint

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    LoraConfig(r=RANK, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM").save_pretrained(str(directory))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, entry in Checkpoint.open(base).entries.items():
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, entry.shape[1], generator=generator) * 0.02
            tensors[f"{module}.lora_B.weight"] = torch.randn(entry.shape[0], RANK, generator=generator) * 0.02
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


OURS = """
import sys
from pathlib import Path
from training.merge import merge
merge(*map(Path, sys.argv[1:]), progress=False, durable=False)
"""

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config
base, adapter, out = sys.argv[1:]
quantization = Mxfp4Config(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=quantization)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""

MEASURED = """
import time
imports = time.monotonic()
import torch, training.merge, safetensors
started, cpu = time.monotonic(), time.process_time()
{program}
import json, re
cpu_s = time.process_time() - cpu
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
seconds = time.monotonic() - started
print(json.dumps({{"seconds": seconds, "cpu_s": cpu_s, "import_s": started - imports, "peak_rss_bytes": peak}}))
"""


def run_python(program: str, *arguments: Path) -> dict[str, float]:
    """Runs `program` in a process of its own: seconds without the imports that both share, and peak resident memory."""
    command = [sys.executable, "-c", MEASURED.format(program=program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_cp(base: Path, out: Path) -> dict[str, float]:
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", str(base), str(out)], check=True)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": seconds, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def timed(work: Callable[[], dict[str, float]], base: Path, out: Path) -> dict[str, float]:
    """`work` from cold caches; adds `on_disk_s`, the time until fsync has returned for every file of `out`."""
    for directory in (base, out):
        _each_file(directory, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))
    os.sync()
    time.sleep(SETTLE_S)
    load = os.getloadavg()[0]
    numbers = work() | {"load_before": load}
    started = time.monotonic()
    _each_file(out, os.fsync)
    return numbers | {"on_disk_s": numbers["seconds"] + time.monotonic() - started}


def _each_file(directory: Path, call: Callable[[int], None]) -> None:
    for path in directory.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        call(descriptor)
        os.close(descriptor)


def against_cp(root: Path, shape: dict[str, Any], numbers: range, *, check: bool) -> Iterator[dict[str, Any]]:
    """Rounds of cp and merge in turn, each yielded when it is done; in the last one every byte of the merge is checked."""
    base, adapter, out = root / "base", root / "adapter", root / "out"
    if not (base / "config.json").exists():  # else kept by an earlier piece
        write_adapter(adapter, write_base(base, shape))
    works: dict[str, Callable[[], dict[str, float]]] = {
        "cp": partial(run_cp, base, out),
        "merge": partial(run_python, OURS, base, adapter, out),
    }
    for number in numbers:
        times, bytes_right = {}, {}
        for name in sorted(works, reverse=bool(number % 2)):
            shutil.rmtree(out, ignore_errors=True)
            times[name] = timed(works[name], base, out)
            say(f"round {number + 1}, {name}: {times[name]['seconds']:.1f} s, on disk {times[name]['on_disk_s']:.1f} s")
            if name == "merge" and check and number == numbers[-1]:
                bytes_right = checked(base, adapter, out)
        yield {"rounds": [times], "layers": shape["num_hidden_layers"], **bytes_right}


def checked(base: Path, adapter: Path, merged: Path) -> dict[str, int]:
    """How many tensors of a merged model are right to the last bit; raises for one that is not."""
    from training.merging.adapter import Adapter
    from training.merging.proof_files import check_adapted, check_copied
    from training.merging.shards import Checkpoint

    source, result = Checkpoint.open(base), Checkpoint.open(merged)
    adapted = Adapter.open(adapter, source)
    return {
        "size_bytes": source.size,
        "tensors": len(source.entries),
        "adapted_tensors_exact": check_adapted(source, adapted, result),
        "copied_tensors_identical": check_copied(source, adapted, result)[0],
    }


def summary(piece: dict[str, Any]) -> dict[str, Any]:
    """Medians over all rounds, and the time of a merge over that of cp."""
    rounds = piece["rounds"]
    figures: dict[str, Any] = {"rounds_counted": len(rounds)}
    for key in ("seconds", "on_disk_s", "cpu_s"):
        cp, merge = (statistics.median(numbers[name][key] for numbers in rounds) for name in ("cp", "merge"))
        figures |= {f"cp_{key}": cp, f"merge_{key}": merge, f"ratio_{key}": merge / cp}
    return figures | {"peak_rss_gib": max(numbers["merge"]["peak_rss_bytes"] for numbers in rounds) / GIB}


def against_peft(root: Path, memory_bytes: int) -> dict[str, Any]:
    """Both on as many 20b layers as PEFT can hold in `memory_bytes`."""
    layer, ends = 1.62e9, 2.4e9  # bytes in bf16: one layer, embedding and head
    layers = max(1, min(24, int((memory_bytes - 2 * ends) / layer)))
    base = write_base(root / "base", {"num_hidden_layers": layers, "num_local_experts": 32})
    adapter = write_adapter(root / "adapter", base)
    result: dict[str, Any] = {"layers": layers, "size_bytes": sum(p.stat().st_size for p in base.glob("*.safetensors"))}
    for name, program in (("merge", OURS), ("peft", PEFT)):
        numbers = timed(partial(run_python, program, base, adapter, root / "out"), base, root / "out")
        written = sum(path.stat().st_size for path in (root / "out").glob("*.safetensors"))
        result[name] = numbers | {"written_bytes": written}
        shutil.rmtree(root / "out")
        say(f"{layers} layers, {name}: {numbers['on_disk_s']:.0f} s, {numbers['peak_rss_bytes'] / GIB:.1f} GiB")
    shutil.rmtree(base)
    shutil.rmtree(adapter)
    return result


def draw(results: dict[str, Any], path: Path) -> None:
    """Time over cp's, and peak memory, beside the limits that the project set itself."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = {
        f"{name} shapes, {piece['layers']} layer{'s' * (piece['layers'] > 1)}": summary(piece)
        for name, piece in results["shapes"].items()
    }
    bars = {name: figures["peak_rss_gib"] for name, figures in shapes.items()}
    if peft := results.get("peft"):
        bars[f"PEFT, {peft['layers']} of 24 layers of 20b"] = peft["peft"]["peak_rss_bytes"] / GIB
    figure, (time_axis, memory_axis) = pyplot.subplots(1, 2, figsize=(10, 2.6), layout="constrained")
    time_axis.barh(list(shapes), [figures["ratio_on_disk_s"] for figures in shapes.values()], color="#4477aa")
    time_axis.axvline(1.3, color="#bb5566", linestyle="--", label="goal: 1.3")
    time_axis.axvline(1.0, color="grey", linewidth=0.8)
    time_axis.set(title="Time of a merge over that of cp, on disk", xlim=(0, 2.0))
    memory_axis.barh(list(bars), list(bars.values()), color=["#4477aa"] * len(shapes) + ["#bbbbbb"])
    memory_axis.axvline(3.0, color="#bb5566", linestyle="--", label="goal: 3 GB")
    memory_axis.set(title="Peak memory, GiB")
    for axis in (time_axis, memory_axis):
        axis.legend(loc="upper right")
        axis.invert_yaxis()
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for bar in axis.containers[0]:  # type: ignore[union-attr]
            axis.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, f" {bar.get_width():.2f}", va="center")
    figure.savefig(path, dpi=110)


@contextmanager
def workspace(directory: Path | None, name: str, needed_bytes: float, *, keep: bool) -> Iterator[Path]:
    """A directory on a disk with room enough, gone afterwards unless `keep`."""
    if keep and directory:
        (directory / name).mkdir(parents=True, exist_ok=True)
        yield directory / name
        return
    with tempfile.TemporaryDirectory(prefix="merge-benchmark-", dir=directory) as path:
        free = shutil.disk_usage(path).free
        if free < needed_bytes:
            sys.exit(f"needs {needed_bytes / 1e9:.0f} GB of disk, {path} has {free / 1e9:.0f} GB; see --directory")
        yield Path(path)


def say(text: str) -> None:
    print(text, flush=True)


def add(results: dict[str, Any], name: str, piece: dict[str, Any]) -> None:
    """Puts a piece among the earlier ones; rounds of the same shape add up."""
    earlier = results["shapes"].get(name, {"rounds": []})
    both = earlier | piece | {"rounds": earlier["rounds"] + piece["rounds"]}
    results["shapes"][name] = both | {"summary": summary(both)}


def save(results: dict[str, Any], paths: argparse.Namespace) -> None:
    paths.json.write_text(json.dumps(results, indent=1) + "\n")
    if results["shapes"]:
        draw(results, paths.figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", nargs="?", choices=["20b", "120b", "peft"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="of the 20b shape; fewer for a quick look")
    parser.add_argument("--peft-memory-gib", type=float, default=12.0, help="memory that PEFT may take")
    parser.add_argument("--directory", type=Path, help="where the checkpoints are written for the time of the run")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint in DIR for the next piece")
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave the bytes to another piece")
    parser.add_argument("--fresh", action="store_true", help="forget the rounds of earlier runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    SHAPES["20b"]["num_hidden_layers"] = arguments.layers
    results: dict[str, Any] = {"shapes": {}}
    if arguments.json.exists() and not arguments.fresh:
        results = json.loads(arguments.json.read_text())
    results["machine"] = f"{os.cpu_count()} CPUs, {platform.platform()}"
    for name in [arguments.piece] if arguments.piece else ["peft", "120b", "20b"]:
        needed = 1.2e9 * (arguments.layers if name == "20b" else 8) + 8e9
        with workspace(arguments.directory, name, needed, keep=arguments.keep) as root:
            say(name)
            if name == "peft":
                results["peft"] = against_peft(root, int(arguments.peft_memory_gib * GIB))
                save(results, arguments)
                continue
            done = len(results["shapes"].get(name, {"rounds": []})["rounds"])
            numbers = range(done, done + arguments.rounds)
            for piece in against_cp(root, SHAPES[name], numbers, check=arguments.check):
                add(results, name, piece)
                save(results, arguments)
    say(json.dumps({name: piece["summary"] for name, piece in results["shapes"].items()}, indent=1))


if __name__ == "__main__":
    main()
