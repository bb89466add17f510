"""Copies of local directories at an URL: an object store as the root under which runs outlive machines.

POLYTHINK_STORAGE names it: `s3://bucket/prefix`, `gs://…`, `file:///mnt/…`, or any URL that an installed fsspec driver knows.
Unset, POLYTHINK_HOME is itself on storage that every node mounts. With it, a run directory is a working copy: whoever writes it
pushes what is whole, and a node that has not got it, or lost it, pulls it. Keys and endpoints come from the environment, as
Arrow's file systems read them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …).
"""

import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.errors import StorageError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

VARIABLE = "POLYTHINK_STORAGE"
MARKER = "_COMPLETE"
"""Object stores have no rename: a directory is there once this object is, which holds the sizes of its files."""


def storage_url() -> str | None:
    """The storage root, or None where POLYTHINK_HOME is it."""
    return (os.environ.get(VARIABLE) or "").rstrip("/") or None


@dataclass(frozen=True)
class Mirror:
    """A directory of this machine and its copy at an URL. Paths are the local ones.

    All methods raise StorageError when the URL does not answer.
    """

    local: Path
    url: str

    def push(self, *paths: Path) -> None:
        """Copies files and whole directories there, as far as they exist; a directory that is there already is left."""
        for path in paths:
            if path.is_dir():
                self._push_directory(path)
            elif path.is_file():
                self._push_file(path)

    def pull(self, *paths: Path) -> None:
        """Puts copies in the place of `paths`, whole: a part of a file or directory is never seen. What is not there is left.

        Raises:
            StorageError: a directory there lacks some of what its marker names, or changes while it is read.
        """
        for path in paths:
            beside = path.with_name(f".{path.name}.pulled-{os.getpid()}-{threading.get_ident()}")
            beside.parent.mkdir(parents=True, exist_ok=True)
            marker = self.read(path / MARKER)
            if marker is None:
                if self._fetch(path, beside):
                    beside.replace(path)
                continue
            shutil.rmtree(beside, ignore_errors=True)  # of a process of the same number that was killed
            beside.mkdir()
            for name, size in json.loads(marker).items():
                (beside / name).parent.mkdir(parents=True, exist_ok=True)
                # more than was counted is there where a file was added to while it was pushed
                if not self._fetch(path / name, beside / name) or (beside / name).stat().st_size < size:
                    shutil.rmtree(beside)
                    raise self._changing(path / name)
            if self.read(path / MARKER) != marker:
                shutil.rmtree(beside)
                raise self._changing(path)
            shutil.rmtree(path, ignore_errors=True)
            beside.rename(path)

    def _changing(self, path: Path) -> StorageError:
        return StorageError(
            f"{self.url}: {path.relative_to(self.local)} is not there whole",
            hint="Another process may be replacing or deleting it; try again.",
        )

    def read(self, path: Path) -> bytes | None:
        """A file's content there; None when it is not there."""
        with self._at(path) as (store, key):
            if store.get_file_info(key).is_file:
                with _unless_gone(store, key), store.open_input_stream(key) as stream:
                    return bytes(stream.read())
        return None

    def directories(self, path: Path) -> list[Path]:
        """The whole directories there below `path`, by name."""
        from pyarrow.fs import FileSelector

        with self._at(path) as (store, key):
            found = store.get_file_info(FileSelector(key, allow_not_found=True))
        names = sorted(info.base_name for info in found if not info.is_file)
        return [path / name for name in names if self.read(path / name / MARKER) is not None]

    def delete(self, path: Path) -> None:
        """Deletes a directory there, its marker first; one that is not there is no error."""
        self._delete_marker(path)
        with self._at(path) as (store, key):
            if store.get_file_info(key).type.name == "Directory":
                store.delete_dir(key)

    def _delete_marker(self, path: Path) -> None:
        with self._at(path / MARKER) as (store, key):
            if store.get_file_info(key).is_file:
                store.delete_file(key)

    def _push_directory(self, path: Path) -> None:
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        marker = json.dumps({str(file.relative_to(path)): file.stat().st_size for file in files}).encode()
        there = self.read(path / MARKER)
        if there == marker or not files:
            return
        if there is not None:  # a push that is cut short must not leave it over other files
            self._delete_marker(path)
        for file in files:
            self._push_file(file)
        with self._at(path / MARKER) as (store, key), store.open_output_stream(key) as stream:
            stream.write(marker)

    def _push_file(self, path: Path) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        with self._at(path) as (store, key):
            if store.type_name != "s3":  # which has no directories, and would get three more objects for each
                store.create_dir(key.rpartition("/")[0])
            # one thread: uploads from several at once can hang (apache/arrow#32372)
            copy_files(str(path), key, LocalFileSystem(), store, use_threads=False)

    def _fetch(self, path: Path, to: Path) -> bool:
        from pyarrow.fs import LocalFileSystem, copy_files

        with self._at(path) as (store, key):
            if store.get_file_info(key).is_file:
                with _unless_gone(store, key):
                    copy_files(key, str(to), store, LocalFileSystem(), use_threads=False)
                    return True
        return False

    @contextmanager
    def _at(self, path: Path) -> Iterator[tuple["FileSystem", str]]:
        """The file system there and the place of `path` in it."""
        name = path.relative_to(self.local).as_posix()
        try:
            store, root = open_url(self.url)
            yield store, root if name == "." else f"{root}/{name}"
        except OSError as error:
            raise StorageError(
                f"{self.url}/{name}: {error}",
                hint=f"Does {VARIABLE} answer, from this node and with these credentials?",
            ) from error


@contextmanager
def _unless_gone(store: "FileSystem", key: str) -> Iterator[None]:
    """Lets a read end without error where its file was deleted meanwhile: asked afterwards, since drivers have several errors for it."""
    try:
        yield
    except OSError:
        if store.get_file_info(key).is_file:
            raise


@functools.cache
def open_url(url: str) -> tuple["FileSystem", str]:
    """Arrow's file system for `url`, or fsspec's where Arrow has none, and the path in it.

    Raises:
        StorageError: neither knows the URL.
    """
    import fsspec
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        store, path = FileSystem.from_uri(url)
    except ArrowInvalid as unknown:
        try:
            driver, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StorageError(
                f"{VARIABLE}={url}: {unknown}; {error}", hint="Write it as s3://bucket/prefix, for example."
            ) from None
        store = PyFileSystem(FSSpecHandler(driver))
    return store, path.rstrip("/")
