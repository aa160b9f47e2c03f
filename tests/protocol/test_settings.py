"""Settings: where a value comes from, what it may be, and that no mistake passes in silence."""

import argparse
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from protocol.settings import SettingsError, add_flags, field_sentences, load_section


@dataclass(frozen=True)
class BaseConfig:
    """What several have in common."""

    listen: str = "tcp://127.0.0.1:0"
    """Where it listens: 100 % local."""


@dataclass(frozen=True)
class SampleConfig(BaseConfig):
    """A service's settings."""

    queue_max: int = 8
    """How many may wait,
    at most."""
    size_bytes: int = 768 << 20
    """Memory."""
    wait_s: float = 1.5
    """How long to wait."""
    quick: bool = True
    """Whether to hurry."""
    kind: Literal["a", "b"] = "a"
    """Which kind."""
    limit: int | None = None
    """A limit, or none."""
    name: str | None = "x"
    """A name, or none."""
    model: str = ""
    """A model."""

    def __post_init__(self) -> None:
        if self.queue_max < 1:
            raise ValueError(f"queue_max must be at least 1, not {self.queue_max}")


def load(
    *argv: str, environ: dict[str, str] | None = None, toml: str | None = None, folder: Path | None = None
) -> SampleConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, SampleConfig)
    file = None
    if toml is not None:
        assert folder is not None
        file = folder / "dango.toml"
        file.write_text(toml)
    return load_section(SampleConfig, "prefill", flags=parser.parse_args(argv), environ=environ or {}, file=file)


def test_defaults() -> None:
    assert load() == SampleConfig()
    assert load_section(SampleConfig, "prefill", environ={"PATH": "x", "DANGO_CACHE": "y"}) == SampleConfig()


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    toml = "[prefill]\nqueue_max = 2\nwait_s = 2\nlimit = 2\nname = '2'\n[decode]\nqueue_max = 99\nother = 1"
    environ = {"DANGO_PREFILL_QUEUE_MAX": "3", "DANGO_PREFILL_WAIT_S": "3", "DANGO_DECODE_LIMIT": "99"}
    got = load("--queue-max", "4", environ=environ, toml=toml, folder=tmp_path)
    assert (got.queue_max, got.wait_s, got.limit, got.name, got.quick) == (4, 3.0, 2, "2", True)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--quick"], "quick", True),
        (["--no-quick"], "quick", False),
        (["--kind", "b"], "kind", "b"),
        (["--limit", "5"], "limit", 5),
        (["--limit", "none"], "limit", None),
        (["--name", "none"], "name", None),
        (["--name", "5"], "name", "5"),
        (["--wait-s", "2"], "wait_s", 2.0),
        (["--wait-s", "1e-3"], "wait_s", 0.001),
        (["--size-bytes", "1024"], "size_bytes", 1024),
        (["--size-bytes", "768MiB"], "size_bytes", 768 << 20),
        (["--size-bytes", "1.5 GiB"], "size_bytes", 3 << 29),
        (["--size-bytes", "2KB"], "size_bytes", 2000),
        (["--size-bytes", "1TB"], "size_bytes", 10**12),
        (["--listen", "ipc://x"], "listen", "ipc://x"),
    ],
)
def test_values_of_flags(flags: list[str], name: str, value: Any) -> None:
    got = getattr(load(*flags), name)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("ON", True), ("1", True), ("No", False), ("0", False)]
)
def test_truths_of_the_environment(text: str, value: bool) -> None:
    assert load(environ={"DANGO_PREFILL_QUICK": text}).quick is value


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[prefil]\n", "dango.toml: unknown section [prefil]; did you mean 'prefill'?"),
        ("[zebra]\n", "unknown section [zebra]; known are conductor, decode, kvcache, prefill, serve"),
        ("[prefill]\nqueue_mx = 1", "dango.toml: [prefill] has no setting 'queue_mx'; did you mean 'queue_max'?"),
        ("prefill = 3", "prefill must be a section, not 3"),
        ("queue_max = 3", "unknown section [queue_max]"),
        ("[prefill", "cannot read the settings file"),
        ("[prefill]\nqueue_max = 'many'", "[prefill]: queue_max must be a whole number, not 'many'"),
        ("[prefill]\nqueue_max = 1.0", "queue_max must be a whole number, not 1.0"),
        ("[prefill]\nqueue_max = true", "queue_max must be a whole number, not True"),
        ("[prefill]\nqueue_max = [1]", "queue_max must be a whole number, not [1]"),
        ("[prefill]\nwait_s = nan", "wait_s must be a number, not nan"),
        ("[prefill]\nwait_s = inf", "wait_s must be a number, not inf"),
        ("[prefill]\nwait_s = true", "wait_s must be a number, not True"),
        ("[prefill]\nquick = 1", "quick must be true or false, not 1"),
        ("[prefill]\nkind = 'c'", "kind must be one of a, b, not 'c'"),
        ("[prefill]\nkind = []", "kind must be one of a, b, not []"),
        ("[prefill]\nname = 5", "name must be text, not 5"),
        ("[prefill]\nsize_bytes = '5 parsecs'", "size_bytes must be a size such as 768MiB, not '5 parsecs'"),
        ("[prefill]\nsize_bytes = '-5'", "size_bytes must be a size"),
        ("[prefill]\nqueue_max = 0", "[prefill] queue_max must be at least 1, not 0"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_place(toml: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(toml=toml, folder=tmp_path)
    assert sentence in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the settings file .*nowhere\.toml"):
        load_section(SampleConfig, "prefill", environ={}, file=tmp_path / "nowhere.toml")


def test_a_mistake_in_the_environment_is_told_with_its_variable() -> None:
    with pytest.raises(SettingsError, match="DANGO_PREFILL_QUEUE_MX; did you mean 'DANGO_PREFILL_QUEUE_MAX'"):
        load(environ={"DANGO_PREFILL_QUEUE_MX": "1"})
    with pytest.raises(SettingsError, match="DANGO_PREFILL_WAIT_S: wait_s must be a number, not 'long'"):
        load(environ={"DANGO_PREFILL_WAIT_S": "long"})
    with pytest.raises(SettingsError, match="DANGO_PREFILL_QUICK: quick must be true or false, not ''"):
        load(environ={"DANGO_PREFILL_QUICK": ""})


def test_a_mistake_on_the_command_line_is_told_with_its_flag() -> None:
    with pytest.raises(SettingsError, match="--queue-max: queue_max must be a whole number, not 'x'"):
        load("--queue-max", "x")
    with pytest.raises(SettingsError, match="--size-bytes: size_bytes must be a size such as 768MiB, not '2kB'"):
        load("--size-bytes", "2kB")
    with pytest.raises(SettingsError, match="--wait-s: wait_s must be a number, not 'nan'"):
        load("--wait-s", "nan")


def test_a_mistake_that_a_better_source_overrides_is_still_told() -> None:
    with pytest.raises(SettingsError, match="DANGO_PREFILL_QUEUE_MAX"):
        load("--queue-max", "4", environ={"DANGO_PREFILL_QUEUE_MAX": "x"})


def test_help_has_every_sentence_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, SampleConfig)
    text = " ".join(parser.format_help().split())
    for words in (
        "Where it listens: 100 % local. (default: tcp://127.0.0.1:0)",
        "How many may wait, at most. (default: 8)",
        "Memory. (default: 768MiB)",
        "Whether to hurry. (default: true)",
        "A limit, or none. (default: none)",
        "A model. (default: empty)",
        "--kind a|b",
        "--no-quick",
    ):
        assert words in text


def test_sentences_of_inherited_fields_too() -> None:
    assert field_sentences(SampleConfig)["listen"] == "Where it listens: 100 % local."
    assert field_sentences(SampleConfig)["queue_max"] == "How many may wait, at most."
    assert len(field_sentences(SampleConfig)) == 9


def test_a_field_without_a_sentence_has_none() -> None:
    @dataclass(frozen=True)
    class BareConfig:
        one: int = 1
        two: int = 2
        """Two."""

    assert field_sentences(BareConfig) == {"two": "Two."}


def test_sections_are_frozen() -> None:
    section = load()
    with pytest.raises(FrozenInstanceError):
        section.queue_max = 3  # type: ignore[misc]


def test_a_variable_of_no_section_is_refused_and_others_are_none_of_our_business() -> None:
    with pytest.raises(SettingsError, match=r"DANGO_PREFIL_THREADS.*DANGO_PREFILL_THREADS"):
        load_section(SampleConfig, "prefill", environ={"DANGO_PREFIL_THREADS": "2"})
    others = {"DANGO_CACHE": "/somewhere", "DANGO_DECODE_THREADS": "2", "PATH": "/bin", "DANGOLANG": "x"}
    assert load_section(SampleConfig, "prefill", environ=others) == load_section(
        SampleConfig, "prefill", environ={}
    )
