"""Imports point one way, few modules know MPI or Horovod, and nothing is ever pickled."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hpcrl", "env_wrappers", "analysis")

LAYERS = {
    "vocabulary": (
        "types specs checks timing exit_codes human durable compression run.counters config.types "
        "config.sections"
    ),
    "pure": (
        "topology comm.wire comm.link acting.unroll replay ops nets agents config learning.optim "
        "learning.loss_scaling"
    ),
    "edges": "",  # all that is named nowhere else
    "roles": "roles",
    "entry": "start cli __main__ bench evaluation.play run.status",
}
ORDER = list(LAYERS)
TORCH_FREE = (
    "types specs checks timing comm.wire acting.unroll topology replay.memory replay.files "
    "config.load comm.link comm.slots comm.stats comm.commands comm.weights comm.unroll_flow job "
    "comm.startup start.launch start.training roles.actor cli"
)
PICKLED_CALLS = {
    *("send", "recv", "isend", "irecv", "ssend", "issend", "bsend", "sendrecv", "mprobe"),
    *("bcast", "gather", "scatter", "allgather", "allreduce", "alltoall", "reduce", "scan"),
    *("exscan", "ibcast", "igather", "iallgather", "iallreduce"),
}
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNIX_SOCKETS = {"env_wrappers.external", "env_wrappers.simulator_client"}
"""Modules that talk to other programs of the same user over a socket file."""
SERVERS = {"socket", "socketserver", "http.server", "xmlrpc", "asyncio", "multiprocessing"}


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def files(*packages):
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, *, for_types=False):
    """(dotted name, line) of everything that a file imports anywhere in it."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(inner for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree(path)):
        if node in skipped and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def layer_of(module):
    """The layer that names the longest prefix of a module of hpcrl."""
    inner = module.removeprefix("hpcrl").removeprefix(".")
    named = [
        (len(prefix), layer)
        for layer, prefixes in LAYERS.items()
        for prefix in prefixes.split()
        if within(inner, prefix)
    ]
    return max(named)[1] if named else "edges" if inner else "vocabulary"


def test_imports_point_one_way():
    modules = {name_of(path) for path in files("hpcrl")}
    wrong = []
    for path in files("hpcrl"):
        here = layer_of(name_of(path))
        for imported, line in imports(path):
            if imported in modules and ORDER.index(layer_of(imported)) > ORDER.index(here):
                wrong.append(f"{path}:{line}: {here} imports {imported} ({layer_of(imported)})")
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other():
    modules = {name_of(path) for path in files("hpcrl", "env_wrappers")}
    # `from package import module` inside the package needs the module only.
    graph = {
        name_of(path): {
            imported
            for imported, _ in imports(path)
            if imported in modules and not within(name_of(path), imported)
        }
        for path in files("hpcrl", "env_wrappers")
    }
    while graph:
        leaves = {module for module, needed in graph.items() if not needed & graph.keys()}
        assert leaves, f"import cycle among {sorted(graph)}"
        graph = {module: needed for module, needed in graph.items() if module not in leaves}


@pytest.mark.parametrize(
    ("library", "importers"),
    [
        ("mpi4py", {"hpcrl.comm.transport"}),
        ("horovod", {"hpcrl.learning.data_parallel"}),
        ("h5py", {"hpcrl.recording.segment"}),
    ],
)
def test_a_library_has_one_importer(library, importers):
    found = {
        name_of(path)
        for path in files("hpcrl", "env_wrappers")
        for imported, _ in imports(path, for_types=True)
        if within(imported, library)
    }
    assert found == importers


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("env_wrappers", ("hpcrl", "torch", "mpi4py", "horovod")),
        ("analysis", ("hpcrl", "torch", "mpi4py", "horovod", "env_wrappers")),
        ("hpcrl/replay", ("torch", "mpi4py")),
        ("hpcrl/topology", ("torch", "mpi4py", "numpy")),
    ],
)
def test_a_package_keeps_to_itself(package, forbidden):
    wrong = [
        f"{path}:{line}: {imported}"
        for path in files(package)
        for imported, line in imports(path, for_types=True)
        if any(within(imported, name) for name in forbidden)
    ]
    assert not wrong, "\n".join(wrong)


def test_mpi4pys_pickling_calls_are_never_made():
    """The one module that holds communicators calls none of their lower-case methods."""
    wrong = [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree(ROOT / "hpcrl" / "comm" / "transport.py"))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in PICKLED_CALLS
    ]
    assert not wrong, "\n".join(wrong)


def test_communicators_leave_the_transport_for_horovod_and_environments_only():
    users = {
        name_of(path)
        for path in files("hpcrl")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "communicator"
    }
    assert users == {"hpcrl.comm.transport", "hpcrl.learning.data_parallel", "hpcrl.comm.team"}


def test_nothing_is_pickled_and_nothing_listens():
    wrong = []
    for path in files(*PACKAGES):
        for imported, line in imports(path):
            if imported == "socket" and name_of(path) in UNIX_SOCKETS:
                continue
            if any(within(imported, name) for name in PICKLERS | SERVERS):
                wrong.append(f"{path}:{line}: imports {imported}")
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("socket.socket", "socket.create_server", "socket.create_connection"):
                assert ast.unparse(node.args[0]) == "socket.AF_UNIX", f"{path}:{node.lineno}"
            unsafe = {"torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load"}
            options = {keyword.arg for keyword in node.keywords}
            if called in unsafe or "allow_pickle" in options:
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def loaded_after(program):
    """Names of the modules that a fresh Python holds after running `program`."""
    text = f"{program}\nimport sys\nprint('loaded:', *sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split("loaded:")[1].split())


def test_an_actor_loads_no_torch_and_no_other_large_library():
    loaded = loaded_after(
        "import hpcrl.start.training, hpcrl.start.launch, hpcrl.roles.actor\n"
        "from env_wrappers import make\n"
        "import numpy as np\n"
        "envs = make('atari:Breakout', 2, [1, 2])\n"
        "envs.reset()\n"
        "envs.step(np.zeros((2, 1), np.int32))\n"
        "envs.close()\n"
    )
    large = {"torch", "horovod", "h5py", "cv2", "matplotlib", "pandas", "tensorboard", "scipy"}
    assert "ale_py" in loaded
    assert not loaded & large


@pytest.mark.parametrize(
    "program",
    [
        "import hpcrl",
        "import hpcrl.cli\nhpcrl.cli.main(['--help'], standalone_mode=False)",
        "import hpcrl.cli\nhpcrl.cli.main(['train', '--help'], standalone_mode=False)",
        "import env_wrappers",
    ],
)
def test_importing_starts_no_mpi_and_loads_no_torch(program):
    loaded = loaded_after(program)
    assert not loaded & {"mpi4py.MPI", "torch", "horovod"}


def test_what_an_actor_may_import_is_free_of_torch():
    program = "\n".join(f"import hpcrl.{module}" for module in TORCH_FREE.split())
    assert not loaded_after(program) & {"torch", "mpi4py.MPI"}
