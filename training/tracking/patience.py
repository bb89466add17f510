"""How long MLflow's client waits for a server. Loads without MLflow."""

import os

RETRIES = 1
ANSWER_S = 10
"""For whoever asks while somebody waits; a driver, which also uploads, keeps MLflow's 120 s."""


def limit_patience(answer_s: int | None = None) -> None:
    """Has MLflow ask a server that fails RETRIES times more, and wait `answer_s` for each answer; MLflow's own 7 retries take
    minutes, and say nothing. What the environment sets already stays."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(RETRIES))
    if answer_s is not None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(answer_s))
