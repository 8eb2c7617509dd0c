#!/usr/bin/env bash
#SBATCH --job-name=fssdp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@900
# As slurm.sh, for runs longer than a job may be: 15 minutes before the time limit Slurm sends
# SIGTERM to this script, which passes it on to the ranks. They finish the iteration, save a
# checkpoint and exit (Megatron's --exit-signal-handler), and the job goes back into the queue.
#   MEGATRON=... DATA=... TOKENIZER=... CHECKPOINTS=~/run/checkpoints \
#       sbatch --nodes 8 examples/slurm_requeue.sh --expert-model-parallel-size 32
set -euo pipefail
: "${CHECKPOINTS:?a folder for checkpoints, on a file system that all nodes share}"
export NODES=$SLURM_JOB_NUM_NODES
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
# torchrun kills its ranks 30 seconds after SIGTERM by default; a checkpoint takes longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=840

ended_early=
end_early() {
    ended_early=1
    scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap end_early TERM

srun --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec examples/megatron_lm.sh "$@"' megatron_lm.sh \
    --exit-signal-handler --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 "$@" &
step=$!
# A trapped signal ends the first wait.
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do
    status=0
    wait "$step" || status=$?
done
if [ -n "$ended_early" ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
