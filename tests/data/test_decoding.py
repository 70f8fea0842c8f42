import io

import numpy as np
import pytest
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data.decoding import UNREADABLE, decode_and_fit, pixels


def test_sixteen_bits_scale_to_eight():
    values = np.array([[0, 257, 65535]], dtype=np.uint16)
    assert pixels(Image.fromarray(values), 1)[:, :, 0].tolist() == [[0, 1, 255]]
    assert pixels(Image.fromarray(values), 3)[0, 2].tolist() == [255, 255, 255]


def test_a_dark_sixteen_bit_image_stays_dark():
    assert pixels(Image.fromarray(np.array([[0, 255]], dtype=np.uint16)), 1)[:, :, 0].tolist() == [[0, 1]]


def test_thirty_two_bit_images_with_eight_bit_values_stay_as_they_are():
    values = np.array([[0, 7, 255]], dtype=np.int32)
    assert pixels(Image.fromarray(values), 1)[:, :, 0].tolist() == [[0, 7, 255]]


def test_transparent_pixels_lie_over_white():
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert pixels(image, 3).tolist() == [[[255, 255, 255], [10, 20, 30]]]


def test_transparent_palette_colour_lies_over_white():
    image = Image.new("P", (2, 1), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putpixel((1, 0), 1)
    image.info["transparency"] = 0
    assert pixels(image, 3).tolist() == [[[255, 255, 255], [0, 0, 200]]]


def test_cmyk_becomes_rgb():
    assert pixels(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), 3).tolist() == [[[255, 0, 0]]]


def test_grey_becomes_three_equal_channels_and_back():
    grey = Image.fromarray(np.array([[3, 200]], dtype=np.uint8))
    assert pixels(grey, 3).tolist() == [[[3] * 3, [200] * 3]]
    assert pixels(grey, 1).tolist() == [[[3], [200]]]


def test_camera_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (2, 1), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    turned = pixels(Image.open(tmp_path / "turned.png"), 1)
    assert turned.shape == (2, 1, 1)
    assert turned[0, 0, 0] == 255


def test_fitting_covers_and_crops_at_the_centre():
    wide = Image.new("RGB", (30, 10), "black")
    wide.paste((255, 255, 255), (10, 0, 20, 10))
    assert (decode_and_fit(wide, 3, (10, 10)) == 255).all()


def test_one_pixel_grows():
    assert (decode_and_fit(Image.new("RGB", (1, 1), (9, 8, 7)), 3, (8, 8)) == [9, 8, 7]).all()


def test_a_large_jpeg_is_decoded_small_and_right(tmp_path):
    ramp = np.linspace(0, 255, 1024, dtype=np.uint8)
    image = Image.fromarray(np.repeat(ramp[None], 1024, 0)).convert("RGB")
    image.save(tmp_path / "ramp.jpg", quality=95)
    small = decode_and_fit(Image.open(tmp_path / "ramp.jpg"), 3, (32, 32)).astype(int)
    assert np.abs(small[:, :, 0] - (ramp.reshape(32, 32).mean(1))).max() <= 3


def test_floating_point_pixels_are_refused():
    with pytest.raises(DataError, match="8 or 16 bits"):
        pixels(Image.new("F", (2, 2)), 3)


@pytest.mark.parametrize("field", ["11010200010000008c000000", "110105000100000008000000"])
def test_a_tiff_with_a_field_of_another_type_is_unreadable(field):
    """Pillow raises a TypeError where the place of the pixels is a text or a fraction."""
    file = io.BytesIO()
    Image.new("RGB", (6, 5), "red").save(file, "TIFF")
    content = file.getvalue()
    at = content.index(bytes.fromhex("1101"))
    damaged = io.BytesIO(content[:at] + bytes.fromhex(field) + content[at + 12 :])
    with pytest.raises(UNREADABLE), Image.open(damaged) as image:
        decode_and_fit(image, 3, (8, 8))
