"""Moonpool's engine beside its peers: the same tokens, one system after the other, round by round.

Every system is loaded once. A case is prepared by all systems, then each round times every one of
them, beginning with another each time, while the others are stopped. Compared is what happens between
two timestamps in the system's own process: see `engine_systems/worker.py` for what is timed.

benchmarks/README.md says how to set up the peers.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.comparison import add_comparison_arguments, now, rotated, say
from benchmarks.resident import REALTIME_PAUSE_S, Resident, ResidentError, make_realtime

from engine.model_folder import ModelConfig
from engine.models import resolve_model
from moonpool.benchmarks.engine import CASES, WARM_STEPS, Case, Phase
from moonpool.benchmarks.engine_under_test import decode_bytes
from moonpool.benchmarks.read_bandwidth import READER, bandwidth_reader
from moonpool.measurement import Measurement, as_json_line, measurement
from moonpool.run_folder import moonpool_home
from moonpool.table import format_table

BENCH = "engine_vs_peers"
OURS = "moonpool"
SYSTEMS_FOLDER = Path(__file__).parent / "engine_systems"
SCRIPTS = {
    OURS: "moonpool_system.py",
    "transformers": "transformers_system.py",
    "vllm": "vllm_system.py",
    "vllm_eager": "vllm_system.py",
}
PEERS = [name for name in SCRIPTS if name != OURS]
PROMPT_SEED = 20


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: tokens per second of each system, and bytes per second of the memory, round by round."""

    case: Case
    rates: Mapping[str, Sequence[float]]
    bandwidths: Sequence[float]
    outputs: Mapping[str, Sequence[Sequence[int]]]
    """The output tokens of each sequence, to see that all compute the same."""


def main() -> int:
    options = _arguments()
    folder = resolve_model(options.model, moonpool_home(), say)
    config = ModelConfig.load(folder)
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    context = {"model": options.model, "dtype": "float32", "threads": options.threads}
    results: list[CaseResult] = []
    with ExitStack() as stack, options.output.open("w", encoding="utf-8") as output:
        systems = _start_all(options, folder, stack)
        abouts = {system.name: system.about for system in systems}
        for case in cases:
            pause_s = REALTIME_PAUSE_S if options.realtime else 0.0
            result = measure(case, systems, config, options.threads, options.rounds, pause_s)
            results.append(result)
            for line in summarise(result, abouts, config, context | now()):
                print(as_json_line(line), file=output, flush=True)
    print(as_ratio_table(results))
    return 0


def _start_all(options: argparse.Namespace, folder: Path, stack: ExitStack) -> list[Resident]:
    """Starts ours and the peers one after the other; `stack` ends them."""
    log_folder = Path(tempfile.mkdtemp(prefix="engine_vs_peers_"))
    systems = []
    for name, python in {OURS: Path(sys.executable), **dict(options.peers)}.items():
        say(f"loading {name} (log in {log_folder})")
        command = [str(python), str(SYSTEMS_FOLDER / SCRIPTS[name]), str(folder), str(options.threads)]
        environment = system_environment(name, python, options.threads)
        system = Resident.start(name, command, environment, log_folder)
        stack.callback(system.close)
        if options.realtime:
            system.make_realtime()
        systems.append(system)
    if options.realtime:
        make_realtime(os.getpid())  # for the bandwidth; last, for what we start would inherit it
    return systems


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare Moonpool's engine with its peers on this machine.")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, or a model's folder")
    parser.add_argument("--threads", type=int, default=2, help="threads of every system (default 2)")
    add_comparison_arguments(parser, tuple(PEERS), [case.name for case in CASES], python=sys.executable)
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="every system at real-time priority, so that other work on the machine disturbs less (as root)",
    )
    return parser.parse_args()


def system_environment(name: str, python: Path, threads: int) -> dict[str, str]:
    """What the system's documentation advises, for `threads` threads and without a look at the network."""
    common = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if SCRIPTS[name] != "vllm_system.py":
        return common
    # vLLM preloads torch's OpenMP library for workers that it starts; here its worker is the process itself.
    find_openmp = "import torch, glob; print(glob.glob(torch.__path__[0] + '/lib/libgomp*.so*')[0])"
    library = subprocess.run(
        [python, "-c", find_openmp], check=True, capture_output=True, text=True
    ).stdout.strip()
    return common | {
        "LD_PRELOAD": library,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "MOONPOOL_PEER_VLLM_EAGER": "1" if name == "vllm_eager" else "",
    }


def measure(
    case: Case,
    systems: Sequence[Resident],
    config: ModelConfig,
    threads: int,
    rounds: int,
    pause_s: float,
) -> CaseResult:
    """`rounds` samples of a case by every system, after one round that is not counted.

    `pause_s` passes before each sample.
    """
    prompts = _prompts(case, config.vocab_size)
    output_tokens_max = 1 + (1 + rounds) * (WARM_STEPS + case.steps)
    if case.phase is Phase.DECODE:
        for system in systems:
            say(f"{case.name}: {system.name} computes its prompts")
            system.ask(do="start_decode", prompts=prompts, output_tokens_max=output_tokens_max)
    rates: dict[str, list[float]] = {system.name: [] for system in systems}
    outputs: dict[str, list[list[int]]] = {system.name: [] for system in systems}
    bandwidths: list[float] = []
    read_bandwidth = bandwidth_reader(threads)
    for round_index in range(1 + rounds):
        time.sleep(pause_s)
        bandwidths.append(read_bandwidth())
        for system in rotated(systems, round_index):
            time.sleep(pause_s)
            answer = _time(case, system, prompts)
            rates[system.name].append(_tokens(case) / answer["seconds"])
            outputs[system.name] += answer.get("outputs", [])
        say(f"{case.name}: round {round_index} " + str({n: round(r[-1], 1) for n, r in rates.items()}))
    if case.phase is Phase.DECODE:
        outputs = {system.name: system.ask(do="end_decode")["outputs"] for system in systems}
    return CaseResult(case, {name: rate[1:] for name, rate in rates.items()}, bandwidths[1:], outputs)


def _time(case: Case, system: Resident, prompts: Sequence[Sequence[int]]) -> dict:
    if case.phase is Phase.PREFILL:
        return system.ask(do="prefill", prompt=prompts[0])
    return system.ask(do="decode", warm_steps=WARM_STEPS, steps=case.steps)


def _tokens(case: Case) -> int:
    """What one sample of a case computes."""
    return case.tokens if case.phase is Phase.PREFILL else case.sequences * case.steps


def _prompts(case: Case, vocabulary: int) -> list[list[int]]:
    numbers = random.Random(PROMPT_SEED)
    return [numbers.choices(range(vocabulary), k=case.tokens) for _ in range(case.sequences)]


def summarise(
    result: CaseResult,
    abouts: Mapping[str, Mapping[str, str]],
    config: ModelConfig,
    context: Mapping[str, object],
) -> list[Measurement]:
    """A line for each system's rate, one for each peer's ratio, and what memory gave and would allow."""
    case, ours = result.case, result.rates[OURS]
    context = {**context, "sequences": case.sequences, "tokens": case.tokens}
    lines = []
    for name, rates in result.rates.items():
        about = {
            "system": abouts[name],
            f"output_tokens_equal_to_{OURS}": equal_share(result.outputs[OURS], result.outputs[name]),
        }
        lines.append(measurement(BENCH, f"{case.name}/{name}", "rate", "tokens/s", rates, context | about))
    for name, rates in result.rates.items():
        if name != OURS:
            ratios = [our / their for our, their in zip(ours, rates, strict=True)]
            lines.append(measurement(BENCH, f"{case.name}/{OURS}:{name}", "rate_ratio", "x", ratios, context))
    memory = [bandwidth / 1e9 for bandwidth in result.bandwidths]
    lines.append(
        measurement(BENCH, f"{case.name}/memory_read", "rate", "GB/s", memory, context | {"reader": READER})
    )
    if case.phase is Phase.DECODE:
        step_bytes = decode_bytes(config, case.sequences, case.tokens)
        shares = [
            rate * step_bytes / (case.sequences * bandwidth)
            for rate, bandwidth in zip(ours, result.bandwidths, strict=True)
        ]
        bound = {**context, "step_bytes": step_bytes}
        lines.append(
            measurement(BENCH, f"{case.name}/{OURS}", "share_of_bandwidth_bound", "x", shares, bound)
        )
    return lines


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of output tokens, as far as both have one, that are the same."""
    pairs = [
        (our_token, their_token)
        for our, their in zip(ours, theirs, strict=True)
        for our_token, their_token in zip(our, their, strict=False)  # one may have gone further
    ]
    return round(sum(our == their for our, their in pairs) / len(pairs), 4)


def as_ratio_table(results: Sequence[CaseResult]) -> str:
    """Medians of each system in tokens per second, and ours over each peer's with its extremes."""
    names = list(results[0].rates)
    peers = [name for name in names if name != OURS]
    header = ["case", *names, *(f"{OURS}/{peer} (min–max)" for peer in peers)]
    rows = []
    for result in results:
        ratios = {
            peer: [o / t for o, t in zip(result.rates[OURS], result.rates[peer], strict=True)]
            for peer in peers
        }
        rows.append(
            [
                result.case.name,
                *(f"{median(result.rates[name]):.1f}" for name in names),
                *(f"{median(r):.2f} ({min(r):.2f}–{max(r):.2f})" for r in ratios.values()),
            ]
        )
    return format_table(header, rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ResidentError as error:
        sys.exit(f"engine_vs_peers: error: {error}")
