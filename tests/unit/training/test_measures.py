"""What a step was like: gathered when it ends, read later."""

import time

import torch

from training.model.loss import Sums
from training.tracking.measures import Measures


def of_a_step(measures: Measures, trained: int, tokens: int) -> None:
    measures.add_tokens(tokens)
    measures.add_loss(Sums(*torch.tensor([9.0, 2.0 * trained, 0.5 * trained])), trained)


def test_what_is_read_is_of_the_step_that_was_gathered() -> None:
    measures = Measures(torch.device("cpu"))
    assert measures.read() is None
    of_a_step(measures, trained=8, tokens=10)
    before = time.monotonic()
    measures.gather(torch.tensor(3.0), torch.tensor(0.25))
    after = time.monotonic()
    of_a_step(measures, trained=2, tokens=100)  # the next step is under way
    assert measures.read() == {"loss": 3, "grad_norm": 0.25}
    assert before <= measures.ended_s <= after, "not when it was read"
    assert measures.tokens == 10
    assert (measures.last["entropy"], measures.last["mean_token_accuracy"]) == (2, 0.5)
    assert measures.last["host_rss_gib"] > 0
    assert measures.read() is None

    measures.gather(torch.tensor(2.0), torch.tensor(0.5))
    assert measures.read() == {"loss": 2, "grad_norm": 0.5}
    assert measures.tokens == 110
