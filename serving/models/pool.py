"""The models in memory: loaded once when first asked for, kept while they are used, the least recently used one leaves."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from serving.errors import UnavailableError
from serving.models.names import ModelSource
from serving.models.served import ServedModel
from training.errors import ModelError, PolythinkError

Key = tuple[str, str | None]
"""Directory and engine."""


class ModelPool:
    """Used from one event loop; loading runs in threads, one at a time.

    Args:
        load: makes a model from its source; raises a PolythinkError when it cannot.
        fits: whether there is memory for the model of a source beside those that are loaded. Where there is not, the others
            are closed first, each after its last answer.
        capacity: models kept; one that answers is never closed before its last answer ended.
        load_timeout_s: longest wait for a model; the load goes on after it.
    """

    def __init__(
        self,
        load: Callable[[ModelSource], ServedModel],
        *,
        fits: Callable[[ModelSource], bool] = lambda source: True,
        capacity: int = 2,
        load_timeout_s: float = 600,
    ):
        self._load = load
        self._fits = fits
        self._capacity = capacity
        self._load_timeout_s = load_timeout_s
        self._loaded: OrderedDict[Key, ServedModel] = OrderedDict()  # least recently used first
        self._loading: dict[Key, asyncio.Task[None]] = {}
        self._one_load = asyncio.Lock()
        self._released = asyncio.Event()  # a model has lost its last user
        self._closing: set[asyncio.Future[None]] = set()
        self._pinned: Key | None = None
        self._users = 0

    @property
    def names(self) -> list[str]:
        """Of the loaded models, most recently used first."""
        return [model.name for model in reversed(self._loaded.values())]

    @property
    def users(self) -> int:
        """Leases that are held."""
        return self._users

    def has(self, source: ModelSource) -> bool:
        return _key(source) in self._loaded

    def pin(self, source: ModelSource) -> None:
        """Keeps the model of `source`, however long it is not used; unpins the one before."""
        self._pinned = _key(source)
        self._evict()

    def forget(self, source: ModelSource) -> None:
        """Closes the model of `source` unless it is pinned or answers: it has turned out not to work."""
        model = self._loaded.get(_key(source))
        if model is not None and not model.users and _key(source) != self._pinned:
            self._remove(_key(source))

    @asynccontextmanager
    async def lease(self, source: ModelSource) -> AsyncIterator[ServedModel]:
        """The model of `source`, loaded if it is not; it stays open inside the context.

        Raises:
            ModelError: it cannot be loaded.
            UnavailableError: it is not loaded in time.
        """
        key = _key(source)
        while (model := self._loaded.get(key)) is None:  # another load may push it out before this task goes on
            await self._wait_for_load(key, source)
        self._loaded.move_to_end(key)
        model.users += 1
        self._users += 1
        try:
            yield model
        finally:
            model.users -= 1
            self._users -= 1
            if not model.users:
                self._released.set()
                if self._loaded.get(key) is not model:
                    self._close(model)

    def check_health(self) -> None:
        """
        Raises:
            EngineError: a model will not answer any more.
        """
        for model in self._loaded.values():
            model.engine.check_health()

    def close(self) -> None:
        for key in list(self._loaded):
            self._loaded.pop(key).close()

    async def _wait_for_load(self, key: Key, source: ModelSource) -> None:
        """Joins the one task that loads the model; who leaves does not stop it."""
        if key not in self._loading:
            self._loading[key] = asyncio.create_task(self._load_into(key, source))
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await asyncio.shield(self._loading[key])
        except TimeoutError:
            raise UnavailableError(f"{source.name} is still being loaded", field="model") from None

    async def _load_into(self, key: Key, source: ModelSource) -> None:
        try:
            async with self._one_load:
                await self._make_room(source)
                model = await asyncio.to_thread(self._load, source.base)
        except PolythinkError:
            raise
        except Exception as error:  # whatever the libraries raise on a broken file or on too little memory
            raise ModelError(
                f"{source.name} cannot be loaded: {type(error).__name__}: {error}", field="model"
            ) from error
        finally:
            del self._loading[key]
        self._loaded[key] = model
        self._evict()

    async def _make_room(self, source: ModelSource) -> None:
        """Closes models until that of `source` fits: the least recently used first, the pinned one last."""
        await self._until_closed()
        while not await asyncio.to_thread(self._fits, source) and self._loaded:
            await self._remove_one()
            await self._until_closed()

    async def _remove_one(self) -> None:
        """Takes one model out and waits for its last answer. Nothing here holds it when memory is measured next."""
        key = next((key for key in self._loaded if key != self._pinned), self._pinned)
        assert key is not None
        model = self._remove(key)
        while model.users:
            self._released.clear()
            await self._released.wait()

    async def _until_closed(self) -> None:
        if self._closing:
            await asyncio.wait(self._closing)

    def _evict(self) -> None:
        newest = next(reversed(self._loaded), None)
        for key in list(self._loaded):
            if len(self._loaded) <= self._capacity:
                return
            if key not in (self._pinned, newest):
                self._remove(key)

    def _remove(self, key: Key) -> ServedModel:
        """Takes a model out; it is closed now, or by the lease that uses it last."""
        model = self._loaded.pop(key)
        if not model.users:
            self._close(model)
        return model

    def _close(self, model: ServedModel) -> None:
        """In a thread, since an engine ends its round first."""
        closing = asyncio.get_running_loop().run_in_executor(None, model.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _key(source: ModelSource) -> Key:
    return str(source.directory), source.engine
