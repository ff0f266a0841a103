"""`moonpool bench NAME`: measurements, all printed in one form (DESIGN §10)."""

from moonpool.arguments import CommandGroup
from moonpool.benchmarks import (
    attention,
    decisions,
    detokenize,
    engine,
    handover,
    kvmeta_restart,
    match,
    place,
    predict,
    prefix,
    serve,
    transfer,
)
from moonpool.benchmarks import hash as hash_chain

GROUP = CommandGroup(
    "bench",
    "measure something",
    (
        prefix.COMMAND,
        engine.COMMAND,
        attention.COMMAND,
        transfer.COMMAND,
        handover.COMMAND,
        hash_chain.COMMAND,
        detokenize.COMMAND,
        match.COMMAND,
        place.COMMAND,
        decisions.COMMAND,
        predict.COMMAND,
        kvmeta_restart.COMMAND,
        serve.COMMAND,
    ),
)
