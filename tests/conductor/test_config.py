"""The Conductor's settings: out of range means refused by name."""

from typing import Any

import pytest

from conductor.config import ConductorConfig

BAD: list[tuple[str, list[Any]]] = [
    ("in_flight_max", [0]),
    ("request_s", [0.0]),
    ("drain_s", [-1.0]),
    ("port", [-1, 65536]),
    ("ttft_limit_s", [-0.1]),
    ("tbt_limit_s", [-0.1]),
    ("batch_ttft_limit_s", [-0.1]),
    ("batch_tbt_limit_s", [-0.1]),
    ("refusal_status", [200, 430, 500]),
    ("reserve_z", [-1.0]),
    ("margin", [-0.1]),
    ("hysteresis", [-0.1, 1.0]),
    ("samples_min", [-1]),
    ("residence_s", [-1.0]),
    ("batch_share", [0.0, 1.1]),
    ("held_max", [0]),
    ("held_tokens_max", [0]),
    ("overtaken_max", [-1]),
    ("rescue_share", [-0.1, 1.0]),
    ("batch_age_s", [0.0]),
]


@pytest.mark.parametrize(("name", "values"), BAD, ids=[name for name, _ in BAD])
def test_out_of_range_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} must be .* not {value}"):
            ConductorConfig(**{name: value})


def test_the_ends_of_the_ranges_are_allowed() -> None:
    ConductorConfig(ttft_limit_s=0, tbt_limit_s=0, batch_ttft_limit_s=0, batch_tbt_limit_s=0)
    ConductorConfig(refusal_status=503, samples_min=0, overtaken_max=0, batch_share=1.0)
