"""Copies at an URL: whole or not there, on S3, through Arrow's drivers and fsspec's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem

from tests.unit.training.object_store import bucket
from training.durable import storage
from training.durable.storage import MARKER, Mirror, open_url
from training.errors import StorageError


@pytest.fixture(params=["s3", "file", "memory"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    local = tmp_path / "local"
    local.mkdir()
    open_url.cache_clear()
    if request.param == "s3":
        with bucket(monkeypatch) as url:
            yield Mirror(local, url)
    else:
        yield Mirror(local, (tmp_path / "there").as_uri() if request.param == "file" else f"memory://{tmp_path}")


def elsewhere(mirror: Mirror, tmp_path: Path) -> Mirror:
    """The same URL seen from another machine."""
    return Mirror(tmp_path / "other", mirror.url)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_come_back_as_they_were_pushed(mirror: Mirror, tmp_path: Path) -> None:
    file = write(mirror.local / "a" / "file.json", "one")
    mirror.push(file, mirror.local / "missing")
    mirror.push(write(file, "two"))
    other = elsewhere(mirror, tmp_path)
    other.pull(other.local / "a" / "file.json", other.local / "missing")
    assert (other.local / "a" / "file.json").read_text() == "two"
    assert not (other.local / "missing").exists()
    assert mirror.read(file) == b"two"
    assert mirror.read(mirror.local / "missing") is None


def test_a_directory_comes_back_whole_and_replaces_what_was_there(mirror: Mirror, tmp_path: Path) -> None:
    directory = mirror.local / "data"
    write(directory / "rows.arrow", "rows")
    write(directory / "deep" / "er.txt", "")
    mirror.push(directory)
    other = elsewhere(mirror, tmp_path)
    write(other.local / "data" / "stale.txt", "of before")
    other.pull(other.local / "data")
    found = {str(p.relative_to(other.local)): p.read_text() for p in other.local.rglob("*") if p.is_file()}
    assert found == {"data/rows.arrow": "rows", "data/deep/er.txt": ""}


def test_a_directory_that_was_being_pushed_is_not_there(mirror: Mirror, tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        write(mirror.local / "checkpoints" / name / "weights", name)
    mirror.push(mirror.local / "checkpoints" / "step-1")
    mirror.push(mirror.local / "checkpoints" / "step-2" / "weights")  # killed before the marker
    other = elsewhere(mirror, tmp_path)
    assert other.directories(other.local / "checkpoints") == [other.local / "checkpoints" / "step-1"]
    other.pull(other.local / "checkpoints" / "step-2")
    assert not (other.local / "checkpoints" / "step-2").exists()


def test_a_directory_that_is_there_is_not_pushed_again(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(mirror.local / "adapter" / "weights", "one")
    mirror.push(file.parent)
    pushed: list[Path] = []
    monkeypatch.setattr(Mirror, "_push_file", lambda self, path: pushed.append(path))
    mirror.push(file.parent)
    assert pushed == []
    write(file, "longer")
    mirror.push(file.parent)
    assert pushed == [file]


def test_a_second_push_that_is_cut_short_leaves_no_mixture(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = mirror.local / "evaluation"
    for name in ("after.jsonl", "before.jsonl"):
        write(directory / name, "of the first push")
    mirror.push(directory)
    for name in ("after.jsonl", "before.jsonl"):
        write(directory / name, "second")
    push_file = Mirror._push_file

    def die(self: Mirror, path: Path) -> None:
        if path.name == "before.jsonl":
            raise KeyboardInterrupt
        push_file(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_push_file", die)
        with pytest.raises(KeyboardInterrupt):
            mirror.push(directory)
    other = elsewhere(mirror, tmp_path)
    other.pull(other.local / "evaluation")
    assert not (other.local / "evaluation").exists()


@pytest.mark.parametrize("change", ["gone", "cut"])
def test_a_directory_that_is_being_deleted_is_never_seen_in_part(mirror: Mirror, tmp_path: Path, change: str) -> None:
    directory = mirror.local / "adapter"
    for name in ("config", "weights"):
        write(directory / name, name)
    mirror.push(directory)
    if change == "cut":
        mirror._push_file(write(directory / "weights", "w"))
    else:
        with mirror._at(directory / "weights") as (store, key):
            store.delete_file(key)
    other = elsewhere(mirror, tmp_path)
    write(other.local / "adapter" / "weights", "of before")
    with pytest.raises(StorageError, match="adapter/weights is not there whole"):
        other.pull(other.local / "adapter")
    assert [path.name for path in other.local.rglob("*")] == ["adapter", "weights"]
    assert (other.local / "adapter" / "weights").read_text() == "of before"


def test_a_file_that_is_deleted_while_it_is_read_is_not_there(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are the markers of checkpoints that rank 0 keeps no more, while another process looks which there are."""
    checkpoint = mirror.local / "checkpoints" / "step-1"
    unless_gone = storage._unless_gone

    @contextmanager
    def delete_first(store: FileSystem, key: str) -> Iterator[None]:
        with unless_gone(store, key):
            store.delete_file(key)
            yield

    mirror.push(write(checkpoint / "weights", "one").parent)
    other = elsewhere(mirror, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_unless_gone", delete_first)
        assert mirror.directories(checkpoint.parent) == []
        other.pull(other.local / "checkpoints" / "step-1" / "weights")
    assert list(other.local.rglob("*.*")) == []
    assert mirror.read(checkpoint / "weights") is None


def test_an_empty_directory_is_not_there(mirror: Mirror, tmp_path: Path) -> None:
    directory = mirror.local / "evaluation"
    directory.mkdir()
    mirror.push(directory)
    other = elsewhere(mirror, tmp_path)
    other.pull(other.local / "evaluation")
    assert not (other.local / "evaluation").exists()


def test_deleting(mirror: Mirror) -> None:
    directory = write(mirror.local / "runs" / "job" / "file", "x").parent
    mirror.push(directory)
    mirror.delete(directory)
    mirror.delete(directory)
    assert mirror.read(directory / "file") is None
    assert mirror.read(directory / MARKER) is None
    assert mirror.directories(directory.parent) == []


def test_a_store_that_does_not_answer_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_url.cache_clear()
    with bucket(monkeypatch) as url:
        pass
    with pytest.raises(StorageError, match="s3://runs/polythink/file") as caught:
        Mirror(tmp_path, url).push(write(tmp_path / "file", "x"))
    assert "POLYTHINK_STORAGE" in caught.value.hint


def test_an_url_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere://x"):
        Mirror(tmp_path, "nowhere://x").read(tmp_path / "file")
