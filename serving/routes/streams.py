"""What is sent while it grows: a log, a job's changes, a directory as an archive."""

import asyncio
import json
import os
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any

from starlette.concurrency import run_in_threadpool

from serving.jobs import JobRecord

POLL_S = 0.5
HEARTBEAT_S = 15.0
"""Between two comments on an idle stream: proxies and clients drop silent connections after 30 to 60 s."""
CHUNK_BYTES = 256 * 1024


def sse(event: str, data: Any, id_: int | None = None) -> str:
    """One server-sent event. `data` is JSON, except plain strings, whose lines are sent as they are."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    lines = [f"id: {id_}"] if id_ is not None else []
    return "\n".join([*lines, f"event: {event}", *(f"data: {line}" for line in text.split("\n"))]) + "\n\n"


def read_tail(path: Path, lines: int | None) -> str:
    """The file's text, or its last `lines` lines; empty when it does not exist yet."""
    if not path.exists():
        return ""
    if lines is None:
        return path.read_text(encoding="utf-8", errors="replace")
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start, block = end, b""
        while start > 0 and block.count(b"\n") <= lines:
            start = max(0, start - CHUNK_BYTES)
            file.seek(start)
            block = file.read(end - start)
    kept = block.decode("utf-8", errors="replace").splitlines(keepends=True)
    return "".join(kept[-lines:])


def read_from(path: Path, offset: int) -> tuple[str, int]:
    """Whole lines from byte `offset` on, at most CHUNK_BYTES, and the offset behind them."""
    if not path.exists():
        return "", offset
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(CHUNK_BYTES)
    whole = block[: block.rfind(b"\n") + 1] or (block if len(block) == CHUNK_BYTES else b"")
    return whole.decode("utf-8", errors="replace"), offset + len(whole)


async def follow_log(path: Path, is_over: Callable[[], bool], offset: int = 0) -> AsyncIterator[str]:
    """`log` events with the lines of `path` as they come, each with the byte offset behind it as id; then `end`."""
    idle_s = 0.0
    while True:
        over = await run_in_threadpool(is_over)  # asked first: what is written before the end is read after it
        text, offset = await run_in_threadpool(read_from, path, offset)
        if text:
            idle_s = 0.0
            yield sse("log", text.removesuffix("\n"), offset)
            continue
        if over:
            yield sse("end", {"offset": offset})
            return
        idle_s += POLL_S
        if idle_s >= HEARTBEAT_S:
            idle_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)


async def follow_job(
    get: Callable[[], JobRecord | None], render: Callable[[JobRecord], dict[str, Any]]
) -> AsyncIterator[str]:
    """`job` events, one now and one at each change; then `end` with the job's last state."""
    last: dict[str, Any] | None = None
    idle_s = 0.0
    while True:
        job = await run_in_threadpool(get)
        if job is None:  # deleted by retention meanwhile
            return
        now = render(job)
        if now != last:
            last, idle_s = now, 0.0
            yield sse("job", now)
        if job.status.is_terminal():
            yield sse("end", now)
            return
        idle_s += POLL_S
        if idle_s >= HEARTBEAT_S:
            idle_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)


def write_zip(directory: Path, archive: IO[bytes]) -> int:
    """All files of `directory` as a zip, uncompressed (weights do not get smaller); rewound. Returns its bytes."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(directory))
    size = archive.tell()
    archive.seek(0)
    return size


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of an open file, which is closed at the end."""
    with file:
        while block := file.read(CHUNK_BYTES):
            yield block
