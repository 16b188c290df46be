"""Names of calls, and the places in them."""

import pytest

from webrtc_duplex.errors import CallNotFoundError
from webrtc_duplex.server.places import Places


def test_a_call_is_found_by_the_place_in_its_name() -> None:
    here = Places("a1", b"key")
    call_id = here.new_call_id()
    assert call_id.startswith("rtc_a1")
    assert Places("b2", b"key").place_of(call_id) == "a1"
    here.require_here(call_id)


def test_names_do_not_repeat() -> None:
    places = Places("0", b"key")
    assert len({places.new_call_id() for _ in range(1000)}) == 1000


@pytest.mark.parametrize("name", ["", "rtc_", "rtc_0_1", "../etc/passwd", "rtc_0aaaaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaa"])
def test_a_name_that_no_place_has_made_is_unknown(name: str) -> None:
    with pytest.raises(CallNotFoundError) as refusal:
        Places("0", b"key").place_of(name)
    assert (refusal.value.status, refusal.value.code) == (404, "call_not_found")


def test_a_place_cannot_be_forged() -> None:
    forged = Places("0", b"another key").new_call_id()
    with pytest.raises(CallNotFoundError):
        Places("0", b"key").place_of(forged)


def test_a_call_of_a_place_that_is_gone_is_lost() -> None:
    call_id = Places("old", b"key").new_call_id()
    with pytest.raises(CallNotFoundError) as refusal:
        Places("new", b"key").require_here(call_id)
    assert (refusal.value.status, refusal.value.code) == (410, "call_lost")


def test_a_place_is_letters_and_digits() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        Places("a_b", b"key")
