"""The examples, run against an echo: what was said comes back."""

from pathlib import Path

import numpy as np
import pytest

from scripts.examples import wav_call
from scripts.stress_peers import hum
from tests.listening import likeness
from tests.server.served import serving
from webrtc_duplex.audio import SAMPLE_RATE


async def test_a_wav_goes_in_and_a_wav_comes_out(tmp_path: Path) -> None:
    said = hum(2.0)
    async with serving(tmp_path) as http:
        both = await wav_call.converse(str(http.make_url("")), said, more_s=0.5)
    wav_call.write(tmp_path / "answer.wav", both)
    assert np.array_equal(both[SAMPLE_RATE : SAMPLE_RATE + len(said), 0], said)
    coefficient, delay = likeness(both[:, 0], both[:, 1])
    assert coefficient > 0.5
    assert 0 < delay < SAMPLE_RATE


def test_a_wav_of_another_rate_is_refused_with_the_way_to_mend_it(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    wav_call.write(path, np.zeros((10, 2), np.int16))
    with pytest.raises(SystemExit, match="sox"):
        wav_call.read(path)
