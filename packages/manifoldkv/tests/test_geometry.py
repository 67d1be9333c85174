"""Which metric suits a model: the statistics worked by hand, the rule, and key sets whose winner is known."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch

from manifoldkv.geometry import SKIPPED_TOKENS, DiagnoseRule, diagnose_keys


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def collision_keys(seed: int = 0) -> torch.Tensor:
    """2000 background keys of radius 10 (sd .5) about one direction, 30 needles in the same directions at radius 16."""
    axis = torch.nn.functional.normalize(random(64, seed=seed), dim=-1)
    directions = torch.nn.functional.normalize(axis + random(2030, 64, seed=seed + 1) * 0.3 / 8, dim=-1)
    radii = torch.cat((10 + 0.5 * random(2000, seed=seed + 2), torch.full((30,), 16.0)))
    order = torch.randperm(2030, generator=torch.Generator().manual_seed(seed + 3))
    return (directions * radii[:, None])[order][None, None]


def mirrored_keys(seed: int = 0) -> torch.Tensor:
    """2000 background keys of radii 6 to 18 about one direction, 30 needles of radius 10 at 30 degrees from it."""
    axis = torch.nn.functional.normalize(random(64, seed=seed), dim=-1)
    other = random(30, 64, seed=seed + 1)
    other = torch.nn.functional.normalize(other - (other @ axis)[:, None] * axis, dim=-1)
    background = torch.nn.functional.normalize(axis + random(2000, 64, seed=seed + 2) * 0.3 / 8, dim=-1)
    radii = 6 + 12 * torch.rand(2000, generator=torch.Generator().manual_seed(seed + 3))
    needles = 10 * (math.cos(math.pi / 6) * axis + math.sin(math.pi / 6) * other)
    order = torch.randperm(2030, generator=torch.Generator().manual_seed(seed + 4))
    return torch.cat((background * radii[:, None], needles))[order][None, None]


def on_axis(radii: list[float]) -> torch.Tensor:
    """Keys of the given radii near the first axis, each a little off it by its rank (the angle grows with it)."""
    rank = torch.tensor(radii).argsort().argsort().float()
    angle = 0.01 * (1 + rank)
    keys = torch.tensor(radii)[:, None] * torch.stack((angle.cos(), angle.sin()), dim=-1)
    return torch.cat((torch.full((SKIPPED_TOKENS, 2), 1000.0), keys))[None, None]


@pytest.fixture(autouse=True)
def _few_tokens_are_enough():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the metric is chosen from")
        yield


class TestStatistics:
    def test_norms_worked_by_hand(self):
        radii = [float(r) for r in range(1, 102)]  # 1 ... 101
        model = diagnose_keys([on_axis(radii)]).model
        mean = 51.0
        sd = math.sqrt((101**2 - 1) / 12)
        assert model.cv == pytest.approx(sd / mean, rel=1e-5)
        # quartiles 26, 51, 76; q1 = 2, q99 = 100
        assert model.upper == pytest.approx(49 / 50, rel=1e-5)
        assert model.lower == pytest.approx(49 / 50, rel=1e-5)

    def test_agreement_is_a_rank_correlation(self):
        """Angles to the mean direction that follow the radius exactly, against it, or not at all."""
        count = 101
        radii = torch.arange(1.0, count + 1)
        for sign, expected in ((1, 1.0), (-1, -1.0)):
            # mirror images on both sides of the axis keep the mean direction on it
            angle = 0.003 * (radii if sign == 1 else count + 1 - radii)
            up = radii[:, None] * torch.stack((angle.cos(), angle.sin()), -1)
            down = radii[:, None] * torch.stack((angle.cos(), -angle.sin()), -1)
            keys = torch.stack((up, down), dim=1).flatten(0, 1)
            keys = torch.cat((torch.ones(SKIPPED_TOKENS, 2), keys))[None, None]
            assert diagnose_keys([keys]).model.agree == pytest.approx(expected, abs=0.01)
        keys = torch.nn.functional.normalize(random(1, 1, 400, 8), dim=-1) * (1 + torch.rand(1, 1, 400, 1))
        assert abs(diagnose_keys([keys]).model.agree) < 0.2

    def test_overlap_of_the_two_selections(self):
        flat = torch.nn.functional.normalize(torch.ones(8) + 0.3 * random(1, 1, 300, 8), dim=-1)
        assert diagnose_keys([flat]).model.overlap > 0.95  # constant norms: both metrics keep the same
        # radius alone moves one half far away, angle alone the other: no token in common
        axis = torch.tensor([1.0, 0.0, 0.0])
        angle = torch.linspace(0.05, 0.1, 50)
        turned = torch.stack((angle.cos(), angle.sin(), 0 * angle), -1)
        turned[1::2, 1] *= -1
        long = torch.cat((axis * 20, axis * 0.1)).view(2, 3).repeat(25, 1)
        keys = torch.cat((torch.ones(SKIPPED_TOKENS, 3), turned * 10, long))[None, None]
        assert diagnose_keys([keys]).model.overlap == 0.0

    def test_the_first_tokens_are_left_out(self):
        keys = random(1, 2, 300, 8)
        changed = keys.clone()
        changed[:, :, :SKIPPED_TOKENS] *= 1e4
        assert diagnose_keys([keys]) == diagnose_keys([changed])

    def test_padding_is_left_out(self):
        keys = random(1, 2, 300, 8)
        padded = torch.cat((torch.full((1, 2, 40, 8), math.nan), keys), dim=2)
        mask = torch.arange(340)[None] >= 40
        assert diagnose_keys([padded], mask) == diagnose_keys([keys])
        assert diagnose_keys([padded], mask.long()).tokens == 300

    def test_faulty_keys_are_left_out(self):
        keys = random(1, 2, 300, 8)
        faulty = torch.cat((keys[:, :, :100], keys[:, :, 100:101], keys[:, :, 100:]), dim=2)
        faulty[0, 1, 100, 3] = math.nan
        assert diagnose_keys([faulty]).model == diagnose_keys([keys]).model

    def test_median_over_heads_and_layers(self):
        keys = [random(1, 2, 300, 8, seed=i) * (1 + i * torch.rand(1, 2, 300, 1)) for i in range(3)]
        single = [diagnose_keys([k[:, h : h + 1]]).model for k in keys for h in range(2)]
        both = diagnose_keys(keys)
        for name in ("cv", "agree", "upper", "lower", "overlap"):
            values = sorted(getattr(g, name) for g in single)
            assert getattr(both.model, name) == pytest.approx((values[2] + values[3]) / 2, abs=1e-6)
            pair = [getattr(g, name) for g in single[:2]]
            assert getattr(both.layers[0], name) == pytest.approx(sum(pair) / 2, abs=1e-6)

    def test_equal_keys_and_any_dtype(self):
        result = diagnose_keys([torch.ones(1, 1, 300, 8, dtype=torch.bfloat16)])
        assert result.model.cv < 1e-6
        assert (result.model.agree, result.metric) == (0.0, "l2")


class TestRule:
    def test_order_and_thresholds(self):
        choose = DiagnoseRule().choose
        cases = [
            ((0.049, -1.0, 0.0, 9.0), "l2", "nearly constant"),
            ((0.05, 0.0, 3.01, 2.0), "l2", "heavy upper tail"),
            ((0.05, 0.0, 3.0, 1.0), "cosine", "radius and angle disagree"),
            ((0.05, 0.0, 9.0, 6.0), "cosine", "radius and angle disagree"),  # 9 isn't more than 1.5 x 6
            ((0.05, 0.1, 1.0, 1.0), "l2", "vote the same way"),
            ((0.05, 0.0999, 1.0, 1.0), "cosine", "radius and angle disagree"),
        ]
        for numbers, metric, words in cases:
            chosen, reason = choose(*numbers)
            assert chosen == metric
            assert words in reason

    def test_constants_are_the_callers(self):
        keys = [random(1, 2, 300, 8)]
        assert diagnose_keys(keys, rule=DiagnoseRule(flat_cv=10.0)).metric == "l2"
        assert diagnose_keys(keys, rule=DiagnoseRule(flat_cv=0.0, tail=99.0, agreement=2.0)).metric == "cosine"

    @pytest.mark.parametrize("seed", [0, 10, 20])
    def test_radial_outliers_call_for_l2(self, seed):
        result = diagnose_keys([collision_keys(seed)])
        assert result.metric == "l2"
        assert "heavy upper tail" in result.model.reason
        assert result.model.upper > 6
        assert result.model.lower < 2.2
        assert abs(result.model.agree) < 0.08

    @pytest.mark.parametrize("seed", [0, 10, 20])
    def test_angular_outliers_call_for_cosine(self, seed):
        result = diagnose_keys([mirrored_keys(seed)])
        assert result.metric == "cosine"
        assert result.model.upper < 1.2
        assert abs(result.model.agree) < 0.1

    def test_each_layer_on_its_own(self):
        result = diagnose_keys([collision_keys(), mirrored_keys()])
        assert [layer.metric for layer in result.layers] == ["l2", "cosine"]


def test_result_is_plain_data():
    result = diagnose_keys([random(2, 2, 300, 8)])
    assert result.tokens == 600
    data = json.loads(json.dumps(result.to_dict()))
    assert data["metric"] == result.metric == data["model"]["metric"]
    assert len(data["layers"]) == 1
    assert set(data["model"]) == {"cv", "agree", "upper", "lower", "overlap", "metric", "reason"}


def test_few_tokens_warn_and_very_few_are_refused():
    with pytest.warns(UserWarning, match=r"^the metric is chosen from 12 tokens; 256 or more make the choice reliable"):
        diagnose_keys([random(1, 1, 12, 4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnose_keys([random(1, 1, 256, 4)])
    with pytest.raises(ValueError, match=r"^11 tokens are too few to diagnose; give at least 12 valid ones a row"):
        diagnose_keys([random(1, 1, 11, 4)])
    mask = torch.arange(30)[None] >= 20
    with pytest.raises(ValueError, match="too few to diagnose"):
        diagnose_keys([random(1, 1, 30, 4)], mask)


def test_rows_too_short_are_left_out_of_a_batch():
    keys = random(2, 1, 300, 4)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, :295] = False
    assert diagnose_keys([keys], mask).model == diagnose_keys([keys[:1]]).model


def test_no_layers():
    with pytest.raises(ValueError, match=r"^no layers given"):
        diagnose_keys([])


class TestModel:
    @pytest.fixture
    def llama(self):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            intermediate_size=32,
            vocab_size=64,
        )
        return transformers.LlamaForCausalLM(config).eval()

    def test_reads_the_keys_of_one_forward_pass(self, llama):
        from manifoldkv import diagnose

        ids = torch.randint(64, (2, 150), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, :20] = 0
        result = diagnose(llama, ids, mask)
        with torch.no_grad():
            cache = llama(ids, attention_mask=mask).past_key_values
        assert result == diagnose_keys([layer.keys for layer in cache.layers], mask)
        assert result.tokens == 280
        assert len(result.layers) == 2

    def test_a_model_without_full_attention(self):
        transformers = pytest.importorskip("transformers")
        from manifoldkv import diagnose

        config = transformers.MistralConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            intermediate_size=32,
            vocab_size=64,
            sliding_window=8,
        )
        model = transformers.MistralForCausalLM(config).eval()
        with pytest.raises(ValueError, match=r"^MistralForCausalLM returned a cache without full-attention keys"):
            diagnose(model, torch.ones(1, 20, dtype=torch.long))
