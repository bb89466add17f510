"""vLLM as an engine: its AsyncLLM takes our token ids and gives token ids back, so that rendering stays training's own.

vLLM's chat routes and Ray Serve's LLM builders render by themselves (harmony in vLLM ignores the model's chat template),
answer no `/generate`, and serve adapters from object stores only: that is why this is an engine and not a service beside.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from serving.engines.engine import (
    Chunk,
    EngineError,
    FinishReason,
    OverloadedError,
    Sampling,
    TokenLogprobs,
    check_fits,
)
from training.errors import ModelError

MAX_TOP_LOGPROBS = 20


class VllmEngine:
    """Continues many sequences at once.

    AsyncLLM belongs to one event loop for life, while models are loaded and asked from others: it has a loop of its own, on
    a thread of its own.

    Args:
        directory: the model, merged MXFP4 as it is.
        max_sequences: decoded together; more wait.
        max_waiting: sequences that may wait before new ones are refused.
        context_length: most tokens per sequence; None takes the model's, as far as memory goes.
        check_adapter: raises when an adapter cannot be served unmerged; None serves no adapters.
        options: further arguments of `AsyncEngineArgs`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_sequences: int = 256,
        max_waiting: int = 512,
        context_length: int | None = None,
        check_adapter: Callable[[Path], None] | None = None,
        **options: Any,
    ):
        self._check_adapter = check_adapter
        self._limit = max_sequences + max_waiting
        self._running = 0
        self._ids = itertools.count(1)
        self._adapters: dict[Path, LoRARequest] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        arguments = AsyncEngineArgs(
            model=str(directory),
            tokenizer=str(directory),
            skip_tokenizer_init=True,
            max_num_seqs=max_sequences,
            max_model_len=context_length if context_length is not None else -1,  # -1: what memory allows
            max_logprobs=MAX_TOP_LOGPROBS,
            enable_log_requests=False,
            **options,
        )
        self._llm: AsyncLLM = self._call(_start(arguments))
        self.context_length: int = self._llm.model_config.max_model_len

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: Path | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See `serving.engines.engine.Engine`."""
        self._check(prompt_ids, sampling)
        lora = None if adapter is None else await asyncio.to_thread(self._lora, adapter)
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        def put(item: Chunk | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        self._running += 1
        pump = asyncio.run_coroutine_threadsafe(self._pump(list(prompt_ids), sampling, lora, put), self._loop)
        try:
            finished = False
            while not finished:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            self._running -= 1
            pump.cancel()  # AsyncLLM aborts the request; after its end this does nothing

    def check_health(self) -> None:
        """See `serving.engines.engine.Engine`."""
        if self._llm.errored:
            raise EngineError("vLLM's engine has died")

    def close(self) -> None:
        """Ends vLLM's processes; sequences that still run get an `EngineError`."""
        if not self._closed:
            self._closed = True
            self._call(_stop(self._llm))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if self._closed:
            raise EngineError("this model is being unloaded", hint="Send the request again.")
        check_fits(prompt_ids, sampling, self.context_length)
        if self._running >= self._limit:
            raise OverloadedError(f"{self._running} requests run or wait already", hint="Try again shortly.")

    def _lora(self, adapter: Path) -> LoRARequest:
        if self._check_adapter is None:
            raise ModelError(
                "this engine serves no adapters",
                hint="Ask for job:ID, its merged model, or raise generator.max_adapters; on CPU vLLM has none.",
                field="model",
            )
        if adapter not in self._adapters:
            self._check_adapter(adapter)  # vLLM drops modules that it does not know without a word
            self._adapters[adapter] = LoRARequest(str(adapter), next(self._ids), str(adapter))
        return self._adapters[adapter]

    async def _pump(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        lora: LoRARequest | None,
        put: Callable[[Chunk | Exception], None],
    ) -> None:
        """Runs one sequence on vLLM's loop; every chunk, or what went wrong, goes to `put`."""
        prompt = TokensPrompt(prompt_token_ids=prompt_ids)
        try:
            outputs = self._llm.generate(prompt, sampling_params(sampling), f"p{next(self._ids)}", lora_request=lora)
            async for output in outputs:
                [completion] = output.outputs
                if completion.token_ids:
                    put(_chunk(completion, sampling.top_logprobs or 0))
        except asyncio.CancelledError:
            put(EngineError("this model was unloaded", hint="Send the request again."))
            raise
        except Exception as error:  # whatever vLLM raises: the caller hears it
            put(EngineError(f"the model failed: {type(error).__name__}: {error}"))

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs `coroutine` on vLLM's loop and waits for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


async def _stop(llm: AsyncLLM) -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    llm.shutdown()


def sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=sorted(sampling.stop_ids),
        ignore_eos=True,  # the stop ids are the whole list
        logprobs=sampling.top_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _chunk(completion: CompletionOutput, count: int) -> Chunk:
    ids = list(completion.token_ids)
    reason: FinishReason | None = None
    if completion.finish_reason is not None:
        reason = "length" if completion.finish_reason == "length" else "stop"
    if completion.logprobs is None:
        return Chunk(ids, reason)
    scores = []
    for token, place in zip(ids, completion.logprobs, strict=True):
        ranked = sorted(place.items(), key=lambda item: item[1].rank or 0)
        top = tuple((other, score.logprob) for other, score in ranked[:count])
        scores.append(TokenLogprobs(place[token].logprob, top))
    return Chunk(ids, reason, scores)
