"""Maps of embeddings: a row a network, coloured by class and by error, with the image under the pointer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from vitclinic._core.images import encode_small
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import MARKERS, ExamView, Figure, Table, draws, escape_plotly, select_usable
from vitclinic.reports.figures.canvas import GREY, PANEL_LONGEST, Measurements, label, make_canvas
from vitclinic.reports.figures.worst_images import has_arrays, short_name
from vitclinic.reports.image_lists import Album, Listing, Row, Thumbnail, isolate, mark_up

MOST_IMAGES = 1000
"""Of all networks of a page together; images that several networks show count once each."""
FEWEST_IMAGES = 60
MOST_COLOURED = 24
"""Classes with a colour and a symbol of their own: the most frequent ones."""
A_ROW = 12
"""Images of a class that a row of the list opens."""
OPEN_NETWORKS = 3
"""Up to so many networks, the figure is open."""
SIDE = 360
"""Pixels of height of a row of maps."""
_ARRAYS = ("points", "shown_names", "shown_images")
_LABELLED = ("labels", "predicted", "classes")
CLASSES = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#661100"),
)
"""Tol's muted colours, safe for colour-blind readers, and none of them a network's."""
WRONG, RIGHT = "#CC3311", GREY


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    name: str
    label: str
    """Empty without labels."""
    predicted: str
    image: int | None
    """Its number in the album."""

    @property
    def is_wrong(self) -> bool:
        return self.label != self.predicted


@draws("embedding_map")
def embedding_map(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the maps of all networks, by class and by error, and list the images of each class."""
    found = [each for each in select_usable(exams, "embedding_map") if has_arrays(each[2], *_ARRAYS)]
    if not found:
        return []
    thumbnails: dict[tuple[bytes, str, str], tuple[int, Thumbnail]] = {}
    maps = [_read_points(one, max(FEWEST_IMAGES, MOST_IMAGES // len(found)), thumbnails) for _, _, one in found]
    rows = [
        (name, point.name, point.label, point.predicted, point.x, point.y)
        for (_, name, _), points in zip(found, maps, strict=True)
        for point in points
    ]
    several = len(found) > 1
    lists = [
        Listing(f"Images by class, of {name}" if several else "Images by class, errors first", _class_rows(points))
        for (_, name, _), points in zip(found, maps, strict=True)
        if points[0].label
    ]
    return [
        Figure(
            name="embedding-map",
            title="Map of the embeddings, by class and by error",
            reading="Each point is an image, near others that look similar to the network; point at one to see it."
            " A network that tells the classes apart has them in groups, and errors where groups meet.",
            paper="Pearson 1901 (PCA); McInnes et al. 2018 (UMAP)",
            table=Table(("network", "image", "label", "predicted", "x", "y"), rows),
            plot=_plot(found, maps),
            album=Album([thumbnail for _, thumbnail in thumbnails.values()], lists),
            notes=_notes(found, maps),
            heavy=len(found) > OPEN_NETWORKS,
        )
    ]


def _read_points(
    one: Measurement, most: int, thumbnails: dict[tuple[bytes, str, str], tuple[int, Thumbnail]]
) -> list[_Point]:
    """Return the points of a network, and add the images of `most` of them to those of the page."""
    arrays, labelled = one.arrays, has_arrays(one, *_LABELLED)
    classes = arrays["classes"].tolist() if labelled else []
    names = [short_name(name) for name in arrays["shown_names"].tolist()]
    points = []
    for place, (x, y) in enumerate(arrays["points"].tolist()):
        mine, said = (classes[int(arrays[key][place])] if labelled else "" for key in ("labels", "predicted"))
        image = None
        if place < min(most, len(arrays["shown_images"])):
            file = encode_small(arrays["shown_images"][place])
            height, width = arrays["shown_images"].shape[1:3]
            drawn = _draw_thumbnail(file, (width, height), names[place], mine, said)
            image = thumbnails.setdefault((file, mine, said), (len(thumbnails), drawn))[0]
        points.append(_Point(x, y, names[place], mine, said, image))
    return points


def _draw_thumbnail(file: bytes, size: tuple[int, int], name: str, mine: str, said: str) -> Thumbnail:
    if not mine:
        return Thumbnail(file, size, mark_up("{}", name), isolate(name), name)
    sentence = "{}" if mine == said else "{} taken for {}"
    both = (mine,) if mine == said else (mine, said)
    return Thumbnail(file, size, mark_up(sentence, *both), sentence.format(*map(isolate, both)), name)


def _plot(found: Measurements, maps: Sequence[Sequence[_Point]]) -> go.Figure:
    labelled = any(points[0].label for points in maps)
    styles = _style_classes(maps)
    titles = []
    for _, name, one in found:
        known = label(name, one, longest=PANEL_LONGEST) if len(found) > 1 else label("", one).strip()
        titles += [f"{known} by class", f"{known} by error"] if labelled else [known]
    spacing = {"horizontal_spacing": 0.06, "vertical_spacing": 0.1 / len(found)}
    figure = make_canvas(SIDE * len(found), len(found), 1 + labelled, titles, legend=2 + len(styles) // 2, **spacing)
    for row, points in enumerate(maps, 1):
        for name, style in styles.items():
            group = [point for point in points if (point.label if point.label in styles else "") == name]
            figure.add_trace(_scatter(group, name or _rest(labelled), style, row == 1 and labelled), row, 1)
        if labelled:
            for name, colour, size in (("right", RIGHT, 5), ("wrong", WRONG, 7)):
                group = [point for point in points if point.is_wrong == (name == "wrong")]
                symbol = "x" if name == "wrong" else "circle"
                style = {"color": colour, "size": size, "symbol": symbol}
                figure.add_trace(_scatter(group, name, style, row == 1), row, 2)
    figure.update_xaxes(showticklabels=False, ticks="", showgrid=False)
    figure.update_yaxes(showticklabels=False, ticks="", showgrid=False)
    figure.update_layout(hovermode="closest", legend_itemsizing="constant")
    return figure


def _rest(labelled: bool) -> str:
    return "other classes" if labelled else "images"


def _style_classes(maps: Sequence[Sequence[_Point]]) -> Mapping[str, dict[str, object]]:
    """Return the marker of each class that has one of its own, and of all others together, under no name."""
    counts = Counter(point.label for points in maps for point in points)
    names = [name for name, _ in counts.most_common(MOST_COLOURED) if name]
    styles: dict[str, dict[str, object]] = {}
    for place, name in enumerate(sorted(names)):
        turn = place + place // len(CLASSES)  # so that two classes of one colour have different symbols
        symbol = MARKERS[turn % len(MARKERS)]
        styles[name] = {"color": CLASSES[place % len(CLASSES)], "symbol": symbol, "size": 6}
    if len(counts) > len(names):
        styles[""] = {"color": GREY if names else CLASSES[0], "size": 5}
    return styles


def _scatter(points: Sequence[_Point], name: str, style: Mapping[str, object], shown: bool) -> go.Scatter:
    return go.Scatter(
        x=[point.x for point in points],
        y=[point.y for point in points],
        mode="markers",
        marker={**style, "opacity": 0.8},
        text=[_describe(point) for point in points],
        customdata=[point.image for point in points],
        hovertemplate="%{text}<extra></extra>",
        name=label(name),
        legendgroup=escape_plotly(name),
        showlegend=shown,
    )


def _describe(point: _Point) -> str:
    said = point.label if not point.is_wrong else f"{point.label} taken for {point.predicted}"
    lines = [said, point.name] if said else [point.name]
    return "<br>".join(escape_plotly(line if len(line) <= 40 else f"{line[:39]}…") for line in lines)


def _class_rows(points: Sequence[_Point]) -> list[Row]:
    """Return a row a class, which opens some of its images, the wrong ones first."""
    rows = []
    for name in sorted({point.label for point in points}):
        mine = sorted((point for point in points if point.label == name), key=lambda point: not point.is_wrong)
        wrong = sum(point.is_wrong for point in mine)
        images = [point.image for point in mine if point.image is not None]
        fact = f"{wrong} of {len(mine)} image{'s' * (len(mine) != 1)} wrong"
        rows.append(Row(mark_up("{}", name), fact, images[:A_ROW], wrong / len(mine)))
    return rows


def _notes(found: Measurements, maps: Sequence[Sequence[_Point]]) -> list[str]:
    notes = []
    voted = any("by_scores" in one.arrays and not bool(one.arrays["by_scores"]) for _, _, one in found)
    if voted:
        whose = "Of networks" if len(found) > 1 else "The network is one"
        notes.append(f"{whose} without scores of these classes: its errors are those of a vote of the nearest images.")
    shares = [one.scalars["variance_shown"].value for _, _, one in found if "variance_shown" in one.scalars]
    if shares:
        shown = " and ".join(f"{share:.0%}" for share in shares[:4])
        notes.append(f"The two axes are the first principal components, with {shown} of the variance.")
    if not all(point.image is not None for points in maps for point in points):
        notes.append("Not all points have their image in the page; the others have their name.")
    return notes
