"""Records out of files, directories, uploads and the hub, each with where it came from; what they mean is `training.data`'s."""

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.config import is_local_path
from training.errors import ConfigError, DataError
from training.run_dir import polythink_home

PARQUET_LIMIT = 2 * 2**30
"""Bytes of one file's rows. Rows are held in memory, and a few MB of Parquet may repeat one text as often as they like."""
PARQUET_ROWS = 1000
"""Read at once."""
OBJECT_BYTES = 64
"""The least that a value takes in Python."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def read(path: str, revision: str | None, split: str) -> Iterator[tuple[str, Any]]:
    """`(source, record)` of everything that `path` names, as `data.path` in the configuration; a record may be its error.

    Raises:
        ConfigError: there is no such file, or it is of an unknown kind.
        DataError: a file or hub data set as a whole cannot be read.
    """
    if not path.startswith("file:") and not is_local_path(path):
        return _read_hub(path, revision, split)
    return (record for file in local_files(path) for record in read_file(file))


def local_files(path: str, field: str = "data.path") -> list[Path]:
    """The files that `path`, which stands in `field`, names: an upload, a file, or those of a directory.

    Raises:
        ConfigError: there are none.
    """
    if path.startswith("file:"):
        identifier = path.removeprefix("file:")
        upload = polythink_home() / "files" / f"{identifier}.jsonl"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", identifier) or not os.path.isfile(upload):
            raise ConfigError(
                f"there is no uploaded file {identifier!r}", hint="POST /files answers its id.", field=field
            )
        return [upload]
    location = Path(path).expanduser()
    if os.path.isdir(location):  # unlike Path.is_dir, also for names that no file system takes
        files = sorted(file for file in location.iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ConfigError(
                f"{location} holds no file of {', '.join(SUFFIXES)}", hint="Give the rows' file.", field=field
            )
        return files
    if not os.path.isfile(location):
        raise ConfigError(f"there is no file {location}", hint="Give a file, directory or hub id.", field=field)
    return [location]


def read_file(path: Path) -> Iterator[tuple[str, Any]]:
    """`(file:line, record)` of a JSONL, JSON, Parquet or CSV file; a line that cannot be read is its error.

    Raises:
        ConfigError: a suffix that is none of these.
        DataError: the file as a whole cannot be read.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path.name} is of an unknown kind", hint=f"Use {', '.join(SUFFIXES)}.", field="data.path")
    try:
        for number, record in reader(path):
            yield f"{path.name}:{number}", record
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise DataError(f"{path.name} cannot be read: {error}", field="data.path") from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _json(line.rstrip("\r\n"))


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    records = _json(path.read_text(encoding="utf-8-sig"))
    if isinstance(records, Exception):
        raise DataError(f"{path.name} is not JSON: {records}", field="data.path")
    if not isinstance(records, list):
        raise DataError(f"{path.name} must hold a list of rows, not a {type(records).__name__}", field="data.path")
    return enumerate(records, start=1)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        return ValueError(f"not JSON: {error.msg} at {line}column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, too deep
        return ValueError(f"not JSON: {error}")


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            _require_size(path, _declared_bytes(file.metadata))
            _require_size(path, _decoded_bytes(path, file.schema))
            for batch in file.iter_batches(PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        raise DataError(f"{path.name} is not Parquet: {error}", field="data.path") from error


def _declared_bytes(metadata: Any) -> int:
    """What a Parquet file says of itself: bytes as they are encoded, and an object for each value that they stand for."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    values = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
    return sum(group.total_byte_size for group in groups) + values * OBJECT_BYTES


def _decoded_bytes(path: Path, schema: Any) -> int:
    """What its rows take. A text that many of them share is in memory once here: it is read as a dictionary."""
    from pyarrow.parquet import ParquetFile

    leaves = [schema.column(index) for index in range(len(schema.names))]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    with ParquetFile(path, read_dictionary=texts) as file:
        return sum(_bytes_of(column) for batch in file.iter_batches(PARQUET_ROWS) for column in batch.columns)


def _bytes_of(array: Any) -> int:
    """What an Arrow array takes once each of its values stands for itself."""
    import pyarrow
    import pyarrow.compute

    if isinstance(array, pyarrow.DictionaryArray):
        lengths = pyarrow.compute.binary_length(array.dictionary).cast("int64")
        return pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0
    if isinstance(array, pyarrow.MapArray):  # has no flatten() of its own
        array = pyarrow.ListArray.from_arrays(array.offsets, array.values)
    if isinstance(array, pyarrow.StructArray):
        return sum(map(_bytes_of, array.flatten()))
    if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
        return _bytes_of(array.flatten())
    return int(array.nbytes)


def _require_size(path: Path, size: int) -> None:
    if size > PARQUET_LIMIT:
        raise DataError(
            f"{path.name} holds more than {PARQUET_LIMIT / 2**30:g} GiB, as rows",
            hint="Split it: data.path may be a directory.",
            field="data.path",
        )


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    """Flat columns, or a `messages` column that holds JSON."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for record in reader:
            if None in record:  # an unquoted comma would cut a text short
                yield reader.line_num, ValueError(f"has more fields than the header's {len(reader.fieldnames or ())}")
                continue
            values: dict[str, Any] = {key: value for key, value in record.items() if value not in (None, "")}
            if isinstance(values.get("messages"), str):
                values["messages"] = _json(values["messages"])
            yield reader.line_num, values


def _read_hub(path: str, revision: str | None, split: str) -> Iterator[tuple[str, Any]]:
    import datasets
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    try:
        dataset = datasets.load_dataset(path, revision=revision, split=split)
    except (OSError, ValueError, RuntimeError, HFValidationError, OfflineModeIsEnabled) as error:
        raise DataError(
            f"cannot load the data set {path} (split {split}): {str(error).splitlines()[0]}",
            hint="Give a local file (with a leading ./ or /), check the hub id, or unset HF_HUB_OFFLINE.",
            field="data.path",
        ) from error
    return ((f"{path}[{split}]:{number}", record) for number, record in enumerate(dataset, start=1))
