"""Annotations: what an image comes with beside a class. A mask, objects, or questions with answers."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.data.annotations.annotation import VOID, Annotation, Objects, Question
    from vitclinic.data.annotations.batch import Annotations
    from vitclinic.data.annotations.geometry import Window
    from vitclinic.data.annotations.view import AnnotatedView

__all__ = ["VOID", "AnnotatedView", "Annotation", "Annotations", "Objects", "Question", "Window"]

make_lazy(__name__)
