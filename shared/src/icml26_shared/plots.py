"""One plain style for all figures, saved as PNG and SVG.

The figures are drawn by matplotlib's Agg renderer directly: pyplot, its global state and the user's backend are left
alone. Example::

    figure = lines({"l2": (kept, accuracy), "cosine": (kept, other)}, xlabel="tokens kept [%]", ylabel="accuracy [%]")
    save(figure, out / "accuracy.png")      # writes accuracy.png and accuracy.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icml26_shared.checkpoint import atomic_path
from icml26_shared.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MARKERS", "PALETTE", "bars", "figure", "lines", "save", "style"]

# Okabe and Ito's palette (Color Universal Design, 2008), told apart with the common kinds of colour blindness; its
# yellow is left out, being too pale for lines on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "icml26",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the common style inside the block; the user's own settings are as before after it."""
    matplotlib = require("matplotlib", "icml26-shared[plots]")
    cycler = require("cycler", "icml26-shared[plots]").cycler
    settings = {**matplotlib.rcParamsDefault, **_STYLE, "axes.prop_cycle": cycler(color=PALETTE)}
    for name in [name for name in settings if name.startswith(("backend", "interactive", "toolbar", "webagg"))]:
        del settings[name]
    with matplotlib.rc_context(settings):
        yield


def figure(rows: int = 1, columns: int = 1, *, size: tuple[float, float] | None = None, **options: Any) -> Any:
    """A figure in the common style with a grid of axes.

    Args:
        rows, columns: shape of the grid.
        size: width and height in inches; default 6.4 × 4 for each axes, at most 14 × 12.
        options: for ``Figure.subplots``, e.g. ``sharey=True``.

    Returns:
        The figure and its axes: one object for a 1 × 1 grid, else an array, as ``Figure.subplots`` gives them.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    module = require("matplotlib.figure", "icml26-shared[plots]")
    backend = require("matplotlib.backends.backend_agg", "icml26-shared[plots]")
    with style():
        made = module.Figure(figsize=size or (min(6.4 * columns, 14), min(4 * rows, 12)))
        backend.FigureCanvasAgg(made)
        return made, made.subplots(rows, columns, **options)


def lines(
    series: Mapping[str, Sequence[Any]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    ax: Axes | None = None,
    **options: Any,
) -> Figure:
    """Lines with markers, one a name, told apart by colour and marker.

    Args:
        series: name to ``(x, y)``, or to ``(x, y, low, high)`` with a band around the line.
        xlabel, ylabel: names of the axes, with units.
        title: one line above the axes.
        ax: axes to draw into; default: a new figure.
        options: for ``Axes.set``, e.g. ``xscale="log"``, ``ylim=(0, 1)``.

    Raises:
        ValueError: nothing to draw, a series of another shape, or unequal lengths.
    """
    if not series:
        raise ValueError("lines needs at least one series, got none")
    with style():
        if ax is None:
            ax = figure()[1]
        for index, (name, values) in enumerate(series.items()):
            x, y, *band = _columns(name, values)
            color = PALETTE[index % len(PALETTE)]
            ax.plot(x, y, label=name, color=color, marker=MARKERS[index % len(MARKERS)])
            if band:
                ax.fill_between(x, band[0], band[1], color=color, alpha=0.15, linewidth=0)
        return _dress(ax, xlabel, ylabel, title, options)


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Figure:
    """Bars in groups, one colour a name.

    Args:
        groups: names of the groups along x.
        series: name to one height a group.
        xlabel, ylabel: names of the axes, with units.
        title: one line above the axes.
        errors: name to one (low, high) a group, drawn as an error bar.
        ax: axes to draw into; default: a new figure.
        options: for ``Axes.set``.

    Raises:
        ValueError: nothing to draw, or a series with another number of heights than there are groups.
    """
    if not series or not len(groups):
        raise ValueError("bars needs at least one group and one series")
    place, width = np.arange(len(groups)), 0.8 / len(series)
    with style():
        if ax is None:
            ax = figure()[1]
        for index, (name, heights) in enumerate(series.items()):
            if len(heights) != len(groups):
                raise ValueError(f"series {name!r} has {len(heights)} heights for {len(groups)} groups")
            offset = (index - (len(series) - 1) / 2) * width
            spread = None
            if errors is not None and name in errors:
                low, high = np.asarray(errors[name], dtype=float).T
                spread = np.stack([np.asarray(heights) - low, high - np.asarray(heights)]).clip(min=0)
            color = PALETTE[index % len(PALETTE)]
            ax.bar(place + offset, heights, width * 0.95, yerr=spread, capsize=2, color=color, label=name)
        ax.set_xticks(place, list(groups))
        return _dress(ax, xlabel, ylabel, title, options)


def save(fig: Figure, path: str | Path) -> tuple[Path, Path]:
    """Save a figure as PNG and as SVG, each whole or not at all; equal figures give equal bytes.

    Args:
        fig: the figure; every visible axes must be named.
        path: where, with or without suffix: both ``x.png`` and ``x.svg`` are written.

    Returns:
        Paths of the PNG and of the SVG.

    Raises:
        ValueError: an axes without a name, or a suffix other than ``.png`` and ``.svg``.
    """
    path = Path(path)
    if path.suffix in (".png", ".svg"):
        path = path.with_suffix("")
    elif path.suffix in (".pdf", ".jpg", ".jpeg", ".gif", ".eps"):
        raise ValueError(f"figures are saved as .png and .svg, got {path.name!r}")
    _check_names(fig)
    png, svg = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    # Neither date nor version: the same figure gives the same file.
    with style():
        with atomic_path(png) as temporary:
            fig.savefig(temporary, format="png", metadata={"Software": None})
        with atomic_path(svg) as temporary:
            fig.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
    return png, svg


def _columns(name: str, values: Sequence[Any]) -> list[np.ndarray]:
    columns = [np.asarray(column) for column in values]
    if len(columns) not in (2, 4) or any(column.shape != columns[0].shape or column.ndim != 1 for column in columns):
        shapes = [column.shape for column in columns]
        raise ValueError(f"series {name!r} must be (x, y) or (x, y, low, high) of equal length, got shapes {shapes}")
    return columns


def _dress(ax: Axes, xlabel: str, ylabel: str, title: str, options: Mapping[str, Any]) -> Figure:
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title, **options)
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend()
    made: Any = ax.get_figure()
    return made  # type: ignore[no-any-return]


def _check_names(fig: Figure) -> None:
    for index, ax in enumerate(fig.axes):
        if not (ax.get_visible() and ax.axison):
            continue
        colorbar = hasattr(ax, "_colorbar")
        missing = [
            letter
            for letter, axis, common in (("x", ax.xaxis, fig.get_supxlabel()), ("y", ax.yaxis, fig.get_supylabel()))
            if not axis.get_label_text().strip() and not common.strip() and axis.get_visible() and _has_ticks(axis)
        ]
        if (colorbar and len(missing) == 2) or (missing and not colorbar):
            where = f"axes {index}" + (f" ({ax.get_title(loc='left')!r})" if ax.get_title(loc="left") else "")
            raise ValueError(f"{where} has no name on its {' and '.join(missing)} axis; set it, with its unit")


def _has_ticks(axis: Any) -> bool:
    """Whether an axis shows numbers; the inner ones of a shared grid do not and need no name."""
    shown = axis.get_tick_params(which="major")
    labels = [shown.get(side, False) for side in ("labelleft", "labelright", "labelbottom", "labeltop")]
    return any(labels)
