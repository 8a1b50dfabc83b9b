"""The picture of `holdfast plan`, drawn by matplotlib: speed against memory of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.figure import FigureBase

from launcher.plan.search import TimedLayout
from launcher.runs.reports.charts import GRID, svg_of

_HEIGHT_IN: Final = 5.2
_NUMBERED: Final = 5
_COLOURS: Final = {"none": "#1d4ed8", "selective": "#b45309", "full": "#1f7a3d"}
_LIMIT: Final = "#c2261d"


def layouts_picture(found: Sequence[TimedLayout]) -> str:
    """Return the picture of layouts, best first, as an SVG document."""
    return svg_of(_HEIGHT_IN, lambda figure: _draw(figure, found))


def _draw(figure: FigureBase, found: Sequence[TimedLayout]) -> None:
    axes = figure.subplots()
    for recompute, colour in _COLOURS.items():
        those = [_place(each) for each in found if each.facts.recompute == recompute]
        if those:
            across, up = zip(*those, strict=True)
            name = f"recompute {recompute}"
            axes.scatter(across, up, s=16, color=colour, alpha=0.6, label=name)
    names = []
    for number, each in enumerate(found[:_NUMBERED], 1):
        axes.annotate(f"{number}", _place(each), (5, 5), textcoords="offset points", fontsize=9)
        names.append(f"{number}: {each.name}, micro-batch {each.facts.micro_batch}")
    axes.set_title("; ".join(names[:3]) + "\n" + "; ".join(names[3:]), fontsize=8, loc="left")
    if (memory := found[0].facts.memory_gib) is not None:
        axes.axvline(memory, color=_LIMIT, lw=1)
        place, text = (memory, 0.02), f"the GPU's {memory:.0f} GiB"
        style: dict[str, Any] = {"ha": "right", "fontsize": 8, "color": _LIMIT, "rotation": 90}
        axes.annotate(text, place, xycoords=("data", "axes fraction"), **style)
    axes.set_xlabel("predicted memory of the fullest GPU (GiB)")
    axes.set_ylabel("predicted tokens/s per GPU")
    axes.grid(color=GRID)
    axes.legend(framealpha=0.9, edgecolor=GRID, loc="lower left")


def _place(layout: TimedLayout) -> tuple[float, float]:
    return layout.memory_gib or 0.0, layout.tokens_per_s / layout.layout.world_size
