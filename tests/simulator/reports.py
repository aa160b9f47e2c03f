"""Reports of runs that never ran, for tables and plots."""

from simulator.record import Outcome, Series
from simulator.report import Report, report_of
from simulator.setup import Setup
from simulator.workload import Arrival


def arrival(number: int) -> Arrival:
    """Two a second, lengths from all classes."""
    return Arrival(number / 2, (2_000, 10_000, 40_000, 90_000)[number % 4], 10, [number])


def a_report(refuse_every: int = 5, setup: Setup | None = None) -> Report:
    """100 requests over 200 samples; every `refuse_every`-th is refused after its prefill."""
    outcomes, series = [], Series()
    for one in map(arrival, range(100)):
        if one.blocks[0] % refuse_every == 0:
            end_s = one.at_s + 2
            outcomes.append(Outcome(one.at_s, one.tokens, 0, one.priority, end_s, refused="tbt", prefill_s=1.0))
        else:
            first_s = one.at_s + 1 + one.tokens / 10_000
            outcomes.append(
                Outcome(
                    one.at_s,
                    one.tokens,
                    one.output,
                    one.priority,
                    end_s=first_s + 0.5,
                    prefill_s=one.tokens / 10_000,
                    reused=512,
                    first_token_s=first_s,
                    tpot_s=0.04,
                    tbt_s=0.05,
                )
            )
    for second in range(200):
        copies = [min(8, 1 + second // 20), min(8, 1 + second // 40)]
        series.sample(second, (0.5, 0.9), 20, 3, 1, second // refuse_every, second / 10, copies)
    return report_of(setup or Setup(), outcomes, series)
