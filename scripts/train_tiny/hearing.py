"""pocketsphinx, who judges and aligns speech: how sound is put before it."""

import numpy as np
from pocketsphinx import Decoder
from scipy.signal import resample_poly

from scripts.train_tiny.voices import Sound

LISTENER_RATE = 16_000


def listener(**options: object) -> Decoder:
    """A recogniser of 16 kHz sound, with its own model of English."""
    return Decoder(samprate=LISTENER_RATE, loglevel="FATAL", **options)


def as_heard(sound: Sound, before: int = 0, after: int = 0) -> bytes:
    """Sound at 24 kHz as 16-bit PCM at 16 kHz, with so many samples of silence around it."""
    padded: Sound = np.pad(resample_poly(sound, 2, 3), (before, after))
    return (np.clip(padded, -1, 1) * 32767).astype("<i2").tobytes()


def hear(decoder: Decoder, pcm: bytes) -> None:
    """Let it hear all of one utterance."""
    decoder.start_utt()
    decoder.process_raw(pcm, full_utt=True)
    decoder.end_utt()


def spoken_words(text: str) -> list[str]:
    """Words as its dictionary spells them."""
    return [word.strip(".,!?").lower() for word in text.split()]
