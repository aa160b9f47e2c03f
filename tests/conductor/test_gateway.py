"""The gateway's answers, on real sockets: whole and streamed, with the `openai` client as it is."""

from engine.tokenizer import Tokenizer
from tests.conductor.edge import MODEL, an_edge
from tests.conductor.scripted import Play

HELLO = [{"role": "user", "content": "hello"}]


async def test_chat_with_the_openai_client(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("The block has a name.", special=False)
    async with an_edge(tokenizer, Play(words, reused=3)) as edge, edge.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=len(words))
    prompt = len(tokenizer.chat(HELLO))
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "The block has a name."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(words)
    assert answer.usage.total_tokens == prompt + len(words)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_chat_stream_has_one_chunk_for_each_token_and_one_end(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("The block has a name.", special=False)
    async with an_edge(tokenizer, Play(words)) as edge, edge.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=len(words), stream=True
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks]
    assert len(chunks) == len(words) + 1
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * len(words)
    assert "".join(choice.delta.content or "" for choice in choices) == "The block has a name."
    assert [choice.finish_reason for choice in choices] == [None] * len(words) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
