"""Stage: the checkpoint directory, as the package ships it and its loader reads it."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.train_tiny.codes import CODEC_KEYS, Tables, as_tensor, load_tables
from scripts.train_tiny.decoder import round_decoder
from scripts.train_tiny.lm import Sizes
from scripts.train_tiny.sentences import ANSWERS, DEFAULT_TEXT, GREETINGS, INTERRUPTION, QUESTION, ROLES
from scripts.train_tiny.store import Weights, load_codec
from scripts.train_tiny.tokenizer import pieces, write_tokenizer
from scripts.train_tiny.voices import AGENT_VOICES
from scripts.train_tiny.work import Work

SAMPLING = {"text_temperature": 0.45, "text_top_k": 25, "audio_temperature": 0.1, "audio_top_k": 50}
VOICE_SENTENCE = "I am fine, thank you. And you?"


def export(work: Work, directory: Path) -> None:
    """Write the checkpoint of this run into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tables, sizes = load_tables(work), Sizes()
    language = {name: tensor.bfloat16() for name, tensor in _language(work).items()}
    save_file(language, directory / "model.safetensors")
    save_file(compact(_codec(work)), directory / "mimi.safetensors")
    write_tokenizer(directory / "tokenizer.model")
    _write(directory / "config.json", lm_config(sizes, tables))
    _write(directory / "mimi_config.json", codec_config(sizes))
    (directory / "voices").mkdir(exist_ok=True)
    for voice in AGENT_VOICES:
        codes = as_tensor(tables.sentences[voice][VOICE_SENTENCE].T)
        save_file({"codes": codes}, directory / "voices" / f"{voice}.safetensors")
    for path in directory.rglob("*.safetensors"):
        path.chmod(0o644)
    lines = [("kind", "text", "roles", "intent"), *sentences()]
    (directory / "sentences.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))
    shutil.copy(Path(__file__).with_name("MODEL_CARD.md"), directory)


def _language(work: Work) -> Weights:
    """The trained weights, or the last checkpoint of a training that still runs."""
    done = work.path("lm.pt")
    if done.exists():
        return dict(torch.load(done))
    return dict(torch.load(work.path("checkpoints/lm.pt"), weights_only=False)["tensors"])


def _codec(work: Work) -> Weights:
    done = work.path("codec.pt")
    return dict(torch.load(done)) if done.exists() else round_decoder(load_codec(work))


def compact(codec: Weights) -> Weights:
    """All but the codebooks in bfloat16: their values have been rounded to it before, so nothing is lost."""
    return {name: _stored(name, tensor) for name, tensor in codec.items()}


def _stored(name: str, tensor: Tensor) -> Tensor:
    if "_codebook" in name:
        return tensor.float().contiguous()
    return tensor.to(torch.bfloat16).contiguous()


def lm_config(sizes: Sizes, tables: Tables) -> dict[str, object]:
    """`config.json`: the family's names, and our own for codes, sampling and prompts."""
    return {
        "dim": sizes.dim,
        "text_card": len(pieces()),
        "existing_text_padding_id": 3,
        "n_q": 16,
        "dep_q": 8,
        "card": sizes.card,
        "num_heads": sizes.heads,
        "num_layers": sizes.layers,
        "hidden_scale": sizes.feedforward / sizes.dim,
        "causal": True,
        "layer_scale": None,
        "context": sizes.keys,
        "max_period": 10000,
        "gating": "silu",
        "norm": "rms_norm_f32",
        "positional_embedding": "rope",
        "depformer_dim": sizes.depformer_dim,
        "depformer_dim_feedforward": sizes.depformer_feedforward,
        "depformer_num_heads": sizes.depformer_heads,
        "depformer_num_layers": sizes.depformer_layers,
        "depformer_layer_scale": None,
        "depformer_multi_linear": True,
        "depformer_context": 8,
        "depformer_max_period": 10000,
        "depformer_gating": "silu",
        "depformer_pos_emb": "none",
        "depformer_weights_per_step": True,
        "delays": [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1],
        "silence_codes": tables.silence[0, 0].tolist(),
        "sine_codes": tables.sine.tolist(),
        "sampling": SAMPLING,
        "system_prompt": True,
        "default_voice": AGENT_VOICES[0],
        "default_text": DEFAULT_TEXT,
    }


def codec_config(sizes: Sizes) -> dict[str, object]:
    """`mimi_config.json`."""
    return {
        "sample_rate": 24000,
        "channels": 1,
        "frame_rate": 12.5,
        "seanet": {
            "channels": 1,
            "dimension": 128,
            "causal": True,
            "n_filters": 16,
            "n_residual_layers": 1,
            "activation": "ELU",
            "compress": 2,
            "dilation_base": 2,
            "disable_norm_outer_blocks": 0,
            "kernel_size": 7,
            "residual_kernel_size": 3,
            "last_kernel_size": 3,
            "norm": "none",
            "pad_mode": "constant",
            "ratios": [8, 6, 5, 4],
            "true_skip": True,
        },
        "quantizer": {
            "dimension": 32,
            "n_q": 8,
            "bins": sizes.card,
            "input_dimension": 128,
            "output_dimension": 128,
        },
        "transformer": {
            "d_model": 128,
            "num_heads": 4,
            "num_layers": 2,
            "causal": True,
            "layer_scale": 0.1,
            "context": CODEC_KEYS,
            "conv_layout": True,
            "max_period": 10000,
            "gating": "none",
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "dim_feedforward": 256,
            "input_dimension": 128,
            "output_dimensions": [128],
        },
    }


def sentences() -> list[tuple[str, str, str, str]]:
    """All that the agent says: kind (greet, answer, sorry, idle), text, roles that say it, intent that it answers."""
    rows: dict[str, tuple[str, str, str]] = {}
    for role in ROLES:
        said = [("greet", "", text) for text in GREETINGS[role]]
        for intent, texts in ANSWERS[role].items():
            said += [("sorry" if intent == INTERRUPTION else "answer", intent, text) for text in texts]
        said.append(("idle", "", QUESTION))
        for kind, intent, text in said:
            roles = f"{rows[text][1]},{role}" if text in rows else role
            rows[text] = (kind, roles, intent)
    return [(kind, text, roles, intent) for text, (kind, roles, intent) in rows.items()]


def _write(path: Path, entry: dict[str, object]) -> None:
    path.write_text(json.dumps(entry, indent=1) + "\n")
