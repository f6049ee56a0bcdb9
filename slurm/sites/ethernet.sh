# shellcheck shell=bash
# shellcheck disable=SC2034 # lib.sh uses what is set here
# Example: plain Ethernet with Open MPI over TCP. Check every line against your site's manual.

module load python openmpi
HPCRL_SRUN_MPI=pmix

export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp
# Without this Open MPI may try the addresses of container bridges, and connections hang.
export OMPI_MCA_btl_tcp_if_include=eth0
export NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
HPCRL_MPIRUN=mpirun
HPCRL_MPIRUN_OPTIONS="--bind-to none"
