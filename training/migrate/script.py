"""Reads keywords out of a training script by its syntax tree, without running it."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.errors import ConfigError

_CONFIGS = {"SFTConfig", "LoraConfig", "Mxfp4Config", "BitsAndBytesConfig", "distributed"}
_CONFIG_NAMES = {"TrainingArguments": "SFTConfig"}  # the same keywords
_BY_POSITION = {"set_experiment", "set_tracking_uri", "set_registry_uri"}
_TRAINER_KEYWORDS = {"max_seq_length", "packing", "dataset_text_field", "dataset_num_proc"}  # before TRL 0.13


@dataclass(frozen=True)
class Computed:
    """A value that only a run of the script would tell."""

    source: str


def read_script(text: str, suffix: str) -> list[tuple[str, Any]]:
    """The keywords of the calls that configure a training, as `SFTConfig.learning_rate` and so on, in the script's order.

    Args:
        suffix: `.py`, or `.ipynb` for a notebook.

    Raises:
        ConfigError: it is not Python, or no notebook.
    """
    try:
        tree = ast.parse(_notebook_source(text) if suffix == ".ipynb" else text)
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno} is not Python: {error.msg}", field="source") from None
    names = _Names(tree)
    keys: list[tuple[str, Any]] = []
    for call in sorted(_calls(tree), key=lambda call: (call.lineno, call.col_offset)):
        keys += _keys(call, names)
    return keys


def _notebook_source(text: str) -> str:
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"this is no notebook: {error}", field="source") from None
    lines = "\n".join(sources).splitlines()
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _keys(call: ast.Call, names: "_Names") -> Iterator[tuple[str, Any]]:
    function, owner = _function(call.func)
    function = _CONFIG_NAMES.get(function, function)
    if function in _CONFIGS:
        yield from ((f"{function}.{key}", value) for key, value in names.keywords(call) if key != "quantization_config")
    elif function == "from_pretrained" and "Model" in owner:
        yield from (("from_pretrained.0", names.value(argument)) for argument in call.args[:1])
        yield from (
            (f"from_pretrained.{key}", value) for key, value in names.keywords(call) if key != "quantization_config"
        )
    elif function == "load_dataset":
        yield from _data_set(call, names)
    elif function == "SFTTrainer":
        yield from ((f"SFTConfig.{key}", value) for key, value in names.keywords(call) if key in _TRAINER_KEYWORDS)
    elif function in _BY_POSITION:
        yield from ((f"{function}.0", names.value(argument)) for argument in call.args[:1])
    for key, value in names.keywords(call):
        if key == "registered_model_name":
            yield key, value


def _data_set(call: ast.Call, names: "_Names") -> Iterator[tuple[str, Any]]:
    """`load_dataset("json", data_files=…)` names a file, anything else a data set of the hub."""
    path = names.value(call.args[0]) if call.args else None
    for key, value in names.keywords(call):
        if key == "data_files":
            files = list(value.values()) if isinstance(value, dict) else value
            path = files[0] if isinstance(files, list) else files
        elif key == "path":
            path = path or value
        else:
            yield f"load_dataset.{key}", value
    if path is not None:
        yield "load_dataset.path", path


def _function(node: ast.expr) -> tuple[str, str]:
    """Name of a called function, and of what it is called on."""
    if isinstance(node, ast.Attribute):
        return node.attr, ast.unparse(node.value)
    return (node.id, "") if isinstance(node, ast.Name) else ("", "")


class _Names:
    """Values of the names that a script gives a constant once, and of expressions of them."""

    def __init__(self, tree: ast.AST):
        self._widgets = self._read_widgets(tree)
        self._options = self._read_options(tree)
        self._parsed = self._read_parsed(tree)
        self._values: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._bind(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self._bind(node.target.id, node.value)
            elif isinstance(node, ast.FunctionDef):
                positional = [*node.args.posonlyargs, *node.args.args]
                defaults = zip(positional[len(positional) - len(node.args.defaults) :], node.args.defaults, strict=True)
                for argument, default in [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
                    if default is not None:
                        self._bind(argument.arg, default)

    def _bind(self, name: str, node: ast.expr) -> None:
        value = self.value(node)
        if name in self._values and self._values[name] != value:
            value = Computed(name)  # which of the values holds, only a run would tell
        self._values[name] = value

    def _read_widgets(self, tree: ast.AST) -> dict[str, Any]:
        """Defaults of `dbutils.widgets.text(name, default)`."""
        return {
            str(call.args[0].value): call.args[1].value
            for call in _calls(tree)
            if _function(call.func) in (("text", "dbutils.widgets"), ("dropdown", "dbutils.widgets"))
            and len(call.args) > 1
            and isinstance(call.args[0], ast.Constant)
            and isinstance(call.args[1], ast.Constant)
        }

    def _read_options(self, tree: ast.AST) -> dict[str, Any]:
        """Defaults of `parser.add_argument("--name", default=…)`, by the name that the parsed arguments have."""
        options: dict[str, Any] = {}
        for call in _calls(tree):
            flags = [flag.value for flag in call.args if isinstance(flag, ast.Constant) and isinstance(flag.value, str)]
            default = next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)
            if _function(call.func)[0] == "add_argument" and flags and isinstance(default, ast.Constant):
                options[max(flags, key=len).lstrip("-").replace("-", "_")] = default.value
        return options

    def _read_parsed(self, tree: ast.AST) -> set[str]:
        """Names that are given what `parser.parse_args()` returns."""
        return {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if isinstance(target, ast.Name) and _function(node.value.func)[0] == "parse_args"
        }

    def keywords(self, call: ast.Call) -> Iterator[tuple[str, Any]]:
        for keyword in call.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                yield keyword.arg, value
            elif isinstance(value, dict):
                yield from value.items()
            else:
                yield "**", value

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or a Computed with its source."""
        try:
            return self._value(node)
        except (LookupError, TypeError, ValueError, ArithmeticError):
            return Computed(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._known(self._values[node.id])
            case ast.List() | ast.Tuple():
                return [self._value(item) for item in node.elts]
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                known: dict[Any, Any] = {self._value(key): self._value(value) for key, value in pairs if key}
                return known
            case ast.JoinedStr():
                return "".join(self._piece(piece) for piece in node.values)
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
        raise LookupError(ast.dump(node))

    def _known(self, value: Any) -> Any:
        if isinstance(value, Computed):
            raise LookupError(value.source)
        return value

    def _piece(self, node: ast.expr) -> str:
        return str(self._value(node.value if isinstance(node, ast.FormattedValue) else node))

    def _arithmetic(self, node: ast.BinOp) -> Any:
        left, right = self._value(node.left), self._value(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return left // right
        raise LookupError("operator")

    def _attribute(self, node: ast.Attribute) -> Any:
        """`torch.bfloat16` is its own name, an option of the command line its default; anything else is computed."""
        if isinstance(node.value, ast.Name) and node.value.id in ("torch", "SchedulerType"):
            return f"{node.value.id}.{node.attr}"
        if isinstance(node.value, ast.Name) and node.value.id in self._parsed:
            return self._options[node.attr]
        raise LookupError(node.attr)

    def _call(self, node: ast.Call) -> Any:
        """Defaults of widgets and environment variables, and `dict`, `str`, `int`, `float` of what is known."""
        function, owner = _function(node.func)
        if (function, owner) == ("get", "dbutils.widgets"):
            return self._widgets[self._value(node.args[0])]
        if (function, owner) in (("get", "os.environ"), ("getenv", "os")) and len(node.args) > 1:
            return self._value(node.args[1])
        if function == "dict" and not owner and not node.args:
            return dict(self.keywords(node))
        if function in ("str", "int", "float") and not owner:
            return {"str": str, "int": int, "float": float}[function](self._value(node.args[0]))
        raise LookupError(function)
