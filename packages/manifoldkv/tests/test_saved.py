"""Saved prompt caches: the same continuation in another process, and one clear error for any file that doesn't fit."""

from __future__ import annotations

import copy
import inspect
import json
import os
import signal
import struct
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifoldkv import KVConfig, ManifoldCache, compress

transformers = pytest.importorskip("transformers")

from manifoldkv.integrations.transformers import CacheFormatError  # noqa: E402
from manifoldkv.integrations.transformers import saved as saved_module  # noqa: E402

SMALL = {"metric": "l2", "n_sink": 2, "n_recent": 4}

CASES = {
    "uniform": ("llama", {"budget": 12}, None),
    "padded": ("llama", {"budget": 12}, [0, 7]),
    "adaptive": ("llama", {"budget": 12, "head_budget": "adaptive"}, [0, 7]),
    "sliding": ("qwen2-sliding", {"budget": 12, "phase": "both", "interval": 1}, None),
    "gemma3-padded": ("gemma3", {"compression_ratio": 0.5}, [3, 0]),
}

IN_ANOTHER_PROCESS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from manifoldkv import ManifoldCache, compress
for folder in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    given = torch.load(folder / "step.pt", weights_only=True)
    cache = ManifoldCache.load(folder / "prompt.safetensors", model.config)
    with compress(model, cache.cfg), torch.no_grad():
        logits = model(past_key_values=cache, **given).logits
    torch.save({"logits": logits, "stored": [s.stored_length for s in cache.stats()]}, folder / "logits.pt")
"""


def prefilled(model, cfg, ids, mask=None):
    """A cache that holds the compressed prompt."""
    with compress(model, cfg) as kv, torch.no_grad():
        model(ids, attention_mask=mask)
    return kv.cache


@pytest.fixture
def saved(tiny, prompt, tmp_path):
    """A saved cache of the tiny Llama and its path."""
    model = tiny("llama")
    cache = prefilled(model, KVConfig(**SMALL, budget=12), prompt(1, 30)[0])
    return model, cache, cache.save(tmp_path / "prompt.safetensors")


class TestRoundTrip:
    def test_another_process_goes_on_with_the_same_logits(self, tiny, prompt, tmp_path):
        expected = {}
        for name, (family, settings, pads) in CASES.items():
            model = copy.deepcopy(tiny(family))
            ids, mask = prompt(2, 30, pads=pads)
            mask = torch.ones_like(ids) if mask is None else mask
            cfg = KVConfig(**SMALL, **settings)
            cache = prefilled(model, cfg, ids, mask)
            mask = torch.cat((mask, torch.ones(2, 3, dtype=torch.long)), 1)
            positions = (mask.cumsum(-1) - 1)[:, -3:]
            step = {"input_ids": prompt(2, 3, seed=1)[0], "attention_mask": mask, "position_ids": positions}
            (tmp_path / name).mkdir()
            cache.save(tmp_path / name / "prompt.safetensors")
            model.save_pretrained(tmp_path / name)
            torch.save(step, tmp_path / name / "step.pt")
            with compress(model, cfg), torch.no_grad():
                logits = model(past_key_values=cache, **step).logits
            expected[name] = logits, [s.stored_length for s in cache.stats()]
        folders = [str(tmp_path / name) for name in CASES]
        subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, *folders], check=True, timeout=300)
        for name, (logits, stored) in expected.items():
            found = torch.load(tmp_path / name / "logits.pt", weights_only=True)
            torch.testing.assert_close(found["logits"], logits, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert found["stored"] == stored, name

    def test_everything_comes_back(self, saved):
        model, cache, path = saved
        loaded = ManifoldCache.load(path, model.config)
        assert loaded.cfg == cache.cfg
        assert loaded.get_seq_length() == 30
        for own, other in zip(loaded.layers, cache.layers, strict=True):
            assert torch.equal(own.keys, other.keys)
            assert torch.equal(own.values, other.values)
            assert torch.equal(own.positions, other.positions)
            assert own.stats() == other.stats()

    def test_the_dtype_of_a_config_may_be_a_name(self, saved):
        model, _, path = saved
        config = copy.deepcopy(model.config)
        config.dtype = "float32"  # as save_pretrained leaves it
        assert ManifoldCache.load(path, config).get_seq_length() == 30
        config.dtype = "bfloat16"
        with pytest.raises(CacheFormatError, match=r"dtype torch\.float32 instead of torch\.bfloat16"):
            ManifoldCache.load(path, config)

    def test_a_dtype_is_kept_and_bfloat16_is_checked(self, tiny, prompt, tmp_path):
        model = copy.deepcopy(tiny("llama")).bfloat16()
        cache = prefilled(model, KVConfig(**SMALL, budget=12), prompt(1, 30)[0])
        path = cache.save(tmp_path / "prompt.safetensors")
        assert ManifoldCache.load(path, model.config, torch.bfloat16).layers[0].keys.dtype == torch.bfloat16
        with pytest.raises(CacheFormatError, match=r"dtype torch\.bfloat16 instead of torch\.float32"):
            ManifoldCache.load(path, model.config, torch.float32)

    def test_decoding_goes_on_evicting(self, tiny, prompt, tmp_path):
        model = tiny("llama")
        cfg = KVConfig(**SMALL, budget=12, phase="both", interval=3)
        ids = prompt(1, 30)[0]
        cache = prefilled(model, cfg, ids)
        loaded = ManifoldCache.load(cache.save(tmp_path / "prompt.safetensors"), model.config)
        with torch.no_grad():
            for step in range(8):
                own = model(ids[:, step : step + 1], past_key_values=loaded).logits
                other = model(ids[:, step : step + 1], past_key_values=cache).logits
                torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)
        assert [s.evictions for s in loaded.stats()] == [s.evictions for s in cache.stats()] == [3, 3]


class TestMismatch:
    @pytest.mark.parametrize(
        ("other", "changes", "said"),
        [
            ("qwen2", {}, "model_type llama instead of qwen2"),
            ("llama", {"num_hidden_layers": 3}, "layers 2 instead of 3"),
            ("llama", {"num_key_value_heads": 4}, "key_value_heads 2 instead of 4"),
            ("llama", {"head_dim": 16}, "head_dim 8 instead of 16"),
            ("llama", {"vocab_size": 99}, "vocab_size 61 instead of 99"),
            ("llama3-rope", {}, "rope"),
        ],
    )
    def test_another_model_is_named(self, other, changes, said, saved, tiny):
        path = saved[2]
        with pytest.raises(CacheFormatError, match=f"saved from another model: .*{said}"):
            ManifoldCache.load(path, tiny(other, **changes).config)

    def test_another_rotary_base_is_named(self, saved):
        model, _, path = saved
        config = copy.deepcopy(model.config)
        config.rope_parameters["rope_theta"] = 5e5
        with pytest.raises(CacheFormatError, match=r"rope .*10000\.0.* instead of .*500000\.0"):
            ManifoldCache.load(path, config)

    def test_a_rotary_base_per_layer_type_is_compared(self, tiny, prompt, tmp_path):
        model = tiny("gemma3")
        path = prefilled(model, KVConfig(**SMALL, budget=12), prompt(1, 30)[0]).save(tmp_path / "prompt.safetensors")
        assert ManifoldCache.load(path, model.config).get_seq_length() == 30
        config = copy.deepcopy(model.config)
        config.rope_parameters["full_attention"]["rope_theta"] = 123.0
        with pytest.raises(CacheFormatError, match=r"rope .* instead of .*'full_attention rope_theta': 123\.0"):
            ManifoldCache.load(path, config)


class TestDamage:
    def test_no_file(self, tiny, tmp_path):
        with pytest.raises(FileNotFoundError, match="no saved cache at"):
            ManifoldCache.load(tmp_path / "nothing", tiny("llama").config)

    def test_truncated_anywhere(self, saved):
        model, _, path = saved
        whole = path.read_bytes()
        for size in [0, 1, 7, 8, 9, 200, len(whole) // 2, len(whole) - 1]:
            path.write_bytes(whole[:size])
            with pytest.raises(CacheFormatError, match="damaged or no safetensors file"):
                ManifoldCache.load(path, model.config)

    def test_random_bytes(self, tiny, tmp_path):
        generator = torch.Generator().manual_seed(0)
        for size in (3, 64, 5000):
            path = tmp_path / f"noise{size}"
            path.write_bytes(bytes(torch.randint(256, (size,), generator=generator).tolist()))
            with pytest.raises(CacheFormatError):
                ManifoldCache.load(path, tiny("llama").config)

    def test_any_damaged_byte_of_the_header(self, saved):
        """Never another error than CacheFormatError; a byte that nothing depends on may pass."""
        model, _, path = saved
        whole = path.read_bytes()
        length = 8 + struct.unpack("<Q", whole[:8])[0]
        generator = torch.Generator().manual_seed(0)
        refused = 0
        for place in torch.randperm(length, generator=generator)[:400].tolist():
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
            try:
                ManifoldCache.load(path, model.config)
            except CacheFormatError:
                refused += 1
        assert refused > 300

    def test_any_damaged_byte_of_the_tensors(self, saved):
        """A flipped bit in a key would change answers and nothing else."""
        model, _, path = saved
        whole = path.read_bytes()
        start = 8 + struct.unpack("<Q", whole[:8])[0]
        generator = torch.Generator().manual_seed(0)
        for place in (start + torch.randperm(len(whole) - start, generator=generator)[:100]).tolist():
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CacheFormatError, match="damaged"):
                ManifoldCache.load(path, model.config)

    def test_the_model_is_not_its_configuration(self, tmp_path):
        with pytest.raises(TypeError, match=r"config must be the model's configuration \(model.config\), not Linear"):
            # as a user meets it: in these tests the annotations are checked too, and speak first
            inspect.unwrap(saved_module.load_cache)(tmp_path / "prompt.safetensors", torch.nn.Linear(1, 1))

    def test_foreign_safetensors(self, tiny, tmp_path):
        model = copy.deepcopy(tiny("llama"))
        model.save_pretrained(tmp_path)
        with pytest.raises(CacheFormatError, match="not a cache saved by this version"):
            ManifoldCache.load(tmp_path / "model.safetensors", model.config)

    @pytest.mark.parametrize(
        "change",
        [
            lambda header: header.update(layers=header["layers"][:1]),
            lambda header: header.update(layers=[{}, {}]),
            lambda header: header.update(layers=[[], []]),
            lambda header: header.update(layers=None),
            lambda header: header.update(cfg=None),
            lambda header: header.update(cfg={"metric": "l2"}),
            lambda header: header["cfg"].update(budget=-3),
            lambda header: header["cfg"].update(unknown=1),
            lambda header: header.update(model=["llama"]),
            lambda header: header["layers"][0].update(logical="thirty"),
            lambda header: header["layers"][0].update(logical=-4),
        ],
    )
    def test_a_header_that_lies(self, saved, change):
        model, _, path = saved
        header = header_of(path)
        change(header)
        forge(path, header)
        with pytest.raises(CacheFormatError):
            ManifoldCache.load(path, model.config)

    @pytest.mark.parametrize("name", ["0.keys", "1.values", "0.positions"])
    def test_a_tensor_missing_or_of_another_shape(self, saved, name):
        model, _, path = saved
        header, tensors = header_of(path), load_file(path)
        for wrong in (None, tensors[name][:, :1].contiguous(), tensors[name][..., :3].contiguous()):
            changed = {**tensors, name: wrong} if wrong is not None else {k: v for k, v in tensors.items() if k != name}
            save_file(changed, path, metadata={"manifoldkv": json.dumps(header)})
            with pytest.raises(CacheFormatError):
                ManifoldCache.load(path, model.config)

    def test_a_file_sets_nothing_but_what_a_cache_has(self, saved):
        model, _, path = saved
        header = header_of(path)
        header["layers"][0]["choose"] = "anything"
        forge(path, header)
        assert ManifoldCache.load(path, model.config).layers[0].choose is None


def forge(path, header):
    """Put another header into the file, with the checksum that belongs to it."""
    tensors = load_file(path)
    header.pop("digest")
    header["digest"] = saved_module._digest(header, tensors)
    save_file(tensors, path, metadata={"manifoldkv": json.dumps(header)})


def header_of(path):
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    return json.loads(json.loads(whole[8 : 8 + length])["__metadata__"]["manifoldkv"])


class TestWriting:
    def test_an_empty_cache_is_refused(self, tiny, tmp_path):
        cache = ManifoldCache(tiny("llama").config, KVConfig(**SMALL, budget=12))
        with pytest.raises(ValueError, match="layer 0 holds nothing yet"):
            cache.save(tmp_path / "prompt.safetensors")
        assert not list(tmp_path.iterdir())

    def test_killed_while_saving_leaves_the_old_file(self, saved):
        """Saves over and over in a process that is killed at a random moment; the file is always whole."""
        model, cache, path = saved
        for delay in (0.0, 0.001, 0.005, 0.013, 0.05):
            child = os.fork()
            if child == 0:
                while True:
                    cache.save(path)
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert ManifoldCache.load(path, model.config).get_seq_length() == 30


class TestPerHead:
    def test_needs_compress_to_go_on(self, tiny, prompt, tmp_path):
        """Heads of unequal length need the attention that compress() installs: without it, one clear error."""
        model = tiny("llama")
        cfg = KVConfig(**SMALL, budget=12, head_budget="adaptive")
        path = prefilled(model, cfg, prompt(1, 30)[0]).save(tmp_path / "prompt.safetensors")
        step = torch.tensor([[5]])
        with pytest.raises(ValueError, match=r"compress\(model, head_budget='adaptive'"):
            model(step, past_key_values=ManifoldCache.load(path, model.config))
        with compress(model, **SMALL, budget=12), pytest.raises(ValueError, match="head_budget='adaptive'"):
            model(step, past_key_values=ManifoldCache.load(path, model.config))
