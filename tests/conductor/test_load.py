"""The share of what the limits allow that a pool carries."""

import pytest

from conductor.ask import NO_LIMITS
from conductor.load import pool_load
from conductor.view import Prefilling
from protocol.ids import RequestId
from protocol.registry import Pool
from tests.conductor.test_admit import LIMITS, busy
from tests.conductor.test_forecast import NOW, SameForAll, a_pool, coming, enter
from tests.conductor.test_view import the


def test_a_pools_load_is_its_predicted_latency_over_the_limit():
    view = busy(10, decodes=2, said=0)
    enter(view, "decode-1", *[coming()] * 50)
    view.enter(the(view, "prefill-0"), (RequestId("p"), 0), Prefilling(1000, 0, 8.0, NOW - 3))
    assert pool_load(view, SameForAll(), Pool.PREFILL, LIMITS, NOW) == pytest.approx(0.5)
    assert pool_load(view, SameForAll(), Pool.DECODE, LIMITS, NOW) == pytest.approx(0.030 / 0.050)
    the(view, "decode-1").streams.clear()
    assert pool_load(view, SameForAll(), Pool.DECODE, LIMITS, NOW) == pytest.approx(0.015 / 0.050)
    assert pool_load(view, SameForAll(), Pool.DECODE, NO_LIMITS, NOW) == 0
    assert pool_load(a_pool(0), SameForAll(), Pool.DECODE, LIMITS, NOW) == 0
