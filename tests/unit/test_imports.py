"""Imports go one way, and what must start fast loads without the heavy libraries."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "mlflow", "ray"}
PACKAGES = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("training/**/__init__.py")}
FOR_SERVING = """
    config errors plan language harmony generate run_dir data
    parsing model.base model.load reasoning.language_names merging.adapter merging.shards tracking.patience
"""
"""What `serving` may import of `training`; `data` only to read an upload, `adapter` to serve one unmerged."""


LIGHT = """
    training.config training.errors training.language training.plan training.run_dir training.data
    serving.api serving.jobs serving.requests serving.schemas
    serving.routes.generate serving.routes.openai serving.generator serving.models.names serving.keys
    ray_app.settings ray_app.queue.store ray_app.distributed training.migrate.convert
"""


@pytest.mark.parametrize("module", LIGHT.split())
def test_light_modules_load_without_the_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules, and names of modules, that a file's tree imports anywhere, also inside functions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


def broken_arrows(package: str) -> list[str]:
    """Imports of `package` that point the wrong way, as `file:line imports module`."""
    found = []
    allowed = tuple(f"training.{name}" for name in FOR_SERVING.split())
    for path in sorted((ROOT / package).rglob("*.py")):
        for module, line in imports(ast.parse(path.read_text(encoding="utf-8"))):
            head = module.partition(".")[0]
            wrong = {
                "training": head in {"serving", "ray_app"},
                "serving": head in {"ray_app", "ray"}
                or (head == "training" and module not in PACKAGES and not module.startswith(allowed)),
                # examples under notebooks/ are programs that people run
                "configs": head in {"training", "serving", "ray_app"} and "notebooks" not in path.parts,
            }[package]
            if wrong:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return found


@pytest.mark.parametrize("package", ["training", "serving", "configs"])
def test_imports_go_one_way(package: str) -> None:
    assert broken_arrows(package) == []


def test_a_broken_arrow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "bad.py").write_text(
        "def f():\n    from training import merge\n    import ray_app.queue.store\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert broken_arrows("serving") == [
        "serving/bad.py:2 imports training.merge",
        "serving/bad.py:3 imports ray_app.queue.store",
    ]


def import_graph(*packages: str) -> dict[str, set[str]]:
    """Which module imports which, also inside functions; what only a type checker reads left out."""
    files = [path for package in packages for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    graph = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                node.body = []
        graph[name] = {module for module, _ in imports(tree) if module in names and module != name}
    return graph


INTENDED = ("training.config", "training.plan")
"""`TrainConfig.resolved` asks the plan what fits, when it is called; the plan is about configurations."""


def test_no_modules_import_each_other() -> None:
    graph = import_graph("training", "serving", "ray_app")
    graph[INTENDED[0]].discard(INTENDED[1])
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")
