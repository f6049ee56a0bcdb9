# shellcheck shell=bash
# What all batch scripts share: prepare a run, launch it, and act on how it ended.
#
#   HPCRL_HOME            hpcrl's checkout; default: the directory of submission
#   HPCRL_PYTHON          Python with hpcrl; default: $HPCRL_HOME/.venv/bin/python
#   HPCRL_SITE            site file: a path, or a name in slurm/sites/
#   HPCRL_RUN_DIR         run directory; default: runs/CONFIG-JOB (or --run.dir on the command line);
#                         for tasks of an array, a folder in it for each
#   HPCRL_SRUN_MPI        srun's --mpi, where the site's default is not the right one
#   HPCRL_MAX_RESTARTS    restarts of one job, in its allocation or by requeue; default 100
#   HPCRL_MAX_FRUITLESS   starts in a row without a newer checkpoint, then it stops; default 2
#   HPCRL_REQUEUE         0: never requeue (a chain of jobs goes on by itself); default 1

hpcrl_say() { echo "hpcrl batch [$(date +%FT%T)]: $*" >&2; }

# hpcrl_prepare CONFIG [OPTION ...]: sets HPCRL_RUN_DIR and HPCRL_COMMAND.
hpcrl_prepare() {
    [ $# -ge 1 ] || { hpcrl_say "usage: sbatch SCRIPT CONFIG [--section.key VALUE ...]"; exit 2; }
    local config=$1 previous='' argument
    HPCRL_HOME=${HPCRL_HOME:-$SLURM_SUBMIT_DIR}
    # HPCRL_SITE may hold a name; a path has a slash.
    if [ -n "${HPCRL_SITE:-}" ]; then
        case $HPCRL_SITE in
            */*) argument=$HPCRL_SITE ;;
            *) argument=$HPCRL_HOME/slurm/sites/$HPCRL_SITE.sh ;;
        esac
        [ -r "$argument" ] || { hpcrl_say "no site file $argument"; exit 2; }
        # shellcheck source=slurm/sites/template.sh
        . "$argument"
    fi
    HPCRL_PYTHON=${HPCRL_PYTHON:-$HPCRL_HOME/.venv/bin/python}
    [ -x "$HPCRL_PYTHON" ] || { hpcrl_say "no Python at $HPCRL_PYTHON: run make env"; exit 2; }

    for argument in "$@"; do
        [ "$previous" = --run.dir ] && HPCRL_RUN_DIR=$argument
        previous=$argument
    done
    # The same over all requeues, so a job that Slurm restarts by itself finds its run again.
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    local stem=${config##*/}
    # The tasks of an array must not share one.
    HPCRL_RUN_DIR=${HPCRL_RUN_DIR:+$HPCRL_RUN_DIR${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}}
    HPCRL_RUN_DIR=${HPCRL_RUN_DIR:-runs/${stem%.*}-${job:-$SLURM_JOB_ID}}
    mkdir -p "$HPCRL_RUN_DIR" || { hpcrl_say "can't create $HPCRL_RUN_DIR"; exit 2; }

    # -m mpi4py: an exception on one rank ends all ranks, instead of leaving them waiting.
    HPCRL_COMMAND=("$HPCRL_PYTHON" -u -m mpi4py -m hpcrl train "$@" --run.dir "$HPCRL_RUN_DIR")
    HPCRL_LAUNCHER_PID=''

    # Slurm sets SLURM_JOB_END_TIME only since 23.02. A hetjob prints one line per component.
    HPCRL_JOB_END=$(squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null | head -n 1) || HPCRL_JOB_END=''
    export HPCRL_JOB_END
    # Since 22.05 srun no longer takes --cpus-per-task from sbatch: ranks would share one core.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # Submitted from a shell inside another step, a job inherits that step's identity, and mpirun
    # and hpcrl would take the batch shell for a rank of it.
    unset SLURM_STEP_ID SLURM_STEPID SLURM_PROCID SLURM_LOCALID SLURM_STEP_NUM_TASKS
    # The same for what an outer srun left of its own options: they would bind these ranks.
    unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_DISTRIBUTION
    hpcrl_say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, nodes $SLURM_JOB_NODELIST," \
        "ends ${HPCRL_JOB_END:-unknown}, run $HPCRL_RUN_DIR"
}

# hpcrl_srun [OPTION ...]: one step over the allocation.
hpcrl_srun() {
    # --wait: else a dead rank's peers could wait until the wall limit. Not --kill-on-bad-exit: the
    # first of all ranks that leave with 75 or 2 would have the others killed, and srun report 143.
    exec srun --kill-on-bad-exit=0 --wait=60 ${HPCRL_SRUN_MPI:+--mpi="$HPCRL_SRUN_MPI"} "$@" \
        "${HPCRL_COMMAND[@]}"
}

# hpcrl_run LAUNCH [ARGUMENT ...]: launches, and again, until the run or this job is at its end.
hpcrl_run() {
    # In this shell only: where --signal=B:USR2 or a site signals the batch shell, the launcher
    # gets it. A trap that requeued at once would kill the step before its checkpoint.
    trap 'hpcrl_forward' USR2 TERM
    local code verdict
    while :; do
        code=0
        hpcrl_launch "$@" || code=$?
        verdict=$("$HPCRL_PYTHON" -m hpcrl verdict "$HPCRL_RUN_DIR" --exit-code "$code" \
            --job "$SLURM_JOB_ID" --max-restarts "${HPCRL_MAX_RESTARTS:-100}" \
            --max-fruitless "${HPCRL_MAX_FRUITLESS:-2}") || verdict="stop $code"
        case $verdict in
            again*) hpcrl_is_running || { hpcrl_say "job is at its end"; exit "$code"; } ;;
            requeue*) hpcrl_requeue ;;
            *) exit "${verdict##* }" ;;
        esac
    done
}

# In the background, as bash runs a trap only between commands, or while it waits.
hpcrl_launch() {
    local code
    "$@" &
    HPCRL_LAUNCHER_PID=$!
    while :; do
        code=0
        wait "$HPCRL_LAUNCHER_PID" || code=$?
        # Interrupted by a trap, wait returns although the launcher still runs.
        kill -0 "$HPCRL_LAUNCHER_PID" 2>/dev/null || break
    done
    HPCRL_LAUNCHER_PID=''
    return "$code"
}

hpcrl_forward() { [ -z "$HPCRL_LAUNCHER_PID" ] || kill -USR2 "$HPCRL_LAUNCHER_PID"; }

# A job that is being cancelled also ends with 75; requeueing it would bring it back to life.
hpcrl_is_running() {
    case $(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null | head -n 1) in
        RUNNING | '') return 0 ;; # '': squeue isn't here, scontrol will say
        *) return 1 ;;
    esac
}

# Only once the launcher has ended: `scontrol requeue` kills a running step at once.
hpcrl_requeue() {
    if [ "${HPCRL_REQUEUE:-1}" = 0 ]; then
        hpcrl_say "HPCRL_REQUEUE is 0: the run goes on when it is submitted again"
        exit 75
    fi
    hpcrl_is_running || { hpcrl_say "the job was cancelled or is over: not requeued"; exit 75; }
    # The task of an array, not the whole array.
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    hpcrl_say "requeues job $job"
    if ! scontrol requeue "$job"; then
        hpcrl_say "can't requeue job $job (no scontrol here, or the site forbids it): the" \
            "checkpoint is safe; submit again with HPCRL_RUN_DIR=$HPCRL_RUN_DIR to go on"
        exit 75
    fi
    # Slurm ends this shell; returning would launch the next step into the dying allocation.
    sleep 300
    exit 75
}
