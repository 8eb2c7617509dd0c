#!/usr/bin/env bash
#SBATCH --job-name=fssdp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
# Run megatron_lm.sh on several nodes, one task per node; torchrun starts the ranks of a node.
#   MEGATRON=... DATA=... TOKENIZER=... \
#       sbatch --nodes 8 examples/slurm.sh --expert-model-parallel-size 32
# Start it in this checkout, on a file system that all nodes share. Where an expert-parallel group
# spans nodes, measure the links once (megatron_lm.sh), and set SPEEDS to that file. After
# --moe-fssdp-timeout the other ranks name a rank that died.
set -euo pipefail
export NODES=$SLURM_JOB_NUM_NODES
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
srun --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec examples/megatron_lm.sh "$@"' megatron_lm.sh "$@"
