"""Failures are printed as they happen: these tests run on borrowed machines, whose time may end before the summary."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
