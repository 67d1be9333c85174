"""``robuq eval-fid``: the Frechet distance between two sets of images, or of features."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from icml26_shared.errors import UserError, require
from robuq.frechet import Moments, MomentsSum, frechet_distance

if TYPE_CHECKING:
    from icml26_shared.console import Context
    from robuq.integrations.features import Extractor

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
ARRAYS = (".npy", ".npz", ".safetensors")
_ALLOWED = (
    "give a folder of images (.png, .jpg, .jpeg, .bmp, .webp) or of arrays, or a .npy, .npz or .safetensors file with "
    "features [n, d], or images [n, h, w, c] or [n, c, h, w] as uint8 or as floats in [0, 1]"
)


def eval_fid_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``eval-fid``."""
    parser.add_argument("reference", type=Path, help="real images or features: a folder, .npy, .npz or .safetensors")
    parser.add_argument("samples", type=Path, help="generated images or features, in any of the same forms")
    parser.add_argument(
        "--extractor", type=Path, help="local folder of transformers or timm that turns images into features"
    )
    parser.add_argument("--batch", type=int, default=32, help="images at a time (default 32)")


def eval_fid(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and tell."""
    if args.batch < 1:
        raise UserError(f"--batch must be at least 1, got {args.batch}")
    extractor = None
    if args.extractor is not None:
        from robuq.integrations.features import load_extractor

        extractor = load_extractor(args.extractor)
    found = [moments_of(path, extractor, args.batch, ctx) for path in (args.reference, args.samples)]
    try:
        distance = frechet_distance(*found)
    except ValueError as error:
        raise UserError(f"{args.reference} and {args.samples}: {error}") from None
    few, d = min(m.count for m in found), len(found[0].mean)
    if few <= d:
        ctx.note(f"{few} rows for {d} features: the covariance is singular and the distance biased upwards")
    ctx.say(f"Frechet distance {distance:.6g}: {found[0].count} against {found[1].count} rows of {d} features")
    return {
        "frechet_distance": distance,
        "features": d,
        "reference": {"path": args.reference, "rows": found[0].count},
        "samples": {"path": args.samples, "rows": found[1].count},
        "extractor": args.extractor,
    }


def moments_of(path: Path, extractor: Extractor | None, batch: int, ctx: Context) -> Moments:
    """Mean and covariance of the features of what lies at ``path``.

    Raises:
        UserError: nothing there that can be read, images without an extractor, or too few rows.
    """
    files = files_of(path)
    total = MomentsSum()
    try:
        with ctx.progress(f"features of {path.name}", len(files)) as bar:
            for rows, done in _rows(files, batch):
                if rows.ndim == 2:
                    total.add(rows)
                elif extractor is None:
                    raise UserError(f"{path} holds images; give --extractor FOLDER, a model of transformers or timm")
                else:
                    for start in range(0, len(rows), batch):
                        total.add(extractor.features(as_images(rows[start : start + batch])).numpy())
                bar.advance(done)
        return total.moments()
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def files_of(path: Path) -> list[Path]:
    """The files to read, in the order of their names."""
    if path.is_file():
        found = [path] if path.suffix.lower() in (*IMAGES, *ARRAYS) else []
    elif path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.suffix.lower() in (*IMAGES, *ARRAYS) and f.is_file())
    else:
        raise UserError(f"nothing at {str(path)!r}; {_ALLOWED}")
    if not found:
        raise UserError(f"nothing to read in {str(path)!r}; {_ALLOWED}")
    return found


def _rows(files: list[Path], batch: int) -> Iterator[tuple[np.ndarray, int]]:
    """Arrays [n, ...] and how many files each finishes; images of one size are read ``batch`` at a time."""
    waiting: list[np.ndarray] = []
    for file in files:
        if file.suffix.lower() in ARRAYS:
            yield read_array(file), 1
            continue
        image = _read_image(file)
        if waiting and (len(waiting) == batch or waiting[0].shape != image.shape):
            yield np.stack(waiting), len(waiting)
            waiting = []
        waiting.append(image)
    if waiting:
        yield np.stack(waiting), len(waiting)


def _read_image(file: Path) -> np.ndarray:
    """uint8 [h, w, 3]."""
    pillow = require("PIL.Image", "eval")
    try:
        with pillow.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, pillow.DecompressionBombError) as error:
        raise UserError(f"{file} is no image that can be read: {error}") from None


def read_array(file: Path) -> np.ndarray:
    """The one array of a file: of several the one called ``features``, ``images`` or ``arr_0``."""
    import zipfile

    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        if file.suffix == ".npy":
            return np.asarray(np.load(file, allow_pickle=False))
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as opened:
                name = _which(list(opened.files), file)
                return np.asarray(opened[name])
        tensors = load_file(file)
    except (OSError, ValueError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return tensors[_which(list(tensors), file)]


def _which(names: list[str], file: Path) -> str:
    if len(names) == 1:
        return names[0]
    for name in ("features", "images", "arr_0"):
        if name in names:
            return name
    raise UserError(f"{file} holds {', '.join(sorted(names)) or 'nothing'}; name one array features or images")


def as_images(rows: np.ndarray) -> Tensor:
    """float32 [n, 3, h, w] in [0, 1] of uint8 or float images in either layout, grey ones three times.

    Raises:
        ValueError: another shape or type, or floats outside [0, 1].
    """
    if rows.ndim != 4 or (rows.shape[1] not in (1, 3) and rows.shape[3] not in (1, 3)):
        raise ValueError(f"got an array of shape {rows.shape}; {_ALLOWED}")
    if rows.dtype != np.uint8 and not np.issubdtype(rows.dtype, np.floating):
        raise ValueError(f"images must be uint8 or floats in [0, 1], got {rows.dtype}")
    images = torch.from_numpy(np.ascontiguousarray(rows)).float()
    if rows.dtype == np.uint8:
        images = images / 255
    elif not bool(((images >= 0) & (images <= 1)).all()):
        raise ValueError(f"float images must be in [0, 1], got {float(images.min()):g} to {float(images.max()):g}")
    if rows.shape[3] in (1, 3):
        images = images.permute(0, 3, 1, 2)
    return images.expand(-1, 3, -1, -1).contiguous()
