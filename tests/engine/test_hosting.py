"""An engine as an instance hosts it: sized by defaults, tested, refused when it could never serve."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine import hosting
from engine.api import Draw, Row, Sampling
from engine.config import ComputeSettings
from engine.hosting import CONTEXTS, host_engine, kind_of
from engine.manifest import open_model
from tests.tiny import tiny_model


async def test_the_defaults_take_all_cores_and_make_room_for_whole_contexts(tmp_path: Path):
    settings = ComputeSettings(model=str(tiny_model(tmp_path)), dtype="float32", context_tokens=64)
    model = open_model(settings)
    engine = await host_engine(model, settings)
    try:
        assert engine.pages == CONTEXTS * 64 // settings.block_tokens
        drawn = await engine.step([Row([5, 6, 7], 0, [0], [Draw(Sampling(temperature=0.0), [5, 6, 7], [])])])
        assert len(drawn[0]) == 1
    finally:
        engine.close()


async def test_pages_for_less_than_one_context_are_refused_with_both_numbers(tmp_path: Path):
    settings = ComputeSettings(model=str(tiny_model(tmp_path)), context_tokens=64, pages=3)
    with pytest.raises(ValueError, match=r"pages is 3.*64 tokens takes 4"):
        await host_engine(open_model(settings), settings)


def test_a_kind_is_the_machine_and_how_it_computes():
    settings = ComputeSettings(threads=2)
    assert kind_of(settings) == kind_of(replace(settings, pages=7))
    assert (
        len(
            {kind_of(settings), kind_of(replace(settings, threads=1)), kind_of(replace(settings, dtype="float32"))}
        )
        == 3
    )
    assert kind_of(replace(settings, kind="rack 7")) == "rack 7"


def test_a_system_that_does_not_tell_its_processor_has_a_kind_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(hosting, "CPU_FACTS", tmp_path / "none")
    assert kind_of(ComputeSettings(threads=2)).endswith("2 threads, bfloat16")
