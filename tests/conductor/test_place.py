"""Algorithm 1 on small views: locality against load, fetching, refusing."""

from conductor.ask import Refusal
from conductor.place import Placement, Prompt, place
from conductor.view import Prefilling, Stream, View
from kvcache_pool.api import Found
from protocol.ids import RequestId
from protocol.registry import Load
from tests.conductor.test_view import a_view, the

ALL = ("kvcache-0", "kvcache-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
PROMPT = Prompt(tokens=40, reusable=9)
NOTHING = Found(0, {})


def a_loaded_view(queued: dict[str, int] | None = None, rates: dict[str, float] | None = None) -> View:
    """Two of everything; `queued` tokens placed, `rates` in tokens a second reported."""
    view = a_view(*ALL)
    for name in ("prefill-0", "prefill-1"):
        the(view, name).load = Load(tokens_s=(rates or {}).get(name, 100.0))
    for name, tokens in (queued or {}).items():
        view.enter(the(view, name), (RequestId("earlier"), 0), Prefilling(tokens, 0, tokens / 100, 0.0))
    return view


def placed(view: View, found: Found, threshold: float = 2.0, prompt: Prompt = PROMPT) -> Placement:
    plan = place(view, prompt, found, threshold)
    assert isinstance(plan, Placement)
    return plan


def test_a_warm_instance_wins_only_while_its_queue_is_short():
    found = Found(8, {"kvcache-0": 8, "kvcache-1": 4})
    assert placed(a_loaded_view(), found).prefill.name == "prefill-0"
    assert placed(a_loaded_view({"prefill-0": 500}), found).prefill.name == "prefill-1"


def test_a_much_longer_prefix_elsewhere_is_fetched_and_a_slightly_longer_one_is_not():
    busy = {"prefill-0": 10_000}
    assert placed(a_loaded_view(busy), Found(9, {"kvcache-0": 9, "kvcache-1": 4})).reuse == 9
    assert placed(a_loaded_view(busy), Found(8, {"kvcache-0": 8, "kvcache-1": 4})).reuse == 4
    assert placed(a_loaded_view(busy), Found(8, {"kvcache-0": 8})).reuse == 8


def test_the_last_token_is_never_taken_from_the_cache():
    assert placed(a_loaded_view(), Found(10, {"kvcache-0": 10})).reuse == PROMPT.reusable


def test_the_faster_instance_wins_when_nothing_is_cached():
    view = a_loaded_view(rates={"prefill-0": 50.0, "prefill-1": 200.0})
    assert placed(view, NOTHING).prefill.name == "prefill-1"


def test_an_instance_without_samples_is_taken_for_an_average_one():
    """Were it taken for slow, it would never get work, nor ever a sample."""
    view = a_loaded_view(rates={"prefill-0": 1e6})
    the(view, "prefill-1").load = Load()
    view.enter(the(view, "prefill-0"), (RequestId("earlier"), 0), Prefilling(40, 0, 0.4, 0.0))
    assert placed(view, NOTHING).prefill.name == "prefill-1"


def test_decode_goes_where_the_step_would_be_shortest_counting_what_is_on_its_way():
    view = a_loaded_view()
    for name in ("decode-0", "decode-1"):
        the(view, name).load = Load(running=2, step_s=0.01)
    for n in range(3):
        view.enter(the(view, "decode-0"), (RequestId(f"on its way {n}"), 0), Stream(10, 0.0))
    plan = placed(view, NOTHING)
    assert plan.decode.name == "decode-1"
    assert plan.near == "kvcache-1"


def test_ties_are_broken_by_name():
    plan = placed(a_loaded_view(), NOTHING)
    assert (plan.prefill.name, plan.decode.name) == ("prefill-0", "decode-0")


def test_the_predicted_time_counts_queue_transfer_and_compute():
    view = a_loaded_view({"prefill-0": 100, "prefill-1": 200})
    assert placed(view, NOTHING).ttft_s == (100 + 40) / 100.0
    layout = view.manifest.layout
    fetch = placed(view, Found(9, {}))
    assert fetch.ttft_s == 9 * layout.block_bytes / 2e9 + (100 + 4) / 100.0


def test_an_empty_pool_is_a_refusal_that_names_it():
    for gone, reason in (("prefill", "no_prefill"), ("decode", "no_decode"), ("kvcache", "no_kvcache")):
        view = a_view(*(name for name in ALL if not name.startswith(gone)))
        refusal = place(view, PROMPT, NOTHING, 2.0)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.status) == (reason, 503)
        assert gone in refusal.text
