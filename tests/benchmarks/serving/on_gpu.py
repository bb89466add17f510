"""The built-in engine on one GPU at gpt-oss's true shapes, random weights: `python -m tests.benchmarks.serving.on_gpu --out FILE`.

In one run: plain `generate` on bf16 weights with transformers' grouped_mm experts at 1, 8 and 64 prompts of 128 tokens; then as many
clients of our engine on packed weights, tokens/s, time to the first token and per token, peak memory; then where a decoding
step's time goes. The goals on an H200 at 20b: 100, 700 and 2,500 tokens/s, a first token within 300 ms at 8 clients, under 16 GiB
without the cache.
"""

import argparse
import asyncio
import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from serving.engines.attention import use_grouped_attention
from serving.engines.engine import Sampling
from serving.engines.norms import use_fused_norms
from serving.engines.transformers_engine import TransformersEngine
from tests.benchmarks.serving.load import Load, Request
from tests.benchmarks.training.checkpoint import SHAPES, write_random_base
from tests.benchmarks.training.in_memory import random_model
from tests.benchmarks.training.report import machine
from training.model import fused
from training.model.experts import Frozen
from training.model.kernels import grouped_mm
from training.run_dir import write_json

GIB = 1024**3
PROMPT_TOKENS = 128
CLIENTS = (1, 8, 64)
TILES = [
    dict(zip(("M", "N", "K", "num_warps", "num_stages"), tile, strict=True))
    for tile in (
        (16, 64, 128, 4, 3),
        (16, 64, 128, 4, 4),
        (16, 128, 128, 4, 3),
        (64, 64, 128, 4, 3),
        (64, 128, 128, 4, 3),
        (64, 128, 128, 8, 3),
    )
]
"""Of `product`: rows, columns, depth, warps, stages."""
ROWS = (4, 32, 256, 512, 1024, 2048)


def main() -> None:
    arguments = _arguments()
    record: dict[str, Any] = {"shape": arguments.shape, "machine": machine(), "prompt_tokens": PROMPT_TOKENS}
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        write_random_base(base, arguments.shape, arguments.layers, weights=False)
        for part in arguments.parts:
            print(part, flush=True)
            record[part] = globals()[part](base, arguments)
            write_json(arguments.out, record)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()


def product(base: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The fused product by tile and rows, against dequantising and `grouped_mm`; milliseconds of gate_up's."""
    model = _model(base, "mxfp4", arguments, layers=1)
    experts: Any = model.model.layers[0].mlp.experts
    up = Frozen(*(getattr(experts, f"gate_up_proj_{part}") for part in Frozen._fields))
    lines, default = [], (fused.FEW, fused.MORE)
    for rows in ROWS:
        chosen = torch.randint(0, experts.num_experts, (rows,), device=arguments.device).sort().values
        offsets = torch.searchsorted(chosen, torch.arange(1, experts.num_experts + 1, device=arguments.device)).int()
        x = torch.randn(rows, experts.hidden_size, device=arguments.device, dtype=torch.bfloat16)
        line: dict[str, Any] = {"rows": rows}
        line["dequantise, grouped_mm"] = _ms(lambda x=x, o=offsets: grouped_mm(x, up.dense(x.shape[1], x.dtype).mT, o))
        for tile in TILES:
            fused.FEW = fused.MORE = tile
            try:
                line[str(tuple(tile.values()))] = _ms(
                    lambda x=x, o=offsets: fused.fused_mm(x, up.blocks, up.scales, up.bias.shape[1], o)
                )
            except Exception as error:
                line[str(tuple(tile.values()))] = str(error)[:80]
        print(line, flush=True)
        lines.append(line)
    fused.FEW, fused.MORE = default
    return lines


def plain(base: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """`generate` as transformers comes, greedy, whole batches."""
    model = _model(base, "bf16", arguments)
    figures = []
    for clients in CLIENTS:
        ids = torch.tensor(_prompts(clients), device=arguments.device)
        options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
        model.generate(ids, max_new_tokens=2, **options)
        begin = time.perf_counter()
        made = model.generate(ids, max_new_tokens=arguments.plain_tokens, **options).shape[1] - ids.shape[1]
        figures.append({"clients": clients, "tokens_per_s": clients * made / (time.perf_counter() - begin)})
        print(figures[-1], flush=True)
    return figures


def engine(base: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Closed loops of each number of clients, two answers a client after one that warms up."""
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model = _model(base, "mxfp4", arguments)
    use_grouped_attention(model)
    if arguments.device == "cuda":
        use_fused_norms(model)
    report: dict[str, Any] = {"load_s": time.perf_counter() - begin}
    served = TransformersEngine(model, max_sequences=max(CLIENTS), max_waiting=512, cache_bytes=4 * GIB)
    try:
        report["closed"] = [asyncio.run(_closed(served, clients, arguments)) for clients in CLIENTS]
        if arguments.device == "cuda":
            report["recorded"] = served._batch._recorded is not None and served._batch._recorded._record
            report["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / GIB
            report["cache_gib"] = (
                sum(t.nbytes for t in (*served._batch._cache._keys, *served._batch._cache._values)) / GIB
            )
            report["step"] = _step(served)
    finally:
        served.close()
    return report


async def _closed(served: TransformersEngine, clients: int, arguments: argparse.Namespace) -> dict[str, float]:
    await asyncio.gather(*(_ask(served, prompt, arguments.tokens) for prompt in _prompts(clients)))
    prompts = _prompts(2 * clients)
    requests: list[Request] = []

    async def client() -> None:
        while prompts:
            requests.append(await _ask(served, prompts.pop(), arguments.tokens))

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    summary = Load(clients, time.perf_counter() - begin, requests).summary()
    print(summary, flush=True)
    return summary


async def _ask(served: TransformersEngine, prompt: list[int], tokens: int) -> Request:
    request, begin = Request(), time.perf_counter()
    async for chunk in served.generate(prompt, Sampling(max_new_tokens=tokens, stop_ids=frozenset())):
        request.first_token_s = request.first_token_s or time.perf_counter() - begin
        request.tokens += len(chunk.ids)
    request.total_s = time.perf_counter() - begin
    return request


def _step(served: TransformersEngine) -> list[dict[str, Any]]:
    """The longest kernels of a replayed step of 64 sequences; `all` is their sum, `step` the whole by the clock."""
    steps = served._batch._recorded
    assert steps is not None
    count = min(max(CLIENTS), served._batch._cache.rows)
    arguments = ([1] * count, [200] * count, [0] * count)
    with torch.inference_mode():
        for _ in range(3):
            steps(*arguments)
        whole = _ms(lambda: steps(*arguments))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps(*arguments)
            torch.cuda.synchronize()
    times = {event.key: (event.count, event.self_device_time_total / 1e3) for event in profiler.key_averages()}
    longest = sorted(times.items(), key=lambda item: -item[1][1])[:20]
    lines = [{"kernel": "step", "calls": 1, "ms": whole}]
    lines += [{"kernel": "all", "calls": sum(c for c, _ in times.values()), "ms": sum(ms for _, ms in times.values())}]
    lines += [{"kernel": name[:100], "calls": calls, "ms": ms} for name, (calls, ms) in longest]
    for line in lines:
        print(f"{line['kernel'][:80]:82}{line['calls']:6}{line['ms']:10.3f}", flush=True)
    return lines


def _ms(run: Any, repeats: int = 20) -> float:
    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def _model(base: Path, weights: str, arguments: argparse.Namespace, layers: int | None = None) -> PreTrainedModel:
    if layers:
        write_random_base(base.parent / "few", arguments.shape, layers, weights=False)
        base = base.parent / "few"
    return random_model(
        base, weights=weights, precision="bf16", attention="eager", experts="grouped_mm", device=arguments.device
    )


def _prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="20b")
    parser.add_argument("--layers", type=int, help="fewer layers than the real model")
    parser.add_argument("--parts", nargs="+", choices=("product", "plain", "engine"), default=["plain", "engine"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each answer")
    parser.add_argument("--plain-tokens", type=int, default=32, help="new tokens of plain generate")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
