import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from icml26_shared.checkpoint import (
    CheckpointError,
    JsonlStore,
    SettingsMismatch,
    StoreLocked,
    atomic_path,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    dumps,
    load_state,
    save_state,
    to_jsonable,
)
from icml26_shared.errors import UserError


def start(code, *arguments):
    """A Python process that has printed its first line."""
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    return process


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kill(process):
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


# --- atomic files -----------------------------------------------------------------------------------------------------

WRITER = """
import sys
from icml26_shared.checkpoint import atomic_write_bytes
path, size = sys.argv[1], int(sys.argv[2])
atomic_write_bytes(path, b"0" * size)
print("ready", flush=True)
number = 0
while True:
    number += 1
    atomic_write_bytes(path, str(number % 10).encode() * size)
"""


def test_a_writer_killed_at_any_moment_leaves_one_whole_file(tmp_path):
    path, size = tmp_path / "data.bin", 2_000_000
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = start(WRITER, path, size)
        time.sleep(float(rng.uniform(0.0, 0.15)))
        kill(process)
        data = path.read_bytes()
        assert len(data) == size
        assert data == data[:1] * size
    atomic_write_bytes(path, b"next")
    assert names(tmp_path) == ["data.bin"], "the next writer sweeps what killed ones left"


def test_a_file_is_replaced_only_when_the_block_ends_well(tmp_path):
    path = tmp_path / "deep" / "notes.txt"
    atomic_write_text(path, "first\r\nlines\n")
    assert path.read_bytes() == b"first\r\nlines\n"

    def fail_half_way():
        with atomic_path(path) as temporary:
            assert temporary.parent == path.parent
            assert temporary.suffix == ".txt"
            temporary.write_text("half")
            assert path.read_text() == "first\nlines\n"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_bytes() == b"first\r\nlines\n"
    assert names(path.parent) == ["notes.txt"]


def test_a_new_file_has_the_permissions_of_the_umask_and_an_old_one_keeps_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write_text(tmp_path / "new", "x")
        atomic_write_text(tmp_path / "old", "x")
        (tmp_path / "old").chmod(0o600)
        atomic_write_text(tmp_path / "old", "y")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o600


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    atomic_write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "x"


def test_writing_over_a_folder_says_so(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; give a file name"):
        atomic_write_text(tmp_path, "x")


def test_a_name_with_glob_characters_sweeps_only_its_own(tmp_path):
    (tmp_path / ".b.here~1~00000000.tmp").write_text("someone else's")
    atomic_write_text(tmp_path / "[ab]*", "x")
    assert names(tmp_path) == [".b.here~1~00000000.tmp", "[ab]*"]


# --- strict JSON ------------------------------------------------------------------------------------------------------


def test_json_takes_numpy_torch_and_python_values():
    import torch

    class Color(Enum):
        RED = "red"

    @dataclass
    class Point:
        x: float
        y: np.float32

    value = {
        "nan": math.nan,
        "inf": [-math.inf, np.float64("inf")],
        "numpy": (np.int64(3), np.bool_(True), np.array([[1.5, np.nan]])),
        "torch": torch.tensor([1, 2]),
        "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        "path": Path("a/b"),
        "enum": Color.RED,
        "point": Point(1.0, np.float32(0.5)),
        "set": {3, 1, 2},
        (1, "x"): None,
        7: True,
    }
    assert json.loads(dumps(value)) == {
        "nan": None,
        "inf": [None, None],
        "numpy": [3, True, [[1.5, None]]],
        "torch": [1, 2],
        "scalar": 0.5,
        "path": "a/b",
        "enum": "red",
        "point": {"x": 1.0, "y": 0.5},
        "set": [1, 2, 3],
        '[1, "x"]': None,
        "7": True,
    }


def test_json_refuses_what_it_cannot_say():
    with pytest.raises(TypeError, match="type complex"):
        to_jsonable({"a": 1j})


def test_text_that_is_no_unicode_is_kept_in_escapes(tmp_path):
    broken = b"caf\xe9".decode(errors="surrogateescape")
    atomic_write_json(tmp_path / "x.json", [broken, "é"])
    assert json.loads((tmp_path / "x.json").read_bytes()) == [broken, "é"]


def test_a_json_file_is_strict_and_ends_with_a_newline(tmp_path):
    atomic_write_json(tmp_path / "x.json", {"π": float("nan")})
    assert (tmp_path / "x.json").read_text() == '{\n  "π": null\n}\n'


# --- results ----------------------------------------------------------------------------------------------------------


def rows(n):
    return [{"task": "t", "index": i, "config": {"ratio": 0.5}, "score": i / 2} for i in range(n)]


def test_rows_come_back_in_a_second_run_which_skips_what_is_done(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    with JsonlStore(path, settings={"model": "m"}) as store:
        for row in rows(2):
            store.append(row)
    with JsonlStore(path, settings={"model": "m"}) as store:
        assert store.done(("t", 1, {"ratio": 0.5}))
        assert not store.done(("t", 2, {"ratio": 0.5}))
        assert {"index": 0, "task": "t", "config": {"ratio": 0.5}} in store
        assert store.get(rows(2)[1])["score"] == 0.5
        store.append(rows(3)[2])
        assert list(store) == rows(3)
        assert len(store) == 3
    assert JsonlStore.read(path) == rows(3)
    header = json.loads(path.read_text().splitlines()[0])
    assert header["settings"] == {"model": "m"}
    assert header["key"] == ["task", "index", "config"]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_half_written_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    with JsonlStore(path) as store:
        for row in rows(3):
            store.append(row)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert JsonlStore.read(path) == rows(2)
    with pytest.warns(UserWarning, match="half-written last line"):
        store = JsonlStore(path)
    with store:
        assert store.rows() == rows(2)
        store.append(rows(3)[2])
    assert path.read_bytes() == whole


STORE = """
import sys
from icml26_shared.checkpoint import JsonlStore
with JsonlStore(sys.argv[1], key=("index",), settings={"seed": 0}) as store:
    print("ready", flush=True)
    for index in range(int(sys.argv[2])):
        if not store.done(index):
            store.append({"index": index, "text": "x" * 3000, "square": index * index})
"""


@pytest.mark.filterwarnings("ignore:.*half-written")
def test_runs_killed_at_random_moments_end_with_the_results_of_one_run(tmp_path):
    path = tmp_path / "killed.jsonl"
    rng = np.random.default_rng(1)
    lengths = []
    for _ in range(4):
        process = start(STORE, path, 10**9)
        time.sleep(float(rng.uniform(0.02, 0.15)))
        kill(process)
        found = JsonlStore.read(path)
        assert [row["index"] for row in found] == list(range(len(found)))
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 0
    count = lengths[-1] + 20
    whole = tmp_path / "whole.jsonl"
    for target in (path, whole):
        process = start(STORE, target, count)
        assert process.wait() == 0
        process.stdout.close()
    assert path.read_bytes() == whole.read_bytes()


FULL = """
import resource, sys
from icml26_shared.checkpoint import JsonlStore
store = JsonlStore(sys.argv[1], key=("index",))
store.append({"index": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.append({"index": 1, "text": "x" * 5000})
except OSError as error:
    print("ready", flush=True)
"""


def test_a_row_that_the_disk_has_no_room_for_leaves_no_part_of_it(tmp_path):
    process = start(FULL, tmp_path / "r.jsonl")
    assert process.wait() == 0
    process.stdout.close()
    assert (tmp_path / "r.jsonl").read_text().splitlines()[1:] == ['{"index": 0}']


def test_other_settings_are_refused_and_the_difference_is_said(tmp_path):
    path = tmp_path / "r.jsonl"
    JsonlStore(path, settings={"model": "a", "seed": 0}).close()
    with pytest.raises(SettingsMismatch) as caught:
        JsonlStore(path, settings={"model": "b", "seed": 0, "dtype": "bf16"})
    said = str(caught.value)
    assert 'model: "a" there, "b" now' in said
    assert 'dtype: not set there, "bf16" now' in said
    assert "seed" not in said
    assert "use another --out" in said
    assert isinstance(caught.value, ValueError)
    with pytest.raises(SettingsMismatch, match=r'key fields: \["task", "index", "config"\] there, \["a"\] now'):
        JsonlStore(path, key=("a",), settings={"model": "a", "seed": 0})
    JsonlStore(path, settings={"seed": 0, "model": "a"}).close()


def test_fresh_forgets_what_is_there(tmp_path):
    path = tmp_path / "r.jsonl"
    with JsonlStore(path, key=("i",), settings={"a": 1}) as store:
        store.append({"i": 1})
    with JsonlStore(path, key=("i",), settings={"a": 2}, fresh=True) as store:
        assert len(store) == 0


def test_rows_can_be_removed(tmp_path):
    path = tmp_path / "r.jsonl"
    with JsonlStore(path) as store:
        for row in rows(4):
            store.append(row)
        assert store.remove(lambda row: row["index"] % 2 == 0) == 2
        assert store.remove(lambda row: False) == 0
        store.append(rows(1)[0])
    assert JsonlStore.read(path) == [rows(4)[1], rows(4)[3], rows(4)[0]]


def test_a_second_process_is_told_that_the_results_are_in_use(tmp_path):
    path = tmp_path / "r.jsonl"
    code = "import sys\nfrom icml26_shared.checkpoint import JsonlStore\ns = JsonlStore(sys.argv[1])\n"
    process = start(code + "print('ready', flush=True)\nimport time; time.sleep(60)", path)
    with pytest.raises(StoreLocked, match=r"in use by another run; .*use another --out") as caught:
        JsonlStore(path)
    assert isinstance(caught.value, UserError)
    assert JsonlStore.read(path) == []
    kill(process)
    JsonlStore(path).close()  # the lock of a killed process is gone


def test_a_file_of_something_else_is_never_touched(tmp_path):
    path = tmp_path / "mine.txt"
    for text in ("my notes", "my\nnotes\n", '{"a": 1}\n', '{"format": "icml26-results"'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"not a results file .*give another path"):
            JsonlStore(path)
        assert path.read_text() == text


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = tmp_path / "r.jsonl"
    with JsonlStore(path) as store:
        for row in rows(2):
            store.append(row)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:10], lines[2]]) + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 2 is damaged"):
        JsonlStore(path)
    assert path.read_bytes() == before


def test_wrong_rows_and_keys_are_errors(tmp_path):
    with JsonlStore(tmp_path / "r.jsonl", key=("task", "index")) as store:
        store.append({"task": "a", "index": 0})
        with pytest.raises(ValueError, match=r"lacks the key field\(s\) \['index'\]"):
            store.append({"task": "a"})
        with pytest.raises(ValueError, match="ask done"):
            store.append({"task": "a", "index": 0, "score": 1})
        with pytest.raises(ValueError, match=r"2 value\(s\)|1 value\(s\)"):
            store.done("a")
        with pytest.raises(TypeError):
            store.append({"task": "a", "index": 1, "score": 1j})
    assert len(JsonlStore.read(tmp_path / "r.jsonl")) == 1
    with pytest.raises(ValueError, match="distinct field names"):
        JsonlStore(tmp_path / "s.jsonl", key="task")
    with pytest.raises(ValueError, match="is a folder"):
        JsonlStore(tmp_path)


def test_remember_computes_once_and_gives_the_same_value_in_every_run(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"pair": (1, math.nan)}

    values = []
    for _ in range(2):
        with JsonlStore(tmp_path / "r.jsonl", key=("k",)) as store:
            values += [store.remember({"k": 1}, compute), store.remember({"k": 1}, compute)]
    assert values == [{"pair": [1, None]}] * 4
    assert len(calls) == 1


# --- states -----------------------------------------------------------------------------------------------------------


def same(a, b):
    """Equality that sees types, dtypes, shapes and NaN."""
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return a == b or (a != a and b != b)


def test_a_training_run_resumes_to_the_same_weights(tmp_path):
    import torch

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        return model, {
            "state": {i: torch.zeros_like(p) for i, p in enumerate(model.parameters())},
            "betas": (0.9, 0.99),
        }

    def step(model, momentum):  # the state has the shape of an optimizer's: integers as keys, a tuple
        model.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                momentum["state"][i] = momentum["betas"][0] * momentum["state"][i] + parameter.grad
                parameter -= 0.01 * momentum["state"][i]

    model, momentum = make()
    for _ in range(3):
        step(model, momentum)
    state = {"step": 3, "model": model.state_dict(), "optimizer": momentum, "rng": torch.get_rng_state()}
    save_state(tmp_path / "run.safetensors", state)
    step(model, momentum)

    resumed, _ = make()
    loaded = load_state(tmp_path / "run.safetensors")
    assert loaded["step"] == 3
    resumed.load_state_dict(loaded["model"])
    torch.set_rng_state(loaded["rng"])
    step(resumed, loaded["optimizer"])
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(resumed.bias, model.bias)


def test_tensors_keep_dtype_shape_and_value_and_may_share_memory(tmp_path):
    import torch

    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "view": base.T,
        "tied": [base, base],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.zeros(0, 5, dtype=torch.int8),
        "scalar": torch.tensor(True),
        "bf16": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        "grad": torch.ones(2, requires_grad=True),
        "array": np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "zero-d": np.array(2.5, dtype=np.float16),
    }
    save_state(tmp_path / "s", state)
    loaded = load_state(tmp_path / "s")
    state["grad"] = state["grad"].detach()
    assert same(loaded, state)


def test_arrays_alone_need_no_torch(tmp_path):
    code = (
        "import sys, numpy\nfrom icml26_shared.checkpoint import save_state, load_state\n"
        "save_state(sys.argv[1], {'a': numpy.arange(3), 'b': (1, None)})\n"
        "loaded = load_state(sys.argv[1])\n"
        "assert loaded['a'].tolist() == [0, 1, 2] and loaded['b'] == (1, None) and 'torch' not in sys.modules\n"
        "print('ready', flush=True)"
    )
    process = start(code, tmp_path / "s")
    assert process.wait() == 0
    process.stdout.close()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("__state__")
keys = st.text(max_size=4) | st.integers(-5, 5).filter(lambda k: k not in (0, 1)) | st.just("__state__") | st.none()
arrays = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["float32", "int64", "uint8", "bool"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)


def _tensor(array):
    import torch

    return torch.from_numpy(array)


states = st.recursive(
    scalars | arrays | arrays.map(_tensor),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
def test_any_nested_state_comes_back_as_it_was(tmp_path, state):
    save_state(tmp_path / "s.safetensors", state)
    assert same(load_state(tmp_path / "s.safetensors"), state)


def test_what_cannot_be_stored_is_named_with_its_place(tmp_path):
    import torch

    for state, message in [
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has a key of type tuple"),
        ([torch.eye(2).to_sparse()], r"state\[0\] is a sparse"),
        ({"a": object()}, r"state\['a'\] is a object"),
    ]:
        with pytest.raises(TypeError, match=message):
            save_state(tmp_path / "s", state)
    assert names(tmp_path) == []


def test_damaged_and_foreign_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "s.safetensors"
    with pytest.raises(FileNotFoundError, match="no saved state"):
        load_state(path)
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(CheckpointError, match="damaged or is not a safetensors file"):
        load_state(path)
    save_file({"a": np.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="not written by save_state"):
        load_state(path)
    save_state(path, {"a": np.arange(1000.0)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        load_state(path)
    save_file(
        {"a": np.zeros(2)}, path, metadata={"format": "icml26-state", "version": "1", "tree": '{"__state__": "?"}'}
    )
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(path)
    assert issubclass(CheckpointError, ValueError)


def test_metadata_is_readable_by_others(tmp_path):
    from safetensors import safe_open

    save_state(tmp_path / "s", {"a": np.zeros(2)}, metadata={"step": 5})
    with safe_open(tmp_path / "s", framework="numpy") as file:
        assert file.metadata()["step"] == "5"
