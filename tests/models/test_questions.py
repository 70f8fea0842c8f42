"""The network that answers questions against transformers' ViLT with the same weights, and against its own pieces."""

import pytest
import safetensors.torch
import timm
import torch

from vitclinic._core.errors import ModelError
from vitclinic.data import open_data
from vitclinic.data.text import TextSpec
from vitclinic.models.questions import Answerer
from vitclinic.models.tokens import passing_tokens
from vitclinic.training import build_recipe
from vitclinic.training.init import read_initial_weights
from vitclinic.training.network import build_network
from vitclinic.treatments import treat

TEXT = TextSpec.of_questions(["what colour is the star", "is there a circle", "how many"])
QUESTIONS = ["what colour is the star", "how many"]


def make(**options):
    torch.manual_seed(0)
    keywords = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 0}
    vit = timm.models.VisionTransformer(**{**keywords, **options})
    return Answerer(vit, TEXT, answers=5).double().eval()


def images(count=2):
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_answers_are_those_of_vilt():
    transformers = pytest.importorskip("transformers")
    network = make()
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    shape = {"image_size": 16, "patch_size": 4, "vocab_size": len(TEXT.tokens), "max_position_embeddings": TEXT.length}
    config = transformers.ViltConfig(**size, **shape, num_labels=5, layer_norm_eps=1e-6, max_image_length=-1)
    vilt = transformers.ViltForQuestionAnswering(config).double().eval()
    vilt.load_state_dict(vilt_state(network, vilt.state_dict()))
    vilt.classifier[1].eps = 1e-5
    network.words.norm.eps = 1e-6
    numbers = network.encode(QUESTIONS)
    with torch.no_grad():
        theirs = vilt(
            input_ids=numbers,
            attention_mask=(numbers != TEXT.padding).long(),
            pixel_values=images(),
            pixel_mask=torch.ones(2, 16, 16, dtype=torch.long),
        )
        ours = network(images(), QUESTIONS)
    torch.testing.assert_close(ours, theirs.logits, rtol=1e-9, atol=1e-9)


def test_weights_of_vilt_answer_as_vilt_does(tmp_path):
    """A run that starts from a file of transformers' answers as transformers does, but for the new classifier."""
    transformers = pytest.importorskip("transformers")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["what", "colour", "is", "the", "star", "there", "a", "circle", "how", "many"],
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    shape = {"image_size": 64, "patch_size": 16, "vocab_size": len(words), "max_position_embeddings": 40}
    torch.manual_seed(3)
    config = transformers.ViltConfig(**size, **shape, initializer_range=0.5, max_image_length=-1)
    vilt = transformers.ViltModel(config)
    safetensors.torch.save_file({f"vilt.{k}": v for k, v in vilt.state_dict().items()}, tmp_path / "vilt.safetensors")
    recipe = build_recipe(
        {
            "task": "vqa",
            "model": {"name": "vit_tiny_fitted", "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2},
            "data": {"source": "scenes:8", "vocabulary": str(tmp_path / "vocab.txt")},
            "init": str(tmp_path / "vilt.safetensors"),
        }
    )
    init = read_initial_weights(recipe)
    network, loaded = build_network(recipe, open_data(recipe.data), init)
    assert not loaded.unfit
    assert loaded.found.drawn == ()
    answerer, pictures = network.eval().backbone, torch.rand(2, 3, 64, 64)
    assert network.mean.flatten().tolist() == [0.5] * 3
    numbers = answerer.encode(QUESTIONS)
    with torch.no_grad():
        pooled = torch.tanh(answerer.pooler(answerer.join(pictures, QUESTIONS)[:, 0]))
        theirs = vilt.eval()(
            input_ids=numbers,
            attention_mask=(numbers != answerer.text.padding).long(),
            pixel_values=pictures,
            pixel_mask=torch.ones(2, 64, 64, dtype=torch.long),
        )
    torch.testing.assert_close(pooled, theirs.pooler_output, rtol=1e-3, atol=1e-3)
    other = build_recipe({**recipe.plain(), "data": "scenes:8"})
    (sentence,) = build_network(other, open_data(other.data), init)[1].unfit
    assert "give the tokens of the weights as data.vocabulary" in sentence


def vilt_state(network, theirs):
    """The weights of a network by the names of transformers."""
    vit, found = network.backbone, {}
    with torch.no_grad():
        found["vilt.embeddings.text_embeddings.word_embeddings.weight"] = network.words.tokens.weight
        found["vilt.embeddings.text_embeddings.position_embeddings.weight"] = network.words.positions[0]
        found["vilt.embeddings.text_embeddings.LayerNorm.weight"] = network.words.norm.weight
        found["vilt.embeddings.text_embeddings.LayerNorm.bias"] = network.words.norm.bias
        found["vilt.embeddings.token_type_embeddings.weight"] = network.kinds
        found["vilt.embeddings.cls_token"] = vit.cls_token
        found["vilt.embeddings.position_embeddings"] = vit.pos_embed
        found["vilt.embeddings.patch_embeddings.projection.weight"] = vit.patch_embed.proj.weight
        found["vilt.embeddings.patch_embeddings.projection.bias"] = vit.patch_embed.proj.bias
        for number, block in enumerate(vit.blocks):
            layer = f"vilt.encoder.layer.{number}"
            for part in ("weight", "bias"):
                for name, value in zip(("query", "key", "value"), getattr(block.attn.qkv, part).chunk(3), strict=True):
                    found[f"{layer}.attention.attention.{name}.{part}"] = value
                found[f"{layer}.attention.output.dense.{part}"] = getattr(block.attn.proj, part)
                found[f"{layer}.intermediate.dense.{part}"] = getattr(block.mlp.fc1, part)
                found[f"{layer}.output.dense.{part}"] = getattr(block.mlp.fc2, part)
                found[f"{layer}.layernorm_before.{part}"] = getattr(block.norm1, part)
                found[f"{layer}.layernorm_after.{part}"] = getattr(block.norm2, part)
        for part in ("weight", "bias"):
            found[f"vilt.layernorm.{part}"] = getattr(vit.norm, part)
            found[f"vilt.pooler.dense.{part}"] = getattr(network.pooler, part)
            for number in (0, 1, 3):
                found[f"classifier.{number}.{part}"] = getattr(network.classifier[number], part)
    unused = "vilt.embeddings.text_embeddings.token_type_embeddings.weight"
    return {**found, unused: torch.zeros_like(theirs[unused])}


def test_padding_changes_nothing():
    network = make()
    longer = Answerer(network.backbone, TextSpec(TEXT.tokens, TEXT.length + 3), answers=5).double().eval()
    state = network.state_dict()
    state["words.positions"] = torch.cat([state["words.positions"], torch.randn(1, 3, 24)], dim=1)
    longer.load_state_dict(state)
    torch.testing.assert_close(longer(images(), QUESTIONS), network(images(), QUESTIONS))


@pytest.mark.parametrize("tokens", ["all", "image", "text"])
def test_broadcasting_among_kinds_is_the_formula_token_by_token(tokens):
    plain = make()
    network = make()
    options = {"scaled": True, "layers": [0], "tokens": tokens, "initial_scale": 0.3}
    treat(network.backbone, {"context_broadcasting": options})
    network.load_state_dict(plain.state_dict(), strict=False)
    seen = {}
    plain.backbone.blocks[0].mlp.register_forward_hook(lambda m, a, y: seen.update(x=y, kinds=passing_tokens()) or None)
    plain(images(), QUESTIONS)
    network.backbone.blocks[0].mlp.register_forward_hook(lambda m, a, y: seen.update(y=y))
    network(images(), QUESTIONS)
    words = [len(TEXT.tokenize(question)) + 2 for question in QUESTIONS]
    for row, count in enumerate(words):
        text, patches = list(range(count)), list(range(TEXT.length, TEXT.length + 17))
        taking = {"all": text + patches, "image": patches, "text": text}[tokens]
        x, expected = seen["x"][row], seen["x"][row].clone()
        mean = sum(x[token] for token in taking) / len(taking)
        for token in taking:
            expected[token] = x[token] + 0.3 * mean
        torch.testing.assert_close(seen["y"][row], expected)


@pytest.mark.parametrize("tokens", ["all", "image", "text"])
def test_scale_zero_is_neutral(tokens):
    network, plain = make(), make()
    treat(network.backbone, {"context_broadcasting": {"scaled": True, "tokens": tokens}})
    network.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(network(images(), QUESTIONS), plain(images(), QUESTIONS), rtol=0, atol=1e-5)


def test_without_a_question_it_sees_the_image_alone():
    network = make()
    torch.testing.assert_close(network(images()), network.backbone(images()))


def test_every_parameter_learns():
    for options in ({}, {"class_token": False, "global_pool": "avg"}):
        network = make(**options)
        network(images(), QUESTIONS).square().sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(ModelError, match="a ResNet: choose a ViT"):
        Answerer(timm.create_model("resnet18"), TEXT, 2)
    with pytest.raises(ModelError, match="There are 1 questions for 2 images"):
        make()(images(), ["how many"])
