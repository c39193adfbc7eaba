"""The `text-generation` and `huggingface_hub` clients against a running server."""

import asyncio
import sys

import text_generation
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError as HubValidationError
from text_generation.errors import ValidationError
from text_generation.types import FinishReason, Message

base_url = sys.argv[1]
prompt = "1, 2, 3, 4,"

client = text_generation.Client(base_url, timeout=120)
whole = client.generate(prompt, max_new_tokens=8, decoder_input_details=False)
assert whole.generated_text.startswith(" 5, 6"), whole
assert whole.details.finish_reason == FinishReason.Length and whole.details.generated_tokens == 8
assert "".join(token.text for token in whole.details.tokens) == whole.generated_text
assert whole.details.seed is None, "nothing was drawn"

events = list(client.generate_stream(prompt, max_new_tokens=8))
assert events[-1].generated_text == whole.generated_text
assert events[-1].details.finish_reason == FinishReason.Length
assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]

full = client.generate(prompt, max_new_tokens=2, return_full_text=True)
assert full.generated_text.startswith(prompt), full
stopped = client.generate(prompt, max_new_tokens=30, stop_sequences=["8"])
assert stopped.details.finish_reason == FinishReason.StopSequence and "8" not in stopped.generated_text
cut = client.generate(prompt, max_new_tokens=2, truncate=3)
assert cut.details.generated_tokens == 2
several = client.generate(prompt, max_new_tokens=4, do_sample=True, temperature=1.5, best_of=3)
assert len(several.details.best_of_sequences) == 2, several
best = [several.details, *several.details.best_of_sequences]
scores = [sum(token.logprob for token in one.tokens) / len(one.tokens) for one in best]
assert scores == sorted(scores, reverse=True), scores
ranked = client.generate(prompt, max_new_tokens=2, top_n_tokens=3)
assert all(len(tokens) == 3 for tokens in ranked.details.top_tokens), ranked
assert [tokens[0].id for tokens in ranked.details.top_tokens] == [t.id for t in ranked.details.tokens]
drawn = [client.generate(prompt, max_new_tokens=6, do_sample=True, seed=7).generated_text for _ in range(2)]
assert drawn[0] == drawn[1], drawn

try:
    client.generate(prompt, watermark=True)
except ValidationError as refused:
    assert "watermark" in str(refused), refused
else:
    raise AssertionError("a watermark was promised and not made")

question = [Message(role="user", content="What is the capital of France?")]
chat = client.chat(messages=question, max_tokens=16, temperature=0.0)
assert "Paris" in chat.choices[0].message.content, chat


async def asynchronously():
    asynchronous = text_generation.AsyncClient(base_url, timeout=120)
    answer = await asynchronous.generate(prompt, max_new_tokens=8)
    assert answer.generated_text == whole.generated_text
    pieces = [event.token.text async for event in asynchronous.generate_stream(prompt, max_new_tokens=8)]
    assert "".join(pieces) == whole.generated_text
    hub = AsyncInferenceClient(base_url)
    stream = await hub.text_generation(prompt, max_new_tokens=8, stream=True)
    assert "".join([piece async for piece in stream]) == whole.generated_text


asyncio.run(asynchronously())

hub = InferenceClient(base_url)
assert hub.text_generation(prompt, max_new_tokens=8) == whole.generated_text
detailed = hub.text_generation(prompt, max_new_tokens=8, details=True)
assert detailed.generated_text == whole.generated_text and detailed.details.finish_reason == "length"
assert [token.id for token in detailed.details.tokens] == [token.id for token in whole.details.tokens]
assert "".join(hub.text_generation(prompt, max_new_tokens=8, stream=True)) == whole.generated_text
last = list(hub.text_generation(prompt, max_new_tokens=8, stream=True, details=True))[-1]
assert last.generated_text == whole.generated_text and last.details.generated_tokens == 8, last
question = [{"role": "user", "content": "What is the capital of France?"}]
said = hub.chat_completion(question, max_tokens=16, temperature=0.0)
assert "Paris" in said.choices[0].message.content, said
streamed = hub.chat_completion(question, max_tokens=16, temperature=0.0, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in streamed) == said.choices[0].message.content
try:
    hub.text_generation(prompt, top_p=2.0)
except HubValidationError as refused:
    assert "top_p" in str(refused), refused
else:
    raise AssertionError("top_p 2 was taken")

print("tgi clients: all good")
