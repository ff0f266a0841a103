"""What a way to the first token is worth to everybody, for `joint`: its own seconds, and those it takes from
others.

- A second of computing counts `compute_weight` times: under overload it is what all wait for, while time in
  a queue costs nobody else anything.
- Where some instances only prefill and others decode too (coupled ones), ways differ in what comes after
  them. The first have the prompt's KV still to send, as far as computing does not hide that. The others keep
  it, and make what they decode wait while they compute, as far as that goes beyond the target between tokens.
  So a short prompt without reuse goes straight to a coupled instance where that is cheaper; a long one does
  not.

A way that misses the target for the first token counts only where all do.
"""

from dataclasses import replace
from math import inf

import numpy as np

from policy.choice import equals_bound_s
from policy.columns import Bools, DecodeColumns, Floats, Table
from policy.cost import step_s, transfer_s
from policy.place_prefill import PrefillQuestion, Ways


def valued(question: PrefillQuestion, ways: Ways) -> Ways:
    """`ways` of all of the question's prefills, with what else they cost in `fixed_s`; the very same where
    nothing else counts."""
    added_s = (question.limits.compute_weight - 1.0) * ways.compute_s + _after_s(question, ways)
    if not added_s.any():
        return ways
    in_time = ways.ttft_s <= question.ttft_s_max
    if in_time.any():
        added_s = np.where(in_time, added_s, inf)
    return replace(ways, fixed_s=ways.fixed_s + added_s)


def _after_s(question: PrefillQuestion, ways: Ways) -> Floats:
    """What comes after the first token, or takes from what runs. Nothing where all are of one kind."""
    request, prefills = question.request, question.prefills
    fleet = question.ahead.board.fleet(request.model, request.fingerprint)
    nothing: Floats = np.zeros(len(ways.names))
    if fleet is None or not fleet.mixed:
        return nothing
    coupled = np.isin(prefills.rows, fleet.decodes.rows, assume_unique=True)
    if coupled.all() or not coupled.any():
        return nothing
    places = np.searchsorted(fleet.decodes.rows, prefills.rows[coupled])
    keeps = coupled.copy()
    keeps[coupled] = _decodes_well(question, fleet.decodes)[places]
    after_s = np.where(keeps, 0.0, np.maximum(0.0, _send_s(question) - ways.compute_s))
    slack_s = _slack_s(question, fleet.decodes.take(places))
    after_s[coupled] += np.maximum(0.0, ways.compute_s[coupled] - slack_s)
    return after_s


def _decodes_well(question: PrefillQuestion, decodes: Table[DecodeColumns]) -> Bools:
    """Whether each is among those with the shortest step: what is prefilled on one that is not is decoded
    elsewhere (`policy.place_decode`)."""
    columns, request = decodes.columns, question.request
    sequences = columns.sequences + request.samples
    steps_s = step_s(columns, sequences, columns.kv_tokens + request.samples * request.prompt_tokens)
    return steps_s <= equals_bound_s(float(steps_s.min()), question.limits)


def _send_s(question: PrefillQuestion) -> Floats:
    """To bring the prompt's KV from each to a decode that has none of it."""
    blocks = -(-question.request.prompt_tokens // question.block_tokens)
    holders = question.ahead.board.holders.take(question.prefills.rows).columns
    return transfer_s(holders, blocks * question.prefills.columns.block_bytes)


def _slack_s(question: PrefillQuestion, coupled: Table[DecodeColumns]) -> Floats:
    """How long each may keep what it decodes waiting once: up to the target between tokens, else as long as a
    step. Without limit where it decodes nothing."""
    columns = coupled.columns
    steps_s = step_s(columns, columns.sequences, columns.kv_tokens)
    tbt_s_max = question.tbt_s_max
    slack_s = steps_s if tbt_s_max == inf else np.maximum(0.0, tbt_s_max - steps_s)
    return np.where(columns.sequences > 0, slack_s, inf)
