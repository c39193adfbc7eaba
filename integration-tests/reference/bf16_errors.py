#!/usr/bin/env python3
"""bf16_errors.py FIXTURES [SMOLLM2_GGUF]

What transformers itself loses by computing in bf16: the models of the fixtures, run with bf16 weights and
activations on a GPU (eager attention, no cache) over each prompt and its expected greedy tokens, against the
expected logprobs of those tokens (f32). Prints fixtures/bf16_errors.json, which bounds our own errors in
bf16. Needs torch, transformers and a GPU, and gguf for SmolLM2.
"""

import json
import pathlib
import sys

import torch
import transformers


def logprobs(model, tokens):
    """ln p(tokens[i] | tokens[..i]) for i from 1."""
    ids = torch.tensor([tokens], device=model.device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
    rows = torch.log_softmax(logits[:-1], dim=-1)
    return rows.gather(1, ids[0, 1:, None])[:, 0].tolist()


def summary(errors):
    return {"tokens": len(errors), "max": round(max(errors), 6), "mean": round(sum(errors) / len(errors), 6)}


def errors(model, prompts):
    """|found - expected| of the prompts' own tokens, and of their greedy continuations."""
    prompt_errors, greedy_errors = [], []
    for prompt in prompts:
        found = logprobs(model, prompt["ids"] + prompt["greedy"]["ids"])
        expected = prompt["token_logprobs"][1:] + prompt["greedy"]["logprobs"]
        off = [abs(a - b) for a, b in zip(found, expected)]
        length = len(prompt["ids"]) - 1
        prompt_errors += off[:length]
        greedy_errors += off[length:]
    return {"prompt": summary(prompt_errors), "greedy": summary(greedy_errors)}


def model_errors(expected, path, **options):
    prompts = json.loads(expected.read_text())["prompts"]
    entry = {}
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", **options
        )
        entry[name] = errors(model.to("cuda").eval(), prompts)
    return entry


def main():
    fixtures = pathlib.Path(sys.argv[1])
    models = {}
    for folder in sorted((fixtures / "models").iterdir()):
        models[folder.name] = model_errors(folder / "expected.json", folder)
    if len(sys.argv) > 2:
        gguf = pathlib.Path(sys.argv[2])
        expected = fixtures / "smollm2" / "generation.json"
        models["smollm2"] = model_errors(expected, gguf.parent, gguf_file=gguf.name)
    reference = f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}"
    print(json.dumps({"reference": reference + ", eager attention, no cache", "models": models}, indent=1))


if __name__ == "__main__":
    main()
