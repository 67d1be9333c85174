"""pytest plugin: tests marked ``triton_interpreter`` run in Triton's interpreter, in a process of their own.

Triton decides when a kernel is *declared* whether it is compiled or interpreted, so one process can do only one of the
two. Mark what needs the interpreter::

    pytestmark = pytest.mark.triton_interpreter        # a whole file, or one test as a decorator

and run pytest as always. Marked tests are collected like the others; the first one starts a child pytest with
``TRITON_INTERPRET=1`` set before any import, which runs each marked test in its turn and hands its reports back.
Selection (``-k``, ``-m``, node ids), ``-x``, durations and pytest-xdist work as usual.

``pytest --triton-interpret`` (or ``TRITON_INTERPRET=1 pytest``) runs everything in this process instead: for debuggers.

It also has the fixtures ``one_thread`` and ``unchecked``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from icml26_shared.kernels import interpreting
from icml26_shared.testing.interpreter import MARKER, REQUESTS_OPTION, ChildSession, serve

_CHILD = pytest.StashKey[ChildSession]()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: the same arithmetic on every machine, and no fight over cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without jaxtyping's checks of annotations: what a user sees who passes something wrong."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("triton", "Triton's interpreter")
    group.addoption(
        "--triton-interpret",
        action="store_true",
        default=False,
        help="run every test in this process with TRITON_INTERPRET=1 (for debugging; by default only marked tests run "
        "in the interpreter, in a child process)",
    )
    group.addoption(REQUESTS_OPTION, default=None, help="(internal) file descriptors of the parent process: READ,WRITE")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set the variable before any conftest or test file can import Triton."""
    if early_config.known_args_namespace.triton_interpret:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARKER}: run in Triton's interpreter on CPU tensors, in a child process with TRITON_INTERPRET=1"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    descriptors = session.config.getoption(REQUESTS_OPTION)
    if descriptors is None:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} error(s) during collection in Triton's interpreter")
    read, write = map(int, descriptors.split(","))
    serve(session, read, write)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _runs_in_child(item):
        return None
    child = item.config.stash.get(_CHILD, None)
    if child is None or not child.alive:
        marked = [other for other in item.session.items if _runs_in_child(other)]
        child = item.config.stash[_CHILD] = ChildSession(item.config, marked)
    following = nextitem if nextitem is not None and _runs_in_child(nextitem) else None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in child.run(item, following):
        item.ihook.pytest_runtest_logreport(report=report)
    _tear_down_here(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    child = session.config.stash.get(_CHILD, None)
    if child is not None:
        child.close()
    return (yield)


def _tear_down_here(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End this process's fixtures that the next test does not share; an unmarked test may have left some."""
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
    if call.excinfo is not None:
        item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, call))


def _runs_in_child(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None and not interpreting()
