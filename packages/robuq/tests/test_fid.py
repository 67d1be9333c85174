"""Frechet distance against closed forms, and `robuq eval-fid` on arrays, on images, and with local extractors."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from icml26_shared.torchvision_ops import declare_missing_operators
from robuq.cli import app
from robuq.cli_fid import as_images
from robuq.frechet import Moments, MomentsSum, frechet_distance
from robuq.integrations.features import load_extractor


def moments(rows, parts=1):
    total = MomentsSum()
    for part in np.array_split(rows, parts):
        total.add(part)
    return total.moments()


def exactly(mean, covariance, n=400, seed=0):
    """Rows whose sample mean and covariance are these to rounding: a whitened sample, coloured."""
    raw = np.random.default_rng(seed).standard_normal((n, len(mean)))
    raw -= raw.mean(0)
    white = np.linalg.solve(np.linalg.cholesky(np.atleast_2d(np.cov(raw, rowvar=False))), raw.T).T
    return white @ np.linalg.cholesky(np.asarray(covariance, float)).T + np.asarray(mean, float)


def test_moments_batch_by_batch_are_numpys():
    rows = np.random.default_rng(0).standard_normal((101, 4)) * [1, 2, 3, 1e-3] + 1e6
    for parts in (1, 2, 50, 101):
        found = moments(rows, parts)
        assert found.count == 101
        assert np.allclose(found.mean, rows.mean(0), rtol=1e-14)
        assert np.allclose(found.covariance, np.cov(rows, rowvar=False), rtol=1e-6, atol=1e-9)


def test_by_hand():
    # one feature: (3 - 1)^2 + (2 - 1)^2
    assert frechet_distance(moments(exactly([1], [[1]])), moments(exactly([3], [[4]]))) == pytest.approx(5)
    # {0, 2}: mean 1, variance 2; {0, 4}: mean 2, variance 8; 1 + (sqrt 8 - sqrt 2)^2 = 3
    pair = moments(np.array([[0.0], [2.0]])), moments(np.array([[0.0], [4.0]]))
    assert frechet_distance(*pair) == pytest.approx(3)


def test_commuting_covariances():
    """With one basis Q: |mu|^2 + sum (sqrt a_i - sqrt b_i)^2."""
    q = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0]
    a, b = np.array([4.0, 1.0, 0.25]), np.array([9.0, 1.0, 1.0])
    first = moments(exactly([0, 0, 0], q @ np.diag(a) @ q.T))
    second = moments(exactly([1, 2, -2], q @ np.diag(b) @ q.T, seed=2))
    assert frechet_distance(first, second) == pytest.approx(9 + 1 + 0 + 0.25, rel=1e-9)
    assert frechet_distance(second, first) == pytest.approx(10.25, rel=1e-9)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-12)


def test_two_by_two_in_closed_form():
    """tr (A B)^{1/2} = sqrt(tr(A B) + 2 sqrt(det A det B)) for two features, commuting or not."""
    a, b = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([[1.0, -0.8], [-0.8, 3.0]])
    cross = math.sqrt(np.trace(a @ b) + 2 * math.sqrt(np.linalg.det(a) * np.linalg.det(b)))
    found = frechet_distance(Moments(9, np.array([0.0, 1.0]), a), Moments(9, np.array([2.0, 1.0]), b))
    assert found == pytest.approx(4 + 3 + 4 - 2 * cross, rel=1e-12)


def test_in_parts_and_by_the_eigenvalues_of_the_product():
    """tr (S_a S_b)^{1/2} is the sum of the roots of the eigenvalues of S_a S_b, which is not symmetric."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((60, 5)), rng.standard_normal((50, 5)) @ rng.standard_normal((5, 5))
    cov_a, cov_b, shift = np.cov(a, rowvar=False), np.cov(b, rowvar=False), a.mean(0) - b.mean(0)
    cross = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real).sum()
    expected = shift @ shift + np.trace(cov_a) + np.trace(cov_b) - 2 * cross
    assert frechet_distance(moments(a, 7), moments(b, 3)) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(Moments.of(a), Moments.of(b)) == pytest.approx(expected, rel=1e-9)


def test_bad_features_are_named():
    total = MomentsSum()
    with pytest.raises(ValueError, match="at least two rows of features, got 0"):
        total.moments()
    total.add(np.ones((1, 3)))
    with pytest.raises(ValueError, match="at least two rows of features, got 1"):
        total.moments()
    with pytest.raises(ValueError, match="rows had 3 features before, now 2"):
        total.add(np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"1 row\(s\) of features are not finite"):
        total.add(np.array([[1.0, np.nan, 0.0], [1.0, 1.0, 1.0]]))
    with pytest.raises(ValueError, match=r"features must be rows \[n, d\], got shape \(3,\)"):
        total.add(np.ones(3))
    with pytest.raises(ValueError, match="the samples have 1 and 2 features"):
        frechet_distance(moments(np.ones((2, 1))), moments(np.ones((2, 2))))


def run(capsys, *arguments):
    code = app.run(["eval-fid", *map(str, arguments), "--json", "--quiet"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


def test_command_on_features_in_every_form(tmp_path, capsys):
    a, b = exactly([0, 0], np.eye(2)), exactly([3, 4], 4 * np.eye(2), n=300)
    np.save(tmp_path / "a.npy", a)
    np.savez(tmp_path / "b.npz", features=b, labels=np.zeros(3))
    save_file({"features": b}, tmp_path / "b.safetensors")
    (tmp_path / "parts").mkdir()
    for i, part in enumerate(np.array_split(b, 3)):
        np.save(tmp_path / "parts" / f"{i}.npy", part)
    for samples in ("b.npz", "b.safetensors", "parts"):
        code, result = run(capsys, tmp_path / "a.npy", tmp_path / samples)
        assert code == 0
        assert result["frechet_distance"] == pytest.approx(25 + 2, rel=1e-9)
        assert (result["features"], result["reference"]["rows"], result["samples"]["rows"]) == (2, 400, 300)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A small ViT in transformers' format, and images for it."""
    declare_missing_operators()
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 16, "width": 16}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2]})
    )
    return folder, model


def pictures(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)


def test_transformers_extractor_on_folders_and_arrays(vit, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    folder, model = vit
    real, made = pictures(9), pictures(7, seed=1)
    (tmp_path / "png").mkdir()
    for i, picture in enumerate(made):
        image.fromarray(picture).save(tmp_path / "png" / f"{i}.png")
    np.save(tmp_path / "real.npy", real)
    features = []
    for array in (real, made):
        x = (torch.from_numpy(array).permute(0, 3, 1, 2) / 255 - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.2
        with torch.no_grad():
            features.append(model(x).pooler_output.numpy())
    expected = frechet_distance(*map(moments, features))
    assert expected > 1e-4
    code, result = run(capsys, tmp_path / "real.npy", tmp_path / "png", "--extractor", folder, "--batch", 4)
    assert code == 0
    assert result["frechet_distance"] == pytest.approx(expected, rel=1e-3)
    assert (result["features"], result["reference"]["rows"], result["samples"]["rows"]) == (16, 9, 7)
    code, error = run(capsys, tmp_path / "real.npy", tmp_path / "png")
    assert code == 2
    assert "holds images; give --extractor FOLDER" in error


def test_timm_extractor(tmp_path):
    declare_missing_operators()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False, num_classes=5).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    extractor = load_extractor(tmp_path)
    assert extractor.size == tuple(model.pretrained_cfg["input_size"][1:])
    x = torch.rand(2, 3, *extractor.size)
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = model.forward_head(model.forward_features((x - mean) / std), pre_logits=True)
    assert torch.allclose(extractor.features(x), expected, atol=1e-5)


def test_layouts_of_images_are_one_image():
    picture = pictures(2)
    expected = torch.from_numpy(picture).permute(0, 3, 1, 2) / 255
    assert torch.allclose(as_images(picture), expected)
    assert torch.allclose(as_images(picture.transpose(0, 3, 1, 2)), expected)
    assert torch.allclose(as_images(picture.astype(np.float64) / 255), expected)
    grey = as_images(picture[..., :1])
    assert torch.allclose(grey, expected[:, :1].expand(-1, 3, -1, -1))
    for wrong, message in (
        (np.zeros((2, 16, 16)), r"array of shape \(2, 16, 16\)"),
        (np.zeros((2, 5, 16, 16)), "give a folder of images"),
        (np.full((2, 3, 4, 4), -1.0), r"float images must be in \[0, 1\], got -1 to -1"),
        (np.zeros((2, 3, 4, 4), np.int64), "images must be uint8 or floats"),
    ):
        with pytest.raises(ValueError, match=message):
            as_images(wrong)


def test_bad_input_is_one_line(vit, tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.ones((3, 2)))
    np.save(tmp_path / "one.npy", np.ones((1, 2)))
    np.savez(tmp_path / "two.npz", x=np.ones(2), y=np.ones(2))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "half.safetensors").write_bytes(b"\x00" * 5)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{}")
    no_weights = tmp_path / "no_weights"
    no_weights.mkdir()
    (no_weights / "config.json").write_text('{"model_type": "vit"}')
    for other, message in (
        ("missing", "nothing at"),
        ("empty", "nothing to read in"),
        ("text.npy", "cannot be read"),
        ("half.safetensors", "cannot be read"),
        ("one.npy", "at least two rows of features, got 1"),
        ("two.npz", "holds x, y; name one array features or images"),
        ("broken.png", "is no image that can be read"),
    ):
        code, error = run(capsys, tmp_path / "a.npy", tmp_path / other)
        assert (code, error.count("\n")) == (2, 1), (other, error)
        assert message in error
    for extractor, message in (("nowhere", "no feature extractor in"), ("odd", "has no *.safetensors files"),
                               ("no_weights", "has no *.safetensors files")):  # fmt: skip
        code, error = run(capsys, tmp_path / "a.npy", tmp_path / "a.npy", "--extractor", tmp_path / extractor)
        assert (code, error.count("\n")) == (2, 1), error
        assert message in error
    code, error = run(capsys, tmp_path / "a.npy", tmp_path / "a.npy", "--batch", 0)
    assert code == 2
    assert "--batch must be at least 1, got 0" in error
