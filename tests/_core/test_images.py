"""Pictures: a map over an image in colours, images side by side, PNG."""

import numpy as np
import pytest

from vitclinic._core.images import beside, blend


def test_a_blend_is_light_where_attention_is_and_shows_the_image():
    image = np.zeros((4, 6, 3), np.uint8)
    attention = np.zeros((4, 6))
    attention[1, 2] = 1
    picture = blend(image, attention)
    assert (picture.shape, picture.dtype) == ((4, 6, 3), np.uint8)
    assert picture.sum(-1).argmax() == 1 * 6 + 2
    white = blend(np.full_like(image, 255), attention)
    assert (white.astype(int) - picture >= 100).all()
    grey = blend(image[..., 0], np.ones((4, 6)))  # one channel, and a map without contrast
    assert len(np.unique(grey.reshape(-1, 3), axis=0)) == 1
    with pytest.raises(ValueError, match="must have the same size"):
        blend(image, attention.T)


def test_small_pictures_are_enlarged_and_stand_beside_their_image():
    image = np.random.default_rng(0).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    picture = beside(image, np.zeros((16, 20)))
    assert picture.shape == (16 * 14, 2 * 20 * 14, 3)
    assert np.array_equal(picture[::14, ::14][:, :20], image)
