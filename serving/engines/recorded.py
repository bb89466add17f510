"""Decoding steps as CUDA graphs: one launch for a step, where its 1,500 kernels would take longer to launch than to run."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from serving.engines.adapters import NO_ADAPTER
from serving.engines.kv_cache import LENGTH_STEP, KeyValueCache, doubled

logger = logging.getLogger(__name__)

Step = Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
"""Logits [R, vocabulary] after tokens [R] at positions [R] of the cache's first R rows, of which so many positions are visible; with
each row's slot [R] of its adapter, None when none has one."""

_ONE_AT_A_TIME = threading.Lock()
"""A process may record one graph at a time, and each model decodes on a thread of its own."""


def is_recordable(model: nn.Module) -> bool:
    """Whether no layer waits for the device, as transformers' loop over experts does: known of gpt-oss with packed experts."""
    return any(type(module).__name__ == "PackedExperts" for module in model.modules())


class RecordedSteps:
    """Runs `step` for any number of rows, recorded once per shape.

    Rows and visible positions are rounded up to powers of two, so that few shapes occur; the rows beyond the batch write at the
    cache's last position, which no sequence uses. A shape's first step runs as it is, which also compiles its kernels; its second
    is recorded. When the cache moves, the recordings are void.

    Args:
        step: does all its work on the device, without waiting for it.
        record: whether to; else every step runs as it is.
    """

    def __init__(self, step: Step, cache: KeyValueCache, device: torch.device, *, record: bool):
        self._step, self._cache, self._device, self._record = step, cache, device, record
        self._recorded: dict[tuple[int, int, bool], _Recording | None] = {}
        self._version = cache.version
        self._short_at = -1  # the cache's version at which there was no memory for a recording
        self._place: _Place | None = None  # of all recordings

    def forget(self) -> None:
        """Drops the recordings and their memory."""
        self._recorded.clear()
        self._place = None

    def __call__(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Logits [B, vocabulary], to be read before the next call.

        Args:
            tokens: the newest of each sequence, [B].
            positions: where they go, [B].
            slots: of the sequences' adapters, [B].
        """
        count, last = len(tokens), self._cache.length - 1
        rows = min(doubled(count, 1), self._cache.rows)
        visible = min(doubled(max(positions) + 1, LENGTH_STEP), self._cache.length)
        spare = rows - count
        inputs = torch.tensor([[*tokens, *[0] * spare], [*positions, *[last] * spare], [*slots, *[NO_ADAPTER] * spare]])
        return self._run(inputs, visible, any(slots))[:count]

    def _run(self, inputs: Tensor, visible: int, adapted: bool) -> Tensor:
        if self._version != self._cache.version:
            self.forget()
            self._version = self._cache.version
        key = (inputs.shape[1], visible, adapted)
        if not self._record or self._short_at == self._version or key not in self._recorded:
            self._recorded[key] = None
            return self._as_it_is(inputs.to(self._device), visible, adapted)
        recording = self._recorded[key]
        if recording is None:
            recording = self._recorded[key] = self._recording_of(inputs, visible, adapted)
            if recording is None:
                return self._as_it_is(inputs.to(self._device), visible, adapted)
        return recording.replay(inputs)

    def _as_it_is(self, inputs: Tensor, visible: int, adapted: bool) -> Tensor:
        tokens, positions, slots = inputs
        return self._step(tokens, positions, visible, slots if adapted else None)

    def _recording_of(self, inputs: Tensor, visible: int, adapted: bool) -> "_Recording | None":
        """None where that fails."""
        self._place = self._place or _Place(self._device)
        try:
            return _Recording(lambda held: self._as_it_is(held, visible, adapted), inputs.to(self._device), self._place)
        except torch.OutOfMemoryError:  # there may be room when the cache has become another
            self._short_at = self._version
            self.forget()
        except RuntimeError as error:
            logger.warning("decoding runs without CUDA graphs: %s", str(error).splitlines()[0])
            self._record = False
            self.forget()
        return None


class _Place:
    """Where recordings are made: a stream of their own, and one pool of memory, as no two of them run at once."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()


class _Recording:
    def __init__(self, step: Callable[[Tensor], Tensor], inputs: Tensor, place: _Place):
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            # of this thread alone: another one may be loading a model meanwhile
            with (
                _ONE_AT_A_TIME,
                torch.cuda.graph(self._graph, pool=place.pool, stream=place.stream, capture_error_mode="thread_local"),
            ):
                self._logits = step(self._inputs)
        except BaseException:
            _mend_generator(inputs.device)
            raise
        finally:
            torch.cuda.set_stream(before)  # which torch leaves undone when a recording fails

    def replay(self, inputs: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._logits


def _mend_generator(device: torch.device) -> None:
    """Gives the device's own generator a state to draw from: a recording that fails leaves one that waits for its end."""
    broken = torch.cuda.default_generators[torch.cuda._get_device_index(device, optional=True)]
    whole = torch.Generator(device).manual_seed(broken.initial_seed())
    broken.graphsafe_set_state(whole.graphsafe_get_state())
