# shellcheck shell=bash
# shellcheck disable=SC2034 # lib.sh uses what is set here
# Example: HPE Cray EX with Slingshot and Cray MPICH. Check every line against your site's manual.

module load PrgEnv-gnu cray-mpich cray-python
# mpi4py must be built against Cray MPICH: MPICC="cc -shared" make env MPI=system

# HPCRL_SRUN_MPI stays unset: cray_shasta is the default there. It knows no heterogeneous jobs.

# Many small receives are posted for each actor; the default completion queue has overflowed.
export FI_CXI_DEFAULT_CQ_SIZE=131072
# With the hardware's match list full, messages are matched in software instead of failing.
export FI_CXI_RX_MATCH_MODE=hybrid
# hpcrl stages GPU data in host memory.
export MPICH_GPU_SUPPORT_ENABLED=0
# NCCL and gloo take the fabric, not the management network.
export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0
