"""The flags of launch scripts that others have written, and what has to change for them to train.

A script is its name and the place where it is published, then its flags as they stand there, with
the values of its shell variables (of its README, where the script has none; {data} and {tokenizer}
stand for files). Under it:

    ! a phrase of the message
    - flags to drop, besides those that are unknown
    + flags to add, or to give another value
    = ranks that it starts, and those that the first message asks for

Each flag of - and + is named by the first message.
"""

import re
import shlex
from dataclasses import dataclass, field


@dataclass
class Script:
    """A launch script.

    Attributes:
        url: where it is published.
        ranks, mended_ranks: that it starts, and that it starts then.
        flags: as they stand there.
        phrases: of the first message.
        dropped, added: what that message asks for.
    """

    url: str
    ranks: int = 8
    mended_ranks: int = 8
    flags: list[str] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


_GITHUB = "https://github.com/"


def _scripts(text: str) -> dict[str, Script]:
    found: dict[str, Script] = {}
    for line in re.sub(r"\n {6,}", " ", text.strip()).splitlines():
        kind, _, rest = line.strip().partition(" ")
        if not line.startswith(" "):
            script = found[kind] = Script(_GITHUB + rest.replace(" ", ""))
        elif kind == "!":
            script.phrases.append(rest)
        elif kind == "=":
            script.ranks, *more = map(int, rest.split())
            script.mended_ranks = more[0] if more else script.ranks
        elif kind in "-+":
            (script.dropped if kind == "-" else script.added).extend(shlex.split(rest))
        else:
            script.flags += shlex.split(line)
    return found


SCRIPTS = _scripts("""
megatron-gpt3-175b NVIDIA/Megatron-LM/blob/157006d/examples/gpt3/train_gpt3_175b_distributed.sh
  --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
  --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1
  --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
  --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
  --lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
  --data-path {data} --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
  --log-interval 100 --save-interval 10000 --eval-interval 1000 --save checkpoints
  --load {new} --eval-iters 10 --tensorboard-dir tensorboard
  ! 8 ranks are not divisible by --tensor-model-parallel-size 8 * --pipeline-model-parallel-s
  ! no tokenizer
  - --load
  + --tokenizer-model {tokenizer}
  = 8 128
megatron-llama3-8b NVIDIA/Megatron-LM/blob/157006d/examples/llama/train_llama3_8b_h100_fp8.sh
  --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
  --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
  --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
  --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
  --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
  --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
  --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
  --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
  --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
  --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
  --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024
  --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1
  --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer
  --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 --split 99,1,0
  --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
  --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
  --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
  --distributed-timeout-minutes 60 --save checkpoints --load {new} --tensorboard-dir tensorboard
  ! --apply-layernorm-1p needs TransformerEngine's norms
  ! --profile needs CUDA
  ! --fp8-format
  - --attention-backend --fp8-format --fp8-param-gather --profile --apply-layernorm-1p --load
megatron-mixtral NVIDIA/Megatron-LM/blob/0a40979/examples/mixtral/train_mixtral_8x7b_distributed.sh
  --use-mcore-models --disable-bias-linear --seq-length 256 --max-position-embeddings 2048
  --num-layers 2 --hidden-size 256 --ffn-hidden-size 896 --num-attention-heads 2
  --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
  --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
  --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion --no-position-embedding
  --rotary-base 1000000 --num-experts 2 --moe-router-topk 2
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
  --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
  --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --mock-data --split 99990,8,2
  --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 7 --min-lr 1.0e-5
  --weight-decay 0.1 --clip-grad 1.0 --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --use-distributed-optimizer
  --sequence-parallel --eval-iters 10 --no-load-optim --no-load-rng
  = 2
  ! --tokenizer-type Llama2Tokenizer needs --vocab-size
  + --vocab-size 32000
megatron-mamba NVIDIA/Megatron-LM/blob/157006d/examples/mamba/train.sh
  --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1
  --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce
  --untie-embeddings-and-output-weights --init-method-std 0.02 --position-embedding-type none
  --num-layers 48 --hidden-size 1024 --num-attention-heads 16 --group-query-attention
  --num-query-groups 8 --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 --seq-length 4096
  --max-position-embeddings 4096 --train-samples 73242188 --lr-warmup-samples 50000
  --lr-decay-samples 73192188 --save checkpoints --load {new} --data-path {data}
  --data-cache-path cache --split 99,1,0 --tokenizer-type GPTSentencePieceTokenizer
  --tokenizer-model tokenizer.model --distributed-backend nccl --micro-batch-size 4
  --global-batch-size 32 --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine --weight-decay 0.1
  --clip-grad 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear
  --normalization RMSNorm --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 10
  --save-interval 2000 --eval-interval 2000 --eval-iters 32 --bf16 --use-mcore-models
  --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
  --no-create-attention-mask-in-dataloader --tensorboard-dir tensorboard
  ! --spec: megasink provides the layer spec
  ! --tokenizer-type GPTSentencePieceTokenizer needs --vocab-size
  - --spec --distributed-backend --load
  + --vocab-size 32000
pai-qwen3-8b alibaba/Pai-Megatron-Patch/blob/0f5c122/examples/qwen3/run_mcore_qwen3.sh
  --save checkpoints --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.01
  --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
  --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 9765 --lr-warmup-iters 97
  --train-iters 9765 --micro-batch-size 1 --global-batch-size 8 --num-layers 36
  --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 12288 --seq-length 128
  --max-position-embeddings 40960 --max-padding-length 128 --log-interval 1 --log-throughput
  --eval-interval 10000 --eval-iters 10 --save-interval 100000 --tensorboard-queue-size 1
  --tensorboard-dir tensorboard --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --context-parallel-size 1
  --no-load-optim --no-load-rng --num-workers 32 --extra-vocab-size 293
  --patch-tokenizer-type Qwen3Tokenizer --swiglu --normalization RMSNorm --norm-epsilon 1e-6
  --use-rotary-position-embeddings --position-embedding-type rope --disable-bias-linear
  --rotary-base 1000000 --no-save-optim --ckpt-format torch_dist
  --transformer-impl transformer_engine --cross-entropy-loss-fusion --qk-layernorm
  --kv-channels 128 --te-rng-tracker --external-cuda-graph --cuda-graph-scope attn
  --recompute-granularity selective --recompute-modules moe --data-path {data} --split 99,1,0
  --dataset MMAP --bf16 --use-distributed-optimizer --sequence-parallel --train-mode pretrain
  --attention-backend flash --untie-embeddings-and-output-weights --group-query-attention
  --num-query-groups 8
  ! --te-rng-tracker needs CUDA
  ! --transformer-impl transformer_engine needs CUDA
  - --attention-backend --external-cuda-graph --transformer-impl --te-rng-tracker
  + --tokenizer-model {tokenizer}
pai-llama31-8b alibaba/Pai-Megatron-Patch/blob/1a7758c/examples/llama3_1/run_mcore_llama3_1.sh
  --save checkpoints --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
  --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 9765 --lr-warmup-iters 97
  --train-iters 9765 --micro-batch-size 1 --global-batch-size 8 --num-layers 32
  --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --seq-length 128
  --max-position-embeddings 131072 --max-padding-length 128 --log-interval 1 --log-throughput
  --eval-interval 10000 --eval-iters 10 --save-interval 100000 --tensorboard-queue-size 1
  --tensorboard-dir tensorboard --log-timers-to-tensorboard --log-batch-size-to-tensorboard
  --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 1 --context-parallel-size 1 --no-load-optim --no-load-rng
  --num-workers 8 --extra-vocab-size 256 --patch-tokenizer-type LLama3Tokenizer --swiglu
  --normalization RMSNorm --norm-epsilon 1e-05 --use-rotary-position-embeddings
  --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
  --rotary-base 500000 --no-save-optim --data-path {data} --split 99,1,0
  --dataset LLama-Pretrain-Idxmap --bf16 --transformer-impl transformer_engine
  --use-distributed-optimizer --sequence-parallel --group-query-attention --num-query-groups 8
  --optimizer hybridadam --optimizer-offload-policy auto --tp-comm-overlap --overlap-grad-reduce
  --overlap-param-gather --train-mode pretrain
  ! --optimizer 'hybridadam' is unknown
  ! --tp-comm-overlap needs CUDA
  - --transformer-impl --tp-comm-overlap
  + --optimizer adam
  + --tokenizer-model {tokenizer}
pai-deepseek-v3 alibaba/Pai-Megatron-Patch/blob/1534940/examples/deepseek_v3/run_mcore_deepseek.sh
  --save checkpoints --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
  --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 305 --lr-warmup-iters 3
  --train-iters 305 --micro-batch-size 1 --global-batch-size 8 --num-layers 61
  --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --seq-length 4096
  --max-position-embeddings 163840 --max-padding-length 4096 --log-interval 1 --log-throughput
  --eval-interval 10000 --eval-iters 10 --save-interval 100000 --tensorboard-queue-size 1
  --tensorboard-dir tensorboard --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --context-parallel-size 1
  --no-load-optim --no-load-rng --num-workers 8 --extra-vocab-size 467
  --patch-tokenizer-type DeepSeekV2Tokenizer --swiglu --normalization RMSNorm --norm-epsilon 1e-6
  --use-rotary-position-embeddings --no-rope-fusion --position-embedding-type rope
  --untie-embeddings-and-output-weights --disable-bias-linear --rotary-base 10000
  --rotary-scaling-factor 40 --no-save-optim --kv-channels 128 --qk-layernorm
  --multi-latent-attention --ckpt-format torch --transformer-impl transformer_engine
  --no-masked-softmax-fusion --use-rope-scaling --use-multi-token-prediction
  --num-mtp-predictor 1 --data-path {data} --split 99,1,0 --dataset MMAP --bf16
  --use-distributed-optimizer --moe-grouped-gemm --moe-token-dispatcher-type alltoall
  --moe-router-topk 8 --moe-router-group-topk 4 --moe-router-num-groups 8 --num-experts 256
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --moe-ffn-hidden-size 2048
  --moe-router-load-balancing-type seq_aux_loss --moe-router-topk-scaling-factor 2.5
  --moe-shared-expert-overlap --moe-router-enable-expert-bias --mscale 1.0 --mscale-all-dim 1.0
  --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.001
  --moe-aux-loss-coeff 0.001 --moe-layer-freq '([0]*3+[1]*58)'
  --moe-shared-expert-intermediate-size 2048 --q-lora-rank 1536 --kv-lora-rank 512
  --qk-nope-head-dim 128 --qk-rope-head-dim 64 --v-head-dim 128 --train-mode pretrain
  --decoder-first-pipeline-num-layers 1 --attention-backend auto
  = 128
  ! --multi-latent-attention: its layers are not supported, with any variant
  ! --moe-grouped-gemm needs TransformerEngine
  - --multi-latent-attention --moe-grouped-gemm --transformer-impl
  + --tokenizer-model {tokenizer}
slime-qwen3-next THUDM/slime/blob/3fca79a/scripts/run-qwen3-next-80B-A3B-8gpus.sh
  --actor-num-nodes 1 --actor-num-gpus-per-node 4
  --spec slime_plugins.models.qwen3_next get_qwen3_next_spec --disable-bias-linear --qk-layernorm
  --group-query-attention --num-attention-heads 16 --num-query-groups 2 --kv-channels 256
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --use-gated-attention
  --normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope
  --norm-epsilon 1e-6 --rotary-percent 0.25 --swiglu --untie-embeddings-and-output-weights
  --vocab-size 151936 --rotary-base 10000000 --moe-ffn-hidden-size 512
  --moe-shared-expert-intermediate-size 512 --moe-router-score-function softmax
  --moe-token-dispatcher-type alltoall --moe-router-topk 10 --moe-layer-freq '([1]*48)'
  --num-experts 512 --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32
  --moe-permute-fusion --moe-aux-loss-coeff 0 --attention-output-gate --moe-shared-expert-gate
  --mtp-num-layers 1 --hf-checkpoint Qwen3-Next --ref-load Qwen3-Next_torch_dist --load {new}
  --save checkpoints --save-interval 20 --prompt-data dapo-math-17k.jsonl --input-key prompt
  --label-key label --apply-chat-template --rollout-shuffle --rm-type deepscaler
  --num-rollout 3000 --rollout-batch-size 16 --n-samples-per-prompt 4
  --rollout-max-response-len 2048 --rollout-temperature 0.8 --global-batch-size 64
  --balance-data --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.98 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
  --use-precision-aware-optimizer --advantage-estimator gspo --kl-loss-coef 0.00
  --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00 --eps-clip 4e-4
  --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 4
  --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --use-dynamic-batch-size --max-tokens-per-gpu 128 --eval-interval 20
  --eval-prompt-data aime aime-2024.jsonl --n-samples-per-eval-prompt 16
  --eval-max-response-len 16384 --eval-top-p 0.7 --rollout-num-gpus-per-engine 2
  --rollout-num-gpus 4 --sglang-mem-fraction-static 0.8 --sglang-ep-size 1
  --sglang-cuda-graph-bs 1 2 4 8 --attention-dropout 0.0 --hidden-dropout 0.0
  --grad-reduce-in-bf16 --attention-softmax-in-fp32 --attention-backend flash
  --moe-token-dispatcher-type alltoall
  = 4
  ! unknown: --use-gated-attention
  ! missing: --seq-length, --max-position-embeddings, --micro-batch-size, --train-iters or
  - --attention-backend --attention-output-gate --moe-grouped-gemm --moe-permute-fusion --spec
  - --apply-layernorm-1p --load --use-precision-aware-optimizer
  - --optimizer-cpu-offload
  + --seq-length 128 --max-position-embeddings 128 --train-iters 9 --micro-batch-size 1
  + --data-path {data} --tokenizer-model {tokenizer}
slime-mimo-7b-mtp THUDM/slime/blob/c3729cc/scripts/run-mimo-7B-rl-mtp.sh
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --swiglu --num-layers 36
  --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias
  --normalization RMSNorm --norm-epsilon 1e-05 --rotary-base 640000 --vocab-size 151680
  --untie-embeddings-and-output-weights --max-position-embeddings 32768 --mtp-num-layers 1
  --mtp-loss-scaling-factor 0.1 --hf-checkpoint MiMo-7B-RL --ref-load MiMo-7B-RL_torch_dist
  --save checkpoints --save-interval 2000 --prompt-data dapo-math-17k.jsonl --input-key prompt
  --label-key label --apply-chat-template --rollout-shuffle --rm-type deepscaler --num-rollout 30
  --rollout-batch-size 16 --n-samples-per-prompt 2 --rollout-max-response-len 8192
  --rollout-temperature 0.8 --global-batch-size 32 --balance-data --optimizer adam --lr 1e-6
  --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
  --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --use-wandb
  --wandb-project slime-mimo-7B-rl --wandb-group mtp-8gpu --wandb-key none
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
  --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --use-dynamic-batch-size --max-tokens-per-gpu 9216 --eval-interval 20
  --eval-prompt-data aime aime-2024.jsonl --n-samples-per-eval-prompt 1
  --eval-max-response-len 8192 --eval-top-p 0.7 --rollout-num-gpus-per-engine 1
  --sglang-mem-fraction-static 0.5 --sglang-speculative-algorithm EAGLE
  --sglang-speculative-num-steps 1 --sglang-speculative-eagle-topk 1
  --sglang-speculative-num-draft-tokens 2 --attention-dropout 0.0 --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
  ! missing: --seq-length, --micro-batch-size, --train-iters or --train-samples
  - --attention-backend --wandb-project
  + --seq-length 128 --train-iters 9 --micro-batch-size 1 --data-path {data}
  + --tokenizer-model {tokenizer}
bigscience-176b bigscience-workshop/bigscience/blob/003b250/train/tr11-176B-ml/tr11-176B-ml.slurm
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
  --pp-partition-method 'type:transformer|embedding' --num-layers 70 --hidden-size 14336
  --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048
  --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048
  --train-samples 220_000_000 --tokenizer-type PretrainedFromHF
  --tokenizer-name-or-path bigscience-catalogue-data-dev/byte-level-bpe-tokenizer
  --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 --position-embedding-type alibi
  --checkpoint-activations --abort-on-unmet-fused-kernel-constraints --kill-switch-path kill
  --pad-vocab-size-to 250880 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
  --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200_000_000
  --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 5990
  --log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1
  --tensorboard-dir tensorboard --tensorboard-queue-size 5 --log-timers-to-tensorboard
  --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --save checkpoints
  --load {new} --train-weighted-split-paths-path train.txt
  --valid-weighted-split-paths-path valid.txt --num-workers 2 --valid-num-workers 0
  --data-impl mmap --distributed-backend nccl --deepspeed --deepspeed_config ds_config.json
  --zero-stage 0 --deepspeed-activation-checkpointing
  = 384
  ! --checkpoint-activations is no longer valid: use --recompute-activations
  ! --num-layers 70 is not divisible by --pipeline-model-parallel-size 12
  - --checkpoint-activations --distributed-backend --load --tokenizer-type
  + --position-embedding-type none --num-layers 72 --data-path {data}
  + --tokenizer-model {tokenizer}
bigscience-1b3 bigscience-workshop/bigscience/blob/104124f/train/tr11-176B-ml/smaller_models/
      tr11b-1B3-ml.slurm
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
  --pp-partition-method 'type:transformer|embedding' --num-layers 24 --hidden-size 2048
  --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
  --micro-batch-size 4 --rampup-batch-size 192 16 9_765_625 --global-batch-size 512
  --train-samples 220_000_000 --tokenizer-type PretrainedFromHF
  --tokenizer-name-or-path bigscience-catalogue-data-dev/byte-level-bpe-tokenizer
  --init-method-std 0.0048 --embed-layernorm --fp16 --seed 42 --position-embedding-type alibi
  --checkpoint-activations --abort-on-unmet-fused-kernel-constraints --pad-vocab-size-to 250880
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 2e-4 --min-lr 1e-5
  --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105
  --clip-grad 1.0 --weight-decay 1e-1 --exit-duration-in-mins 5990 --log-interval 1
  --save-interval 250 --eval-interval 1000 --eval-iters 1 --tensorboard-dir tensorboard
  --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
  --log-validation-ppl-to-tensorboard --save checkpoints --load {new}
  --train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt
  --data-impl mmap --distributed-backend nccl --deepspeed --deepspeed_config ds_config.json
  --zero-stage 0 --deepspeed-activation-checkpointing
  = 64
  ! --position-embedding-type 'alibi' is unknown
  - --checkpoint-activations --distributed-backend --load --tokenizer-type
  + --position-embedding-type none --data-path {data}
  + --tokenizer-model {tokenizer}
swiss-llama3-70b swiss-ai/Megatron-LM/blob/0e57e5e/submit-llama3-70b.sh
  --transformer-impl transformer_engine --use-precision-aware-optimizer --main-grads-dtype bf16
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --max-position-embeddings 8192
  --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8
  --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu
  --untie-embeddings-and-output-weights --log-throughput --log-progress
  --tensorboard-dir tensorboard --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
  --log-memory-to-tensorboard --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1
  --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --micro-batch-size 1
  --global-batch-size 1024 --no-check-for-nan-in-loss-and-grad --train-iters 500
  --log-interval 1 --cross-entropy-loss-fusion --disable-bias-linear --optimizer adam
  --dataloader-type single --manual-gc --manual-gc-interval 50 --seed 28
  --init-method-std 0.008944 --lr 0.00015 --min-lr 0.000015 --lr-decay-style cosine
  --lr-warmup-iters 200 --save checkpoints --save-interval 250 --ckpt-format torch_dist
  --load {new} --async-save --bf16 --tensor-model-parallel-size 4 --sequence-parallel
  --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 5
  --context-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
  --overlap-param-gather --defer-embedding-wgrad-compute --wgrad-deferral-limit 22
  --overlap-p2p-communication-warmup-flush --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model tj-solergibert/swai --split 100,0,0 --seq-length 8192 --num-workers 1
  --num-dataset-builder-threads 1 --data-path {data} --data-cache-path cache
  = 128
  ! --defer-embedding-wgrad-compute needs CUDA
  - --transformer-impl --load --use-precision-aware-optimizer --defer-embedding-wgrad-compute
  + --tokenizer-model {tokenizer}
epfl-llama2-7b epfLLM/Megatron-LLM/blob/0e2a5b1/examples/finetune.sh
  --tensor_model_parallel_size 8 --pipeline_model_parallel_size 1 --load {new}
  --save checkpoints --tensorboard_dir tensorboard --data_path {data} --model_name llama2
  --tokenizer_type SentencePieceTokenizer --bf16 --global_batch_size 12 --micro_batch_size 1
  --num_workers=2 --vocab_file=tokenizer.model --use_rms_norm --glu_activation swiglu
  --no_tie_embed_logits --vocab_extra_ids_list '[bib_ref],[/bib_ref]' --layernorm_epsilon 1e-5
  --use_flash_attn --no_bias_gelu_fusion --seq_length 4096 --max_position_embeddings 4096
  --log_interval 1 --save_interval 200 --eval_interval 200 --eval_iters 10 --hidden_dropout 0.0
  --position_embedding_type rotary --no_bias_dropout_fusion --use_checkpoint_args
  --train_iters 1000 --attention_dropout 0.0 --adam_beta1 0.9 --adam_beta2 0.95 --adam_eps 1e-5
  --lr_decay_style cosine --lr_warmup_fraction 0.1 --lr 3e-4 --min_lr 1e-6 --weight_decay 0.1
  --sequence_parallel --recompute_granularity selective
  ! unknown: --seq_length 4096: did you mean --seq-length?
  ! --use-flash-attn: use --attention-kernel
  ! --position-embedding-type 'rotary' is unknown
  ! missing: --num-layers, --hidden-size, --num-attention-heads
  - --use-flash-attn --load
  + --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --position-embedding-type rope
  + --vocab-size 32000
""")
