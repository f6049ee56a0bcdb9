# shellcheck shell=bash
# What all batch scripts share: prepare a run, launch it, and act on how it ended.
#
#   HPCRL_HOME            hpcrl's checkout; default: the directory of submission
#   HPCRL_PYTHON          Python with hpcrl; default: $HPCRL_HOME/.venv/bin/python
#   HPCRL_SITE            site file: a path, or a name in slurm/sites/
#   HPCRL_RUN_DIR         run directory; --run.dir on the command line comes before it, CONFIG's after
#                         it; default: runs/CONFIG-JOB; for tasks of an array, a folder in it for each
#   HPCRL_SRUN_MPI        srun's --mpi, where the site's default is not the right one
#   HPCRL_MAX_RESTARTS    restarts of one job, in its allocation or by requeue; default 100
#   HPCRL_MAX_FRUITLESS   starts in a row without a newer checkpoint, then it stops; default 2
#   HPCRL_REQUEUE         0: never requeue (a chain of jobs goes on by itself); default 1

# Nothing that the job does may depend on what it can say: its output can be on a full file system.
hpcrl_say() { echo "hpcrl batch [$(date +%FT%T)]: $*" >&2 || :; }

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
        case $argument in --run.dir=*) HPCRL_RUN_DIR=${argument#*=} ;; esac
        previous=$argument
    done
    HPCRL_RUN_DIR=${HPCRL_RUN_DIR:-$(hpcrl_value run.dir "$@")}
    # The same over all requeues, so a job that Slurm restarts by itself finds its run again.
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    local stem=${config##*/}
    # The tasks of an array must not share one.
    HPCRL_RUN_DIR=${HPCRL_RUN_DIR:+$HPCRL_RUN_DIR${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}}
    HPCRL_RUN_DIR=${HPCRL_RUN_DIR:-runs/${stem%.*}-${job:-$SLURM_JOB_ID}}
    mkdir -p "$HPCRL_RUN_DIR" || { hpcrl_say "can't create $HPCRL_RUN_DIR"; exit 2; }

    HPCRL_ARGUMENTS=("$@")
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

# hpcrl_value KEY CONFIG [OPTION ...]: the configured value; nothing of a configuration that can't be
# read, of which the launch says what is wrong.
hpcrl_value() { "$HPCRL_PYTHON" -m hpcrl value "$@" 2>/dev/null || :; }

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
    # What Slurm itself requeued, as a node failed, is a restart like any other.
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
        verdict=$(hpcrl_verdict --lost) || verdict=again
        case $verdict in stop*) exit "${verdict##* }" ;; esac
    fi
    while :; do
        code=0
        hpcrl_launch "$@" || code=$?
        verdict=$(hpcrl_verdict --exit-code "$code") || verdict="stop $code"
        case $verdict in
            again*)
                hpcrl_is_running || { hpcrl_say "job is at its end"; exit "$code"; }
                hpcrl_fit || hpcrl_requeue "${verdict##* }"
                ;;
            requeue*) hpcrl_requeue "${verdict##* }" ;;
            *) exit "${verdict##* }" ;;
        esac
    done
}

# hpcrl_verdict OPTION ...: prints what to do and an exit code.
hpcrl_verdict() {
    "$HPCRL_PYTHON" -m hpcrl verdict "$HPCRL_RUN_DIR" "$@" --job "$SLURM_JOB_ID" \
        --requeues "${SLURM_RESTART_COUNT:-0}" --max-restarts "${HPCRL_MAX_RESTARTS:-100}" \
        --max-fruitless "${HPCRL_MAX_FRUITLESS:-2}"
}

# Before a launch in a job that has lost a node, which --no-kill keeps: as many ranks as it still has
# room for. Fails where they are too few for the configuration.
hpcrl_fit() {
    local nodes ranks=${SLURM_NTASKS_PER_NODE:-}
    nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %D 2>/dev/null | head -n 1) || return 0
    [ "${nodes:-$SLURM_JOB_NUM_NODES}" -lt "$SLURM_JOB_NUM_NODES" ] || return 0
    hpcrl_say "$nodes of $SLURM_JOB_NUM_NODES nodes are left"
    case $ranks in '' | *[!0-9]*) return 1 ;; esac
    "$HPCRL_PYTHON" -m hpcrl plan "${HPCRL_ARGUMENTS[@]}" --nodes "$nodes" --ranks-per-node "$ranks" \
        --gpus-per-node "${SLURM_GPUS_ON_NODE:-0}" >/dev/null || return 1
    SLURM_JOB_NODELIST=$(squeue -h -j "$SLURM_JOB_ID" -o %N | head -n 1) || return 1
    # srun takes its defaults from these, and refuses those of nodes that are gone.
    export SLURM_JOB_NODELIST SLURM_NODELIST=$SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES=$nodes
    export SLURM_NNODES=$nodes SLURM_NTASKS=$((nodes * ranks)) SLURM_NPROCS=$((nodes * ranks))
    export SLURM_TASKS_PER_NODE="$ranks(x$nodes)"
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

# hpcrl_requeue CODE: the code is for where there is no requeue: 75 after a stop, else the failure's.
# Only once the launcher has ended: `scontrol requeue` kills a running step at once.
hpcrl_requeue() {
    local how="submit again with HPCRL_RUN_DIR=$HPCRL_RUN_DIR to go on"
    [ "$1" = 75 ] && how="the checkpoint is safe; $how"
    if [ "${HPCRL_REQUEUE:-1}" = 0 ]; then
        hpcrl_say "HPCRL_REQUEUE is 0, not requeued: $how"
        exit "$1"
    fi
    hpcrl_is_running || { hpcrl_say "the job was cancelled or is over: not requeued"; exit "$1"; }
    # The task of an array, not the whole array.
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    hpcrl_say "requeues job $job"
    if ! scontrol requeue "$job"; then
        hpcrl_say "can't requeue job $job (no scontrol here, or the site forbids it): $how"
        exit "$1"
    fi
    # Slurm ends this shell; returning would launch the next step into the dying allocation.
    sleep 300
    exit "$1"
}
