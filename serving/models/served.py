"""A loaded model with what turns messages into its token ids and back. Loads without torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from serving.engines.engine import Engine, EngineError, Sampling
from training.harmony import Renderer


@dataclass
class ServedModel:
    """A model that answers. `users` counts those who do so now; its pool keeps the count."""

    name: str
    engine: Engine
    renderer: Renderer
    stop_ids: frozenset[int]
    users: int = 0

    async def probe(self, adapter: Path | None = None) -> None:
        """Proves that the model generates: one token, of a probability that is a number.

        Raises:
            EngineError: it does not.
            ModelError: the adapter does not fit it.
        """
        prompt = self.renderer.prompt_ids([{"role": "user", "content": "Hello"}])
        sampling = Sampling(max_new_tokens=1, stop_ids=self.stop_ids, top_logprobs=1)
        async for chunk in self.engine.generate(prompt, sampling, adapter):
            if not all(math.isfinite(score.logprob) for score in chunk.logprobs):
                raise EngineError(f"{self.name} computes no numbers: its weights are broken")

    def close(self) -> None:
        self.engine.close()
