"""Each field of a setup has a flag; what is not given stays as the base has it."""

import argparse
from dataclasses import fields

import pytest

from simulator.flags import add_setup_flags, phase, setup_of
from simulator.setup import BadSetup, Setup
from simulator.synthetic import LogNormal, Phase


def parsed(*words: str, base: Setup | None = None) -> Setup:
    parser = argparse.ArgumentParser()
    add_setup_flags(parser, base)
    return setup_of(parser.parse_args(list(words)), base)


def test_no_flag_gives_the_base() -> None:
    assert parsed() == Setup()
    assert parsed(base=Setup(speed=3, hold=False)) == Setup(speed=3, hold=False)


def test_flags_say_what_the_fields_say() -> None:
    words = "--trace x.jsonl --speed 2 --limit 100 --decode 1 --admission early --no-reserve --no-hold"
    expected = Setup(
        trace="x.jsonl",
        speed=2,
        limit=100,
        decode=1,
        admission="early",
        reserve=False,
        hold=False,
        tbt_limit_s=0.05,
    )
    assert parsed(*words.split(), "--tbt-limit", "0.05") == expected
    assert parsed("--hold", base=Setup(hold=False)).hold


def test_every_field_has_a_flag_with_its_default_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_setup_flags(parser)
    assert {action.dest for action in parser._actions} >= {field.name for field in fields(Setup)}
    assert "(default: 30.0)" in parser.format_help()
    assert "(default: true)" in parser.format_help()


def test_traffic_is_made_by_words() -> None:
    assert parsed("--poisson", "2.5").phases == (Phase(600, 2.5),)
    told = parsed(
        "--phase", "rate=4", "--phase", "rate=8,span=300,cv=3,input=4000,output-sigma=0.5,prefixes=2"
    ).phases
    shifted = Phase(300, 8, cv=3, input=LogNormal(4000), output=LogNormal(343, 0.5), prefixes=2)
    assert told == (Phase(600, 4), shifted)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("span=3", "rate is missing"),
        ("rate=fast", "rate: not a number: 'fast'"),
        ("rate=1,wings=2", "no word 'wings': there are span, rate"),
        ("rate=0", "must be above 0"),
        ("rate", "not a number"),
    ],
)
def test_a_phase_that_makes_no_sense_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=sentence):
        phase(text)


def test_two_ways_to_make_traffic_exclude_each_other() -> None:
    with pytest.raises(BadSetup, match="give the one or the others"):
        parsed("--poisson", "2", "--phase", "rate=1")
    with pytest.raises(BadSetup, match="must be above 0"):
        parsed("--poisson", "0")
