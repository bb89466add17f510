"""YAML as people write it. What readers of YAML let pass is refused: a key that a mapping gives twice, of which the last would win."""

from typing import Any

import yaml

from training.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"  # `<<`, which may stand several times


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str):
        super().__init__(text)
        self._path: list[str] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._path.append(str(getattr(index, "value", index)))
        node = super().compose_node(parent, index)
        self._path.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                dotted = ".".join([*self._path[1:], key.value])
                raise ConfigError(
                    f"{dotted} is given twice, in line {lines[key.value]} and in line {line}",
                    hint="Keep one of them: YAML's readers would take the last without a word.",
                    field=dotted,
                )
            lines[key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """The value of the one document in `text`.

    Raises:
        ConfigError: a key is given twice; both lines are named.
        yaml.YAMLError, ValueError, RecursionError: it is no YAML, holds a date in month 13, or is nested too deep.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
