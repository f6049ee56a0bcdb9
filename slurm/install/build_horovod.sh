#!/usr/bin/env bash
# Install Horovod into a virtual environment, from a cached wheel or by building one.
#
#   slurm/install/build_horovod.sh [PYTHON]        default: .venv/bin/python
#
# PyPI has Horovod only as a source archive whose CMake files ask for C++14; torch's headers need
# C++17. The wheel is tied to the Python, torch and MPI it was compiled against, so the cache
# folder names all three. Any HOROVOD_* variable (HOROVOD_GPU_OPERATIONS=NCCL, say) is passed on.
# Exit: 0 installed, 1 not (one message says why; training then uses another gradient backend).
set -euo pipefail

readonly version=0.28.1
python=${1:-.venv/bin/python}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
PATH=$(dirname "$python"):$PATH # the environment's own mpicc and cmake come before the site's
export PATH
export PIP_DISABLE_PIP_VERSION_CHECK=1

give_up() {
    printf 'Horovod is not installed: %s\n' "$1"
    printf 'Training works without it (gradient backends mpi and torch). Try again: make horovod\n'
    exit 1
}

wheel_key() {
    "$python" - <<'PY'
import platform
import sys
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
import torch
from mpi4py import MPI

vendor, release = MPI.get_vendor()
name = vendor.replace(" ", "").lower() + ".".join(map(str, release))
if not Path(sys.prefix, "bin", "mpicxx").exists():
    name += "site"
tag = "cp{}{}".format(*sys.version_info)
print(f"{tag}-torch{torch.__version__}-{name}-{platform.machine()}")
PY
}

require_build_tools() {
    local tool header
    for tool in make c++ mpicxx; do
        command -v "$tool" >/dev/null || give_up "'$tool' is not on PATH."
    done
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [ -e "$header" ] || give_up "Python's headers are missing ($header; Debian: python3-dev)."
}

# Libraries are found relative to the installed module, never in the folder it was built in: the
# cached wheel serves environments elsewhere. A site MPI keeps its own absolute path as well.
patch_source() {
    local use_link_path=OFF
    [ "$(command -v mpicxx)" = "$(dirname "$python")/mpicxx" ] || use_link_path=ON
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
        CMakeLists.txt horovod/torch/CMakeLists.txt
    sed -i "/^set(CMAKE_CXX_STANDARD 17)/a\\
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\\
set(CMAKE_INSTALL_RPATH \"\$ORIGIN/../../torch/lib;\$ORIGIN/../../../..\")\\
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH $use_link_path)" CMakeLists.txt
}

build_wheel() {
    set -ex
    cd "$1"
    "$python" -m pip install -c "$constraints" \
        setuptools wheel packaging cmake cffi pyyaml psutil cloudpickle
    # Downloading an sdist runs its set-up for the metadata, hence no build isolation here too.
    "$python" -m pip download --no-binary :all: --no-deps --no-build-isolation \
        "horovod==$version"
    tar xzf "horovod-$version.tar.gz"
    cd "horovod-$version"
    patch_source
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1
    export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export CMAKE_POLICY_VERSION_MINIMUM=3.5              # CMake 4 refuses the older declarations
    export CXXFLAGS="-include cstdint ${CXXFLAGS:-}"     # GCC 13 no longer includes it by itself
    MAKEFLAGS=-j$(nproc) "$python" -m pip wheel --no-build-isolation --no-deps -w .. .
}

# Two MPI libraries in one process would exchange invalid handles.
one_mpi_library() {
    "$python" - <<'PY'
import re
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
import horovod.torch as hvd
from mpi4py import MPI

maps = Path("/proc/self/maps").read_text()
found = set(re.findall(r"/\S*/libmpi(?:_abi|_cray|_gnu_\d+|_intel|ch)?\.so\S*", maps))
assert hvd.mpi_built(), "built without MPI"
assert len(found) <= 1, f"mpi4py ({MPI.get_vendor()}) and Horovod differ: {sorted(found)}"
PY
}

key=$(wheel_key) || give_up "mpi4py or torch does not import in $python."
key=$key${HOROVOD_GPU_OPERATIONS:+-$HOROVOD_GPU_OPERATIONS}
cache=${HPCRL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hpcrl}/wheels/$key
mkdir -p "$cache" 2>/dev/null || give_up "cannot write the cache folder $cache (HPCRL_CACHE moves it)."

wheel=$(find "$cache" -name "horovod-$version-*.whl" -print -quit)
if [ -z "$wheel" ]; then
    require_build_tools
    log=$cache/build.log
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "Building Horovod $version for $key: some minutes, once. Log: $log"
    # As the condition of an 'if', the function would run on after a failing command.
    set +e
    (build_wheel "$work") >"$log" 2>&1
    status=$?
    set -e
    [ $status -eq 0 ] || give_up "its build failed, see $log"
    name=$(basename "$work"/horovod-*.whl)
    cp "$work/$name" "$cache/$name.part" # a rename is atomic only within one file system
    wheel=$cache/$name
    mv "$wheel.part" "$wheel"
fi
"$python" -m pip install -q --no-deps --force-reinstall "$wheel"
one_mpi_library || give_up "the wheel $wheel does not work here; delete it to build anew."
echo "Horovod $version installed ($wheel)"
