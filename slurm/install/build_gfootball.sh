#!/usr/bin/env bash
# Install Google Research Football into a Python, from a cached wheel or by building one.
#
#   slurm/install/build_gfootball.sh [PYTHON]        default: .venv/bin/python
#
# PyPI has it only as a source archive, with the engine and all that it shows inside. It needs a
# setuptools that Python 3.12 no longer runs, and Boost.Python built for the same Python minor
# version: Debian 12 has that for 3.11. The build takes some twelve minutes on 2 cores.
# Exit: 0 installed, 1 not (one message says why).
set -euo pipefail

readonly version=2.10.2
readonly packages="libsdl2-dev libsdl2-image-dev libsdl2-ttf-dev libsdl2-gfx-dev \
libboost-python-dev libboost-thread-dev libboost-system-dev libboost-filesystem-dev \
libgl1-mesa-dev cmake g++ make"
python=${1:-.venv/bin/python}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1

give_up() {
    printf 'Football is not installed: %s\n' "$1" >&2
    exit 1
}

require_build_tools() {
    local minor=$1 header
    for header in SDL2/SDL.h SDL2/SDL_image.h SDL2/SDL_ttf.h SDL2/SDL2_gfxPrimitives.h \
        boost/python.hpp boost/thread.hpp GL/gl.h; do
        [ -e "/usr/include/$header" ] || echo "#include <$header>" | c++ -x c++ -M - >/dev/null 2>&1 ||
            give_up "the header $header is missing. Debian: apt-get install $packages"
    done
    ldconfig -p | grep -q "libboost_python$minor" ||
        give_up "there is no libboost_python$minor: this Python needs Boost.Python of its own minor version."
    for header in cmake make c++; do
        command -v "$header" >/dev/null || give_up "'$header' is not on PATH."
    done
}

build_wheel() {
    set -ex
    cd "$1"
    "$python" -m venv tools
    tools/bin/python -m pip install 'setuptools<66' wheel psutil six
    PATH=$1/tools/bin:$PATH tools/bin/python -m pip wheel --no-build-isolation --no-deps \
        --no-binary :all: -w . "gfootball==$version"
}

minor=$("$python" -c 'import sys; print("{}{}".format(*sys.version_info))') ||
    give_up "$python is no Python."
[ "$minor" -le 311 ] || give_up "it needs Python 3.11 or older, $python is $minor."
key=cp$minor-gfootball$version-$(uname -m)
cache=${HPCRL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hpcrl}/wheels/$key
mkdir -p "$cache" 2>/dev/null || give_up "cannot write the cache folder $cache (HPCRL_CACHE moves it)."

wheel=$(find "$cache" -name "gfootball-$version-*.whl" -print -quit)
if [ -z "$wheel" ]; then
    require_build_tools "$minor"
    log=$cache/build.log
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "Building Football $version for $key: some twelve minutes, once. Log: $log"
    # As the condition of an 'if', the function would run on after a failing command.
    set +e
    (build_wheel "$work") >"$log" 2>&1
    status=$?
    set -e
    [ $status -eq 0 ] || give_up "its build failed, see $log"
    name=$(basename "$work"/gfootball-*.whl)
    cp "$work/$name" "$cache/$name.part" # a rename is atomic only within one file system
    wheel=$cache/$name
    mv "$wheel.part" "$wheel"
fi
"$python" -m pip install -q -c "$constraints" "$wheel" 'gym==0.25.2' six ||
    give_up "pip could not install $wheel"
SDL_VIDEODRIVER=dummy "$python" -W ignore -c 'import gfootball_engine, gfootball.env' 2>/dev/null ||
    give_up "the wheel $wheel does not work here; delete it to build anew."
echo "Football $version installed ($wheel)"
