"""`shapes`: ten drawn shapes in ten textures, a set that needs no download.

Shape, texture, colour, place, size, tilt, background, clutter and noise are drawn independently, so that the
outline is the only thing that tells the class. Texture k is the partner of class k: `texture_cue` makes it a
shortcut in training, and `cue_conflict` asks afterwards which of the two a network looks at [Geirhos 2019].

Image i of a split depends on (seed, split, i) and on nothing else: 2,000 images are a prefix of 4,000, and
workers may draw in any order. Only `Generator.random` of PCG64 is used, the stream least likely to change
between numpy releases; sines may differ in the last bit between machines, and so, rarely, a pixel by a level.

How hard, without augmentation, on 1,000 test images: a thin ResNet-18 reaches 83% after 12 epochs on 2,000
images, all of which it then knows, and 96% after two epochs on 20,000. A ViT of width 96, depth 6 and patch 4
reaches 42% from 2,000 and 44% from 20,000 after 23,000 images seen: at 250 images/s, about 90 seconds.
"""

from vitclinic.data.shapes.drawing import VERSION, draw, mask
from vitclinic.data.shapes.outlines import CLASSES, TEXTURES
from vitclinic.data.shapes.sampling import SPLITS, cue_conflict, example, examples, labels

__all__ = ["CLASSES", "SPLITS", "TEXTURES", "VERSION", "cue_conflict", "draw", "example", "examples", "labels", "mask"]
