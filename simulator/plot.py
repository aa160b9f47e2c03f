"""Pictures for people, drawn from reports: each function writes a PNG file and returns its path."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from simulator.report import Report

if TYPE_CHECKING:  # an optional extra: needed only to draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito's palette, which color-blind readers tell apart; grey for its yellow, too pale for a line."""
DASHES = ("-", "--", "-.", ":")
"""A second difference between lines, for more lines than colors and for prints in grey."""
DPI = 130
WIDTH, ROW = 9.0, 2.6
"""Inches of a picture, and of a panel's height."""
LEGEND_LETTERS = 100
"""That fit beside each other in a legend; more labels make more lines."""
RATE_S = 60
"""Refusals and wasted time are drawn per minute: a second's are mostly none or one."""
BEYOND = 4.0
"""Latencies are drawn up to so many times their limit: how far beyond it one comes is not worth the room."""
HOT = (1, 10, 100)
"""Copies are drawn as the mean of so many of the hottest blocks."""


Lines = dict[str, tuple[Sequence[float], Sequence[float]]]
"""x and y by label."""


class NoMatplotlib(Exception):
    """The optional extra is not installed; the text says how to get it."""


def require_matplotlib() -> None:
    """Raises NoMatplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise NoMatplotlib(
            "plots need matplotlib: `make sim` installs it, or pip install 'dango-serve[sim]'"
        ) from error


def draw_runs(reports: Mapping[str, Report], folder: Path) -> list[Path]:
    """Everything that there is to see of some runs: one picture a subject, all runs in each."""
    pictures = [
        draw_distributions(reports, folder / "latency.png"),
        draw_loads(reports, folder / "load.png"),
        draw_refusals(reports, folder / "refusals.png"),
    ]
    if len(reports) > 1:
        pictures.append(draw_figures(reports, folder / "figures.png"))
    if any(hot for report in reports.values() for hot in report["series"]["copies"]):
        pictures.append(draw_copies(reports, folder / "copies.png"))
    return pictures


def draw_distributions(reports: Mapping[str, Report], path: Path) -> Path:
    """Which share of requests has at most which TTFT and which TBT, with the limits."""
    figure = _figure(1.6, "Latency of the requests that were served")
    subjects = (
        ("ttft_s", "ttft_limit_s", "time to first token (s)"),
        ("tbt_s", "tbt_limit_s", "time between tokens (s)"),
    )
    for place, (name, limit, label) in enumerate(subjects, start=1):
        axes = figure.add_subplot(1, 2, place)
        for style, (run, report) in zip(_styles(), reports.items(), strict=False):
            values = report["quantiles"][name]
            axes.plot(values, numpy.linspace(0, 1, len(values)), label=run, **style)
        limits = sorted({report["setup"][limit] for report in reports.values()})
        for value in limits:
            axes.axvline(value, color="0.4", linewidth=1)
            axes.annotate(f"limit {value:g} s", (value, 0.02), rotation=90, ha="right", color="0.3", fontsize=8)
        axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.01), xlim=(0, None))
        axes.set_xlim(0, min(axes.get_xlim()[1], BEYOND * max(limits, default=math.inf)))
    return _saved(figure, path)


def draw_loads(reports: Mapping[str, Report], path: Path) -> Path:
    """Both pools' load over time, a panel a run: predicted latency over its limit, so 1 is all that is allowed."""
    figure = _figure(len(reports), "Load of both pools (predicted latency / limit)")
    first: Axes | None = None
    for place, (run, report) in enumerate(reports.items(), start=1):
        axes = figure.add_subplot(len(reports), 1, place, sharex=first)
        first, series = first or axes, report["series"]
        for color, dash, pool in zip(COLORS, DASHES, ("prefill", "decode"), strict=False):
            axes.plot(
                _minutes(report), series[f"{pool}_load"], color=color, linestyle=dash, linewidth=1.1, label=pool
            )
        axes.axhline(1, color="0.4", linewidth=1)
        axes.set(ylabel="load", ylim=(0, None), title=f"{run}   (S = {report['swing']:.3f})")
    figure.axes[-1].set_xlabel("time (min)")
    return _saved(figure, path)


def draw_refusals(reports: Mapping[str, Report], path: Path) -> Path:
    """Refusals and wasted prefill time over time, all runs in one."""
    figure = _figure(2, "Refusals and wasted prefill over time")
    subjects = (("refused", "refused a minute"), ("wasted_s", "wasted prefill\n(s a minute)"))
    for place, (name, label) in enumerate(subjects, start=1):
        axes = figure.add_subplot(2, 1, place)
        for style, (run, report) in zip(_styles(), reports.items(), strict=False):
            minutes, rates = _per_minute(report, name)
            axes.plot(minutes, rates, label=run, **style)
        axes.set(ylabel=label, ylim=(0, None), xlim=(0, None))
    figure.axes[-1].set_xlabel("time (min)")
    return _saved(figure, path)


def draw_copies(reports: Mapping[str, Report], path: Path) -> Path:
    """On how many segments the hottest blocks are, over time, a panel a run."""
    figure = _figure(len(reports), "Copies of the hottest blocks")
    for place, (run, report) in enumerate(reports.items(), start=1):
        axes = figure.add_subplot(len(reports), 1, place)
        rows = report["series"]["copies"]
        most = max(map(len, rows), default=0)
        padded = numpy.array([[*row, *[0] * (most - len(row))] for row in rows], dtype=float).reshape(
            len(rows), most
        )
        for style, hot in zip(_styles(), [hot for hot in HOT if hot <= most] or [most], strict=False):
            axes.plot(_minutes(report), padded[:, :hot].mean(axis=1), label=f"mean of the hottest {hot}", **style)
        axes.set(ylabel="segments with it", ylim=(0, report["setup"]["prefill"] * 1.05), title=run)
    figure.axes[-1].set_xlabel("time (min)")
    return _saved(figure, path)


def draw_figures(reports: Mapping[str, Report], path: Path) -> Path:
    """Bars by run: goodput, refusals, wasted prefill, hit rate."""
    subjects = (
        ("goodput", "goodput (requests/s)", 1.0),
        ("refused_share", "refused (%)", 100.0),
        ("wasted_share", "prefill wasted (%)", 100.0),
        ("hit_rate", "hit rate (%)", 100.0),
    )
    figure = _figure(1.4 + 0.25 * len(reports), "Figures by run")
    for place, (name, label, times) in enumerate(subjects, start=1):
        axes = figure.add_subplot(2, 2, place)
        _bars(axes, {run: report["summary"][name] * times for run, report in reports.items()})
        axes.set_xlabel(label)
    return _saved(figure, path)


def draw_bars(values: Mapping[str, float], label: str, title: str, path: Path) -> Path:
    """One bar for each name."""
    figure = _figure(0.6 + 0.16 * len(values), title)
    axes = figure.add_subplot(1, 1, 1)
    _bars(axes, values)
    axes.set_xlabel(label)
    return _saved(figure, path)


def draw_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    labels: tuple[str, str],
    title: str,
    path: Path,
    logarithmic: bool = False,
) -> Path:
    """Measured points joined by lines: for each name its x and y; `labels` of the x and the y axis."""
    figure = _figure(1.7, title)
    axes = figure.add_subplot(1, 1, 1)
    for style, (name, (x, y)) in zip(_styles(), lines.items(), strict=False):
        axes.plot(x, y, marker="o", markersize=4, label=name, **style)
    if logarithmic:
        axes.set_xscale("log")
    axes.set(xlabel=labels[0], ylabel=labels[1], ylim=(0, None))
    return _saved(figure, path)


def draw_panels(
    panels: Mapping[str, Lines],
    labels: tuple[str, str],
    title: str,
    path: Path,
    columns: int,
    level: float,
) -> Path:
    """Shares over something, a panel for each name, `columns` in a row, all with equal axes.

    A label has the same style in every panel. `level` is drawn across each.
    """
    rows = -(-len(panels) // columns)
    figure = _figure(1.1 * rows, title)
    all_labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    styles = dict(zip(all_labels, _styles(), strict=False))
    first: Axes | None = None
    for place, (name, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, place, sharex=first, sharey=first)
        first = first or axes
        for label, (x, y) in lines.items():
            axes.plot(x, y, marker="o", markersize=3, label=label, **styles[label])
        axes.axhline(level, color="0.4", linewidth=1)
        axes.set(title=name, ylim=(0, 1.02))
        axes.set_xlabel(labels[0] if place > len(panels) - columns else "")
        axes.set_ylabel(labels[1] if place % columns == 1 or columns == 1 else "")
    return _saved(figure, path)


def _figure(panels: float, title: str) -> "Figure":
    """A figure of its own, without matplotlib's global state. Raises NoMatplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, ROW * panels + 0.8), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=12)
    return figure


def _saved(figure: "Figure", path: Path) -> Path:
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        axes.grid(True, color="0.9", linewidth=0.8, axis="x" if axes.patches else "both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        lines |= zip(labels, handles, strict=True)
    if lines:  # one for all panels, and below them: inside it would hide a line
        columns = max(1, LEGEND_LETTERS // max(map(len, lines)))
        handles, labels = list(lines.values()), list(lines)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of the library in it: equal runs give equal files.
    figure.savefig(path, format="png", metadata={"Software": ""})
    return path


def _styles() -> Iterable[dict[str, Any]]:
    """Endless, each another pair of color and dash as long as there are any."""
    index = 0
    while True:
        yield {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.6}
        index += 1


def _bars(axes: "Axes", values: Mapping[str, float]) -> None:
    """Lying bars, first on top, with their values."""
    bars = axes.barh(list(values), list(values.values()), color=COLORS[0], height=0.65)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _minutes(report: Report) -> NDArray[numpy.float64]:
    return numpy.asarray(report["series"]["at_s"], dtype=numpy.float64) / 60


def _per_minute(report: Report, name: str) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    """What a running total rose by in each minute: middles of the minutes, and the rise."""
    step = max(1, round(RATE_S / report["series"]["every_s"]))
    totals = numpy.asarray(report["series"][name], dtype=numpy.float64)[::step]
    times = _minutes(report)[::step]
    return (times[1:] + times[:-1]) / 2, numpy.diff(totals)
