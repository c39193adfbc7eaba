#!/usr/bin/env python3
"""Trireme beside llama.cpp on the same GGUF, the same machine and the same threads, in one run.

    python3 -m venv v && v/bin/pip install llama-cpp-python
    v/bin/python integration-tests/bench/compare.py --model "$(trireme where smollm2)" [--rounds 5] [--json FILE]

Rows (medians of the rounds; the two engines take turns, the one at rest has no process running or is idle):
  decode      one sequence, tokens a second between the first and the last of 128 tokens
  prefill     tokens a second of a fresh 512-token prompt (for Trireme: time to first token over HTTP)
  16 chats    16 chats of 64 new tokens: at once for Trireme, one after another for llama.cpp; output tokens a second
  tp2 decode  Trireme with two ranks of one thread each, beside one rank with two threads
"""

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
QUESTIONS = [
    "Name three uses of a paper clip.", "Why is the sky blue?", "Write a haiku about rain.",
    "What is the capital of Peru?", "Explain recursion to a child.", "How do bees make honey?",
    "List five prime numbers.", "What causes tides?", "Describe the taste of an apple.",
    "How does a bicycle stay upright?", "Who wrote Hamlet?", "What is photosynthesis?",
    "Give advice for a job interview.", "Tell a short story about a fox.", "What is a neutron star?",
    "How do I boil an egg?",
]


class Server:
    """A `trireme serve` of its own."""

    def __init__(self, model, tp, threads, extra):
        binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "release", "trireme")
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [binary, "serve", model, "--tp", str(tp), "--threads", str(threads), "--port", "0", "--grpc-port", "0",
             "--no-prefix-cache", *extra],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.port = None
        for line in self.process.stdout:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        if self.port is None:
            self.log.seek(0)
            raise SystemExit(self.log.read().decode())
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def stream(self, path, body):
        """Times of the events of one stream, from the moment of asking."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        start = time.perf_counter()
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(response.read().decode())
        times = []
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - start)
        connection.close()
        return times


def random_prompt(length):
    return [random.randrange(1000, 40000) for _ in range(length)]


def trireme_decode(server):
    times = server.stream("/v1/completions", {
        "prompt": random_prompt(16), "max_tokens": 128, "ignore_eos": True, "temperature": 0})
    return 127 / (times[127] - times[0])


def trireme_prefill(server):
    times = server.stream("/v1/completions", {
        "prompt": random_prompt(512), "max_tokens": 1, "ignore_eos": True, "temperature": 0})
    return 512 / times[0]


def trireme_chats(server):
    def chat(question):
        server.stream("/v1/chat/completions", {
            "messages": [{"role": "user", "content": question}], "max_tokens": 64, "ignore_eos": True, "temperature": 0})
    threads = [threading.Thread(target=chat, args=(question,)) for question in QUESTIONS]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 16 * 64 / (time.perf_counter() - start)


def llama_decode(llama):
    llama.reset()
    llama.eval(random_prompt(16))
    token = llama.sample(temp=0.0)
    start = time.perf_counter()
    for _ in range(127):
        llama.eval([token])
        token = llama.sample(temp=0.0)
    return 127 / (time.perf_counter() - start)


def llama_prefill(llama):
    llama.reset()
    prompt = random_prompt(512)
    start = time.perf_counter()
    llama.eval(prompt)
    llama.sample(temp=0.0)
    return 512 / (time.perf_counter() - start)


def llama_chats(llama):
    """Chats of 64 tokens each, whatever ends them earlier in chat: the same work as the other side."""
    start = time.perf_counter()
    for question in QUESTIONS:
        text = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        llama.reset()
        llama.eval(llama.tokenize(text.encode(), add_bos=False, special=True))
        for _ in range(64):
            llama.eval([llama.sample(temp=0.0)])
    return 16 * 64 / (time.perf_counter() - start)


def median_of(rounds, measure, subject):
    measure(subject)  # warm
    return statistics.median(measure(subject) for _ in range(rounds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("extra", nargs="*", help="more arguments of `trireme serve`")
    arguments = parser.parse_args()
    random.seed(1)

    import llama_cpp
    llama = llama_cpp.Llama(arguments.model, n_ctx=2048, n_batch=512, n_threads=arguments.threads,
                            n_threads_batch=arguments.threads, verbose=False)
    result = {"llama.cpp": {}, "trireme": {}}
    rounds = arguments.rounds
    server = Server(arguments.model, 1, arguments.threads, arguments.extra)
    for name, ours, theirs in (("decode", trireme_decode, llama_decode),
                               ("prefill", trireme_prefill, llama_prefill),
                               ("16 chats", trireme_chats, llama_chats)):
        result["trireme"][name] = median_of(rounds, ours, server)
        result["llama.cpp"][name] = median_of(rounds if name != "16 chats" else 1, theirs, llama)
    server.stop()
    server = Server(arguments.model, 2, 1, arguments.extra)
    result["trireme"]["tp2 decode"] = median_of(rounds, trireme_decode, server)
    server.stop()

    print(f"{'row':12} {'trireme':>10} {'llama.cpp':>10} {'ratio':>7}")
    for name in ("decode", "prefill", "16 chats"):
        ours, theirs = result["trireme"][name], result["llama.cpp"][name]
        print(f"{name:12} {ours:10.1f} {theirs:10.1f} {ours / theirs:7.2f}")
    ours, one = result["trireme"]["tp2 decode"], result["trireme"]["decode"]
    print(f"{'tp2 / tp1':12} {ours:10.1f} {one:10.1f} {ours / one:7.2f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
