# shellcheck shell=bash
# Site file of the test cluster: Debian's Open MPI, which its srun can start.
# shellcheck disable=SC2034 # used by lib.sh
HPCRL_SRUN_MPI=${HPCRL_SRUN_MPI-pmix}
export MPI4PY_LIBMPI=libmpi.so.40
# The "nodes" are one host: their shared memory segments would have the same names.
export OMPI_MCA_btl=self,tcp OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_mpi_yield_when_idle=1
export OMP_NUM_THREADS=1
