"""What goes on behind the API when the cluster misbehaves: strays, losses, outages, silence."""

import asyncio
import json

import pytest
from aiohttp import ClientResponse
from tests.unit.gateway.fake_cluster import (
    DECODE,
    GATEWAY,
    PREFILL,
    Worker,
    accept,
    chat_body,
    ids,
    running_cluster,
)
from tests.unit.gateway.model_files import write_model_folder

from cluster import subjects
from cluster.delivery import RawMessage
from cluster.errors import NoResponderError
from cluster.logs import Level, Logger
from cluster.messages import (
    Cancel,
    Finish,
    FinishEntry,
    PromptPart,
    RefusalReason,
    Refused,
    Resume,
    StreamBatch,
    Submit,
    TokensEntry,
)
from cluster.metrics import ServiceMetrics
from cluster.testing.bus import FakeBroker
from gateway.answers.notices import NOTICE_TRIES_MAX, Notices
from gateway.answers.requests import GatewayLimits
from gateway.answers.running import PLACE_AGAIN_BACKOFF_S, RequestLimits
from gateway.metrics import GatewayMetrics
from gateway.text.answer_text import AnswerText
from gateway.text_model import pack_token_ids
from kvindex.core import InstanceId
from policy.core import FinishReason, Placement, Rejection, RejectReason, RequestId

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
OTHER = InstanceId("decode-2")


async def begin(cluster, **parameters) -> "tuple[asyncio.Task, Submit]":
    asking = asyncio.create_task(cluster.chat(**parameters))
    return asking, await cluster.prefill.submits.get()


async def begin_stream(cluster, token_ids: list[int]) -> "tuple[ClientResponse, Submit]":
    """A stream that has shown its first tokens."""
    body = chat_body(stream=True)
    asking = asyncio.create_task(cluster.session.post(cluster.url + CHAT, json=body))
    submit = await cluster.prefill.submits.get()
    await cluster.decode.tokens(submit, token_ids, 0)
    return await asking, submit


async def streamed(reply: ClientResponse) -> str:
    """The whole text of a stream that ends in order."""
    *chunks, done = [line for line in (await reply.text()).split("\n\n") if line]
    assert done == "data: [DONE]"
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content", "") for delta in deltas)


def content(answer) -> str:
    return answer["choices"][0]["message"]["content"]


async def test_a_gap_is_asked_for_and_filled(cluster) -> None:
    asking, submit = await begin(cluster)
    token_ids = ids("The quick brown fox")
    await cluster.decode.tokens(submit, token_ids[:2], 0)
    await cluster.decode.tokens(submit, token_ids[3:], 3)
    assert await cluster.decode.notices.get() == Resume(submit.work.request_id, 0, 0, 2)
    await cluster.decode.tokens(submit, token_ids[2:], 2)
    await cluster.decode.finish(submit, len(token_ids), FinishReason.LENGTH)
    status, answer = await asking
    assert (status, content(answer)) == (200, "The quick brown fox")
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_after_an_outage_of_the_bus_the_stream_is_resumed(cluster) -> None:
    token_ids = ids("The quick brown fox")
    reply, submit = await begin_stream(cluster, token_ids[:4])
    cluster.gateway_bus.disconnect()
    await cluster.decode.tokens(submit, token_ids[4:], 4)
    cluster.gateway_bus.reconnect()
    assert await cluster.decode.notices.get() == Resume(submit.work.request_id, 0, 0, 4)
    await cluster.decode.tokens(submit, token_ids[4:], 4)
    await cluster.decode.finish(submit, len(token_ids))
    assert await streamed(reply) == "The quick brown fox"


async def test_a_resume_that_is_refused_places_the_request_again(cluster) -> None:
    token_ids = ids("The quick brown fox")
    reply, submit = await begin_stream(cluster, token_ids[:4])

    def forgetful(body):
        if isinstance(body, Resume):
            return Refused(body.request_id, body.attempt, RefusalReason.UNKNOWN)
        return accept(body)

    cluster.decode.answer = forgetful
    await cluster.decode.tokens(submit, token_ids[5:], 5)
    again = await cluster.prefill.submits.get()
    assert (again.work.attempt, cluster.scheduled[1].excluded) == (1, (DECODE,))
    await cluster.decode.tokens(again, token_ids[4:], 4)
    await cluster.decode.finish(again, len(token_ids))
    assert await streamed(reply) == "The quick brown fox"


async def test_a_bug_in_the_gateway_is_500_and_gives_everything_back(cluster, monkeypatch) -> None:
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.answers.placing.split", broken)
    status, answer = await cluster.chat()
    assert (status, answer["error"]["type"]) == (500, "server_error")
    monkeypatch.undo()
    asking, submit = await begin(cluster)
    await cluster.decode.say(submit, ids("yes"))
    assert (await asking)[0] == 200


async def test_a_bug_at_one_request_costs_no_other_its_tokens(cluster, monkeypatch) -> None:
    """Both are in one message of decode, the broken one first."""
    feed = AnswerText.feed

    def broken(text, token_ids, logprobs):
        if token_ids == ids("no"):
            raise ZeroDivisionError
        return feed(text, token_ids, logprobs)

    monkeypatch.setattr(AnswerText, "feed", broken)
    (unlucky, first), (lucky, second) = await begin(cluster), await begin(cluster)
    tokens, finished = [], []
    for submit, text in ((first, "no"), (second, "yes")):
        work, count = submit.work, len(ids(text))
        tokens.append(TokensEntry(work.request_id, work.attempt, 0, 0, pack_token_ids(ids(text))))
        finished.append(FinishEntry(work.request_id, work.attempt, 0, count, FinishReason.LENGTH))
    batch = StreamBatch(tokens=tuple(tokens), finished=tuple(finished))
    await cluster.decode.bus.publish(subjects.stream(GATEWAY), batch)
    async with asyncio.timeout(5):
        assert (await unlucky)[0] == 500
        status, answer = await lucky
    assert (status, content(answer)) == (200, "yes")
    assert await cluster.decode.notices.get() == Cancel(first.work.request_id, 0)


async def test_a_lost_instance_is_replaced(cluster) -> None:
    token_ids = ids("The quick brown fox")
    reply, _ = await begin_stream(cluster, token_ids[:4])
    cluster.requests.instance_lost(OTHER)
    cluster.requests.instance_lost(PREFILL)  # not needed any more: decode speaks
    cluster.requests.instance_lost(DECODE)
    again = await cluster.prefill.submits.get()
    assert (again.work.attempt, cluster.scheduled[1].excluded) == (1, (DECODE,))
    await cluster.decode.tokens(again, token_ids[4:], 4)
    await cluster.decode.finish(again, len(token_ids))
    assert await streamed(reply) == "The quick brown fox"


async def test_replacements_ask_a_few_at_a_time_and_the_oldest_first(folder) -> None:
    limits = GatewayLimits(replacements_in_flight_max=2)
    async with running_cluster(folder, limits=limits) as cluster:
        begun = [await begin(cluster) for _ in range(6)]
        full, release = asyncio.Event(), asyncio.Event()

        async def slowly(request):
            if len(cluster.scheduled) == 8:
                full.set()
            await release.wait()
            return Placement(request.request_id, request.attempt, PREFILL, DECODE)

        cluster.place = slowly
        cluster.requests.instance_lost(DECODE)
        await full.wait()
        # Long enough for everyone's backoff: who is not asking yet waits for a place.
        await asyncio.sleep(2 * PLACE_AGAIN_BACKOFF_S * 2)
        assert len(cluster.scheduled) == 8
        release.set()
        for _ in begun:
            await cluster.decode.say(await cluster.prefill.submits.get(), ids("yes"))
        assert {status for status, _ in await asyncio.gather(*(asking for asking, _ in begun))} == {200}


async def test_a_burst_waits_for_its_turn_to_be_placed_but_not_for_ever(folder) -> None:
    """No more ask at once than the conductors shall answer; who has no turn in time is told to come again."""
    limits = GatewayLimits(placements_asked_max=3, request=RequestLimits(schedule_timeout_s=1.0))
    async with running_cluster(folder, limits=limits) as cluster:
        place = cluster.place
        asked, asked_max, hold = 0, 0, asyncio.Event()

        async def slow_place(request):
            nonlocal asked, asked_max
            asked += 1
            asked_max = max(asked_max, asked)
            await (hold.wait() if holding else asyncio.sleep(0.01))
            asked -= 1
            return await place(request)

        holding, cluster.place = False, slow_place
        burst = [asyncio.create_task(cluster.chat()) for _ in range(12)]
        for _ in burst:
            submit = await asyncio.wait_for(cluster.prefill.submits.get(), 5)
            await cluster.decode.say(submit, ids("Paris."))
        assert [status for status, _ in await asyncio.gather(*burst)] == [200] * 12
        assert asked_max == 3

        # Those that ask wait for two conductors, one after the other, and so longer than the others.
        await cluster.broker.bus(OTHER).subscribe(subjects.SCHEDULE_STANDBY, cluster.conduct)
        holding = True
        waiting = [asyncio.create_task(cluster.post("/v1/chat/completions", chat_body())) for _ in range(5)]
        replies = await asyncio.gather(*waiting)
        hold.set()
        assert sorted(reply.status for reply in replies) == [429, 429, 503, 503, 503]
        for reply in replies:
            if reply.status == 429:
                assert reply.headers["x-moonpool-rejected-reason"] == "overloaded"
                assert int(reply.headers["retry-after"]) >= 1


async def test_tokens_of_nobody_are_answered_by_a_cancel_and_a_finish_is_acknowledged(cluster) -> None:
    asking, submit = await begin(cluster)
    await cluster.decode.say(submit, ids("yes"))
    await asking
    assert isinstance(await cluster.decode.notices.get(), Finish)
    await cluster.decode.tokens(submit, ids("more"), 7)
    assert await cluster.decode.notices.get() == Cancel(submit.work.request_id, 0)
    await cluster.decode.finish(submit, 9)
    assert await cluster.decode.notices.get() == Finish(submit.work.request_id, 0, 9)
    assert cluster.value("moonpool_gateway_stray_entries_total") == 2


async def test_bad_entries_harm_nobody(cluster) -> None:
    asking, submit = await begin(cluster)
    work = submit.work
    whole = StreamBatch(tokens=())
    good = ids("yes")
    await cluster.decode.tokens(submit, good, -5)
    cluster.broker.send(RawMessage(subjects.stream(GATEWAY), b"{", None, None))
    await cluster.decode.bus.publish(subjects.stream(GATEWAY), Cancel(work.request_id, 0))
    await cluster.decode.bus.publish(subjects.stream(GATEWAY), whole)
    await cluster.decode.tokens(submit, [-1, 2**31 - 1], 0)
    await cluster.decode.finish(submit, -1)
    await cluster.decode.tokens(submit, good, 2)
    await cluster.decode.finish(submit, 2 + len(good))
    status, answer = await asking
    assert (status, content(answer)) == (200, "yes")


async def test_tokens_may_overtake_the_answer_to_the_submit(cluster) -> None:
    accepting = asyncio.Event()
    original = cluster.prefill.answer

    async def late(body):
        await accepting.wait()
        return original(body)

    cluster.prefill.answer = late
    asking, submit = await begin(cluster)
    await cluster.decode.say(submit, ids("yes"))
    status, answer = await asking
    assert (status, content(answer)) == (200, "yes")
    accepting.set()


async def test_a_prefill_that_does_not_answer_is_avoided_and_cancelled(folder) -> None:
    limits = GatewayLimits(request=RequestLimits(submit_timeout_s=0.05))
    async with running_cluster(folder, limits=limits) as cluster:

        async def place(request):
            prefill = OTHER if not request.excluded else PREFILL
            return Placement(request.request_id, request.attempt, prefill, DECODE)

        async def silent(body):
            if isinstance(body, Submit):
                await asyncio.Event().wait()
            return accept(body)

        cluster.place = place
        other = await Worker(cluster.broker.bus(OTHER)).start()
        other.answer = silent
        asking, submit = await begin(cluster)
        assert submit.work.attempt == 1
        assert cluster.scheduled[1].excluded == (OTHER,)
        assert await other.notices.get() == Cancel(submit.work.request_id, 0)
        await cluster.decode.say(submit, ids("yes"))
        assert (await asking)[0] == 200
        other.bus.disconnect()


async def test_a_part_that_is_refused_refuses_the_request(tmp_path) -> None:
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1_000_000}
    (folder / "config.json").write_text(json.dumps(config))
    async with running_cluster(folder) as cluster:
        cluster.prefill.answer = lambda body: (
            Refused("", 0, RefusalReason.BAD_REQUEST, "parts do not fit")
            if isinstance(body, PromptPart)
            else accept(body)
        )
        body = {"model": "tiny", "prompt": [1] * 200_000, "max_tokens": 1}
        reply = await cluster.post("/v1/completions", body)
        assert reply.status == 400
        assert "parts do not fit" in reply.text
        assert cluster.prefill.submits.empty()


async def test_an_external_scheduler_that_talks_nonsense_is_503(cluster) -> None:
    async def nonsense(request):
        return Placement(RequestId("somebody-else"), request.attempt, PREFILL, DECODE)

    cluster.place = nonsense
    status, answer = await cluster.chat()
    assert status == 503
    assert "Placement" in answer["error"]["message"]


@pytest.mark.parametrize("answer_class", [Placement, Rejection])
async def test_a_scheduler_that_answers_another_attempt_is_503(cluster, answer_class) -> None:
    async def nonsense(request):
        if answer_class is Placement:
            return Placement(request.request_id, request.attempt + 1, PREFILL, DECODE)
        return Rejection(request.request_id, request.attempt + 1, RejectReason.OVERLOADED, "full", 1.0)

    cluster.place = nonsense
    async with asyncio.timeout(5):
        status, answer = await cluster.chat()
    assert status == 503
    assert "attempt" in answer["error"]["message"]


async def test_fifty_bad_requests_then_good_ones(cluster) -> None:
    bad = [b"{", b"[1]", b'{"model": "tiny"}', b"\xff", b'{"model": 5, "messages": 7}'] * 10
    replies = await asyncio.gather(*(cluster.session.post(cluster.url + CHAT, data=body) for body in bad))
    assert {reply.status for reply in replies} == {400}
    for _ in range(5):
        asking, submit = await begin(cluster)
        await cluster.decode.say(submit, ids("good"))
        assert (await asking)[0] == 200
    assert len(cluster.scheduled) == 5


async def test_many_at_once_are_kept_apart(cluster) -> None:
    words = [f"answer {number}" for number in range(40)]

    async def serve() -> None:
        for word in words:
            submit = await cluster.prefill.submits.get()
            texts[submit.work.request_id] = word
            await cluster.decode.say(submit, ids(word))

    texts: dict[RequestId, str] = {}
    serving = asyncio.create_task(serve())
    answers = await asyncio.gather(*(cluster.chat() for _ in words))
    await serving
    assert {status for status, _ in answers} == {200}
    for _, answer in answers:
        assert content(answer) == texts[RequestId(answer["id"].removeprefix("chatcmpl-"))]


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(cluster) -> None:
    """Half of them are dropped after a few turns of the loop, wherever their request then is."""

    async def serve() -> None:
        while True:
            submit = await cluster.prefill.submits.get()
            await cluster.decode.say(submit, ids("a few tokens"))

    serving = asyncio.create_task(serve())
    asking = [asyncio.create_task(cluster.post(CHAT, chat_body(stream=n % 3 == 0))) for n in range(60)]
    for turn, task in enumerate(asking):
        for _ in range(turn % 17):
            await asyncio.sleep(0)
        if turn % 2:
            task.cancel()
    done = await asyncio.gather(*asking, return_exceptions=True)
    assert {reply.status for reply in done if not isinstance(reply, asyncio.CancelledError)} == {200}
    await cluster.requests.drain(5.0)
    assert cluster.requests.in_progress == 0
    assert cluster.value("moonpool_gateway_in_progress_requests") == 0
    serving.cancel()


class TestNotices:
    def make(self, broker: FakeBroker) -> tuple[Notices, ServiceMetrics]:
        metrics = ServiceMetrics()
        log = Logger(Level.ERROR)
        notices = Notices(broker.bus(GATEWAY), GatewayMetrics(metrics.registry), log, timeout_s=0.5)
        return notices, metrics

    async def test_a_notice_is_repeated_until_it_is_acknowledged(self, monkeypatch) -> None:
        monkeypatch.setattr("gateway.answers.notices.BACKOFF_S", 0.001)
        broker = FakeBroker()
        worker = await Worker(broker.bus(DECODE)).start()
        failures = 3

        def flaky(body):
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise NoResponderError("not yet")
            return accept(body)

        worker.answer = flaky
        notices, metrics = self.make(broker)
        cancel = Cancel(RequestId("r"), 0)
        notices.send(DECODE, cancel, None)
        notices.send(DECODE, cancel, None)
        assert notices.under_way == 1
        await notices.settle(5.0)
        assert worker.notices.qsize() == 4
        assert metrics.registry.get_sample_value("moonpool_gateway_given_up_notices_total") == 0
        await worker.bus.close()

    async def test_it_is_given_up_after_a_bounded_number_of_tries(self, monkeypatch) -> None:
        monkeypatch.setattr("gateway.answers.notices.BACKOFF_S", 0.001)
        broker = FakeBroker()
        notices, metrics = self.make(broker)
        notices.send(DECODE, Cancel(RequestId("r"), 0), None)
        await notices.settle(5.0)
        assert notices.under_way == 0
        assert metrics.registry.get_sample_value("moonpool_gateway_given_up_notices_total") == 1
        sent = metrics.registry.get_sample_value("moonpool_bus_sent_messages_total", {"family": "instance"})
        assert not sent
        assert NOTICE_TRIES_MAX > 1

    async def test_how_many_are_under_way_is_bounded(self, monkeypatch) -> None:
        monkeypatch.setattr("gateway.answers.notices.NOTICES_MAX", 3)
        notices, metrics = self.make(FakeBroker())
        for number in range(5):
            notices.send(DECODE, Cancel(RequestId(f"r{number}"), 0), None)
        assert notices.under_way == 3
        assert metrics.registry.get_sample_value("moonpool_gateway_given_up_notices_total") == 2
        await notices.close()
        assert notices.under_way == 0


async def test_what_decides_about_a_request_is_told_to_the_conductor_and_to_the_workers(folder) -> None:
    async with running_cluster(folder) as cluster:

        async def place(request) -> Placement:
            return Placement(request.request_id, request.attempt, PREFILL, DECODE, output_tokens_expected=17)

        cluster.place = place
        asking, submit = await begin(cluster, priority=-2, ttft_ms_max=30_000, tbt_ms_max=80)
        asked = cluster.scheduled[0]
        assert (asked.priority, asked.tbt_ms_max, asked.samples) == (-2, 80, 1)
        assert 0 < asked.ttft_ms_max < 30_000, "what is left of it"
        assert (submit.work.priority, submit.work.output_tokens_expected) == (-2, 17)
        await cluster.decode.say(submit, ids("fox"))
        assert (await asking)[0] == 200


async def test_a_request_that_names_no_targets_leaves_them_to_the_cluster(cluster) -> None:
    asking, submit = await begin(cluster)
    asked = cluster.scheduled[0]
    assert (asked.priority, asked.ttft_ms_max, asked.tbt_ms_max) == (0, None, None)
    await cluster.decode.say(submit, ids("fox"))
    assert (await asking)[0] == 200
