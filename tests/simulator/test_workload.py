"""Traces are read as they were published, and transforms change only what they say."""

import json
import lzma
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ask import Priority
from simulator.workload import (
    BLOCK_TOKENS,
    Arrival,
    BadTrace,
    equal_prompts,
    load_trace,
    outputs_times,
    prompt_ids,
    share_of_batch,
    sliced,
    sped,
    spread,
    thinned,
)

LINE = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [3, 9]}


def arrivals(*times: float) -> list[Arrival]:
    """One request at each time, each with blocks of its own."""
    return [Arrival(at_s, 600, 10, [2 * n, 2 * n + 1]) for n, at_s in enumerate(times)]


@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "mean_output", "span_s", "longest", "distinct"),
    [
        ("conversation", 12_031, 12_035, 343, 3_537, 126_195, 182_790),
        ("synthetic", 3_993, 15_325, 149, 1_022, 191_378, 43_924),
    ],
)
def test_the_shipped_traces_are_the_published_ones(
    name: str, requests: int, mean_input: int, mean_output: int, span_s: int, longest: int, distinct: int
) -> None:
    trace = load_trace(name)
    assert len(trace) == requests
    assert round(sum(one.tokens for one in trace) / requests) == mean_input
    assert int(sum(one.output for one in trace) / requests + 0.5) == mean_output
    assert round(trace[-1].at_s) == span_s
    assert max(one.tokens for one in trace) == longest
    assert len({block for one in trace for block in one.blocks}) == distinct


def test_a_file_is_read_plain_or_packed(tmp_path: Path) -> None:
    text = "\n".join(json.dumps({**LINE, "timestamp": stamp}) for stamp in (0, 0, 1500)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    read = load_trace(str(tmp_path / "a.jsonl"))
    assert read[2] == Arrival(1.5, 1000, 7, [3, 9])
    assert read == load_trace(str(tmp_path / "a.jsonl.xz"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        (json.dumps({"timestamp": 0}), "input_length is missing"),
        (json.dumps({**LINE, "input_length": 0}), "input_length is not a whole number of at least 1: 0"),
        (json.dumps({**LINE, "output_length": True}), "output_length is not a whole number"),
        (json.dumps({**LINE, "timestamp": -1}), "timestamp is not a number of milliseconds: -1"),
        (json.dumps({**LINE, "timestamp": "1"}), "timestamp is not a number of milliseconds: '1'"),
        (json.dumps({**LINE, "timestamp": float("nan")}), "timestamp is not a number of milliseconds: nan"),
        (json.dumps({**LINE, "hash_ids": [1, 2.5]}), "hash_ids is not a list of whole numbers"),
        (json.dumps({**LINE, "hash_ids": [1, 1 << 32]}), "hash_ids is not a list of whole numbers"),
        (json.dumps({**LINE, "hash_ids": [1]}), "1 hash_ids for 1000 tokens, not 2"),
        (json.dumps({**LINE, "timestamp": 1}), "timestamp is before that of the line above"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n")
    with pytest.raises(BadTrace) as caught:
        load_trace(str(path))
    assert str(caught.value).startswith(f"{path}:2: {sentence}")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="no such trace: there are conversation and synthetic"):
        load_trace("conversations")
    (tmp_path / "a.xz").write_text("plain")
    with pytest.raises(BadTrace, match="not readable as xz"):
        load_trace(str(tmp_path / "a.xz"))
    (tmp_path / "b.xz").write_bytes(lzma.compress(json.dumps(LINE).encode() * 50)[:-8])
    with pytest.raises(BadTrace):
        load_trace(str(tmp_path / "b.xz"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BadTrace, match="no request in it"):
        load_trace(str(tmp_path / "empty"))


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4), st.integers(1, 512))
def test_prompts_are_equal_exactly_as_far_as_their_blocks(left: list[int], right: list[int], last: int) -> None:
    one, other = (
        prompt_ids(Arrival(0.0, BLOCK_TOKENS * len(blocks) + last, 1, [*blocks, 9])) for blocks in (left, right)
    )
    assert len(one) == BLOCK_TOKENS * len(left) + last
    common = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if common is not None:
        assert one[: common * BLOCK_TOKENS] == other[: common * BLOCK_TOKENS]
        assert one[common * BLOCK_TOKENS] != other[common * BLOCK_TOKENS]


def test_a_prompt_of_the_largest_id_is_uint32() -> None:
    ids = prompt_ids(Arrival(0.0, 3, 1, [(1 << 32) - 1]), block_tokens=2)
    assert (ids.typecode, ids.itemsize, list(ids)) == ("I", 4, [(1 << 32) - 1] * 2)


def test_ties_are_spread_over_the_time_to_the_next_stamp_in_order() -> None:
    given_ = arrivals(0, 0, 0, 3, 3, 7, 7)
    told = spread(given_, Random(1))
    assert [one.blocks for one in told] == [one.blocks for one in given_]
    times = [one.at_s for one in told]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    assert [int(at_s) for at_s in times[:3]] == [0, 1, 2], "each in its own third of the 3 s"
    assert all(3 <= at_s < 7 for at_s in times[3:5])
    assert all(7 <= at_s < 11 for at_s in times[5:]), "the last ones take the gap before them"
    assert told == spread(given_, Random(1)) != spread(given_, Random(2))


def test_a_slice_starts_at_zero() -> None:
    given_ = arrivals(0, 1, 2, 3, 4, 5)
    assert [one.at_s for one in sliced(given_, skip=1, limit=2, since_s=1, until_s=5)] == [0, 1]
    assert sliced(given_, skip=1, limit=2, since_s=1)[0].blocks == given_[2].blocks
    assert sliced(given_, since_s=9) == []


def test_speed_and_lengths_of_answers() -> None:
    assert [one.at_s for one in sped(arrivals(0, 4), 2)] == [0, 2]
    assert [one.output for one in outputs_times(arrivals(0), 6)] == [60]
    assert [one.output for one in outputs_times(arrivals(0), 0.01)] == [1]
    assert [one.output for one in outputs_times(arrivals(0), 6, limit=20)] == [20]


def test_equal_prompts_share_nothing_unless_asked() -> None:
    given_ = [Arrival(0, 1500, 1, [0, 1, 2]), Arrival(1, 700, 1, [0, 3]), Arrival(2, 3000, 1, [0, 1, 4, 5, 6, 7])]
    equal = equal_prompts(given_, 2000)
    assert {one.tokens for one in equal} == {2000}
    assert len({block for one in equal for block in one.blocks}) == 12
    kept = [one.blocks for one in equal_prompts(given_, 2000, share=True)]
    assert [blocks[:2] for blocks in kept] == [[0, 1], [0, 3], [0, 1]]
    assert {len(blocks) for blocks in kept} == {4}
    assert len({block for blocks in kept for block in blocks}) == 9, "what is filled up is each one's own"


def test_classes_and_thinning_follow_the_share_and_the_seed() -> None:
    given_ = arrivals(*range(1000))
    batch = sum(one.priority is Priority.BATCH for one in share_of_batch(given_, 0.3, Random(1)))
    assert 250 < batch < 350
    assert share_of_batch(given_, 0.0, Random(1)) == given_
    assert 550 < len(thinned(given_, 0.6, Random(1))) < 650
    assert thinned(given_, 0.6, Random(1)) == thinned(given_, 0.6, Random(1))


def test_a_trace_may_have_blocks_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [4, 5, 6]}')
    [arrival] = load_trace(str(path), 16)
    assert arrival.blocks == [4, 5, 6]
    assert list(prompt_ids(arrival, 16)) == [4] * 16 + [5] * 16 + [6]
    [equal] = equal_prompts([arrival], 40, True, 16)
    assert equal.blocks[:3] == [4, 5, 6]
    with pytest.raises(BadTrace, match="3 hash_ids for 33 tokens, not 1"):
        load_trace(str(path))
