"""vLLM's own figures, in the text form that Prometheus reads."""

import pytest

from aerie.engine_metrics import EngineMetrics, Serving, Speculation, Steps, read_metrics

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="k {2} 9"} 3.0
vllm:num_requests_running{engine="1",model_name="k"} 1.0
vllm:num_requests_waiting{engine="0",model_name="k"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="k",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="k"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="k"} 0.125
vllm:prompt_tokens_total{engine="0",model_name="k"} 640.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="k",source="local_compute"} 640.0
vllm:generation_tokens_total{engine="0",model_name="k"} 1.2e+03
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="k"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="k"} 41.0
vllm:iteration_tokens_total_sum{engine="0",model_name="k"} 1840.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="k"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="k"} 1e+01
vllm:spec_decode_num_drafts_created{engine="0",model_name="k"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="k"} 330.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="k"} 165.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="k",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="k",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="k",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="k",position="2"} 26.0
process_cpu_seconds_total 12.5
"""
SPECULATION = Speculation(110, 330, 165, (99, 40, 26))


def test_each_engine_has_its_steps_and_all_else_is_summed():
    metrics = read_metrics(METRICS)
    assert metrics == EngineMetrics(
        engines={"0": Steps(41, 3, 7, 0.25), "1": Steps(0, 1, 0, 0.125)},
        prompt_tokens=640,
        generation_tokens=1200,
        speculation=SPECULATION,
    )
    assert (metrics.requests_running, metrics.requests_waiting, metrics.kv_cache_usage) == (4, 7, 0.25)


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 0.0\n", "<html>not metrics</html>"])
def test_an_engine_without_speculation_has_no_counters(text):
    metrics = read_metrics(text)
    assert metrics.speculation is None
    assert (metrics.requests_running, metrics.requests_waiting, metrics.kv_cache_usage) == (0, 0, 0.0)


def test_a_value_that_looks_like_a_label_is_none():
    text = 'vllm:num_requests_running{model_name="x engine=\\"7\\"",engine="0"} 2.0\n'
    assert read_metrics(text).engines == {"0": Steps(requests_running=2)}


def test_labels_may_be_missing():
    assert read_metrics("vllm:num_requests_running 2.0\n").engines == {"": Steps(requests_running=2)}
    assert read_metrics("vllm:spec_decode_num_drafts_total 3.0\n").speculation == Speculation(3, 0, 0)


def test_rates_are_the_difference_of_two_readings():
    earlier = EngineMetrics({}, 140, 1000)
    assert read_metrics(METRICS).serving_since(earlier, 2.0) == Serving(4, 7, 0.25, 100.0, 250.0)


def test_the_acceptance_length_counts_the_targets_own_token():
    assert SPECULATION.acceptance_length == 2.5
    assert str(SPECULATION) == "110 drafts, 165 of 330 drafted tokens accepted, 2.50 tokens a step"


def test_nothing_drafted_has_no_length():
    assert Speculation(0, 0, 0).acceptance_length is None
    assert str(Speculation(0, 0, 0)) == "0 drafts, 0 of 0 drafted tokens accepted"


def test_two_readings_give_what_one_request_did():
    assert SPECULATION - Speculation(100, 300, 150, (90, 36, 24)) == Speculation(10, 30, 15, (9, 4, 2))
    assert (SPECULATION - Speculation(0, 0, 0)).accepted_by_position == (99, 40, 26)
