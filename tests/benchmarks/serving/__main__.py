"""Serving against its alternatives on one machine: `python -m tests.benchmarks.serving [--parts …] [--json FILE]`.

Goals on CPU with the tiny model: at 16 clients at least 3 times the tokens/s of plain `generate` in a loop and of
`transformers serve`; HTTP + Ray add less than 10 ms at the median for one client; under 32 clients with a swap of models
every 30 s no request fails and memory grows by less than 5 %; over vLLM at least 0.95 of what its own server does.
Nothing else should run meanwhile: the report says how busy the machine was.
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from serving.models.loading import stop_ids
from tests.benchmarks.serving.figures import draw
from tests.benchmarks.serving.load import Service, closed_loop, open_loop
from tests.benchmarks.serving.overhead import overhead_ms
from tests.benchmarks.serving.servers import bare_vllm, our_service, transformers_serve
from tests.benchmarks.serving.soak import soak
from training.harmony import Renderer
from training.model import load as models

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny"
PARTS = ("bare", "transformers_serve", "polythink", "overhead", "soak", "vllm")
CONTEXT = 2048


def read_prompts(count: int) -> list[str]:
    lines = [line for name in ("held_out", "train") for line in (TINY / f"{name}.jsonl").read_text().splitlines()]
    users = [json.loads(line)["user"] for line in lines]
    return [users[index % len(users)] for index in range(count)]


class Bench:
    """The measured parts; each fills one entry of `report`, which is shown and kept as it grows."""

    def __init__(self, arguments: argparse.Namespace):
        self.model_dir = arguments.model.resolve()
        self.prompts = read_prompts(128)
        self.arguments = arguments
        self.json: Path | None = arguments.json
        self.report: dict[str, Any] = json.loads(self.json.read_text()) if self.json and self.json.exists() else {}

    async def run(self) -> None:
        for part in self.arguments.parts:
            load = os.getloadavg()[0]
            begin = time.monotonic()
            figures = await getattr(self, part)()
            self.report[part] = figures
            facts = {
                "cpus": os.cpu_count(),
                "load_before": round(load, 2),
                "wall_s": round(time.monotonic() - begin, 1),
            }
            self.report.setdefault("machine", {})[part] = facts
            print(f"{part}: {json.dumps(figures)} {facts}", flush=True)
            if self.json:
                self.json.write_text(json.dumps(self.report, indent=1) + "\n")

    async def bare(self) -> dict[str, float]:
        """Plain `generate`, one prompt after the other."""
        plain = models.load(self.model_dir)
        renderer, ends = Renderer(AutoTokenizer.from_pretrained(self.model_dir)), list(stop_ids(self.model_dir))
        options = {"max_new_tokens": self.arguments.max_tokens, "do_sample": False, "eos_token_id": ends}
        begin, tokens = time.perf_counter(), 0
        for prompt in self.prompts[:32]:
            ids = torch.tensor([renderer.prompt_ids([{"role": "user", "content": prompt}])])
            tokens += plain.generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - ids.shape[1]
        return {"tokens_per_s": round(tokens / (time.perf_counter() - begin), 1)}

    async def transformers_serve(self) -> dict[str, float]:
        with transformers_serve(self.model_dir) as url:
            service = Service(url, str(self.model_dir))
            await closed_loop(service, self.prompts[:2], 1, 4)
            return (await closed_loop(service, self.prompts[:32], 16, self.arguments.max_tokens)).summary()

    async def polythink(self) -> dict[str, Any]:
        """Closed loops of 1 to 64 clients, then an open loop."""
        generator = {"num_gpus": self.arguments.gpus, "max_sequences": self.arguments.sequences}
        with (
            tempfile.TemporaryDirectory() as home,
            our_service(Path(home).resolve(), [self.model_dir], generator) as url,
        ):
            service = Service(url, str(self.model_dir))
            await closed_loop(service, self.prompts[:2], 1, 4)
            loads = []
            for clients in (1, 4, 16, 64):
                prompts = self.prompts[: max(16, 4 * clients)]
                loads.append((await closed_loop(service, prompts, clients, self.arguments.max_tokens)).summary())
            rate = self.arguments.rate
            opened = await open_loop(service, self.prompts[:32], rate, self.arguments.max_tokens)
            return {"closed": loads, "open": opened.summary() | {"rate_per_s": rate}}

    async def overhead(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as home, our_service(Path(home).resolve(), [self.model_dir]) as url:
            return await overhead_ms(url, self.model_dir, Path(home).resolve())

    async def soak(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory).resolve()
            names = [str(shutil.copytree(self.model_dir, home / name)) for name in ("first", "second")]
            with our_service(home, []) as url:
                return await soak(url, names, self.prompts, self.arguments.minutes, clients=32, swap_s=30)

    async def vllm(self) -> dict[str, Any]:
        """Our path over vLLM and vLLM's own server, on the same token ids; in an environment that has both."""
        renderer = Renderer(AutoTokenizer.from_pretrained(self.model_dir))

        def encode(prompt: str) -> list[int]:
            return renderer.prompt_ids([{"role": "user", "content": prompt}])

        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory).resolve()
            model_dir = dequantised(self.model_dir, home / "model")
            with bare_vllm(model_dir, CONTEXT) as url:
                bare = await self._at_16(Service(url, str(model_dir), encode))
            generator = {"engine": "vllm", "context_length": CONTEXT, "max_sequences": 32}
            with our_service(home, [], generator) as url:
                ours = await self._at_16(Service(url, str(model_dir)))
        return {"bare": bare, "polythink": ours, "ratio": round(ours["tokens_per_s"] / bare["tokens_per_s"], 3)}

    async def _at_16(self, service: Service) -> dict[str, float]:
        await closed_loop(service, self.prompts[:16], 16, self.arguments.max_tokens)  # kernels are compiled
        return (await closed_loop(service, self.prompts, 16, self.arguments.max_tokens)).summary()


def dequantised(model_dir: Path, target: Path) -> Path:
    """The model with experts in fp32: vLLM's MXFP4 kernels ask for AMX on CPU."""
    models.load(model_dir).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(model_dir / name, target / name)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY / "base")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:4])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the open loop")
    parser.add_argument("--gpus", type=float, default=0, help="of our service in the part polythink")
    parser.add_argument("--sequences", type=int, default=32, help="that it answers at once there")
    parser.add_argument("--minutes", type=float, default=10, help="of the soak")
    parser.add_argument("--json", type=Path, help="report to read, complete and write")
    parser.add_argument("--picture", type=Path, help="drawn from the report")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(parsed)
    asyncio.run(bench.run())
    if parsed.picture:
        draw(bench.report, parsed.picture)
