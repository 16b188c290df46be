"""EchoRunner: each frame comes back as it was heard. No weights, no torch: for networks, pages and tests."""

import numpy as np
from numpy.typing import NDArray

from webrtc_duplex.audio import Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import ModelCard, Prompt


class EchoRunner:
    """The engine's model interface around nothing: a row has no state."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.card = ModelCard(
            name="echo", voices=(), default_voice=None, takes_text=False, max_text_chars=0, pieces=("",)
        )

    def load_prompt(self, prompt: Prompt) -> int:
        """Nothing to prefill. Raises RequestError where something is asked of an echo."""
        if prompt.voice is not None:
            raise RequestError("an echo has no voice of its own", param="voice")
        if prompt.text:
            raise RequestError("an echo takes no text prompt", param="instructions")
        return 0

    def begin(self, row: int, prompt: Prompt) -> int:
        return 0

    def prefill(self, row: int, columns: int) -> int:
        return 0

    def reset(self, row: int) -> None:
        pass

    def fill(self, row: int) -> None:
        pass

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        return pcm.copy(), np.zeros(len(rows), np.int64), np.ones(len(rows), np.bool_)
