"""A server of its own for a measurement."""

import http.client
import json
import os
import re
import subprocess
import tempfile
import threading
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def start(model, flags):
    """The launcher and its port."""
    binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "release", "trireme")
    process = subprocess.Popen(
        [binary, "serve", model, "--port", "0", "--grpc-port", "0", *flags],
        stdout=subprocess.PIPE, stderr=tempfile.TemporaryFile(), text=True)
    for line in process.stdout:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found:
            threading.Thread(target=lambda: [None for _ in process.stdout], daemon=True).start()
            return process, int(found.group(1))
    raise SystemExit("the server did not start")


def ask(port, body):
    """Seconds of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise SystemExit(answer.decode())
    return time.perf_counter() - begin
