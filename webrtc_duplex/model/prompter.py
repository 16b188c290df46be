"""What a caller wishes, made into the prompt of this model: which voice, which words, or why not."""

from dataclasses import dataclass
from typing import NamedTuple

from sentencepiece import SentencePieceProcessor

from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.errors import CheckpointError, RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.model.checkpoint import Checkpoint
from webrtc_duplex.model.personaplex import DELAYS
from webrtc_duplex.model.prompts import PromptColumns, bare_start, system_prompt
from webrtc_duplex.model.voices import VoiceShelf

SYSTEM_TAG = "<system>"


class Wish(NamedTuple):
    """All of a caller's prompt that its columns depend on, defaults filled in: the key of a prompt cache."""

    voice: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Prompter:
    """Prompts for one model."""

    checkpoint: Checkpoint
    shelf: VoiceShelf

    def __post_init__(self) -> None:
        wanted = self.checkpoint.default_voice
        if wanted is not None and wanted not in self.shelf.voices:
            known = ", ".join(self.shelf.voices) or "none"
            raise CheckpointError(f"{self.checkpoint.directory} has no voice {wanted!r}, its default; it has {known}")

    @property
    def default_voice(self) -> str | None:
        """The voice of a caller that names none; None if the model has none."""
        if not self.checkpoint.system_prompt:
            return None
        return self.checkpoint.default_voice or next(iter(self.shelf.voices), None)

    @property
    def max_tokens(self) -> int:
        """Tokens that a text prompt may have: half of the attention window, so that the call has the other half."""
        return self.checkpoint.lm.keys // 2 if self.checkpoint.system_prompt else 0

    def card(self) -> ModelCard:
        """What servers are told of the model."""
        names = pieces(self.checkpoint.tokenizer)
        return ModelCard(
            name=self.checkpoint.name,
            voices=tuple(self.shelf.voices) if self.checkpoint.system_prompt else (),
            default_voice=self.default_voice,
            takes_text=self.checkpoint.system_prompt,
            max_text_chars=self.max_tokens * max(map(len, names)),
            pieces=names,
            delay_s=max(DELAYS) * FRAME_S,
        )

    def wish(self, prompt: Prompt) -> Wish:
        """Fill in the model's defaults. Raises RequestError for what this model has not."""
        text = self.checkpoint.default_text if prompt.text is None else prompt.text.strip()
        if not self.checkpoint.system_prompt:
            if prompt.voice is not None:
                raise RequestError("this model has one voice and no choice of it", param="voice")
            if text:
                raise RequestError("this model takes no text prompt: it was trained without", param="instructions")
        return Wish(self.default_voice if prompt.voice is None else prompt.voice, text)

    def columns(self, wish: Wish) -> PromptColumns:
        """Return the prompt ready for prefill.

        Raises RequestError for an unknown voice or a text too long, CheckpointError for a voice that is unfit.
        """
        if not self.checkpoint.system_prompt:
            return bare_start(self.checkpoint.lm)
        voice = None if wish.voice is None else self.shelf.get(wish.voice)
        return system_prompt(self.checkpoint.lm, voice, self._tokens(wish.text))

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.checkpoint.tokenizer.encode(wrapped(text)) if text else []
        if len(tokens) > self.max_tokens:
            raise RequestError(
                f"the text prompt is {len(tokens)} tokens long, and may be {self.max_tokens}: half of the model's "
                f"window of {self.checkpoint.lm.keys}",
                code="prompt_too_long",
                param="instructions",
            )
        return tokens


def wrapped(text: str) -> str:
    """A persona between the tags of PersonaPlex's training: the same tag before and after."""
    text = text.strip()
    if text.startswith(SYSTEM_TAG) and text.endswith(SYSTEM_TAG):
        return text
    return f"{SYSTEM_TAG} {text} {SYSTEM_TAG}"


def pieces(tokenizer: SentencePieceProcessor) -> tuple[str, ...]:
    """How each text token is shown: '' for the padding and control tokens, a leading space where a word begins."""
    return tuple(_shown(tokenizer, token) for token in range(tokenizer.get_piece_size()))


def _shown(tokenizer: SentencePieceProcessor, token: int) -> str:
    if tokenizer.is_control(token) or tokenizer.is_unknown(token) or tokenizer.is_unused(token):
        return ""
    piece: str = tokenizer.id_to_piece(token)
    if tokenizer.is_byte(token):  # "<0x41>": one byte of UTF-8, a character of its own only in ASCII
        code = int(piece[3:5], 16)
        return chr(code) if code < 0x80 else ""
    return piece.replace("\u2581", " ")
