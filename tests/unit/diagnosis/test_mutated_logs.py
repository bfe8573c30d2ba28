"""A few hundred of the logs that tests/fuzz/mutated_logs.py reads a hundred thousand of."""

from fuzz.mutations import check, logs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@settings(max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(log=logs(), size=st.sampled_from([1_000_000, 4096, 100]))
def test_no_log_raises_and_whatever_is_made_of_it_has_its_form(log, size):
    check(log, size)
