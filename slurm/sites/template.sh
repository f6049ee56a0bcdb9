# shellcheck shell=bash
# shellcheck disable=SC2034 # lib.sh uses what is set here
# A site's settings: copy it to slurm/sites/NAME.sh and submit with HPCRL_SITE=NAME. It is sourced by
# the batch script on the first node, before the launch. Nothing here is ever set by hpcrl itself.

# The modules under which .venv was made (make env MPI=system).
# module load python openmpi

# Only where the site's default is wrong: `srun --mpi=list` shows the choices.
# HPCRL_SRUN_MPI=pmix

# For train_mpirun.sbatch.
# HPCRL_MPIRUN=mpirun
# HPCRL_MPIRUN_OPTIONS="--bind-to none"

# Partition, account and the like belong on sbatch's command line or in SBATCH_* variables of
# your shell: SBATCH_PARTITION, SBATCH_ACCOUNT.
