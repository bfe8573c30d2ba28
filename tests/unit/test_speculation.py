from aerie.speculation import Speculation, read_counters

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="k"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="k"} 1e+01
vllm:spec_decode_num_drafts_created{engine="0",model_name="k"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="k"} 330.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="k"} 165.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 99.0
"""


def test_counters_are_summed_over_engines():
    assert read_counters(METRICS) == Speculation(drafts=110, draft_tokens=330, accepted_tokens=165)


def test_an_engine_without_speculation_has_no_counters():
    assert read_counters('vllm:num_requests_running{engine="0"} 0.0\n') is None


def test_the_acceptance_length_counts_the_targets_own_token():
    assert Speculation(110, 330, 165).acceptance_length == 2.5
    assert str(Speculation(110, 330, 165)) == "110 drafts, 165 of 330 drafted tokens accepted, 2.50 tokens a step"


def test_nothing_drafted_has_no_length():
    assert Speculation(0, 0, 0).acceptance_length is None
    assert str(Speculation(0, 0, 0)) == "0 drafts, 0 of 0 drafted tokens accepted"


def test_two_readings_give_what_one_request_did():
    assert Speculation(110, 330, 165) - Speculation(100, 300, 150) == Speculation(10, 30, 15)
