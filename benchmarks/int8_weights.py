"""What int8 weights gain on a CPU: decode steps of one engine with float32 and one with int8 matrices.

The two take turns. On a machine that others use, `--clock cpu --threads 1` counts processor time instead of
time that passed. One JSON object a line; metric `ratio` is float32's time over int8's, round by round.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable

from engine.models import resolve_model
from engine.native.packing import WeightDtype
from moonpool.benchmarks.engine_under_test import EngineUnderTest
from moonpool.machine import machine_context
from moonpool.measurement import as_json_line, measurement
from moonpool.run_folder import moonpool_home

CONTEXT_TOKENS = 512
STEPS = 6
PROMPT_SEED = 20
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    batches = [int(batch) for batch in options.batches.split(",")]
    folder = resolve_model(options.model, moonpool_home(), lambda text: print(text, file=sys.stderr))
    engines = {
        dtype: EngineUnderTest(
            folder,
            threads=options.threads,
            backend="native",
            sequences_max=max(batches),
            tokens_max=CONTEXT_TOKENS + STEPS * (options.rounds + 1) + 1,
            weight_dtype=dtype,
        )
        for dtype in WeightDtype
    }
    vocab_size = next(iter(engines.values())).config.vocab_size
    prompt = random.Random(PROMPT_SEED).choices(range(vocab_size), k=CONTEXT_TOKENS)
    context = {
        "model": options.model,
        "threads": options.threads,
        "clock": options.clock,
        **machine_context(),
    }
    for batch in batches:
        times_s: dict[WeightDtype, list[float]] = {dtype: [] for dtype in engines}
        for engine in engines.values():
            engine.start_copies(prompt, batch)
            engine.decode_step()
        for _ in range(options.rounds):
            for dtype, engine in engines.items():
                started_s = clock()
                for _ in range(STEPS):
                    engine.decode_step()
                times_s[dtype].append((clock() - started_s) / STEPS)
        for dtype, measured_s in times_s.items():
            rates = [batch / step_s for step_s in measured_s]
            case = f"decode_{batch}/{dtype}"
            print(as_json_line(measurement("int8_weights", case, "rate", "tokens/s", rates, context)))
        pairs = zip(times_s[WeightDtype.FLOAT32], times_s[WeightDtype.INT8], strict=True)
        ratios = [float32_s / int8_s for float32_s, int8_s in pairs]
        print(as_json_line(measurement("int8_weights", f"decode_{batch}", "ratio", "", ratios, context)))


if __name__ == "__main__":
    main()
