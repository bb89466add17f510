"""What is sent while it grows: a log, a job's changes, a directory as an archive."""

import asyncio
import io
import json
import os
import re
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any

from starlette.concurrency import iterate_in_threadpool

from serving.jobs import JobRecord

POLL_S = 0.5
HEARTBEAT_S = 15.0
"""Between two comments on an idle stream: proxies and clients drop silent connections after 30 to 60 s."""
CHUNK_BYTES = 256 * 1024
LINE_END = re.compile(r"\r\n|\r|\n")
"""What ends a line of an event stream: a progress bar's carriage return would cut a log's line short."""


def sse(event: str, data: Any, id_: int | None = None) -> str:
    """One server-sent event. `data` is JSON, except plain strings, whose lines are sent as they are."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    lines = [f"id: {id_}"] if id_ is not None else []
    return "\n".join([*lines, f"event: {event}", *(f"data: {line}" for line in LINE_END.split(text))]) + "\n\n"


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
    kept = io.BytesIO(block).readlines()[-lines:]  # unlike splitlines, does not count a progress bar's carriage returns
    return b"".join(kept).decode("utf-8", errors="replace")


def read_from(path: Path, offset: int) -> tuple[str, int]:
    """Whole lines from byte `offset` on, at most CHUNK_BYTES, and the offset behind them."""
    if not path.exists():
        return "", offset
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(CHUNK_BYTES)
    whole = block[: block.rfind(b"\n") + 1] or (block if len(block) == CHUNK_BYTES else b"")
    return whole.decode("utf-8", errors="replace"), offset + len(whole)


def log_events(path: Path, is_over: Callable[[], bool], offset: int = 0) -> Iterator[str]:
    """`log` events with the lines of `path`, each with the byte offset behind it as id; then `end`. Empty while it waits."""
    while True:
        over = is_over()  # asked first: what is written before the end is read after it
        text, offset = read_from(path, offset)
        if text:
            yield sse("log", text.removesuffix("\n").removesuffix("\r"), offset)
        elif over:
            yield sse("end", {"offset": offset})
            return
        else:
            yield ""


def job_events(get: Callable[[], JobRecord | None], render: Callable[[JobRecord], str]) -> Iterator[str]:
    """`job` events, one now and one at each change; then `end` with the job's last state. Empty while it waits."""
    last = ""
    while (job := get()) is not None:  # else retention has deleted it meanwhile
        now = render(job)
        if now != last:
            last = now
            yield sse("job", now)
        if job.status.is_terminal():
            yield sse("end", now)
            return
        yield ""


async def follow(events: Iterator[str]) -> AsyncIterator[str]:
    """`events`, made in threads. An empty one says that there is nothing new: then comes a pause, now and then a comment."""
    idle_s = 0.0
    async for event in iterate_in_threadpool(events):
        if event:
            idle_s = 0.0
            yield event
            continue
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
