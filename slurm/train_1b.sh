#!/bin/bash
# Trains preset 1b_4096 through srun, one task a GPU, on as many nodes and GPUs as the job has:
#
#     sbatch slurm/train_1b.sh [further options of pretrain.py]          (from the repository's folder)
#     sbatch --nodes=4 slurm/train_1b.sh --train.global_batch_size 32
#
# On one GPU this is the paper's protocol. On n GPUs the global batch is n samples, unless --train.global_batch_size is
# given.
#
# Edit for your cluster: the #SBATCH lines below (nodes, GPUs, CPUs, time; add --partition, --account or
# --constraint). PYTHON, if the environment is not .venv in the repository's folder.
#
# Two minutes before the time limit, or when preempted, every rank saves and exits with code 75; the job is then put
# back into the queue and resumes from that checkpoint, in the same output folder.

#SBATCH --job-name=aah_1b_4096
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u

SAVED_AND_PREEMPTED=75

fail() {
    echo "error: $1" >&2
    exit 2
}

cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}" || exit 2
[ -f aah_dist/pretrain.py ] || fail "aah_dist/pretrain.py is not in $PWD; run sbatch from the repository's folder."

gpus_per_node=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}
gpus_per_node=${gpus_per_node##*:} # h100:8 -> 8
[[ $gpus_per_node =~ ^[1-9][0-9]*$ ]] || fail "the job has no GPUs; ask for them, for example --gpus-per-node=8."

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ -n "$MASTER_ADDR" ] || fail "scontrol show hostnames names no host for $SLURM_JOB_NODELIST."
# Two jobs that share a node get different ports; a requeued job keeps its own.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

ntasks=$((SLURM_JOB_NUM_NODES * gpus_per_node))
srun_options=(
    --nodes="$SLURM_JOB_NUM_NODES"
    --ntasks="$ntasks"
    --ntasks-per-node="$gpus_per_node"
    # Ranks that saved leave within seconds of each other; --kill-on-bad-exit would take their code 75 for a failure
    # and kill the slower ones. A rank that fails ends the others after this wait.
    --kill-on-bad-exit=0
    --wait=60
)
# srun does not inherit the job's CPUs per task.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && srun_options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")

# Each task sees all GPUs of its node and picks the one of its LOCAL_RANK.
# shellcheck disable=SC2016  # expanded by each task, not here
task='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"'

srun_pid=
signalled=0
# shellcheck disable=SC2329  # called by the trap
forward() {
    signalled=1
    # srun passes USR1 on to every task; TERM would make it kill them.
    [ -n "$srun_pid" ] && kill -USR1 "$srun_pid" 2>/dev/null
}
trap forward USR1 TERM

srun "${srun_options[@]}" bash -c "$task" task "${PYTHON:-.venv/bin/python}" -u aah_dist/pretrain.py \
    --preset 1b_4096 --output_dir "runs/1b_4096-$SLURM_JOB_ID" --train.global_batch_size "$ntasks" "$@" &
srun_pid=$!

# A trapped signal ends `wait` before srun has ended.
while true; do
    signalled=0
    wait "$srun_pid"
    code=$?
    [ "$signalled" -eq 1 ] || break
done

if [ "$code" -eq "$SAVED_AND_PREEMPTED" ]; then
    echo "saved and preempted; requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "error: job $SLURM_JOB_ID could not be requeued;" \
        "submit it again with --output_dir runs/1b_4096-$SLURM_JOB_ID" >&2
fi
exit "$code"
