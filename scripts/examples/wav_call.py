#!/usr/bin/env python3
"""WAV in, WAV out, through a running server.

    python scripts/examples/wav_call.py question.wav answer.wav --url http://localhost:8080

`python` is the environment's: `.venv/bin/python`, if it is not active.

The answer is stereo: left what was said, right what the agent said, as they would be heard together.
"""

import argparse
import asyncio
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from webrtc_duplex.audio import CHUNK_S, CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.client import ReceivedSound, connect


async def converse(url: str, said: Pcm, more_s: float) -> Pcm:
    """Say it all after a second, listen for `more_s` longer; returns both voices, [samples, 2]."""
    said = np.concatenate([np.zeros(SAMPLE_RATE, np.int16), said])  # the agent may still be picking up
    async with connect(url) as call:
        sounds = aiter(call.sound())
        heard = [await anext(sounds)]
        listening = asyncio.create_task(_listen(sounds, heard))
        await call.send(said)
        await asyncio.sleep(1 + more_s)  # up to a second of what was said waits in the microphone
        listening.cancel()
    return laid_together(said, heard)


async def _listen(sounds: AsyncIterator[ReceivedSound], heard: list[ReceivedSound]) -> None:
    async for sound in sounds:
        heard.append(sound)


def laid_together(said: Pcm, heard: list[ReceivedSound]) -> Pcm:
    """Each packet's sound where it came to be heard; silence that was not sent is silence."""
    length = max(len(said), round((heard[-1].at - heard[0].at) / CHUNK_S + 1) * CHUNK_SAMPLES)
    both = np.zeros((length, 2), np.int16)
    both[: len(said), 0] = said
    for sound in heard:
        place = (sound.timestamp - heard[0].timestamp) % 2**32 * SAMPLE_RATE // 48_000
        both[place : place + len(sound.pcm), 1] = sound.pcm[: max(0, length - place)]
    return both


def read(path: Path) -> Pcm:
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLE_RATE, 1, 2):
            raise SystemExit(f"{path} must be mono, 16 bit, {SAMPLE_RATE} Hz (sox in.wav -r 24000 -c 1 -b 16 out.wav)")
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def write(path: Path, pcm: Pcm) -> None:
    with wave.open(str(path), "wb") as file:
        file.setframerate(SAMPLE_RATE)
        file.setsampwidth(2)
        file.setnchannels(pcm.shape[1])
        file.writeframes(pcm.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--more", type=float, default=5.0, help="seconds to listen after the last word")
    options = parser.parse_args()
    write(options.answer, asyncio.run(converse(options.url, read(options.question), options.more)))


if __name__ == "__main__":
    main()
