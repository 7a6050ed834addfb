"""The short way of small requests: what it takes from the budget for bodies."""

from __future__ import annotations

from lakebed.gateway.direct import Share
from lakebed.gateway.limits import Budget


def test_a_share_of_the_budget_is_given_back_once() -> None:
    """A request that is answered and whose connection is lost gives back what it took, and nothing of another."""
    budget = Budget(100)
    assert budget.take(60) and budget.take(40)
    share = Share(budget, 60)

    share.give_back()
    share.give_back()

    assert 40 == budget.held
