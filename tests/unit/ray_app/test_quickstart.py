"""What quickstart shows and when it is not content; the whole of it runs as `make quickstart`."""

import io
import socket
from pathlib import Path

import pytest
from rich.console import Console

from ray_app.cli import quickstart
from ray_app.cli.console import share_table
from training.errors import TrainingError
from training.reasoning.metrics import Judged, report


def judged(language: str, matches: bool) -> Judged:
    return Judged("id", "?", "es", language, "", "", "stop", 1, language, matches, 1.0, matches, None, None)


def figures(*outcomes: tuple[str, bool]) -> dict[str, object]:
    return report([judged(language, matches) for language, matches in outcomes])


BEFORE = figures(("de", False), ("de", False), ("fr", False), ("en", True))
AFTER = figures(("de", True), ("de", False), ("fr", True), ("en", True))


def test_english_stands_apart_from_the_share_that_counts() -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(share_table({"before": BEFORE, "after": AFTER}))
    rows = {line.strip().split("  ")[0]: line.split() for line in output.getvalue().splitlines()}
    assert rows["German"][1:4] == ["2", "0%", "50%"]
    assert "0%" in rows["all of these"]
    assert "67%" in rows["all of these"]
    assert rows["English"][1:4] == ["1", "100%", "100%"]


def test_a_share_below_nineteen_of_twenty_is_an_error() -> None:
    with pytest.raises(TrainingError, match="67% of the prompts"):
        quickstart._require_share({"before": BEFORE, "after": AFTER})
    quickstart._require_share({"before": BEFORE, "after": figures(*[("de", True)] * 19, ("de", False))})


def test_taken_ports_are_replaced_by_free_ones(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setenv("POLYTHINK_PORT", str(taken))
        assert quickstart._ports().port == 0
    assert quickstart._ports().port == taken
