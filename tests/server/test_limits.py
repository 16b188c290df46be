"""How often one may ask."""

import pytest

from webrtc_duplex.errors import RequestError
from webrtc_duplex.server import limits
from webrtc_duplex.server.limits import Bucket, Rate


def test_a_bucket_is_full_at_first_and_fills_with_time() -> None:
    bucket = Bucket(per_s=10, burst=10, now=0.0)
    assert [bucket.take(0.0) for _ in range(11)] == [True] * 10 + [False]
    assert not bucket.take(0.05) and bucket.take(0.15) and not bucket.take(0.15)


def test_ten_seconds_worth_may_be_used_at_once_and_no_more() -> None:
    rate = Rate(60)
    for _ in range(10):
        rate.take("a", 0.0)
    with pytest.raises(RequestError) as refusal:
        rate.take("a", 0.0)
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    assert refusal.value.retry_after_s == pytest.approx(1.0)


def test_the_allowance_comes_back_with_time() -> None:
    rate = Rate(60)
    for _ in range(10):
        rate.take("a", 0.0)
    rate.take("a", 1.0)
    with pytest.raises(RequestError):
        rate.take("a", 1.5)


def test_one_asker_does_not_use_up_anothers() -> None:
    rate = Rate(1)
    rate.take("a", 0.0)
    rate.take("b", 0.0)


def test_askers_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ASKERS", 2)
    rate = Rate(1)
    for asker in "abc":
        rate.take(asker, 0.0)
    rate.take("a", 0.0)
    with pytest.raises(RequestError):
        rate.take("c", 0.0)
