"""Two models side by side."""

import pytest

from tests.unit.training.test_evaluate import ENGLISH, GERMAN, judged
from training.config import EvaluationConfig, GateConfig, parse_config
from training.driver import _register
from training.errors import ConfigError
from training.reasoning.compare import compare, compare_runs
from training.reasoning.metrics import gate, report, tags
from training.run_dir import RunDir, write_json


def figures(right, wrong):
    return report([judged("de", GERMAN)] * right + [judged("de", ENGLISH)] * wrong + [judged("en", ENGLISH)])


def line(lines, name):
    return next(line for line in lines if line.name == name)


class TestCompare:
    def test_a_difference_comes_with_its_interval(self):
        # Newcombe 1998 (doi:10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I), table II, 56/70 against 48/80: 0.0524 to 0.3339
        found = line(compare(figures(48, 32), figures(56, 14)), "trace match")
        assert found.difference == pytest.approx(0.2)
        assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
        assert found.is_clear

    def test_a_small_difference_is_not_clear(self):
        assert not line(compare(figures(5, 5), figures(6, 4)), "trace match").is_clear

    def test_languages_have_their_own_lines(self):
        lines = compare(figures(5, 5), report([judged("fr", GERMAN)]))
        assert line(lines, "trace match, German").first == 0.5
        assert line(lines, "trace match, German").second is None
        assert line(lines, "trace match, French").second == 0.0
        assert line(lines, "trace match, English").first == 1.0
        assert line(lines, "accuracy").difference is None

    def test_runs_are_read_from_their_directories(self, tmp_path):
        config = parse_config({"model": {"path": "./m"}, "data": {"path": "./d"}, "scaling": {"device": "cpu"}})
        runs = [RunDir.create(tmp_path / name, config) for name in "ab"]
        with pytest.raises(ConfigError, match="a has no evaluation"):
            compare_runs(runs, tmp_path / "figure.png")
        for run, right in zip(runs, (5, 9), strict=True):
            write_json(
                run.evaluation / "evaluation.json", {"before": figures(0, 10), "after": figures(right, 10 - right)}
            )
        found = line(compare_runs(runs, tmp_path / "figure.png"), "trace match")
        assert (found.first, found.second) == (0.5, 0.9)
        assert (tmp_path / "figure.png").stat().st_size > 1000


class TestGate:
    def test_a_model_below_it_is_told_why(self):
        config = EvaluationConfig(gate=GateConfig(trace_match=0.95, purity=0.2))
        evaluation = {"before": figures(10, 0), "after": figures(5, 5)}
        assert gate(evaluation, config) == "trace_match is 50.0%, the gate asks for 95.0%"

    def test_a_model_above_it_passes(self):
        config = EvaluationConfig(gate=GateConfig(trace_match=0.95))
        assert gate({"before": figures(0, 10), "after": figures(96, 4)}, config) is None
        assert gate(figures(96, 4), config) is None

    def test_what_was_not_measured_does_not_pass(self):
        config = EvaluationConfig(gate=GateConfig(accuracy=0.5))
        assert gate({"after": figures(5, 5)}, config) == "accuracy was not measured, the gate asks for 50.0%"
        assert "not measured" in gate(None, config)

    def test_the_driver_registers_no_model_that_misses_it(self, tmp_path):
        values = {"model": {"path": "./m"}, "data": {"path": "./d"}, "scaling": {"device": "cpu"}}
        config = parse_config(values | {"evaluation": {"gate": {"trace_match": 0.95}}})
        nowhere = None  # MLflow: asking it to register would fail
        evaluation = {"before": figures(0, 10), "after": figures(5, 5)}
        assert _register(config, RunDir(tmp_path), nowhere, tmp_path, {}, evaluation) == {
            "registered_model": None,
            "registration": "gated",
            "reason": "trace_match is 50.0%, the gate asks for 95.0%",
        }

    def test_without_a_gate_all_pass(self):
        assert gate({"after": figures(0, 10)}, EvaluationConfig()) is None


def test_a_registered_version_is_tagged_with_its_figures():
    found = tags({"before": figures(0, 10), "after": figures(9, 1)})
    assert found["trace_match"] == "0.900"
    assert found["trace_match_before"] == "0.000"
    assert "accuracy" not in found
    assert tags(None) == {}
