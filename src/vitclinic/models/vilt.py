"""Weights of ViLT [Kim et al. 2021] as transformers names them, by the names of a ViT and of its words.

Its transformer is a ViT, so that those weights go where any ViT's do. What reads the words, tells the kinds of tokens
apart and pools them belongs to the head (`models.questions.Answerer`); the answers' classifier is left out, since its
answers have an order of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

State = dict[str, Tensor]

_WORDS = "embeddings.text_embeddings.word_embeddings.weight"
_TEXT = "embeddings.text_embeddings"
_BLOCK = {
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}
MEAN = STD = [0.5, 0.5, 0.5]
"""What ViLT normalizes images with."""


def is_vilt(state: State) -> bool:
    """Return True if these are the weights of a ViLT of transformers."""
    return _WORDS in state or f"vilt.{_WORDS}" in state


def convert_vilt(state: State) -> tuple[State, State]:
    """Return the weights of the transformer by timm's names, and those of the head by ours.

    The type of a text token, of which a question has one, is added to its position, as the network does.
    """
    state = {name.removeprefix("vilt."): value for name, value in state.items()}
    backbone = {
        "cls_token": state["embeddings.cls_token"],
        "pos_embed": state["embeddings.position_embeddings"],
    }
    head = {
        "words.tokens.weight": state[_WORDS],
        "words.positions": (
            state[f"{_TEXT}.position_embeddings.weight"] + state[f"{_TEXT}.token_type_embeddings.weight"][0]
        )[None],
        "kinds": state["embeddings.token_type_embeddings.weight"][:2],
    }
    for part in ("weight", "bias"):
        backbone[f"patch_embed.proj.{part}"] = state[f"embeddings.patch_embeddings.projection.{part}"]
        backbone[f"norm.{part}"] = state[f"layernorm.{part}"]
        head[f"words.norm.{part}"] = state[f"{_TEXT}.LayerNorm.{part}"]
        if f"pooler.dense.{part}" in state:
            head[f"pooler.{part}"] = state[f"pooler.dense.{part}"]
        depth = sum(name.endswith("layernorm_before.weight") for name in state)
        for number in range(depth):
            theirs, ours = f"encoder.layer.{number}", f"blocks.{number}"
            attention = [state[f"{theirs}.attention.attention.{name}.{part}"] for name in ("query", "key", "value")]
            backbone[f"{ours}.attn.qkv.{part}"] = torch.cat(attention)
            for name, own in _BLOCK.items():
                backbone[f"{ours}.{own}.{part}"] = state[f"{theirs}.{name}.{part}"]
    return backbone, head


def load_head(network: nn.Module, head: State) -> tuple[list[str], list[str]]:
    """Put the weights of a head that fit into a network with that head.

    Positions of longer questions than the network reads are cut off.

    Returns:
        What was loaded, and sentences on what was not.
    """
    wanted, loaded, notices = network.state_dict(), {}, []
    for name, value in head.items():
        if name not in wanted:
            notices.append(f"{name} has no place in the task's head")
            continue
        fitting = value[:, : wanted[name].shape[1]] if name == "words.positions" else value
        if fitting.shape == wanted[name].shape:
            loaded[name] = fitting
        elif name == "words.tokens.weight":
            notices.append(
                f"the words are new: the weights have {len(value):,} and the data {len(wanted[name]):,}; give the"
                " tokens of the weights as data.vocabulary (their vocab.txt)"
            )
        else:
            notices.append(f"{name} is new: {list(value.shape)} in the weights, {list(wanted[name].shape)} here")
    network.load_state_dict(loaded, strict=False)
    return list(loaded), notices
