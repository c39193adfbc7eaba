#!/usr/bin/env python3
"""What scoring a prompt costs: time beside its prefill alone, and memory of the shards.

    python3 integration-tests/bench/scoring_cost.py --model "$(trireme where smollm2)" [--tokens 2048] [--rounds 7] [-- flags of serve]

The two requests take turns, so that what else runs on the machine meets both; the ratio of their
medians counts. Memory is how much higher each shard's peak (VmHWM, reset before each) is over a scored
prompt than over the same prompt only prefilled.
"""

import argparse
import json
import random
import re
import statistics
import subprocess

from serving import ask, start


def shards(launcher):
    """Process ids of the launcher's shards."""
    children = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(launcher)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in children.splitlines() if line.split()[1].startswith("trireme-shard")]


def reset_peak(pid):
    with open(f"/proc/{pid}/clear_refs", "w") as refs:
        refs.write("5")


def peak_kib(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    args = parser.parse_args()
    process, port = start(args.model, ["--no-prefix-cache", *args.flags])
    try:
        prompt = [random.randrange(1000, 40000) for _ in range(args.tokens - 1)]
        prefill = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        scored = {**prefill, "prompt_logprobs": 1}
        pids = shards(process.pid)
        peaks = []
        for body in (prefill, prefill, scored):
            for pid in pids:
                reset_peak(pid)
            ask(port, body)
            peaks.append([peak_kib(pid) / 1024 for pid in pids])
        rise = [with_scores - without for without, with_scores in zip(peaks[1], peaks[2])]
        times = {"prefill": [], "scored": []}
        for _ in range(args.rounds):
            times["prefill"].append(ask(port, prefill))
            times["scored"].append(ask(port, scored))
    finally:
        process.terminate()
        process.wait()
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(json.dumps({
        "tokens": args.tokens, "flags": args.flags, "prefill_s": round(medians["prefill"], 3),
        "scored_s": round(medians["scored"], 3), "ratio": round(medians["scored"] / medians["prefill"], 3),
        "ratio_of_fastest": round(min(times["scored"]) / min(times["prefill"]), 3),
        "shard_peak_rise_mib": [round(value, 1) for value in rise],
    }))


main()
