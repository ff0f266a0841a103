"""What prefill and decode share: engine thread, pool, transfer endpoint and reporting, put together once.

Owns the running of a request on one instance: `prefill_duty` and `decode_duty` carry out the effects of
the machines in `protocol`. Knows nothing of HTTP, placement or other instances' pools.
"""
