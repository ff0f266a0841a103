"""Whom the gateway asks for a place, and what it makes of silence."""

import asyncio

import pytest
from tests.support.views import request
from tests.support.virtual_time import run_in_virtual_time

from cluster import subjects
from cluster.bus import Received
from cluster.testing import FakeBroker
from cluster.tracing import TraceContext
from gateway.answers.placing import FIRST_ANSWER_SHARE, ask_placement
from kvindex.core import InstanceId
from policy.core import Placement
from protocol.answer import NotPlaced, Placed, Unscheduled

pytestmark = pytest.mark.unit

TIMEOUT_S = 5.0
QUESTION = request("r1")
PLACEMENT = Placement(QUESTION.request_id, QUESTION.attempt, InstanceId("p1"), InstanceId("d1"))


class Conductors:
    """On one subject; the first `silent` questions die with who was asked."""

    def __init__(self, silent: int) -> None:
        self.asked = 0
        self._silent = silent

    async def answer(self, received: Received) -> Placement:
        self.asked += 1
        if self.asked <= self._silent:
            await asyncio.Event().wait()
        return PLACEMENT


def asked(silent: int, standby: bool = False) -> tuple[Placed | NotPlaced | Unscheduled, int, float]:
    """(what came of it, questions to conductors, how long it took)"""
    found = []

    async def main() -> None:
        broker, conductors, standbys = FakeBroker(), Conductors(silent), Conductors(0)
        await broker.bus("conductor").subscribe(subjects.SCHEDULE, conductors.answer)
        if standby:
            await broker.bus("standby").subscribe(subjects.SCHEDULE_STANDBY, standbys.answer)
        started_s = asyncio.get_running_loop().time()
        outcome = await ask_placement(broker.bus("gateway"), QUESTION, TraceContext.new(), TIMEOUT_S)
        found.append((outcome, conductors.asked, asyncio.get_running_loop().time() - started_s))

    run_in_virtual_time(main())
    return found[0]


def test_a_question_that_died_with_its_conductor_is_asked_again() -> None:
    outcome, questions, took_s = asked(silent=1)
    assert outcome == Placed(PLACEMENT)
    assert questions == 2
    assert took_s == pytest.approx(TIMEOUT_S * FIRST_ANSWER_SHARE)


def test_where_none_answers_in_time_standbys_are_asked_and_nobody_is_asked_on() -> None:
    outcome, questions, took_s = asked(silent=9, standby=True)
    assert outcome == Placed(PLACEMENT)
    assert questions == 2
    assert took_s == pytest.approx(TIMEOUT_S)
    outcome, questions, _ = asked(silent=9)
    assert isinstance(outcome, Unscheduled)
    assert questions == 2
