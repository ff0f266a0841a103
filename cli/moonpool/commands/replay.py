"""`moonpool replay --trace FILE`: sends a trace to a running stack, and tells what came of it.

Requests are sent by their timestamps, `--speedup` times as fast, whatever has become of those before. Each is
a streamed completion: one token for `--scale` tokens of the trace, equal blocks of the trace as equal tokens,
so that prefixes are shared as in the trace, and exactly as many tokens to answer with. A request's priority
goes with it (`priority`), where the trace has one that is not 0, and with `--send-targets` so do the targets
(`ttft_ms_max`, `tbt_ms_max`): one that the cluster cannot serve within them is refused. What was an answer in
the trace comes back as part of a later prompt with tokens of its own: the cluster's answers are other ones.

Times of a request count from its sending. How late it was sent itself is told apart: by more than a trifle
only where `--in-flight-max` were open, or this process could not follow.

`--json` prints one object; a rate is per second, and null where there was no time to tell it from:

    trace, url, model, context_tokens, scale, speedup, seed, in_flight_max, ttft_target_ms, tbt_target_ms
    targets_sent        whether requests carried them
    complete            false where Ctrl-C ended it early
    began_unix_s        the time of day at its start, when the first request was due
    requests            of the trace, after --limit
    too_long            of these, with answer longer than the context: not sent; too_long_requests has the
                        numbers of the first ten, counted from 1
    sent, served, rejected, failed, interrupted
                        served: streamed to its end; rejected: 429 or 503; interrupted: in flight at Ctrl-C
    good, ttft_met, tbt_met
                        served within both targets, within each
    short_answers       served with fewer tokens than asked for
    rejections, failures
                        lists of {"status", "reason", "requests", "example"}, the commonest first; status is
                        null where no HTTP answer told it; example is what the first one said
    span_s              from the first request that was due to the end of the last
    offered_per_s       all requests, over the time in which they are due
    sent_per_s          those sent, over the time in which they were sent
    served_per_s, goodput_per_s
                        over span_s
    prompt_tokens, cached_tokens, output_tokens, prompt_tokens_per_s, output_tokens_per_s
                        of those served, as the cluster counts them
    hit_rate            cached of all prompt tokens of those served; null where the cluster does not say
    reusable_rate       what a cache would find that never gives up a block and is filled at once
    ttft_ms, tbt_ms, gap_ms, e2e_ms, late_ms
                        {"n", "p50", "p90", "p99", "max"}, or null; tbt_ms: each request's mean of the longest
                        tenth of its gaps between tokens, gap_ms: all gaps, within 2 %; late_ms: of all sent
    per_request         with --per-request: [{"due_s", "sent_s", "ended_s", "outcome", "prompt_tokens",
                        "output_tokens", "cached_tokens", "ttft_s", "tbt_s"}], times from the replay's start

The exit status is 1 where nothing was served and something failed, 130 after Ctrl-C.
"""

import argparse
import asyncio
import json
import secrets
import sys
from pathlib import Path

from moonpool.arguments import Command, positive, seconds, whole_number
from moonpool.errors import EXIT_FAILURE, EXIT_OK, CommandError
from moonpool.find_stack import add_stack_arguments, gateway_api
from moonpool.html_file import claim_html
from moonpool.replay.prompts import FIRST_TOKEN_ID, LAST_TOKEN_ID, TOKEN_ID_MAX, TokenRange
from moonpool.replay.records import Results
from moonpool.replay.report import ReplayReport, as_object, as_text, named, per_request
from moonpool.replay.schedule import SCALE_MAX, Schedule, reusable_tokens, schedule
from moonpool.replay.statistics import Targets, summarise
from moonpool.replay.target import Target, find_target
from simulator.trace import LINES_MAX, TraceError, read_trace

SPEEDUP_MAX = 1e6
SEED_MAX = 2**63 - 1
IN_FLIGHT_MAX_DEFAULT = 1000
IN_FLIGHT_MAX_MAX = 20_000
"""Each is a connection, which is a file to the operating system."""
CONTEXT_TOKENS_MAX = 100_000_000
TARGET_MS_MAX = 3_600_000.0
TTFT_TARGET_MS_DEFAULT, TBT_TARGET_MS_DEFAULT = 30_000.0, 100.0
"""Those of `simulator.setup` for the reference hardware."""
SILENCE_S_DEFAULT = 300.0
SILENCE_S_MAX = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="one JSON request a line")
    parser.add_argument(
        "--speedup",
        type=positive(SPEEDUP_MAX),
        default=1.0,
        metavar="X",
        help="so many times as fast as the trace's timestamps (default 1)",
    )
    parser.add_argument(
        "--scale",
        type=positive(SCALE_MAX),
        default=1.0,
        metavar="S",
        help="tokens of the trace for each token that is sent, prompts and answers alike (default 1); "
        "prefixes are shared in whole blocks of the cluster, so powers of 2 up to 32 lose nothing",
    )
    parser.add_argument(
        "--limit", type=whole_number(1, LINES_MAX), metavar="N", help="only the trace's first N requests"
    )
    parser.add_argument(
        "--ttft-ms",
        type=positive(TARGET_MS_MAX),
        default=TTFT_TARGET_MS_DEFAULT,
        metavar="MS",
        help="target of the time to first token, to judge answers by; see --send-targets "
        f"(default {TTFT_TARGET_MS_DEFAULT:g})",
    )
    parser.add_argument(
        "--tbt-ms",
        type=positive(TARGET_MS_MAX),
        default=TBT_TARGET_MS_DEFAULT,
        metavar="MS",
        help=f"target of the time between tokens, likewise (default {TBT_TARGET_MS_DEFAULT:g})",
    )
    parser.add_argument(
        "--send-targets",
        action="store_true",
        help="requests carry both targets, as ttft_ms_max and tbt_ms_max, so that the cluster refuses what "
        "it cannot serve within them (default: the cluster goes by its own)",
    )
    parser.add_argument(
        "--in-flight-max",
        type=whole_number(1, IN_FLIGHT_MAX_MAX),
        default=IN_FLIGHT_MAX_DEFAULT,
        metavar="N",
        help=f"requests open at once; others are sent late (default {IN_FLIGHT_MAX_DEFAULT})",
    )
    parser.add_argument(
        "--timeout",
        type=seconds(SILENCE_S_MAX),
        default=SILENCE_S_DEFAULT,
        metavar="S",
        help=f"longest silence of one answer in seconds (default {SILENCE_S_DEFAULT:g})",
    )
    parser.add_argument("--model", metavar="NAME", help="of those served (default the first)")
    parser.add_argument(
        "--context-tokens",
        type=whole_number(2, CONTEXT_TOKENS_MAX),
        metavar="N",
        help="longest prompt and answer together (default what the server says)",
    )
    parser.add_argument(
        "--token-ids",
        type=token_range,
        default=TokenRange(),
        metavar="FIRST-LAST",
        help=f"ordinary tokens of the model, to make prompts of (default {FIRST_TOKEN_ID}-{LAST_TOKEN_ID})",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, SEED_MAX),
        metavar="N",
        help="the same seed makes the same prompts (default another in every run: nothing of it is cached)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--per-request", action="store_true", help="with --json: every request's own result")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also a page with charts")
    add_stack_arguments(parser)


def token_range(text: str) -> TokenRange:
    """An argparse type: two token ids."""
    first, _, last = text.partition("-")
    if not all(part.isascii() and part.isdecimal() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"must look like {FIRST_TOKEN_ID}-{LAST_TOKEN_ID}, not {text!r}")
    if not int(first) < int(last) <= TOKEN_ID_MAX:
        raise argparse.ArgumentTypeError(f"must go up, and to {TOKEN_ID_MAX} at most, not {text!r}")
    return TokenRange(int(first), int(last))


def run(options: argparse.Namespace) -> int:
    try:
        trace = read_trace(options.trace)[: options.limit]
    except TraceError as error:
        raise CommandError(str(error)) from None
    api = gateway_api(options)
    url = api.url
    target = find_target(api, options.model, options.context_tokens)
    plan = schedule(
        trace, speedup=options.speedup, scale=options.scale, context_tokens_max=target.context_tokens_max
    )
    if not plan.requests:
        raise CommandError(
            f"none of the {len(trace)} requests fits into the context of {target.context_tokens_max} tokens; "
            f"a --scale above {options.scale:g} makes them shorter"
        )
    seed = secrets.randbits(32) if options.seed is None else options.seed
    claim_html(options.html)
    results, complete = _replay(plan, target, seed, options)
    report = _report(plan, target, url, seed, options, results, complete)
    if options.json:
        told = as_object(report)
        if options.per_request:
            told["per_request"] = per_request(results.records)
        print(json.dumps(told))
    else:
        print(as_text(report))
    if options.html is not None:
        from moonpool.replay.page import as_page

        options.html.write_text(as_page(report, results.records), encoding="utf-8")
    if not complete:
        raise KeyboardInterrupt
    return _exit_status(report, options.prog)


def _replay(plan: Schedule, target: Target, seed: int, options: argparse.Namespace) -> tuple[Results, bool]:
    """What was found, and whether all was sent and has ended: Ctrl-C ends it early."""
    from moonpool.replay.progress import shown_progress
    from moonpool.replay.sender import SenderConfig, send_all

    results = Results()
    config = SenderConfig(
        target,
        options.scale,
        seed,
        options.token_ids,
        options.in_flight_max,
        options.timeout,
        ttft_ms_max=options.ttft_ms if options.send_targets else None,
        tbt_ms_max=options.tbt_ms if options.send_targets else None,
    )

    async def replay() -> None:
        async with shown_progress(results, len(plan.requests), sys.stderr):
            await send_all(plan.requests, config, results)

    try:
        asyncio.run(replay())
    except KeyboardInterrupt:
        return results, False
    return results, True


def _report(
    plan: Schedule,
    target: Target,
    url: str,
    seed: int,
    options: argparse.Namespace,
    results: Results,
    complete: bool,
) -> ReplayReport:
    targets = Targets(options.ttft_ms / 1e3, options.tbt_ms / 1e3)
    prompt_tokens = sum(request.prompt_tokens for request in plan.requests)
    return ReplayReport(
        trace=str(options.trace),
        url=url,
        model=target.model,
        context_tokens=target.context_tokens_max,
        scale=options.scale,
        speedup=options.speedup,
        seed=seed,
        in_flight_max=options.in_flight_max,
        targets=targets,
        targets_sent=options.send_targets,
        requests=len(plan.requests) + len(plan.too_long),
        too_long=plan.too_long,
        reusable_rate=reusable_tokens(plan.requests, options.scale) / prompt_tokens,
        complete=complete,
        began_unix_s=results.began_unix_s,
        summary=summarise(results, targets, len(plan.requests), plan.window_s),
    )


def _exit_status(report: ReplayReport, prog: str) -> int:
    summary = report.summary
    if summary.served or not summary.failures:
        return EXIT_OK
    print(f"{prog}: error: nothing was served; {named(summary.failures[0])}", file=sys.stderr)
    return EXIT_FAILURE


COMMAND = Command("replay", "send a trace of requests to a running stack", add_arguments, run)
