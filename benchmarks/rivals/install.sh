#!/usr/bin/env bash
# Makes a virtual environment for each rival under FOLDER: install.sh [FOLDER [NAME...]]
# NAME is sb3, sample_factory or rllib (the last takes over a gigabyte); sb3 and sample_factory if absent.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/hpcrl-rivals}
shift || true
[ $# -gt 0 ] || set -- sb3 sample_factory
for name in "$@"; do
    [ -f "$here/requirements/$name.txt" ] || { echo "no rival is called $name: sb3, sample_factory, rllib" >&2; exit 2; }
    ${PYTHON:-python3} -m venv "$folder/$name"
    "$folder/$name/bin/pip" install -q --disable-pip-version-check -r "$here/requirements/$name.txt"
    echo "$name: $folder/$name/bin/python"
done
