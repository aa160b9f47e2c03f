"""`dango sim` teaches, writes JSON and plots where it is told to, and answers a mistake with one sentence."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

import simulator.__main__ as command
from simulator import plot
from simulator.experiments import hit_rates
from simulator.flags import add_setup_flags, setup_of
from simulator.parallel import Tell
from simulator.table import described
from tests.simulator.reports import a_report

ROOT = Path(__file__).resolve().parents[2]


class Pretended:
    """An experiment that simulates nothing: the report of a run that never ran, of the setup asked for."""

    ABOUT = "nothing is run"

    def __init__(self, pressed: bool = False) -> None:
        self.pressed = pressed

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_flags(parser)

    def run(self, args: argparse.Namespace, tell: Tell) -> dict[str, Any]:
        if self.pressed:
            raise KeyboardInterrupt
        tell(f"{args.jobs} at once")
        return a_report(setup=setup_of(args))

    def table(self, report: dict[str, Any]) -> str:
        return described(report)

    def draw(self, report: dict[str, Any], folder: Path) -> list[Path]:
        return [plot.draw_loads({"this": report}, folder / "load.png")]


def sim(*words: str, pressed: bool = False) -> int:
    return command.main(words, {"pretend": Pretended(pressed)})


def test_alone_it_lists_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "usage: dango sim" in out
    assert all(f"    {name}" in out for name in command.EXPERIMENTS)


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_each_experiment_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: dango sim {name}" in out
    assert "--plot FOLDER" in out


def test_a_table_is_printed_and_progress_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("pretend", "--jobs", "2") == 0
    out, err = capsys.readouterr()
    assert re.search(r"^refused +20$", out, re.MULTILINE)
    assert err == "dango sim: 2 at once\n"


def test_json_to_stdout_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("pretend", "--decode", "2", "--json", "-") == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["experiment"], body["command"]) == ("pretend", "dango sim pretend --decode 2 --json -")
    assert body["setup"]["decode"] == 2
    assert body["summary"]["refused"] == 20


def test_files_go_where_they_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("pretend", "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "plots")) == 0
    assert json.loads((tmp_path / "run.json").read_text())["experiment"] == "pretend"
    assert (tmp_path / "plots" / "load.png").exists()
    assert f"drew {tmp_path / 'plots' / 'load.png'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--speed", "0"], "speed must be above 0, not 0.0"),
        (["--poisson", "1", "--phase", "rate=2"], "--poisson is one --phase"),
        (["--json", "no/such/folder/run.json"], "no/such/folder/run.json"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("pretend", *words) == 1
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "words", [["fly"], ["pretend", "--wings"], ["pretend", "--jobs", "0"], ["pretend", "--z", "a"]]
)
def test_what_it_does_not_know_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sim(*words)
    assert end.value.code == 2
    assert "usage: dango sim" in capsys.readouterr().err


def test_ctrl_c_ends_it_as_in_a_shell() -> None:
    assert sim("pretend", pressed=True) == 130


def test_commands_in_the_readme_are_understood() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    dango sim (\S[^\n]*?)(?:   .*)?$", text, re.MULTILINE)
    assert len(commands) > 3
    for words in commands:
        command._parser(command.EXPERIMENTS).parse_args(words.split())


def test_rivals_of_lru_are_shown_side_by_side(tmp_path: Path) -> None:
    rates = dict.fromkeys(hit_rates.RULES, 0.25)
    report = {"rivals": {"synthetic": [{"capacity": size, "rates": rates} for size in (1_000, 10_000)]}}
    heading, _, first, _ = hit_rates.table(report).splitlines()
    assert all(rule in heading for rule in hit_rates.RULES)
    assert first.split() == ["synthetic", "1,000", *["0.2500"] * len(hit_rates.RULES)]
    assert [path.name for path in hit_rates.draw(report, tmp_path)] == ["hit-rates-rivals.png"]
    rate = hit_rates.rate_by(("synthetic", 1_000, "length_aware"))
    assert rate == pytest.approx(0.0845, abs=0.001)


def test_hit_rates_are_those_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["hit-rates", "--trace", "synthetic", "--plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" yes") == len(hit_rates.CAPACITIES)
    assert (tmp_path / "hit-rates.png").exists()


def test_a_hit_rate_that_is_not_the_known_one_is_told() -> None:
    row = {"capacity": 1000, "rate": 0.1, "known": 0.045, "agrees": False}
    assert hit_rates.table({"traces": {"conversation": [row]}}).splitlines()[-1].split()[-1] == "NO"


def test_equal_runs_give_equal_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "run",
        "--poisson",
        "2",
        "--limit",
        "12",
        "--prefill",
        "2",
        "--decode",
        "2",
        "--seed",
        "5",
        "--json",
        "-",
    ]
    assert command.main(words) == 0
    first = capsys.readouterr().out
    assert json.loads(first)["summary"]["requests"] == 12
    assert command.main(words) == 0
    assert capsys.readouterr().out == first
