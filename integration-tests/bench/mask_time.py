#!/usr/bin/env python3
"""What grammars cost a step: the time that steps wait for masks, and how long they are beside free ones.

    python3 integration-tests/bench/mask_time.py --model "$(trireme where smollm2)" [--seconds 20] [--at-once 1,4,16] [-- flags of serve]

So many answers at a time at temperature 1, each under the next of the schemas of clients/structured_client.py;
then as many without a grammar. Shares are of the time of all steps, from the server's own metrics.
"""

import argparse
import http.client
import itertools
import json
import os
import re
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "clients"))
from schemas import numbered  # noqa: E402
from serving import ask, start  # noqa: E402

# Compiled before the measurement.
SCHEMAS = 40
SUMS = {
    "wait": r"trireme_step_grammar_wait_seconds_sum(?:{[^}]*})? (\S+)",
    "step": r"trireme_step_duration_seconds_sum(?:{[^}]*})? (\S+)",
    "steps": r"trireme_step_duration_seconds_count(?:{[^}]*})? (\S+)",
}


def sums(port):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return {name: sum(float(value) for value in re.findall(pattern, text)) for name, pattern in SUMS.items()}


def body(number, constrained):
    constraint = {"guided_json": numbered(number % SCHEMAS)} if constrained else {"ignore_eos": True}
    return {"prompt": [1 + number % 100, 7, 9], "temperature": 1, "seed": number, "max_tokens": 100, **constraint}


def load(port, at_once, seconds, constrained):
    """What the metrics grew by while `at_once` clients asked one after the other."""
    end, number, before = time.monotonic() + seconds, itertools.count(), sums(port)

    def client():
        while time.monotonic() < end:
            ask(port, body(next(number), constrained))

    clients = [threading.Thread(target=client) for _ in range(at_once)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return {name: value - before[name] for name, value in sums(port).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--at-once", default="1,4,16")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    args = parser.parse_args()
    process, port = start(args.model, args.flags)
    try:
        for number in range(SCHEMAS):
            ask(port, {**body(number, True), "max_tokens": 1})
        for at_once in map(int, args.at_once.split(",")):
            grammar = load(port, at_once, args.seconds, True)
            free = load(port, at_once, args.seconds, False)
            mean = {name: 1000 * run["step"] / run["steps"] for name, run in (("grammar", grammar), ("free", free))}
            print(json.dumps({
                "flags": args.flags, "at_once": at_once, "steps": int(grammar["steps"]),
                "waiting_share": round(grammar["wait"] / grammar["step"], 4),
                "step_ms": round(mean["grammar"], 2), "free_step_ms": round(mean["free"], 2),
            }), flush=True)
    finally:
        process.terminate()
        process.wait()


main()
