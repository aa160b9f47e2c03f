"""A run as JSON-ready figures: what tables and plots are made of, small enough to hand between processes."""

from collections.abc import Sequence
from typing import Any

import numpy

from simulator.record import Outcome, Series, summarize
from simulator.setup import Setup

Report = dict[str, Any]
"""`setup`, `summary`, `swing`, `quantiles` ({"ttft_s": [...], "tbt_s": [...]}) and `series`."""

QUANTILES = 201
"""Points of a distribution, equally far apart from least to most: a curve that looks smooth, and shows a p99.5."""


WARM_S = 60.0
"""Of the start, left out of `swing`, as is what comes after the last arrival: pools that fill once and empty once
do not swing."""


def report_of(setup: Setup, outcomes: Sequence[Outcome], series: Series) -> Report:
    """What a run came to."""
    answered = [one for one in outcomes if one.first_token_s is not None]
    return {
        "setup": setup.body(),
        "summary": summarize(outcomes, setup.limits).body(),
        "swing": series.swing(WARM_S, max((one.at_s for one in outcomes), default=0.0)),
        "quantiles": {
            "ttft_s": _quantiles([one.ttft_s for one in answered]),
            "tbt_s": _quantiles([one.tbt_s for one in answered if one.output > 1]),
        },
        "series": series.body(),
    }


def _quantiles(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    return [float(value) for value in numpy.quantile(values, numpy.linspace(0, 1, QUANTILES))]
