"""What the client sends: paced, bounded, never silent."""

import asyncio

import numpy as np
import pytest
from aiortc.mediastreams import MediaStreamError

from webrtc_duplex.client.microphone import TICKS, WAITING, Microphone
from webrtc_duplex.media.opus import Decoder


class Clock:
    """Runs ahead, so that every packet is due at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


async def loudness(microphone: Microphone, packets: int) -> list[float]:
    """How loud the next packets are, to one who hears them in order."""
    decoder = Decoder()
    heard = [decoder.decode(bytes(await microphone.recv())) for _ in range(packets)]
    return [float(np.abs(pcm.astype(float)).mean()) for pcm in heard if pcm is not None]


async def test_a_microphone_sends_silence_while_nothing_is_said() -> None:
    microphone = Microphone(Clock())
    assert [(await microphone.recv()).pts for _ in range(3)] == [0, TICKS, 2 * TICKS]
    assert max(await loudness(microphone, 3)) < 2
    assert microphone.sent_at is None


async def test_samples_of_any_number_become_packets_of_20_ms() -> None:
    microphone = Microphone(Clock())
    sound = (8000 * np.sin(np.arange(1000) * 0.2)).astype(np.int16)
    await microphone.say(sound[:700])
    await microphone.say(sound[700:])
    first, second, *_, last = await loudness(microphone, 5)
    assert first > 500
    assert second > 500
    assert last < 100  # what rings on in the codec
    assert microphone.sent_at is not None


async def test_who_says_more_than_a_second_waits() -> None:
    microphone = Microphone(Clock())
    saying = asyncio.create_task(microphone.say(np.zeros(480 * (WAITING + 1), np.int16)))
    await asyncio.sleep(0)
    assert not saying.done()
    await microphone.recv()
    await saying


async def test_a_stopped_microphone_says_so() -> None:
    microphone = Microphone(Clock())
    microphone.stop()
    with pytest.raises(MediaStreamError):
        await microphone.recv()
