#!/usr/bin/env bash
# Submits N jobs of one run, each after the end of the one before: for sites that forbid requeue.
#   slurm/chain.sh N RUN_DIR [options of sbatch] slurm/train.sbatch CONFIG [--section.key VALUE ...]
# The jobs that start after the run is done end within seconds.
set -euo pipefail

[ $# -ge 4 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
count=$1
export HPCRL_RUN_DIR=$2 HPCRL_REQUEUE=0
shift 2
after=()
for _ in $(seq "$count"); do
    # afterany, not afterok: a job that stopped at its wall limit ended with 75.
    job=$(sbatch --parsable "${after[@]}" "$@")
    job=${job%%;*} # a federation adds its cluster's name
    echo "$job"
    after=(--dependency="afterany:$job")
done
