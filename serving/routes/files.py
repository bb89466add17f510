"""`POST /files`: rows that a client uploads, checked whole before they are kept. Used as `data.path: file:ID`."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from serving.errors import RequestError
from serving.jobs import JobStore
from serving.routes.jobs import IdempotencyKey
from serving.schemas import FileAnswer, FileQuery

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")

SCRATCH = ".upload-"
ABANDONED_S = 86_400
"""Age of scratch that no upload is at work on any more."""

RowReader = Callable[[Path], Sequence[dict[str, Any]]]
"""A file's rows, each as JSON can hold it; raises DataError with every fault of every row."""


@dataclass(frozen=True)
class FileRoutes:
    """The upload route: rows go to `directory/ID.jsonl`, in one form whatever they came in."""

    store: JobStore
    directory: Path
    read_rows: RowReader

    def router(self) -> APIRouter:
        router = APIRouter(tags=["files"])
        router.add_api_route("/files", self.upload, methods=["POST"], status_code=201, response_model=FileAnswer)
        return router

    async def upload(
        self, request: Request, query: Annotated[FileQuery, Query()], idempotency_key: IdempotencyKey = None
    ) -> FileAnswer:
        """Keep rows for training: the body is a JSONL, JSON, CSV or Parquet file."""
        await run_in_threadpool(self._make_directory)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.directory) as scratch:
            received = Path(scratch) / "body"
            body_hash = await _receive(request.stream(), received, query.name or "")
            return await run_in_threadpool(self._keep, received, query.name, idempotency_key, body_hash)

    def _keep(self, received: Path, name: str | None, key: str | None, body_hash: str) -> FileAnswer:
        if key and (known := self.store.recall("files", key, body_hash)):
            return FileAnswer(**known)
        rows = self.read_rows(received.rename(received.with_name(_file_name(name, ending(received, name)))))
        answer = FileAnswer(id=f"file-{secrets.token_hex(8)}", rows=len(rows))
        kept = received.with_name("kept")  # what was received has an ending
        with kept.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        target = kept.rename(self.directory / f"{answer.id}.jsonl")
        if key:  # two requests with one key may have come this far: the first one's answer counts
            first: FileAnswer | None = None
            try:
                first = FileAnswer(**self.store.remember("files", key, body_hash, answer.model_dump()))
            finally:
                if first != answer:  # nobody will know its id
                    target.unlink()
            return first
        return answer

    def _make_directory(self) -> None:
        """Makes the directory, and deletes what uploads left there whose process was killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for scratch in self.directory.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError):  # another upload was first
                if time.time() - scratch.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(scratch)


async def _receive(body: AsyncIterator[bytes], target: Path, name: str) -> str:
    """Writes the body to `target` as it comes; returns the SHA-256 of it and of its name, which decides how it is read."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass") + b"\0")
    with target.open("wb") as file:
        async for block in body:
            digest.update(block)
            await run_in_threadpool(file.write, block)
    return digest.hexdigest()


def ending(received: Path, name: str | None) -> str:
    """The file's format as an ending: from the name that the client gave, else from the first bytes.

    Raises:
        RequestError: the body is empty, or the name ends in something else.
    """
    with received.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head:
        raise RequestError("the body is empty", hint="Send the file's bytes: curl --data-binary @rows.jsonl …/files")
    if name is not None:
        suffix = Path(name).suffix.lower()
        if suffix not in ENDINGS:
            raise RequestError(
                f"name={name!r} does not say a format", hint=f"Endings: {', '.join(ENDINGS)}.", field="name"
            )
        return suffix
    if head.startswith(b"PAR1"):
        return ".parquet"
    return {b"[": ".json", b"{": ".jsonl"}.get(head[:1], ".csv")


def _file_name(name: str | None, suffix: str) -> str:
    """The name that faults are reported under: the client's, as far as any file system takes it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(name).name)[-100:] if name else f"rows{suffix}"


def read_rows(path: Path) -> Sequence[dict[str, Any]]:
    """Rows through `training.data`, which is imported here so that the API starts without its libraries."""
    from training.config import DataConfig
    from training.data import load_rows

    rows = load_rows(DataConfig(path=str(path)))
    return [{"messages": row.messages, "reasoning_language": row.reasoning_language} for row in rows]
