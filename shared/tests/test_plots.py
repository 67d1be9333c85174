import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from icml26_shared.errors import MissingExtra
from icml26_shared.plots import PALETTE, bars, figure, lines, save, style


def example():
    x = np.arange(5.0)
    series = {"ours": (x, x**2), "peer": (x, x, x - 1, x + 1)}
    return lines(series, xlabel="size [tokens]", ylabel="time [ms]", title="Time")


def test_png_and_svg_are_saved_with_either_suffix_or_none(tmp_path):
    fig = lines({"a": ([1, 2], [1, 2])}, xlabel="x", ylabel="y")
    for name in ("a.png", "v1.5"):
        png, svg = save(fig, tmp_path / name)
        assert png.read_bytes().startswith(b"\x89PNG")
        assert svg.read_text().lstrip().startswith("<?xml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg", "v1.5.png", "v1.5.svg"]
    with pytest.raises(ValueError, match=r"saved as \.png and \.svg"):
        save(example(), tmp_path / "a.pdf")


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    first, second = save(example(), tmp_path / "a"), save(example(), tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_an_axis_without_a_name_is_refused_and_nothing_is_written(tmp_path):
    fig, ax = figure()
    ax.plot([1, 2])
    ax.set_xlabel("step")
    with pytest.raises(ValueError, match="axes 0 has no name on its y axis; set it, with its unit"):
        save(fig, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    ax.set_ylabel("loss [nats]")
    save(fig, tmp_path / "a")


def test_grids_colorbars_and_pictures_need_only_the_names_they_show(tmp_path):
    fig, axes = figure(2, 2, sharex=True, sharey=True)
    for ax in axes.flat:
        ax.plot([1, 2])
    with pytest.raises(ValueError, match="no name"):
        save(fig, tmp_path / "a")
    for ax in axes[1]:
        ax.set_xlabel("x [m]")
    for ax in axes[:, 0]:
        ax.set_ylabel("y [m]")
    save(fig, tmp_path / "a")

    fig, axes = figure(1, 2)
    axes[0].imshow(np.eye(3))
    axes[0].axis("off")
    image = axes[1].imshow(np.eye(3))
    axes[1].set(xlabel="column", ylabel="row")
    bar = fig.colorbar(image, ax=axes[1])
    with pytest.raises(ValueError, match="axes 2 has no name"):
        save(fig, tmp_path / "b")
    bar.set_label("weight")
    save(fig, tmp_path / "b")

    fig, axes = figure(1, 2)
    for ax in axes:
        ax.plot([1, 2])
    fig.supxlabel("x")
    fig.supylabel("y")
    save(fig, tmp_path / "c")


def test_matplotlibs_own_settings_stay_and_do_not_matter(tmp_path):
    code = (
        "import sys, matplotlib\nmatplotlib.use('svg')\nmatplotlib.rcParams['font.size'] = 33\n"
        "before = dict(matplotlib.rcParams)\n"
        "sys.path.insert(0, sys.argv[1])\nfrom test_plots import example, save\n"
        "save(example(), sys.argv[2])\n"
        "assert dict(matplotlib.rcParams) == before\n"
        "assert matplotlib.get_backend() == 'svg'\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    for here in save(example(), tmp_path / "here"):
        assert here.read_bytes() == (tmp_path / f"there{here.suffix}").read_bytes()


def test_the_style_holds_inside_its_block_only():
    import matplotlib

    before = matplotlib.rcParams["axes.spines.top"], matplotlib.rcParams["svg.hashsalt"]
    with style():
        assert matplotlib.rcParams["axes.spines.top"] is False
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(PALETTE)
    assert (matplotlib.rcParams["axes.spines.top"], matplotlib.rcParams["svg.hashsalt"]) == before


def test_lines_draws_what_it_is_given():
    ax = example().axes[0]
    assert [line.get_label() for line in ax.get_lines()] == ["ours", "peer"]
    np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), np.arange(5.0) ** 2)
    assert len({(line.get_color(), line.get_marker()) for line in ax.get_lines()}) == 2
    assert ax.get_legend() is not None
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("size [tokens]", "time [ms]")
    one = lines({"a": ([1, 2], [3, 4])}, xlabel="x", ylabel="y", yscale="log", xlim=(0, 9)).axes[0]
    assert one.get_legend() is None
    assert one.get_yscale() == "log"
    assert one.get_xlim() == (0, 9)


def test_lines_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="at least one series"):
        lines({}, xlabel="x", ylabel="y")
    for values in (([1, 2], [1]), ([1], [1], [1]), ([[1]], [[1]])):
        with pytest.raises(ValueError, match="of equal length"):
            lines({"a": values}, xlabel="x", ylabel="y")


def test_bars_stand_side_by_side_with_their_errors():
    found = bars(
        ["r=0.2", "r=0.5"],
        {"l2": [0.5, 0.25], "cosine": [1.0, 0.75]},
        xlabel="share removed",
        ylabel="accuracy",
        errors={"l2": [(0.4, 0.7), (0.25, 0.5)]},
    )
    ax = found.axes[0]
    rectangles = [patch for patch in ax.patches if patch.get_height() > 0]
    assert [patch.get_height() for patch in rectangles] == [0.5, 0.25, 1.0, 0.75]
    spans = sorted((patch.get_x(), patch.get_x() + patch.get_width()) for patch in rectangles)
    assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(spans))
    assert [text.get_text() for text in ax.get_xticklabels()] == ["r=0.2", "r=0.5"]
    with pytest.raises(ValueError, match="has 1 heights for 2 groups"):
        bars(["a", "b"], {"x": [1.0]}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="at least one group"):
        bars([], {}, xlabel="x", ylabel="y")


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1.0, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(colors, matrix):
    """CIELAB (D65) of sRGB colours as someone with this vision sees them."""
    from matplotlib.colors import to_rgb

    rgb = np.array([to_rgb(color) for color in colors])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(matrix).T, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = seen @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


@pytest.mark.parametrize("vision", BLINDNESS)
def test_colors_are_told_apart_with_colour_blindness(vision):
    colors = lab(PALETTE, BLINDNESS[vision])
    distances = np.linalg.norm(colors[:, None] - colors[None], axis=-1)
    # A just noticeable difference is about 2.3.
    assert distances[np.triu_indices(len(PALETTE), 1)].min() > 7


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"icml26-shared\[plots\]"):
        figure()
