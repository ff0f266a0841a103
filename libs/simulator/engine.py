"""The engine of one instance: step after step, each with what `policy.plan_step` chooses.

One that only prefills, one that only decodes and one that does both are the same here. While nothing is to be
prefilled and the blocks last, many steps are one event, up to the first sequence that ends; who comes
meanwhile joins at the end of the step in progress. Knows no queue, no pool and no other instance.

A step takes what the cost model says: prefill alone T_prefill of each part, with one fixed part in all,
decode alone T_step. A step with both reads the weights once, while it computes:
max(d, T_prefill) + e b + f K.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from policy.core import CostCoefficients
from policy.cost import prefill_s, step_s
from policy.plan_step import DecodeWork, PrefillWork, StepLimits, StepPlan, plan_step
from simulator.batch import Decoding, StepTimes, step_times, steps_with_room
from simulator.device_memory import DeviceMemory
from simulator.events import Event, Events
from simulator.prefill_job import PrefillJob


@dataclass(slots=True)
class _Steps:
    """Pure decode steps in progress, one event at the end of the last."""

    began_s: float
    times: StepTimes
    steps: int


class Engine:
    def __init__(
        self,
        events: Events,
        cost: CostCoefficients,
        limits: StepLimits,
        memory: DeviceMemory,
        before_change: Callable[[], None],
        on_finished: Callable[[Decoding], None],
    ) -> None:
        self.busy_s = 0.0
        self.preempted = 0
        """How often a sequence had to give its blocks back."""
        self._events = events
        self.cost = cost
        """Of steps that begin from now on."""
        self._limits = limits
        self._memory = memory
        self._before_change = before_change
        self._on_finished = on_finished
        self._waiting: list[PrefillJob] = []
        self._running: list[Decoding] = []
        self._joining: list[Decoding] = []
        self._without_blocks: deque[Decoding] = deque()
        self._recomputing: list[Decoding] = []
        self._step_s = array("d")
        """Of every step so far that had a decode in it."""
        self._steps: _Steps | None = None
        self._end: Event | None = None
        """Of the steps in progress; None while idle."""
        self._settling = False
        """Steps are over and what follows from them is being told: the next ones begin after that."""
        self._stopped = False

    @property
    def now_s(self) -> float:
        return self._events.now_s

    @property
    def waits_for_blocks(self) -> bool:
        return bool(self._without_blocks)

    def decoding(self, at_s: float) -> list[tuple[Decoding, int]]:
        """Every sequence here with the steps it has done since it was last settled, as of a time since which
        nothing changed."""
        done = 0
        if self._steps is not None:
            done = min(self._steps.steps, self._steps.times.done_within(at_s - self._steps.began_s))
        here = [(decoding, done) for decoding in self._running]
        here += [(decoding, 0) for decoding in (*self._joining, *self._recomputing, *self._without_blocks)]
        return here

    def add_prefill(self, job: PrefillJob) -> None:
        self._waiting.append(job)
        self.wake()

    def add_decoding(self, decoding: Decoding) -> None:
        """Its first token is out, and `blocks` are taken for it."""
        self._joining.append(decoding)
        self.wake()

    def drop(self, job: PrefillJob) -> None:
        """Nobody wants it any more. What a step in progress computes of it comes to nothing."""
        job.tell_nobody()
        if job in self._waiting:
            self._waiting.remove(job)

    def stop(self) -> None:
        """For ever. What its sequences have put out by now is told; all else is lost."""
        self._stopped = True
        if self._end is not None:
            self._end.cancel()
        if self._steps is not None:
            steps, passed_s = self._steps, self._events.now_s - self._steps.began_s
            done = min(steps.steps, steps.times.done_within(passed_s))
            self._step_s.frombytes(steps.times.each(done).tobytes())
            self.busy_s += steps.times.upto(done)
        for decoding in self._running:
            self._put_out_gaps(decoding, decoding.joined_s + sum(self._step_s[decoding.first_step :]))
        for decoding, _ in self.decoding(self._events.now_s):
            decoding.request.last_token_s = decoding.token_at_s

    def wake(self) -> None:
        """There is more to do than before, or more blocks to do it with."""
        if self._settling or self._stopped:
            return
        if self._end is None:
            self._begin()
        elif self._steps is not None and (self._waiting or self._joining):
            self._cut(self._steps)

    def _cut(self, steps: _Steps) -> None:
        """End with the step in progress."""
        fewer = steps.times.begun_within(self._events.now_s - steps.began_s)
        if fewer < steps.steps and self._end is not None:
            self._end.cancel()
            steps.steps = fewer
            ends_s = max(self._events.now_s, steps.began_s + steps.times.upto(fewer))
            self._end = self._events.at(ends_s, self._end_steps)

    def _begin(self) -> None:
        self._bring_back()
        for decoding in self._joining:
            decoding.first_step = len(self._step_s)
            decoding.joined_s = self._events.now_s
        self._running += self._joining
        self._joining.clear()
        steps = 0
        if self._running and not self._waiting:
            shortest = min(decoding.left for decoding in self._running)
            steps = steps_with_room(self._running, shortest, self._memory.free)
        if steps:
            self._begin_steps(steps)
        elif self._waiting or self._running:
            self._begin_planned_step()

    def _begin_steps(self, steps: int) -> None:
        for decoding in self._running:
            lacking = decoding.lacking_blocks(steps)
            self._memory.take(lacking)
            decoding.blocks += lacking
        self._steps = _Steps(self._events.now_s, step_times(self.cost, self._running), steps)
        self._end = self._events.after(self._steps.times.upto(steps), self._end_steps)

    def _end_steps(self) -> None:
        self._before_change()
        steps = self._steps
        assert steps is not None
        self._steps = self._end = None
        self._step_s.frombytes(steps.times.each(steps.steps).tobytes())
        self.busy_s += steps.times.upto(steps.steps)
        self._settling = True
        self._advance(steps.steps)
        self._settling = False
        self._begin()

    def _begin_planned_step(self) -> None:
        """One step, after as many sequences gave their blocks back as that takes."""
        while True:
            plan = self._plan()
            if not plan.preempted:
                break
            self._preempt(self._running.pop())
        assert len(plan.decodes) == len(self._running), "more decodes than a step has places for"
        if not plan.decodes and not plan.prefills:
            return
        for decoding in self._running:
            lacking = decoding.lacking_blocks(1)
            self._memory.take(lacking)
            decoding.blocks += lacking
        jobs = self._waiting[: len(plan.prefills)]
        parts = [(job, part.tokens) for job, part in zip(jobs, plan.prefills, strict=True)]
        compute_s = self._compute_s(parts)
        duration_s = compute_s
        if self._running:
            kv_tokens = sum(decoding.kv_tokens for decoding in self._running)
            alone_s = step_s(self.cost, len(self._running), kv_tokens)
            duration_s = alone_s + max(0.0, compute_s - self.cost.step_fixed_s)
        self._end = self._events.after(duration_s, lambda: self._end_planned_step(parts, duration_s))
        for job, tokens in parts:
            job.part_began(tokens, duration_s)

    def _plan(self) -> StepPlan:
        waiting = [PrefillWork(job.request.request_id, job.new_tokens) for job in self._waiting]
        running = [
            DecodeWork(decoding.request.request_id, decoding.lacking_blocks(1)) for decoding in self._running
        ]
        return plan_step(waiting, running, self._memory.free, self._limits)

    def _compute_s(self, parts: Sequence[tuple[PrefillJob, int]]) -> float:
        """Whatever its parts, a step goes through the model once."""
        if not parts:
            return 0.0
        fixed_s = self.cost.prefill_fixed_s
        return fixed_s + sum(self._part_s(job, tokens) - fixed_s for job, tokens in parts)

    def _part_s(self, job: PrefillJob, tokens: int) -> float:
        """Of a part that is alone in its step."""
        return max(job.load_s, prefill_s(self.cost, tokens, job.prefix_tokens))

    def _end_planned_step(self, parts: list[tuple[PrefillJob, int]], duration_s: float) -> None:
        self._before_change()
        self._end = None
        self.busy_s += duration_s
        if self._running:
            self._step_s.append(duration_s)
        for job, tokens in parts:
            job.new_tokens -= tokens
            job.prefix_tokens += tokens
            job.load_s = 0.0
            job.part_done()
        self._settling = True
        self._waiting = [job for job in self._waiting if job.new_tokens]
        for job, _ in parts:
            if not job.new_tokens:
                job.done()
        self._advance(1)
        self._settling = False
        self._begin()

    def _advance(self, steps: int) -> None:
        """Everything that runs did so many steps."""
        for decoding in self._running:
            decoding.kv_tokens += steps
            decoding.left -= steps
            self._give(decoding, decoding.spare_blocks())
        over = [decoding for decoding in self._running if not decoding.left]
        if over:
            self._running = [decoding for decoding in self._running if decoding.left]
            for decoding in over:
                self._put_out_gaps(decoding, self._events.now_s)
                self._finish(decoding)

    def _finish(self, decoding: Decoding) -> None:
        self._give(decoding, decoding.blocks)
        self._on_finished(decoding)

    def _give(self, decoding: Decoding, blocks: int) -> None:
        decoding.blocks -= blocks
        self._memory.give(blocks)

    def _put_out_gaps(self, decoding: Decoding, token_at_s: float) -> None:
        """What it waited for each token since it joined; the first one since the token before."""
        gaps_s = self._step_s[decoding.first_step :]
        if gaps_s:
            gaps_s[0] += decoding.joined_s - decoding.token_at_s
            decoding.request.gaps_s.extend(gaps_s)
            decoding.token_at_s = token_at_s

    def _preempt(self, decoding: Decoding) -> None:
        self.preempted += 1
        self._put_out_gaps(decoding, self._events.now_s)
        self._give(decoding, decoding.blocks)
        self._without_blocks.append(decoding)

    def _bring_back(self) -> None:
        """Preempted sequences are computed again, prompt and answer so far, once there are blocks."""
        while self._without_blocks:
            decoding = self._without_blocks[0]
            blocks = self._memory.reserved_blocks(decoding.kv_tokens + 1)
            if blocks > self._memory.free:
                return
            self._without_blocks.popleft()
            self._memory.take(blocks)
            decoding.blocks = blocks
            self._waiting.append(
                PrefillJob(
                    decoding.request,
                    new_tokens=decoding.kv_tokens + 1,
                    prefix_tokens=0,
                    load_s=0.0,
                    done=partial(self._recomputed, decoding),
                )
            )
            self._recomputing.append(decoding)

    def _recomputed(self, decoding: Decoding) -> None:
        """Which samples the next token."""
        self._recomputing.remove(decoding)
        decoding.kv_tokens += 1
        decoding.left -= 1
        decoding.request.gaps_s.append(self._events.now_s - decoding.token_at_s)
        decoding.token_at_s = self._events.now_s
        if decoding.left:
            self._joining.append(decoding)
        else:
            self._finish(decoding)
