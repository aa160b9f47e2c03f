"""The index is filled and asked as it says, only smaller."""

from bench.index import PREFIX, SEGMENTS, a_full_index, chain_of, cost_of


def test_every_prompt_is_cached_whole_and_the_memory_of_it_is_told() -> None:
    prompts = 2 * SEGMENTS
    index = a_full_index(prompts)
    index.check()
    assert index.stats().free == 0
    assert all(index.find(chain_of(prompt)).reach == PREFIX for prompt in range(prompts))
    assert index.find(chain_of(prompts)).reach == 0
    cost = cost_of(100 * SEGMENTS * PREFIX, seed=1)
    assert min(cost.find_us, cost.walk_us, cost.lease_us) > 0
    assert 50 < cost.bytes < 1000
