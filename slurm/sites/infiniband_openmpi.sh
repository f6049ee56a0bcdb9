# shellcheck shell=bash
# shellcheck disable=SC2034 # lib.sh uses what is set here
# Example: InfiniBand with Open MPI over UCX. Check every line against your site's manual.

module load python openmpi
HPCRL_SRUN_MPI=pmix

export OMPI_MCA_pml=ucx OMPI_MCA_osc=ucx
# Reliable connections need memory per peer; with thousands of ranks let UCX use dynamic ones.
export UCX_TLS=self,sm,rc,dc
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
HPCRL_MPIRUN=mpirun
HPCRL_MPIRUN_OPTIONS="--bind-to none --map-by slot"
