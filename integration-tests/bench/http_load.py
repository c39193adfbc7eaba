#!/usr/bin/env python3
"""Streams many completions over HTTP and counts their tokens, as `trireme bench --load` does over gRPC.

    integration-tests/bench/http_load.py --port 8000 --load 400x400 --prefill 1000 --decode 1000 [--processes 8]

Prompts are random token ids. Requests are dealt to processes, each with its own event loop and one connection a
request, so that the client is not what is measured: `client_cpu` is its busiest process's part of the time.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import time


async def request(args, seed, start):
    """Times of the tokens of one stream, in seconds from the common start."""
    draw = random.Random(seed)
    body = json.dumps({
        "prompt": [draw.randrange(32, 256) for _ in range(args.prefill)], "max_tokens": args.decode,
        "ignore_eos": True, "temperature": 0, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", args.port, limit=1 << 20)
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n").encode()
    sent = time.monotonic()
    writer.write(head + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{status!r} {await reader.read()!r}")
    times, rest = [], b""
    while piece := await reader.read(1 << 16):
        now = time.monotonic()
        rest += piece
        events = rest.count(b"data: {")
        times.extend([now - start] * events)
        rest = rest[-6:]  # may be the start of an event
    writer.close()
    if len(times) != args.decode:
        raise SystemExit(f"{len(times)} tokens of {args.decode}; the end: {rest!r}")
    return sent - start, times


def process(args, seeds, concurrency, start, results):
    async def run():
        gate = asyncio.Semaphore(concurrency)

        async def one(seed):
            async with gate:
                return await request(args, seed, start)
        return await asyncio.gather(*(one(seed) for seed in seeds))
    outcomes = asyncio.run(run())
    busy = time.process_time() / (time.monotonic() - start)
    results.put((outcomes, busy))


def percentile(values, percent):
    values = sorted(values)
    return values[max(0, -(-len(values) * percent // 100) - 1)] if values else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--load", required=True, help="REQUESTSxCONCURRENCY")
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    requests, concurrency = map(int, args.load.split("x"))
    processes = min(args.processes, requests, concurrency)
    results = multiprocessing.Queue()
    start = time.monotonic()
    for index in range(processes):
        seeds = [args.seed + seed for seed in range(index, requests, processes)]
        mine = len(range(index, concurrency, processes))
        multiprocessing.Process(target=process, args=(args, seeds, mine, start, results)).start()
    answers = [results.get() for _ in range(processes)]
    streams = [outcome for outcomes, _ in answers for outcome in outcomes]
    wall_s = max(times[-1] for _, times in streams)
    gaps = [(b - a) * 1e3 for _, times in streams for a, b in zip(times, times[1:])]
    ttft = [(times[0] - sent) * 1e3 for sent, times in streams]
    figures = {
        "case": "http load", "requests": requests, "concurrency": concurrency,
        "prompt_tokens": args.prefill, "new_tokens": args.decode, "wall_s": wall_s,
        "output_tokens_per_s": sum(len(times) for _, times in streams) / wall_s,
        "ttft_ms_p50": percentile(ttft, 50), "ttft_ms_p99": percentile(ttft, 99),
        "inter_token_ms_p50": percentile(gaps, 50), "inter_token_ms_p99": percentile(gaps, 99),
        "client_cpu": max(busy for _, busy in answers),
    }
    print("  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in figures.items()))


if __name__ == "__main__":
    main()
