#!/usr/bin/env bash
# The Python of a container image, for HPCRL_PYTHON: ranks, and what a batch script asks of hpcrl, run
# in the image; the batch script itself, with scontrol, outside.
#   export HPCRL_IMAGE=hpcrl.sif HPCRL_CONTAINER_OPTIONS=--nv    # words, such as --bind /scratch
#   HPCRL_PYTHON=slurm/install/container_python.sh sbatch slurm/train.sbatch CONFIG
set -euo pipefail
image=${HPCRL_IMAGE:?set it to the image, such as hpcrl.sif}
# shellcheck disable=SC2086 # the options are words
exec "${HPCRL_CONTAINER:-apptainer}" exec ${HPCRL_CONTAINER_OPTIONS:-} "$image" python "$@"
