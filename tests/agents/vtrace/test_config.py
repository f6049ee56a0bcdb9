import pytest
from pydantic import ValidationError

from hpcrl.agents.vtrace.config import VTraceConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("discount", 1.01),
        ("lambda_", -0.1),
        ("rho_bar", 0.0),
        ("entropy_cost", -1e-3),
        ("reward_clip", -1.0),
        ("value_cost", float("nan")),
        ("dicsount", 0.9),
    ],
)
def test_values_out_of_bounds_and_unknown_names_are_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        VTraceConfig(**{name: value})


def test_c_bar_above_rho_bar_is_refused_with_the_reason():
    with pytest.raises(ValidationError, match=r"c_bar is 2\.0, above rho_bar 1\.0.*contraction"):
        VTraceConfig(c_bar=2.0)
