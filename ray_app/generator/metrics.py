"""The generator's figures for Prometheus, on Ray's own metrics endpoint (which puts `ray_` before each name)."""

from ray.util.metrics import Counter, Histogram

from serving.answers.measures import Measured

SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
TOKEN_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1]


class GeneratorMetrics:
    """Named as serving engines name theirs: base units in the name, seconds, totals."""

    def __init__(self) -> None:
        self._requests = Counter(
            "polythink_requests_total", "Requests, by how they ended (a finish reason, or an error).", ("outcome",)
        )
        self._prompt_tokens = Counter("polythink_prompt_tokens_total", "Prompt tokens read.")
        self._generation_tokens = Counter("polythink_generation_tokens_total", "Tokens generated.")
        self._languages = Counter(
            "polythink_reasoning_language_total",
            "Answers for which a reasoning language was asked, by whether the reasoning was in it.",
            ("requested", "matches"),
        )
        self._first_token = Histogram(
            "polythink_time_to_first_token_seconds", "From the model being there to its first token.", SECONDS
        )
        self._per_token = Histogram(
            "polythink_time_per_output_token_seconds", "Mean per answer, after its first token.", TOKEN_SECONDS
        )
        self._duration = Histogram("polythink_request_duration_seconds", "Whole requests.", SECONDS)
        self._load = Histogram("polythink_model_wait_seconds", "Waiting for a model to be loaded.", SECONDS)

    def observe(self, measured: Measured) -> None:
        self._requests.inc(1, {"outcome": measured.outcome})
        for counter, tokens in (
            (self._prompt_tokens, measured.prompt_tokens),
            (self._generation_tokens, measured.completion_tokens),
        ):
            if tokens:
                counter.inc(tokens)
        if measured.language:
            matches = {True: "yes", False: "no", None: "unknown"}[measured.matches]
            self._languages.inc(1, {"requested": measured.language, "matches": matches})
        for histogram, seconds in (
            (self._first_token, measured.first_token_s),
            (self._per_token, measured.per_token_s),
            (self._duration, measured.total_s),
            (self._load, measured.load_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
