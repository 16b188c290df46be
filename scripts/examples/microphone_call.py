#!/usr/bin/env python3
"""A call from a terminal: your microphone and loudspeaker (use headphones), the agent's words as text.

    pip install sounddevice
    python scripts/examples/microphone_call.py http://localhost:8080 [voice]

`pip` and `python` are the environment's: `.venv/bin/python`, if it is not active. Ctrl-C hangs up.
"""

import asyncio
import sys
from collections import deque

import numpy as np

from webrtc_duplex.audio import CHUNK_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.client import Call, connect

try:
    import sounddevice
except ImportError:
    raise SystemExit("sounddevice is wanted, and not there: pip install sounddevice") from None

PLAYOUT_CHUNKS = 10
"""200 ms of the agent's sound may wait to be played; then the oldest goes."""


async def talk(url: str, voice: str | None) -> None:
    loop = asyncio.get_running_loop()
    spoken: asyncio.Queue[Pcm] = asyncio.Queue(50)
    waiting: deque[Pcm] = deque(maxlen=PLAYOUT_CHUNKS)

    def on_sound(heard: Pcm, played: Pcm, *_: object) -> None:
        """On the sound card's own thread: 20 ms in, 20 ms out."""
        loop.call_soon_threadsafe(_put, spoken, heard[:, 0].copy())
        played[:, 0] = waiting.popleft() if waiting else 0

    device = sounddevice.Stream(SAMPLE_RATE, CHUNK_SAMPLES, channels=1, dtype="int16", callback=on_sound)
    async with connect(url, voice=voice) as call, asyncio.TaskGroup() as tasks:
        with device:
            tasks.create_task(_speak(call, spoken))
            tasks.create_task(_show(call))
            async for sound in call.sound():
                waiting.append(sound.pcm if len(sound.pcm) == CHUNK_SAMPLES else np.resize(sound.pcm, CHUNK_SAMPLES))


def _put(spoken: "asyncio.Queue[Pcm]", chunk: Pcm) -> None:
    if not spoken.full():
        spoken.put_nowait(chunk)


async def _speak(call: Call, spoken: "asyncio.Queue[Pcm]") -> None:
    while not call.over.is_set():
        await call.send(await spoken.get())


async def _show(call: Call) -> None:
    async for event in call.events():
        if event.type == "response.output_audio_transcript.delta":
            sys.stdout.write(event.body["delta"])
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        asyncio.run(talk(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
    except KeyboardInterrupt:
        pass
