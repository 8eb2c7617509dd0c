#!/usr/bin/env bash
# Train a Qwen3-30B-A3B with Megatron-LM's own pretrain_gpt.py and FSSDP. Run it on every node.
#   MEGATRON=~/Megatron-LM DATA=~/data/text_document TOKENIZER=~/Qwen3-30B-A3B \
#       examples/megatron_lm.sh
# One node of 8 GPUs by default; slurm.sh starts several. Further arguments are passed to Megatron.
# FSSDP is the lines from "-m megatron_hecate run" to "--"; without these lines this is stock
# Megatron. It has not been run on GPUs yet.
set -euo pipefail
: "${MEGATRON:?a checkout of Megatron-LM}" "${DATA:?a prefix made by its tools/preprocess_data.py}"
: "${TOKENIZER:?a folder or name for HuggingFaceTokenizer}"

launch=(
    torchrun --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node 8
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
    -m megatron_hecate run
    --moe-fssdp --moe-fssdp-slots 2 --moe-fssdp-lifetime auto
    # Speeds of this cluster, measured by: torchrun ... -m megatron_hecate measure FILE
    ${SPEEDS:+--moe-fssdp-speeds "$SPEEDS"}
    --
    "$MEGATRON/pretrain_gpt.py"
)
model=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --swiglu
    --num-attention-heads 32 --group-query-attention --num-query-groups 4
    --kv-channels 128 --qk-layernorm --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights
    --seq-length 4096 --max-position-embeddings 40960
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-grouped-gemm --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
)
parallel=(
    --expert-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
training=(
    --bf16 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 256 --train-iters 10000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200
    --weight-decay 0.1 --clip-grad 1.0
    --data-path "$DATA" --split 99,1,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
exec "${launch[@]}" "${model[@]}" "${parallel[@]}" "${training[@]}" "$@"
