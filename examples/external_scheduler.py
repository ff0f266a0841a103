"""Takes over placement: python external_scheduler.py nats://127.0.0.1:4222 (docs/schedulers.md)."""

import argparse
import asyncio
import time

import nats
import orjson

NAME, INCARNATION = "external-scheduler", time.time_ns()
SILENT_S_MAX = 3.0
loads: dict[str, dict] = {}  # the latest load of each instance, and when it came


def place(asked: dict) -> tuple[str, dict]:
    """The prefill with the fewest tokens to compute, the decode with the fewest requests."""
    oldest_s = time.monotonic() - SILENT_S_MAX
    serving = [load for load in loads.values() if load["heard_s"] > oldest_s and load["state"] == "serving"]
    fit = [load for load in serving if load["instance"] not in asked["excluded"]] or serving
    prefills = [load for load in fit if "prefill" in load["roles"]]
    decodes = [load for load in fit if "decode" in load["roles"]]
    of = {"request_id": asked["request_id"], "attempt": asked["attempt"]}
    if not prefills or not decodes:
        return "rejection", of | {"reason": "no_instance", "detail": "nobody serves", "retry_after_s": 1.0}
    prefill = min(prefills, key=lambda load: sum(request["new_tokens"] for request in load["queued"]))
    decode = min(decodes, key=lambda load: len(load["running"]))
    # Until their next load shows it, both count what they have just been given.
    prefill["queued"].append({"new_tokens": asked["prompt_tokens"]})
    decode["running"].append({})
    return "placement", of | {"prefill": prefill["instance"], "decode": decode["instance"]}


async def main(url: str) -> None:
    async def on_load(message) -> None:
        load = orjson.loads(message.data)["body"]
        loads[load["instance"]] = load | {"heard_s": time.monotonic()}

    async def on_schedule(message) -> None:
        kind, body = place(orjson.loads(message.data)["body"])
        envelope = {"v": 1, "kind": kind, "sender": NAME, "incarnation": INCARNATION, "seq": 1}
        await message.respond(orjson.dumps(envelope | {"sent_at_s": time.time(), "body": body}))
        print(kind, orjson.dumps(body).decode(), flush=True)

    client = await nats.connect(url, name=NAME, max_reconnect_attempts=-1)
    await client.subscribe("moonpool.v1.load.*", cb=on_load)
    await asyncio.sleep(1.5)  # each instance tells its load once a second: now all are known
    await client.subscribe("moonpool.v1.schedule", queue="conductor", cb=on_schedule)
    await client.flush()
    print("scheduling", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nats_url")
    asyncio.run(main(parser.parse_args().nats_url))
