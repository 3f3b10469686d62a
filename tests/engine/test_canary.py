"""What a sane answer looks like."""

from __future__ import annotations

import math

from entrypoint.engine.canary import Kind, judge, liveness_request, request

TEXT = Kind(embedding=False, tokenizer=True, trust=True)
VECTOR = Kind(embedding=True, tokenizer=True, trust=True)


def answer(*tokens: int, logprob: float | None = -0.5) -> dict:
    return {"meta_info": {"output_token_logprobs": [[logprob, token, None] for token in tokens]}}


def test_the_first_sane_answer_becomes_the_reference() -> None:
    verdict = judge(TEXT, answer(5, 9, 2), ())
    assert (verdict.failure, verdict.reference) == (None, (5.0, 9.0, 2.0))
    again = judge(TEXT, answer(5, 8, 2), verdict.reference)
    assert (again.failure, again.reference) == (None, verdict.reference)


def test_nan_is_a_null_or_a_not_finite_logprob_or_the_engines_own_word() -> None:
    assert judge(TEXT, answer(5, logprob=None), ()).failure == "nan"
    assert judge(TEXT, answer(5, logprob=math.nan), ()).failure == "nan"
    assert judge(TEXT, {"meta_info": {"finish_reason": {"matched": "NaN happened"}}}, ()).failure == "nan"


def test_token_zero_repeated_is_degenerate() -> None:
    assert judge(TEXT, answer(0, 0, 0, 0), ()).failure == "degenerate"


def test_one_token_repeated_is_degenerate_only_beside_a_varied_reference() -> None:
    assert judge(TEXT, answer(7, 7, 7), ()).failure is None
    assert judge(TEXT, answer(7, 7, 7), (5.0, 9.0, 2.0)).failure == "degenerate"


def test_an_answer_with_nothing_of_the_reference_is_degenerate() -> None:
    assert judge(TEXT, answer(70, 71, 72, 73), (5.0, 9.0, 2.0, 4.0)).failure == "degenerate"


def test_an_empty_answer_is_degenerate() -> None:
    assert judge(TEXT, {"meta_info": {}}, ()).failure == "degenerate"


def test_dummy_weights_are_only_checked_for_nan() -> None:
    dummy = Kind(embedding=False, tokenizer=False, trust=False)
    assert judge(dummy, answer(0, 0, 0), ()).failure is None
    assert judge(dummy, answer(0, logprob=None), ()).failure == "nan"


def test_embeddings() -> None:
    first = judge(VECTOR, {"embedding": [0.6, 0.8]}, ())
    assert (first.failure, first.reference) == (None, (0.6, 0.8))
    assert judge(VECTOR, {"embedding": [0.6, 0.8]}, first.reference).failure is None
    assert judge(VECTOR, {"embedding": [0.8, -0.6]}, first.reference).failure == "degenerate"
    assert judge(VECTOR, {"embedding": [None, 0.8]}, ()).failure == "nan"
    assert judge(VECTOR, {"embedding": [0.0, 0.0]}, ()).failure == "degenerate"
    assert judge(VECTOR, {"embedding": []}, ()).failure == "degenerate"


def test_requests_carry_text_only_when_the_engine_has_a_tokenizer() -> None:
    assert "text" in request(TEXT)
    assert "input_ids" in request(Kind(False, False, True))
    assert liveness_request(TEXT)["sampling_params"]["max_new_tokens"] == 1
    assert "sampling_params" not in liveness_request(VECTOR)
