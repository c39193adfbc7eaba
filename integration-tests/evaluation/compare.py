#!/usr/bin/env python3
"""lm_eval over Trireme beside lm_eval over transformers, on the same weights.

    python3 integration-tests/evaluation/compare.py [--python VENV] [--smollm2 FILE] [--quick] [--json FILE]

Makes a virtual environment with lm_eval, torch and transformers on its first run (several GB, from
PyPI), and runs itself there. Then, for each small model of the fixtures: the four local tasks
(choices, loglikelihood, rolling, generate_until) over `--model hf` in float32, and over
`local-completions` with TP 1 and TP 3 x PP 2, batches of 1 and 8, one request at a time and 16,
prompts as ids and as text; and the `gguf` backend once. For SmolLM2, the pairs and texts of
fixtures/smollm2/loglikelihood.json, whose numbers are those of lm_eval's hf model.

Equal means: the same choices and texts, the same is_greedy, and sums of logprobs within 1e-3 a
token. Exits with 1 where that does not hold.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
FIXTURES = os.path.join(ROOT, "integration-tests", "fixtures")
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
MODELS = ["smollm-like", "llama3-like"]
SPLITS = [(1, 1), (3, 2)]
TASKS = ["trireme_choice", "trireme_cloze", "trireme_rolling", "trireme_generate"]
PER_TOKEN = 1e-3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.path.join(TARGET, "lm-eval-python"), help="folder of the virtual environment")
    parser.add_argument("--smollm2", help="the GGUF file, as `trireme where smollm2` prints it")
    parser.add_argument("--quick", action="store_true", help="one model, fewer combinations")
    parser.add_argument("--json", help="write the figures here")
    return parser.parse_args()


def enter(folder):
    """Goes on in the virtual environment, made if need be."""
    if os.path.realpath(sys.prefix) == os.path.realpath(folder):
        return
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(os.path.join(folder, "packages.ok")):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        requirements = os.path.join(HERE, "requirements.txt")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        open(os.path.join(folder, "packages.ok"), "w").close()
    os.execv(python, [python, *sys.argv])


class Server:
    """A `trireme serve` of its own."""

    def __init__(self, model, tp, pp):
        binary = os.path.join(TARGET, "release", "trireme")
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [binary, "serve", model, "--tp", str(tp), "--pp", str(pp), "--dtype", "f32", "--port", "0",
             "--grpc-port", "0", "--served-model-name", "model"],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.address = None
        for line in self.process.stdout:
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                self.address = found.group(0)
                break
        if self.address is None:
            self.log.seek(0)
            raise SystemExit(self.log.read().decode())
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


class Run:
    """What one lm_eval run said: metrics of each task, and each document's answers."""

    def __init__(self, results):
        self.metrics = {
            task: {name: value for name, value in metrics.items() if isinstance(value, float) and "stderr" not in name}
            for task, metrics in results["results"].items()
        }
        self.answers = {
            task: [flat(sample["resps"]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for task, samples in results["samples"].items()
        }


def flat(answers):
    """The answers to one document, as floats, booleans and strings in a row."""
    if isinstance(answers, (list, tuple)):
        return [value for answer in answers for value in flat(answer)]
    return [answers]


def evaluate(model, model_args, tasks, batch=1):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=os.path.join(HERE, "tasks"), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, model_args=model_args, tasks=tasks, batch_size=batch, device="cpu", task_manager=manager,
        log_samples=True, bootstrap_iters=0, verbosity="ERROR")
    return Run(results)


def over_http(server, tokenizer, max_length, tasks, batch, concurrent, tokenized):
    return evaluate("local-completions", {
        "model": "model", "base_url": f"{server.address}/v1/completions", "tokenizer_backend": "huggingface",
        "tokenizer": tokenizer, "max_length": max_length, "num_concurrent": concurrent,
        "tokenized_requests": tokenized, "add_bos_token": False, "max_retries": 1,
    }, tasks, batch)


def combinations(quick):
    """Batch size, requests at once, prompts as ids."""
    if quick:
        return [(1, 1, True), (8, 1, False)]
    return [(batch, concurrent, tokenized) for batch, concurrent in [(1, 1), (8, 1), (1, 16), (8, 16)] for tokenized in (True, False)]


def worst(found, expected, tokens):
    """Largest distance of two runs' logprobs a token, and what else differs."""
    distance, differs = 0.0, []
    for task in expected.answers:
        for document, (one, other) in enumerate(zip(found.answers[task], expected.answers[task], strict=True)):
            if len(one) != len(other):
                differs.append(f"{task} {document}: {len(one)} answers, not {len(other)}")
            for value, wanted in zip(one, other):
                if isinstance(wanted, float) and not isinstance(wanted, bool):
                    distance = max(distance, abs(value - wanted) / tokens(task, document))
                elif value != wanted:
                    differs.append(f"{task} {document}: {value!r}, not {wanted!r}")
        for name, value in expected.metrics[task].items():
            if name.startswith(("acc", "exact_match")) and found.metrics[task][name] != value:
                differs.append(f"{task} {name}: {found.metrics[task][name]}, not {value}")
    return distance, differs


class Report:
    def __init__(self):
        self.rows, self.failed = [], False

    def check(self, what, distance, differs):
        good = distance <= PER_TOKEN and not differs
        self.failed |= not good
        self.rows.append({"what": what, "logprob_distance_per_token": distance, "differs": differs})
        print(f"{'ok ' if good else 'BAD'} {what}: {distance:.1e} a token", *differs[:5], sep="\n      " if differs else " ", flush=True)


def compare_small_model(name, report, quick):
    from transformers import AutoTokenizer

    folder = os.path.join(FIXTURES, "models", name)
    with open(os.path.join(folder, "config.json")) as config:
        max_length = json.load(config)["max_position_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = {task: open(os.path.join(HERE, "tasks", task.removeprefix("trireme_") + ".jsonl")).readlines() for task in TASKS}

    def tokens(task, document):
        """Tokens of a rolling text; one for the others, whose few tokens need no allowance."""
        text = json.loads(lines[task][document]).get("text")
        return len(tokenizer.encode(text)) if text else 1

    # The API model keeps room for the token that is generated, and for a prefix in rolling texts.
    reference = {"pretrained": folder, "dtype": "float32", "max_length": max_length - 2}
    as_ids = evaluate("hf", {**reference, "add_bos_token": False}, TASKS)
    # To a text that is gone on from, the server adds what the tokenizer adds by itself.
    as_text = evaluate("hf", reference, TASKS[-1:])
    as_text.answers = {**as_ids.answers, **as_text.answers}
    as_text.metrics = {**as_ids.metrics, **as_text.metrics}
    runs = {}
    for tp, pp in SPLITS:
        with Server(folder, tp, pp) as server:
            for batch, concurrent, tokenized in combinations(quick):
                found = over_http(server, folder, max_length, TASKS, batch, concurrent, tokenized)
                expected = as_ids if tokenized else as_text
                what = f"{name} tp {tp} pp {pp}, batch {batch}, {concurrent} at once, {'ids' if tokenized else 'text'}"
                report.check(f"{what}: hf", *worst(found, expected, tokens))
                first = runs.setdefault((batch, concurrent, tokenized), found)
                if first is not found:
                    report.check(f"{what}: tp 1 pp 1", *worst(found, first, tokens))
                same = runs.setdefault((tp, pp, tokenized), found)
                if same is not found:
                    differs = [] if same.answers == found.answers else ["answers differ between batches"]
                    report.check(f"{what}: its first run, to the bit", 0.0, differs)
            if (tp, pp) == SPLITS[0]:
                # That backend cannot ask for a text without context, of which the cloze task has one.
                gguf = evaluate("gguf", {"base_url": server.address}, ["trireme_choice"])
                wanted = Run({"results": {}, "samples": {}})
                wanted.answers = {"trireme_choice": as_ids.answers["trireme_choice"]}
                wanted.metrics = {"trireme_choice": as_ids.metrics["trireme_choice"]}
                report.check(f"{name} gguf backend: hf", *worst(gguf, wanted, tokens))


def compare_smollm2(file, report):
    """The reference's pairs, asked as lm_eval asks."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    tokenizer = os.path.join(FIXTURES, "tokenizers", "smollm2")
    with open(os.path.join(FIXTURES, "smollm2", "loglikelihood.json")) as fixture:
        expected = json.load(fixture)
    first = None
    for tp, pp in SPLITS:
        with Server(file, tp, pp) as server:
            model = get_model("local-completions")(
                model="model", base_url=f"{server.address}/v1/completions", tokenizer_backend="huggingface",
                tokenizer=tokenizer, max_length=2048, num_concurrent=8, batch_size=4)
            ask = lambda kind, values: [Instance(kind, {}, value, index) for index, value in enumerate(values)]
            pairs = [(pair["context"], pair["continuation"]) for pair in expected["pairs"]]
            scores = model.loglikelihood(ask("loglikelihood", pairs))
            rolling = model.loglikelihood_rolling(ask("loglikelihood_rolling", [(text["text"],) for text in expected["rolling"]]))
        distance, differs = 0.0, []
        for pair, (logprob, greedy) in zip(expected["pairs"], scores, strict=True):
            distance = max(distance, abs(logprob - pair["logprob"]) / len(pair["continuation_ids"]))
            if greedy != pair["is_greedy"]:
                differs.append(f"{pair['context']!r}{pair['continuation']!r}: is_greedy {greedy}")
        for text, logprob in zip(expected["rolling"], rolling, strict=True):
            distance = max(distance, abs(logprob - text["logprob"]) / len(text["ids"]))
        report.check(f"smollm2 tp {tp} pp {pp}: the reference's pairs and texts", distance, differs)
        answers = [*scores, *rolling]
        first = first or answers
        distance = max(abs(one - other) for one, other in zip(flat(answers), flat(first), strict=True))
        report.check(f"smollm2 tp {tp} pp {pp}: tp 1 pp 1", distance, [])


def main():
    args = arguments()
    enter(args.python)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("OPENAI_API_KEY", "none")
    args.json, args.smollm2 = (path and os.path.abspath(path) for path in (args.json, args.smollm2))
    # The tasks name their data by relative paths.
    os.chdir(os.path.join(HERE, "tasks"))
    report = Report()
    for name in MODELS[:1] if args.quick else MODELS:
        compare_small_model(name, report, args.quick)
    if args.smollm2:
        compare_smollm2(args.smollm2, report)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(report.rows, out, indent=1)
    print("lm_eval: differences found" if report.failed else "lm_eval: all equal")
    sys.exit(report.failed)


main()
