"""The flags of a simulated run: one for each field of a Setup, with its sentence as help."""

import argparse
import dataclasses
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from conductor.place import PLACEMENTS
from protocol.settings import field_sentences
from simulator.setup import ADMISSIONS, BadSetup, Setup
from simulator.synthetic import LogNormal, Phase

CHOICES = {"placement": tuple(PLACEMENTS), "admission": ADMISSIONS}
PHASE_S = 600.0
"""Length of made traffic unless it is given: some ten times the longest answers."""

WORDS: dict[str, tuple[str, type]] = {
    "span": ("span_s", float),
    "rate": ("rate", float),
    "cv": ("cv", float),
    "on": ("on_s", float),
    "off": ("off_s", float),
    "prefixes": ("prefixes", int),
    "prefix-tokens": ("prefix_tokens", int),
}
"""What `--phase` may say: the word, and the field of a Phase with its type. Lengths are apart, in LENGTHS."""

LENGTHS = {
    "input": ("input", "mean"),
    "input-sigma": ("input", "sigma"),
    "output": ("output", "mean"),
    "output-sigma": ("output", "sigma"),
}
"""Further words of `--phase`: the length in a Phase, and its field."""


def add_setup_flags(parser: argparse.ArgumentParser, base: Setup | None = None) -> None:
    """A flag for every field of a Setup; `base` has the defaults that the help tells.

    What is not given stays None, for `setup_of` to fill.
    """
    base, hints, sentences = base or Setup(), typing.get_type_hints(Setup), field_sentences(Setup)
    group = parser.add_argument_group("the run")
    for field in fields(Setup):
        if field.name == "phases":
            continue
        default = getattr(base, field.name)
        shown = str(default).lower() if isinstance(default, bool) else "none" if default is None else default
        told = f"{sentences[field.name]} (default: {shown})".replace("%", "%%")
        flag = "--" + field.name.removesuffix("_s").replace("_", "-")
        if isinstance(default, bool):
            group.add_argument(
                flag, dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=told
            )
        else:
            kind, choices = _kind(hints[field.name]), CHOICES.get(field.name)
            name = None if choices else field.name.removesuffix("_s").rpartition("_")[2].upper()
            group.add_argument(flag, dest=field.name, type=kind, choices=choices, metavar=name, help=told)
    made = parser.add_argument_group("made traffic, instead of a trace")
    made.add_argument("--poisson", type=float, metavar="RATE", help=f"so many a second for {PHASE_S:g} s")
    made.add_argument(
        "--phase",
        dest="phases",
        action="append",
        type=phase,
        metavar="WORD=VALUE,...",
        help=f"traffic of one kind; several are a shift in mid-run. Words: {', '.join((*WORDS, *LENGTHS))}. "
        "Example: --phase rate=4,span=600 --phase rate=8,span=300,cv=3,input=4000",
    )


def _kind(hint: Any) -> Callable[[str], Any]:
    """`int | None` -> int."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return typing.cast(Callable[[str], Any], kinds[0] if kinds else hint)


def phase(text: str) -> Phase:
    """What one `--phase` says. Raises ArgumentTypeError."""
    given: dict[str, Any] = {"span_s": PHASE_S}
    lengths: dict[str, dict[str, Any]] = {"input": {}, "output": {}}
    for part in text.split(","):
        word, _, value = part.partition("=")
        try:
            if word in WORDS:
                name, kind = WORDS[word]
                given[name] = kind(value)
            elif word in LENGTHS:
                length, name = LENGTHS[word]
                lengths[length][name] = float(value)
            else:
                raise argparse.ArgumentTypeError(f"no word {word!r}: there are {', '.join((*WORDS, *LENGTHS))}")
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{word}: not a number: {value!r}") from error
    defaults = {field.name: field.default for field in fields(Phase)}
    for length, changed in lengths.items():
        default = defaults[length]
        assert isinstance(default, LogNormal)
        given[length] = dataclasses.replace(default, **changed)
    try:
        return Phase(**given)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError("rate is missing" if "rate" not in given else str(error)) from error


def setup_of(args: argparse.Namespace, base: Setup | None = None) -> Setup:
    """The base with what the command line gives. Raises BadSetup."""
    names = [field.name for field in fields(Setup) if field.name != "phases"]
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.poisson is not None and args.phases:
        raise BadSetup("--poisson is one --phase: give the one or the others")
    if args.poisson is not None:
        given["phases"] = (phase(f"rate={args.poisson}"),) if args.poisson > 0 else ()
        if not given["phases"]:
            raise BadSetup("--poisson must be above 0")
    elif args.phases:
        given["phases"] = tuple(args.phases)
    return dataclasses.replace(base or Setup(), **given)
