"""The `openai` package against a running server: chat, completions, streaming, errors."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the capital of France?"}]

chat = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=24)
text = chat.choices[0].message.content
assert "Paris" in text, text
assert chat.choices[0].message.role == "assistant"
assert chat.choices[0].finish_reason in ("stop", "length")
assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
assert chat.id.startswith("chatcmpl-") and chat.object == "chat.completion"

chunks = list(
    client.chat.completions.create(
        model=model,
        messages=question,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
)
streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert streamed == text, (streamed, text)
assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens
assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == chat.choices[0].finish_reason

scored = client.chat.completions.create(
    model=model, messages=question, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
)
for entry in scored.choices[0].logprobs.content:
    assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob, entry
    assert entry.bytes is not None

plain = client.completions.create(model=model, prompt="1 2 3 4", max_tokens=8, temperature=0, logprobs=2)
assert plain.object == "text_completion" and plain.usage.completion_tokens == 8
assert len(plain.choices[0].logprobs.tokens) == 8
assert "".join(plain.choices[0].logprobs.tokens) == plain.choices[0].text

streamed = "".join(
    c.choices[0].text
    for c in client.completions.create(model=model, prompt="1 2 3 4", max_tokens=8, temperature=0, stream=True)
)
assert streamed == plain.choices[0].text, (streamed, plain.choices[0].text)

several = client.completions.create(model=model, prompt=["a b c", "1 2 3"], max_tokens=4, temperature=0)
assert [c.index for c in several.choices] == [0, 1]

again = [
    client.completions.create(model=model, prompt="Once", max_tokens=12, temperature=1.0, seed=7).choices[0].text
    for _ in range(2)
]
assert again[0] == again[1], again

stopped = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=40, temperature=0, stop=["8"])
assert "8" not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop", stopped

for call, error in (
    (lambda: client.completions.create(model="nothing", prompt="a"), openai.NotFoundError),
    (lambda: client.completions.create(model=model, prompt="a", temperature=-1), openai.BadRequestError),
    (lambda: client.completions.create(model=model, prompt="a", suffix="b"), openai.UnprocessableEntityError),
):
    try:
        call()
    except error as refused:
        assert refused.body["message"], refused
    else:
        raise AssertionError(f"expected {error}")

print("openai client: all good")
