#!/usr/bin/env bash
# Installs hpcrl where compute nodes have no internet, in two steps:
#   slurm/install/offline.sh fetch WHEELHOUSE        on a login node with internet, or any Linux
#                                                    machine with the same Python
#   slurm/install/offline.sh install WHEELHOUSE DIR  without internet
# With mksquashfs at hand DIR is also packed into DIR.sqsh: one file instead of some 20 000, which
# spares a parallel file system; mount it at the same path (squashfuse, or your site's option).
# DIR/share/hpcrl has the batch scripts: HPCRL_HOME for sbatch, with HPCRL_PYTHON=DIR/bin/python.
# PYTHON=... chooses another Python. mpi4py's wheel runs with Open MPI, MPICH and their kin; for
# Cray MPICH build it afterwards: MPICC='cc -shared' pip install --no-binary mpi4py mpi4py
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() { sed -n '2,6s/^# //p' slurm/install/offline.sh >&2; exit 2; }
python=${PYTHON:-python3}
case ${1:-} in
    fetch)
        [ $# -eq 2 ] || usage
        "$python" -m pip wheel --wheel-dir "$2" -c constraints.txt setuptools '.[atari]'
        ;;
    install)
        [ $# -eq 3 ] || usage
        # --copies: a link to the builder's Python would dangle inside an image.
        "$python" -m venv --copies "$3"
        "$3/bin/python" -m pip install --no-index --find-links "$2" -c constraints.txt 'hpcrl[atari]'
        # What batch scripts need, and `hpcrl submit` finds there.
        mkdir -p "$3/share/hpcrl"
        cp -r slurm configs "$3/share/hpcrl/"
        if command -v mksquashfs >/dev/null; then
            mksquashfs "$3" "$3.sqsh" -noappend -quiet
            echo "wrote $3.sqsh"
        fi
        ;;
    *) usage ;;
esac
