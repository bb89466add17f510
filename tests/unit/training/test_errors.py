"""Errors cross process borders: each survives pickling, says its parts, and is a standard exception as well."""

import pickle

import pytest

from training import errors
from training.errors import PolythinkError

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PolythinkError)]
STANDARD = {"ConfigError": ValueError, "DataError": ValueError, "ModelError": ValueError, "StorageError": OSError}
STANDARD |= {"MergeError": RuntimeError, "TrainingError": RuntimeError}


def test_the_tree_is_the_drawn_one() -> None:
    assert {kind.__name__ for kind in ALL} == {"PolythinkError", *STANDARD}
    assert all(name in (errors.__doc__ or "") for name in STANDARD)


@pytest.mark.parametrize("kind", ALL)
def test_survives_pickling(kind: type[PolythinkError]) -> None:
    error = kind("the disk is full: 3 of 4 GiB", hint="Free some.", field="checkpoint.keep")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert back.as_dict() == error.as_dict()
    assert str(back) == "the disk is full: 3 of 4 GiB"


@pytest.mark.parametrize("kind", ALL)
def test_as_dict_has_the_wire_form(kind: type[PolythinkError]) -> None:
    assert kind("message").as_dict() == {"type": kind.__name__, "message": "message", "hint": "", "field": None}


@pytest.mark.parametrize(("name", "standard"), STANDARD.items())
def test_is_a_standard_exception_too(name: str, standard: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), standard)
